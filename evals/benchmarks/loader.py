"""Tokens per second of the loader, through grain, on one core.

    python -m evals.benchmarks.loader --data=PREPARED

Rows are read in shuffled order, corrupted and laid out as batches, as in
training. The figures are of one pinned core: 1,000,000 a second is what a GPU
eats at the size of BabyLlama.
"""

import dataclasses
import os
import time

from antlm_jax import cli, settings, units
from antlm_jax.data import source as source_lib
from antlm_jax.data.order import Order, Part
from antlm_jax.data.prepared import Prepared
from antlm_jax.objectives import curriculum, objective
from antlm_jax.objectives.batch import Layout
from antlm_jax.settings import setting
from antlm_jax.training import run

CASES = {
  "clm": "C",
  "mlm": "M",
  "mlm, all <mask>": "A",
  "mlm, whole words": "W",
  "mlm, spans": "S",
  "clm:mlm 1:15": "C:M=1:15",
}
OBJECTIVES = objective.OBJECTIVES | {
  "A": objective.Objective(
    "all", "bidirectional", 0, "masked", 0.4, None, 1.0, 0.0
  ),
  "W": objective.Objective(
    "word", "bidirectional", 0, "masked", 0.15, unit="word"
  ),
  "S": objective.Objective(
    "span", "bidirectional", 0, "masked", 0.15, unit="span"
  ),
}


def measure(data: str, text: str, batch_size: int, seconds: float) -> float:
  """Returns tokens per second of one curriculum."""
  prepared = Prepared.open(data)
  rows = prepared.train
  source = source_lib.Source(
    rows=rows,
    order=Order(len(rows), (Part(0.0, Layout(batch_size)),)),
    curriculum=curriculum.parse(text, OBJECTIVES, 1, 10**6),
    objectives=OBJECTIVES,
    vocabulary=run.vocabulary(prepared.tokenizer),
    seed=0,
  )
  batches = source_lib.load(source, threads=1)
  for _ in range(30):  # past what was prefetched while grain started
    next(batches)
  begun, steps = time.monotonic(), 0
  while time.monotonic() - begun < seconds:
    next(batches)
    steps += 1
  return steps * batch_size * rows.seq_len / (time.monotonic() - begun)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  data: str = setting(help="a prepared folder")
  batch_size: int = setting(256, "rows", least=1)
  seconds: float = setting(3.0, "per case", over=0)


def main(argv) -> None:
  """Prints a line per case."""
  parser = cli.Parser(
    prog="python -m evals.benchmarks.loader", description=__doc__
  )
  settings.add_arguments(parser, Settings)
  args = settings.from_args(Settings, parser.parse_args(argv))
  os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
  for name, text in CASES.items():
    rate = measure(args.data, text, args.batch_size, args.seconds)
    print(f"{name:<18}{units.quantity(rate)} tokens/s", flush=True)


if __name__ == "__main__":
  cli.run(main)
