"""Fills masks in a text.

python -m antlm_jax.fill_mask --checkpoint=RUN --text="The <mask> sat."
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import cli, models
from antlm_jax.errors import UserError
from antlm_jax.inference import framing
from antlm_jax.masks import AttentionMask
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import Loaded

MASK = "<mask>"
_STAND_IN = "0"  # no letter, so that it stays apart from what is around it
_LENGTH_STEP = 16  # row lengths are multiples of it


def fill_mask(
  loaded: Loaded, text: str, top: int = 5
) -> list[list[tuple[str, float]]]:
  """Predicts the masked tokens of a text, each by itself.

  Attention is bidirectional. A prediction is read in place, or one position
  before where the model was trained so (see `framing.mask_shift`).

  Args:
    loaded: The model.
    text: Holds one `<mask>` or more; each stands for one token.
    top: How many candidates of each.

  Returns:
    For each mask, its candidates and their probabilities, best first.

  Raises:
    UserError: if there is no mask, the text is too long, or the model cannot
      predict a mask.
  """
  tokens = encode(loaded, text)
  framing.check_length(loaded, len(tokens), text)
  (masked,) = np.nonzero(tokens == framing.mask_id(loaded))
  at = masked - framing.mask_shift(loaded.config)
  if at[0] < 0:
    raise UserError(
      "nothing stands before the first <mask>, where this model predicts it"
    )
  probabilities = _probabilities(loaded, tokens)[at]
  best = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top]
  return [
    [(_show(loaded, token), float(row[token])) for token in candidates]
    for row, candidates in zip(probabilities, best, strict=True)
  ]


def encode(loaded: Loaded, text: str) -> np.ndarray:
  """Encodes a text with masks, and frames it, int32 `[n]`.

  The text around a mask is encoded as it would be around a word: a mask takes
  the space before it, as a word does.

  Raises:
    UserError: if there is no mask.
  """
  mask_id = framing.mask_id(loaded)
  pieces = text.split(MASK)
  if len(pieces) == 1:
    raise UserError(f"the text holds no {MASK}: {text!r}")
  ids, spans = loaded.tokenizer.encode_offsets(_STAND_IN.join(pieces))
  ends = np.cumsum([len(piece) + 1 for piece in pieces[:-1]])
  # The space before may be a token of its own, and is added where none is.
  spaces = [not piece or piece.endswith(" ") for piece in pieces[:-1]]
  starts = ends - 1 - np.array(spaces, int)
  out, done = [], 0  # masks that are written
  for token, (start, end) in zip(ids, spans, strict=True):
    begun = int(np.searchsorted(starts, end))
    if begun == np.searchsorted(ends, start, side="right"):  # meets no mask
      out.append(token)
      continue
    out += [mask_id] * (begun - done)
    done = begun
  before, after = framing.frame(loaded)
  return np.concatenate([before, np.array(out, np.int32), after])


def _show(loaded: Loaded, token: int) -> str:
  return loaded.tokenizer.decode([token], skip_special=False)


def _probabilities(loaded: Loaded, tokens: np.ndarray) -> np.ndarray:
  """Probabilities at every position of a row, float32 `[n, V]`."""
  config = loaded.model.config
  length = framing.round_up(len(tokens), _LENGTH_STEP, config.max_seq_len)
  row = np.zeros((1, length), np.int32)
  row[0, : len(tokens)] = tokens
  program = _program(config)
  return np.asarray(program(loaded.params, row, len(tokens)))[: len(tokens)]


@functools.lru_cache(maxsize=4)
def _program(config):
  model = models.from_config(config)

  @jax.jit
  def program(params, row, length):
    positions = jnp.arange(row.shape[1])[None]
    mask = AttentionMask(k_end=jnp.full(row.shape, length))
    hidden = model.encode(params, row, positions, mask)
    return jax.nn.softmax(model.logits(params, hidden[0]))

  return program


def _parser() -> cli.Parser:
  parser = cli.Parser(
    prog="python -m antlm_jax.fill_mask",
    description=__doc__,
  )
  add = parser.add_argument
  checkpoint.add_arguments(parser)
  add("--text", required=True, help=f"holds one {MASK} or more")
  add("--top", type=int, default=5, help="candidates of each mask (5)")
  return parser


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parser().parse_args(argv)
  if args.top < 1:
    raise UserError(f"--top={args.top} is not positive")
  loaded = checkpoint.load(args.checkpoint, args.step)
  filled = fill_mask(loaded, args.text, args.top)
  for number, candidates in enumerate(filled, start=1):
    if len(filled) > 1:
      print(f"{MASK} {number}")
    for token, probability in candidates:
      print(f"{probability:8.4f}  {token}")


if __name__ == "__main__":
  cli.run(main)
