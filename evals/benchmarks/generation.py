"""Tokens that generation makes in a second, beside transformers with its cache.

    python -m evals.benchmarks.generation --sizes=5M,97M

Both have the same random weights, exported, in float32, and continue the same
prompts of unequal lengths, greedily and by turns; each ratio is of one turn.
Above 1 we are faster. Ours is `antlm_jax.generate`, from text to text, theirs
`generate` alone, from tokens to tokens. Both have as many threads as the
process has cores. Nothing ends early. The first call of ours also compiles:
`compile` is by how much it is longer.

It needs torch and transformers, as `.[hf]` has.
"""

import dataclasses
import functools
import os
import pathlib
import tempfile
import time

import jax
import numpy as np
import tokenizers

from antlm_jax import cli, config, models, units
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.hf import export
from antlm_jax.inference import generation
from antlm_jax.models.llama import SHAPES
from antlm_jax.settings import setting
from antlm_jax.training import checkpoint
from evals.benchmarks.common import RESULTS, Report, arguments

_SMALL = dict(layers=4, width=256, mlp_width=704, heads=4, kv_heads=4)
SIZES = {  # the encoder's shape, and its vocabulary
  "5M": (_SMALL, 8_192),
  "5M-grouped": (_SMALL | {"kv_heads": 1}, 8_192),
  "97M": (SHAPES["97M"], 16_000),
}
_SPECIAL = ("<pad>", "<s>")  # and no end of text
_PROMPTS = 4, 24  # words of the shortest and of the longest


def make_model(size: str, folder: pathlib.Path) -> checkpoint.Loaded:
  """Makes a model of random weights, and one token for each word."""
  shape, vocab_size = SIZES[size]
  words = [*_SPECIAL, *(f"w{n}" for n in range(vocab_size - len(_SPECIAL)))]
  ids = {word: n for n, word in enumerate(words)}
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(ids, unk_token=words[-1])
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  backend.add_special_tokens(list(_SPECIAL))
  settings = config.default("llama")
  # Large weights: the likeliest token is so by far, in both.
  settings.model.update(shape, max_seq_len=512, init_std=0.1)
  model = models.build(settings.model, vocab_size)
  return checkpoint.Loaded(
    config=settings,
    tokenizer=Tokenizer(backend),
    boundary="bos",
    data="random",
    path=folder,
    step=0,
    model=model,
    params=jax.jit(functools.partial(model.init, 0))(),
  )


def make_prompts(count: int, vocab_size: int) -> list[str]:
  """Makes prompts of words drawn at random, the first one the longest."""
  draw = np.random.default_rng(0)
  least, most = _PROMPTS
  lengths = [most, *draw.integers(least, most, count - 1, endpoint=True)]
  return [
    " ".join(f"w{n}" for n in draw.integers(0, vocab_size // 2, length))
    for length in lengths
  ]


class Peer:
  """The same model in transformers, rows padded at their left."""

  def __init__(self, loaded: checkpoint.Loaded, folder: pathlib.Path):
    import torch  # only to compare with it
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    self._torch = torch
    (path,) = export.export(loaded, folder / "hf", ["causal"])
    auto = transformers.AutoModelForCausalLM
    self._model = auto.from_pretrained(path).eval()
    self.about = {
      "torch": torch.__version__,
      "transformers": transformers.__version__,
      "threads": torch.get_num_threads(),
    }

  def generate(self, rows: list[np.ndarray], tokens: int) -> np.ndarray:
    """Returns what follows rows of tokens, `[B, tokens]`."""
    longest = max(map(len, rows))
    pads = [longest - len(row) for row in rows]
    ids = [np.pad(row, (n, 0)) for row, n in zip(rows, pads, strict=True)]
    seen = [np.arange(longest) >= n for n in pads]
    out = self._model.generate(
      self._torch.tensor(np.stack(ids), dtype=self._torch.long),
      attention_mask=self._torch.tensor(np.stack(seen), dtype=self._torch.long),
      max_new_tokens=tokens,
      do_sample=False,
    )
    return out[:, longest:].numpy()


def measure(loaded, peer: Peer, batch: int, tokens: int, rounds: int) -> dict:
  """Times one case, ours and theirs by turns."""
  prompts = make_prompts(batch, loaded.tokenizer.vocab_size)
  rows = [generation.encode(loaded, prompt) for prompt in prompts]

  def ours():
    texts = generation.generate(loaded, prompts, tokens=tokens, temperature=0)
    found = loaded.tokenizer.encode_batch(texts)
    return np.stack([ids[-tokens:] for ids in found])

  def theirs():
    return peer.generate(rows, tokens)

  (first, a), (_, b) = _timed(ours), _timed(theirs)
  turns = [(_timed(ours)[0], _timed(theirs)[0]) for _ in range(rounds)]
  taken = np.array(turns)
  ratios = taken[:, 1] / taken[:, 0]
  mine, other = batch * tokens / np.median(taken, axis=0)
  return {
    "batch": batch,
    "tokens": tokens,
    "tokens_per_second": mine,
    "transformers": other,
    "ratio": float(np.median(ratios)),
    "ratios": sorted(ratios.tolist()),
    "compile_seconds": first - float(np.median(taken[:, 0])),
    "same": float((a == b).mean()),
  }


def _timed(call):
  begun = time.perf_counter()
  out = call()
  return time.perf_counter() - begun, out


_CELLS = {  # of the table, by column: its width, and what it shows of a row
  "size": (10, lambda row: row["size"]),
  "batch": (5, lambda row: row["batch"]),
  "tokens": (6, lambda row: row["tokens"]),
  "ours/s": (8, lambda row: f"{row['tokens_per_second']:,.0f}"),
  "theirs/s": (8, lambda row: f"{row['transformers']:,.0f}"),
  "ratio": (5, lambda row: f"{row['ratio']:.2f}"),
  "from to": (
    12,
    lambda row: f"{row['ratios'][0]:.2f} {row['ratios'][-1]:.2f}",
  ),
  "compile": (7, lambda row: units.duration(row["compile_seconds"])),
  "same": (6, lambda row: f"{row['same']:.1%}"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  sizes: tuple[str, ...] = setting(
    tuple(SIZES), f"of {', '.join(SIZES)}", choices=SIZES
  )
  batches: tuple[int, ...] = setting((1, 8), "prompts at once", least=1)
  tokens: tuple[int, ...] = setting((50, 200), "new tokens", least=1, most=480)
  rounds: int = setting(5, "turns of each case", least=1)
  output: str = setting(str(RESULTS), "a folder", read=cli.here)


def main(argv) -> None:
  """Prints a line per case, and writes them all as JSON."""
  args = arguments("generation", __doc__, Settings, argv)
  device = jax.devices()[0].device_kind
  report = None
  for size in args.sizes:
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      loaded = make_model(size, folder)
      peer = Peer(loaded, folder)
    report = report or Report(
      args.output,
      f"generation {device}",
      {column: width for column, (width, _) in _CELLS.items()},
      "<>",
      device=device,
      **peer.about,
    )
    for batch in args.batches:
      for tokens in args.tokens:
        row = {"size": size, "parameters": loaded.model.size}
        row |= measure(loaded, peer, batch, tokens, args.rounds)
        report.add(row, [show(row) for _, show in _CELLS.values()])
  report.close()


if __name__ == "__main__":
  cli.run(main)
