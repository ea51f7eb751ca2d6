"""Weak scaling on paper: the same batch a chip, on ever more chips.

    python -m evals.benchmarks.weak_scaling

Plans the train step of the 1B encoder (arXiv 2507.00994) on v5p slices of 8
to 2,048 chips, 9 rows of 2,048 tokens each, with the state over as many chips
as there are, up to 64 (over more the width of 1,728 does not divide). What a
chip needs of memory must not grow with their number; the bytes that it sends
are printed. No chip is at hand: all of it is what TPU's compiler makes of the
step.
"""

import dataclasses
import sys

from antlm_jax import cli, units
from antlm_jax.evals.benchmarks.common import RESULTS, Report, arguments
from antlm_jax.planning import topology
from antlm_jax.planning.estimate import estimate
from antlm_jax.planning.search import Pod
from antlm_jax.settings import setting

SLICES = ("2x2x2", "2x4x4", "4x4x8", "8x8x8", "8x16x16")
_SAME = 1.01  # the program itself differs by some megabytes


def measure(config: str, shape: str, rows: int, widest: int) -> dict:
  """Plans the first train step of a config on a slice."""
  devices = topology.devices(shape)
  fsdp = min(len(devices), widest)
  settings = (
    f"mesh.fsdp={fsdp}",
    f"train.batch_size={rows * len(devices)}",
  )
  pod = Pod(config, (), devices, vocab_size=128_256, pieces=2)
  run = pod.run(settings)
  found = estimate(run, run.programs(evaluations=False)[0])
  sent = {f"{c['kind']} over {c['axes']}": c["sent"] for c in found.collectives}
  return {
    "topology": shape,
    "chips": len(devices),
    "mesh": dict(run.mesh.shape),
    "sent_bytes": sum(sent.values()),
    "sent_by": sent,
    **found.to_json(),
  }


_CELLS = {  # of the table, by column: its width, and what it shows of a row
  "slice": (12, lambda row: row["topology"]),
  "mesh": (
    28,
    lambda row: ", ".join(f"{a}={n}" for a, n in row["mesh"].items()),
  ),
  "arguments": (9, lambda row: units.gib(row["memory"]["arguments"])),
  "needed": (9, lambda row: units.gib(row["memory"]["needed"])),
  "sent": (8, lambda row: units.quantity(row["sent_bytes"], "B")),
  "network": (8, lambda row: units.milliseconds(row["seconds"]["network"])),
  "step": (9, lambda row: units.milliseconds(row["step_seconds"])),
  "MFU": (6, lambda row: f"{row['mfu']:.1%}"),
  "compiled": (8, lambda row: units.duration(row["compile_seconds"])),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  config: str = setting("configs/encoders.py:size=1B", "which model")
  generation: str = setting("v5p", "the chips")
  slices: tuple[str, ...] = setting(SLICES, "their shapes")
  rows: int = setting(9, "rows of a chip", least=1)
  widest: int = setting(64, "chips to share the state", least=1)
  output: str = setting(str(RESULTS), "a folder", read=cli.here)


def main(argv) -> None:
  """Prints a line per slice, and writes them all as JSON."""
  args = arguments(__doc__, Settings, argv)
  report = Report(
    args.output,
    f"weak scaling {args.generation}",
    {name: width for name, (width, _) in _CELLS.items()},
    "<<>",
    config=args.config,
  )
  for shape in args.slices:
    shape = f"{args.generation}:{shape}"
    row = measure(args.config, shape, args.rows, args.widest)
    cells = [shape, "does not fit"]
    if row["memory"]["fits"]:
      cells = [cell(row) for _, cell in _CELLS.values()]
    report.add(row, cells)
  report.close()
  needed = [row["memory"]["needed"] for row in report.rows]
  if max(needed) > _SAME * needed[0]:
    print("the memory of a chip grows with their number", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  cli.run(main)
