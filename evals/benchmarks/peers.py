"""How fast this library is compared with its peers, on this machine.

    python -m antlm_jax.evals.benchmarks.peers
    python -m antlm_jax.evals.benchmarks.peers --kinds=train --at_once=4

A case is work that a peer does as well, with the same weights, batches or
texts. Each side has its own process, and both work by turns. On a CPU, they
compute in float32, with a thread for each core. For a GPU, see
`beside.training`. Above 1 we are faster.

`ratio` is the median of the turns' ratios, `from to` the least and the
greatest. `memory` is the most memory of a GPU that ours and theirs took.
`compile` is by how much our first call was longer. `same` says whether both
results agree.

It needs the packages of `.[test-hf]`.
"""

import contextlib
import dataclasses
import os
import pathlib
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata

import jax

from antlm_jax import cli, units
from antlm_jax.data import toy_english
from antlm_jax.errors import UserError
from antlm_jax.evals.benchmarks import common
from antlm_jax.evals.benchmarks.beside import generation, scoring, training
from antlm_jax.evals.benchmarks.turns import Case, Side, Worker, time_case
from antlm_jax.runtime import cores
from antlm_jax.settings import Section, setting


def _training(device: str, *shape) -> Case:
  work = training.Training(*shape)
  return Case(device, work, "transformers", training.ours, training.theirs)


def _generation(*shape) -> Case:
  work = generation.Generation(*shape)
  return Case("cpu", work, "transformers", generation.ours, generation.theirs)


def _texts(device: str, peer: str, theirs: Side, *shape) -> Case:
  return Case(device, scoring.Texts(*shape), peer, scoring.ours, theirs)


_EMBEDDER = "sentence-transformers", scoring.sentence_transformers
_MINICONS = "minicons", scoring.minicons
CASES = (
  # Batch, size, rows, tokens of a row, and steps of a call.
  _training("cpu", "clm", "7M", 16, 128, 4),
  _training("cpu", "mlm", "7M", 16, 128, 4),
  _training("cpu", "packed", "7M", 16, 128, 2),
  _training("cpu", "clm", "97M", 8, 128, 1),
  _training("cpu", "mlm", "97M", 8, 128, 1),
  _training("gpu", "clm", "97M", 256, 128, 20, "bfloat16"),
  _training("gpu", "clm", "210M", 8, 2048, 20, "bfloat16"),
  _training("gpu", "mlm", "ModernBERT", 32, 1024, 10, "bfloat16"),
  _training("gpu", "packed", "97M", 64, 512, 10, "bfloat16"),
  # Size, prompts at once, and tokens after each.
  _generation("7M", 1, 200),
  _generation("7M", 8, 50),
  _generation("97M", 1, 200),
  _generation("97M", 8, 50),
  # Kind, mode, size, and most pairs of each file.
  _texts("cpu", "lm-eval", scoring.lm_eval, "score", "causal", "7M", 100),
  _texts("cpu", *_MINICONS, "score", "causal", "7M", 100),
  _texts("cpu", *_MINICONS, "score", "mlm", "7M", 5),
  _texts("gpu", *_MINICONS, "score", "mlm", "97M", 10),
  _texts("cpu", *_EMBEDDER, "embed", "mlm", "7M", 100),
  _texts("gpu", *_EMBEDDER, "embed", "mlm", "97M", 300),
)
_KINDS = tuple(dict.fromkeys(case.work.kind for case in CASES))
_DEVICES = tuple(dict.fromkeys(case.device for case in CASES))
_PEERS = tuple(dict.fromkeys(case.peer for case in CASES))
_COLUMNS = {
  "case": 30,
  "peer": 21,
  "ratio": (5, "{:.2f}".format, "ratio"),
  "from to": (9, lambda r: f"{r[0]:.2f} {r[-1]:.2f}", "ratios"),
  "ours/s": (14, "{:,.4g} {}".format, "ours", "unit"),
  "theirs/s": (9, "{:,.4g}".format, "theirs"),
  "memory": (19, lambda peaks: " ".join(map(units.gib, peaks)), "peak_bytes"),
  "compile": (7, units.duration, "compile_seconds"),
  "same": (4, lambda same: "yes" if same else "NO", "same"),
  "error": 0,
}


@dataclasses.dataclass(frozen=True)
class Comparisons(Section):
  """The command's arguments."""

  kinds: tuple[str, ...] = setting(
    _KINDS, f"Kinds of work: {', '.join(_KINDS)}", choices=_KINDS
  )
  devices: tuple[str, ...] = setting(
    (),
    "Devices whose cases to time (default: this machine's)",
    choices=_DEVICES,
  )
  tiny: bool = setting(False, "Rehearse all cases at a tiny size")
  rounds: int = setting(9, "Number of timed turns of each case", least=1)
  at_once: int = setting(
    1, "Number of cases that are compiled at once", least=1
  )
  output: str = common.output()


def time_cases(cases: Sequence[Case], args: Comparisons) -> Iterator[dict]:
  """Times cases, `args.at_once` of which have processes; yields their rows."""
  with tempfile.TemporaryDirectory() as temporary:
    root = pathlib.Path(temporary)
    toy_english.write_toy_english(root / "toy")
    for start in range(0, len(cases), args.at_once):
      started = []
      with contextlib.ExitStack() as stack:
        for number, case in enumerate(cases[start : start + args.at_once]):
          folder = root / str(start + number)
          folder.mkdir()
          workers = (
            stack.enter_context(Worker(side, case.work, folder))
            for side in (case.ours, case.theirs)
          )
          started.append((case, *workers))
        for case, ours, theirs in started:
          yield time_case(case, ours, theirs, args.rounds)


def main(argv: Sequence[str]) -> None:
  """Prints a line per case, and writes them all as JSON."""
  # The GPU's memory is for both sides.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  args = common.benchmark_arguments(__doc__, Comparisons, argv)
  device = jax.devices()[0]
  count = cores.count_cores()
  facts = {"device": device.device_kind, "cores": count}
  for peer in ("torch", *_PEERS):
    try:
      facts[peer] = metadata.version(peer)
    except metadata.PackageNotFoundError:
      print(f"without {peer}, which is not installed")
  name = f"peers {platform.machine()} {device.device_kind} {count} cores"
  name += " tiny" * args.tiny
  chosen = args.devices or (device.platform,)
  cases = [
    dataclasses.replace(case, work=case.work.tiny()) if args.tiny else case
    for case in CASES
    if case.device in chosen
    and case.work.kind in args.kinds
    and case.peer in facts
  ]
  if not cases:
    raise UserError(f"there are no such cases for {', '.join(chosen)}")
  rows = time_cases(cases, args)
  rows = common.report_rows(rows, args.output, name, _COLUMNS, "<<>", **facts)
  if any("error" in row or not row["same"] for row in rows):
    sys.exit(1)


if __name__ == "__main__":
  cli.run_command(main)
