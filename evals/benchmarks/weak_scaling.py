"""Weak scaling on paper: the same batch a chip, on ever more chips.

    python -m evals.benchmarks.weak_scaling

Plans the train step of the 1B encoder (arXiv 2507.00994) on v5p slices of 8
to 2,048 chips, 9 rows of 2,048 tokens each, with the state over as many chips
as there are, up to 64 (over more the width of 1,728 does not divide). What a
chip needs of memory must not grow with their number; the bytes that it sends
are printed. No chip is at hand: all of it is what TPU's compiler makes of the
step.
"""

import datetime
import json
import pathlib
import sys

import jax

from antlm_jax import cli
from antlm_jax.planning import topology
from antlm_jax.planning.estimate import estimate, programs
from antlm_jax.planning.search import Pod
from antlm_jax.runtime import files

SLICES = ("2x2x2", "2x4x4", "4x4x8", "8x8x8", "8x16x16")
_ROWS = 9  # of a chip
_WIDEST = 64  # chips that share the state
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
  found = estimate(run, programs(run, evaluations=False)[0])
  sent = {f"{c['kind']} over {c['axes']}": c["sent"] for c in found.collectives}
  return {
    "topology": shape,
    "chips": len(devices),
    "mesh": dict(run.mesh.shape),
    "sent_bytes": sum(sent.values()),
    "sent_by": sent,
    **found.to_json(),
  }


def _say(row: dict) -> str:
  if not row["memory"]["fits"]:
    return f"{row['topology']}: does not fit"
  mesh = ", ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
  return (
    f"{row['topology']:<14}{mesh:<30}"
    f"{row['memory']['arguments'] / 2**30:9.2f} GiB"
    f"{row['memory']['needed'] / 2**30:9.2f} GiB"
    f"{row['sent_bytes'] / 1e9:9.2f} GB"
    f"{row['seconds']['network'] * 1e3:8.1f} ms"
    f"{row['step_seconds'] * 1e3:8.1f} ms"
    f"{row['mfu']:8.1%}"
    f"{row['compile_seconds']:8.0f} s"
  )


def main(argv) -> None:
  """Prints a line per slice, and writes them all as JSON."""
  parser = cli.Parser(
    prog="python -m evals.benchmarks.weak_scaling", description=__doc__
  )
  add = parser.add_argument
  add("--config", default="configs/encoders.py:size=1B", help="which model")
  add("--generation", default="v5p", help="the chips")
  add("--slices", default=",".join(SLICES), help="their shapes")
  add("--rows", type=int, default=_ROWS, help="rows of a chip")
  add("--widest", type=int, default=_WIDEST, help="chips to share the state")
  add("--output", default="evals/benchmarks/results", help="a folder")
  args = parser.parse_args(argv)
  path = pathlib.Path(args.output) / f"weak-scaling-{args.generation}.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  result = {
    "config": args.config,
    "date": datetime.date.today().isoformat(),
    "jax": jax.__version__,
    "rows": [],
  }
  print(
    f"{'slice':<44}{'arguments':>13}{'needed':>13}{'sent':>12}{'network':>11}"
    f"{'step':>11}{'MFU':>8}{'compiled':>10}"
  )
  for shape in args.slices.split(","):
    shape = f"{args.generation}:{shape}"
    row = measure(args.config, shape, args.rows, args.widest)
    print(_say(row), flush=True)
    # After each slice: what was found stays, whatever comes next.
    result["rows"].append(row)
    files.write_text(path, json.dumps(result, indent=1) + "\n")
  print(f"wrote {path}")
  needed = [row["memory"]["needed"] for row in result["rows"]]
  if max(needed) > _SAME * needed[0]:
    print("the memory of a chip grows with their number", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  cli.run(main)
