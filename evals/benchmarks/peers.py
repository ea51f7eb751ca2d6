"""How fast this library is compared with its peers, on this machine.

    python -m antlm_jax.evals.benchmarks.peers --pairs=FOLDER --text=PATH

A case is work that a peer does as well, with the same weights, batches or
texts, in float32. Both work by turns in one process, with a thread for each
core. Above 1 we are faster. `ratio` is the median of the turns' ratios, `from
to` the least and the greatest, and `best` the ratio of the best turns of each.
`others` is the largest share of the machine that other processes took, and
`again` how many turns were repeated for that. Both results are compared.
`compile` is by how much our first call was longer; a case `anew` compiles in
every call.

It needs the packages of `.[test-hf]`.
"""

import dataclasses
import pathlib
import platform
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version

import jax

from antlm_jax import cli, units
from antlm_jax.data import toy_english
from antlm_jax.evals.benchmarks import common, turns
from antlm_jax.evals.benchmarks.beside import (
  data,
  generation,
  models,
  scoring,
  training,
)
from antlm_jax.runtime import cores
from antlm_jax.settings import Section, setting

_KINDS = "train", "generate", "score", "data"
_PEERS = "torch", "transformers", "lm_eval", "minicons", "datasets"
_COLUMNS = {
  "case": 24,
  "peer": 12,
  "ratio": (5, "{:.2f}".format, "ratio"),
  "best": (4, "{:.2f}".format, "best"),
  "from to": (9, lambda r: f"{r[0]:.2f} {r[-1]:.2f}", "ratios"),
  "ours/s": (14, "{:,.4g} {}".format, "ours", "unit"),
  "theirs/s": (8, "{:,.4g}".format, "theirs"),
  "compile": (7, units.duration, "compile_seconds"),
  "others": (6, "{:.0%}".format, "others"),
  "again": (5, str, "repeated"),
  "same": (4, lambda same: "yes" if same else "NO", "same"),
}


@dataclasses.dataclass(frozen=True)
class Comparisons(Section):
  """The command's arguments."""

  cases: tuple[str, ...] = setting(
    _KINDS, f"Kinds of work: {', '.join(_KINDS)}", choices=_KINDS
  )
  sizes: tuple[str, ...] = setting(
    ("7M", "97M"),
    f"Model sizes, of {', '.join(models.SIZES)}; scoring uses the first only",
    choices=models.SIZES,
  )
  pairs: str | None = setting(
    None, "Folder of minimal pairs, such as BLiMP's (default: toy English)"
  )
  limit: int = setting(
    100, "Number of pairs from each file; 0 for all", least=0
  )
  text: tuple[str, ...] = setting(
    (), "Text files to prepare (default: toy English)"
  )
  rounds: int = setting(9, "Number of timed turns of each case", least=1)
  output: str = common.output()


def peer_cases(
  args: Comparisons, folder: pathlib.Path
) -> Iterator[turns.TimedCase]:
  """Yields the cases; a case's models are gone after it."""
  toy_english.write_toy_english(folder / "toy")
  pairs = args.pairs or str(folder / "toy/pairs")
  text = args.text or (str(folder / "toy/text"),)
  for kind in args.cases:
    if kind == "data":
      yield from data.preparation_cases(folder, text)
    if kind == "score":  # with a larger one it takes hours
      size = args.sizes[0]
      yield from scoring.scoring_cases(folder / kind, size, pairs, args.limit)
    for size in args.sizes:
      if kind == "train":
        yield from training.training_cases(folder / kind / size, size)
      if kind == "generate":
        yield from generation.generation_cases(folder / kind / size, size)


def main(argv: Sequence[str]) -> None:
  """Prints a line per case, and writes them all as JSON."""
  args = common.benchmark_arguments(__doc__, Comparisons, argv)
  device = jax.devices()[0].device_kind
  count = cores.count_cores()
  versions = {name: version(name) for name in _PEERS}
  facts = {"device": device, "cores": count, **versions}
  name = f"peers {platform.machine()} {device} {count} cores"
  with tempfile.TemporaryDirectory() as folder:
    cases = peer_cases(args, pathlib.Path(folder))
    rows = (turns.time_case(case, args.rounds) for case in cases)
    common.report_rows(rows, args.output, name, _COLUMNS, "<<>", **facts)


if __name__ == "__main__":
  cli.run_command(main)
