"""Continues a prompt, left to right.

python -m antlm_jax.generate --checkpoint=RUN --prompt="Once upon a time"
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import cli, models
from antlm_jax.errors import UserError
from antlm_jax.inference import framing
from antlm_jax.masks import CAUSAL
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import Loaded

_LENGTH_STEP = 64  # row lengths are multiples of it


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How a token is drawn.

  Attributes:
    temperature: Divides the logits; 0 takes the likeliest token.
    top_k: Only so many of the likeliest tokens are drawn; 0 for all.
    top_p: Only the likeliest tokens are drawn that together are this likely
      (nucleus sampling, arXiv 1904.09751).
  """

  temperature: float = 0.8
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self):
    for name, right, expected in (
      ("temperature", self.temperature >= 0, "0 or more"),
      ("top_k", self.top_k >= 0, "0 or more"),
      ("top_p", 0 < self.top_p <= 1, "over 0 and at most 1"),
    ):
      if not right:
        raise UserError(f"{name}={getattr(self, name)} is not {expected}")

  def draw(self, key: jax.Array, logits: jax.Array) -> jax.Array:
    """Draws tokens `[B]` from logits `[B, V]`."""
    if self.temperature == 0:
      return jnp.argmax(logits, axis=-1)
    logits = logits / self.temperature
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    likely = jax.nn.softmax(ranked)
    kept = jnp.cumsum(likely, axis=-1) - likely < self.top_p
    if self.top_k:
      kept &= jnp.arange(logits.shape[-1]) < self.top_k
    rank = jax.random.categorical(key, jnp.where(kept, ranked, -jnp.inf))
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0]


def generate(
  loaded: Loaded,
  prompt: str,
  tokens: int = 50,
  temperature: float = 0.8,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
  count: int = 1,
) -> list[str]:
  """Continues a prompt.

  A text ends with the end-of-text token, after `tokens` more, or where the
  model's max_seq_len is reached. No other special token is ever drawn.

  Args:
    loaded: The model.
    prompt: May be empty where documents began with a special token.
    tokens: Tokens to add, at most.
    temperature: See `Sampling`, with `top_k` and `top_p`.
    seed: Equal seeds give equal texts.
    count: How many continuations.

  Returns:
    `count` texts, each with the prompt.

  Raises:
    UserError: for a prompt that is too long or that nothing can continue, or
      a setting out of range.
  """
  for name, value in (("tokens", tokens), ("count", count)):
    if value < 1:
      raise UserError(f"{name}={value} is not positive")
  start = encode(loaded, prompt)
  stop = min(len(start) + tokens, loaded.model.config.max_seq_len)
  sampling = Sampling(temperature, top_k, top_p)
  rows, ends = _continue(loaded, start, stop, sampling, seed, count)
  return [
    loaded.tokenizer.decode(row[:end])
    for row, end in zip(rows, ends, strict=True)
  ]


def encode(loaded: Loaded, prompt: str) -> np.ndarray:
  """Encodes a prompt after what stood before a document, int32 `[n]`.

  Raises:
    UserError: if it is too long to be continued, or nothing.
  """
  ids = loaded.tokenizer.encode(prompt)
  start = np.concatenate([framing.frame(loaded)[0], ids])
  framing.check_length(loaded, len(start) + 1, prompt)
  if not len(start):
    raise UserError(
      "the prompt is empty, and this model saw no token before a document:"
      " give a prompt"
    )
  return start


def _continue(loaded: Loaded, start, stop, sampling, seed, count):
  """Returns rows `[count, T]` and where each ends `[count]`."""
  config = loaded.model.config
  length = framing.round_up(stop, _LENGTH_STEP, config.max_seq_len)
  rows = np.zeros((count, length), np.int32)
  rows[:, : len(start)] = start
  eos = loaded.tokenizer.eos_id
  banned = loaded.tokenizer.special.copy()
  if eos is not None:
    banned[eos] = False
  rows, ends = _program(config, sampling)(
    loaded.params,
    rows,
    len(start),
    stop,
    banned,
    -1 if eos is None else eos,
    jax.random.key(seed),
  )
  return np.asarray(rows), np.asarray(ends)


@functools.lru_cache(maxsize=8)
def _program(config, sampling: Sampling):
  """Compiles the loop; without a cache of keys and values, for simplicity."""
  model = models.from_config(config)

  @jax.jit
  def program(params, rows, start, stop, banned, eos, key):
    positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)

    def unfinished(carry):
      _, ends, at = carry
      return (at < stop) & jnp.any(ends == stop)

    def step(carry):
      rows, ends, at = carry
      hidden = model.encode(params, rows, positions, CAUSAL)
      logits = model.logits(params, hidden[:, at - 1])
      logits = jnp.where(banned, -jnp.inf, logits)
      token = sampling.draw(jax.random.fold_in(key, at), logits)
      ends = jnp.where((ends == stop) & (token == eos), at, ends)
      return rows.at[:, at].set(token), ends, at + 1

    ends = jnp.full(len(rows), stop)
    return jax.lax.while_loop(unfinished, step, (rows, ends, start))[:2]

  return program


def _parser() -> cli.Parser:
  parser = cli.Parser(
    prog="python -m antlm_jax.generate",
    description=__doc__,
    may_be_empty=("prompt",),
  )
  add = parser.add_argument
  checkpoint.add_arguments(parser)
  add("--prompt", required=True, help="the text to continue")
  add("--tokens", type=int, default=50, help="tokens to add, at most")
  add("--temperature", type=float, default=0.8, help="0 for the likeliest")
  add("--top_k", type=int, default=0, help="draw from so many; 0 for all")
  add("--top_p", type=float, default=1.0, help="draw from this likely part")
  add("--seed", type=int, default=0, help="equal seeds give equal texts")
  add("--count", type=int, default=1, help="how many continuations")
  return parser


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = vars(_parser().parse_args(argv))
  loaded = checkpoint.load(args.pop("checkpoint"), args.pop("step"))
  texts = generate(loaded, **args)
  longest = loaded.model.config.max_seq_len
  if len(encode(loaded, args["prompt"])) + args["tokens"] > longest:
    note = f"note: texts stop at the model's max_seq_len={longest} tokens"
    print(note, file=sys.stderr)
  print("\n---\n".join(texts))


if __name__ == "__main__":
  cli.run(main)
