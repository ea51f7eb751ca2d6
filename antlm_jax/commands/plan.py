"""Plans a run on TPUs or GPUs, on a machine that has none.

    antlm plan --config=encoders:size=1B \\
      --topology=v5p:4x4x8 --pieces=2

Compiles the run's train step for each kind of batch in its curriculum, and its
evaluations. Prints the memory that they need and a roofline from published
peaks: computation, memory and network never wait for each other, so a real step
is slower. A forecast estimates its time. A topology is a TPU generation and a
shape, or GPUs: h100:8, h200:8 or b200:8 for one node, h100:4x8 for four nodes.

If the run fits into memory, the exit status is 0. If it does not, plan tries
more `fsdp`, recomputation and microbatches until it does, and exits with 1.
"""

import dataclasses
import datetime
import sys
from collections.abc import Callable, Sequence

import jax

from antlm_jax import cli, settings, tables
from antlm_jax.errors import UserError
from antlm_jax.planning import search, topology
from antlm_jax.planning.estimate import Estimate, estimate_all
from antlm_jax.planning.forecast import Forecast
from antlm_jax.planning.search import Pod
from antlm_jax.runtime import chips, files, sharding
from antlm_jax.settings import setting
from antlm_jax.training.experiment import Run
from antlm_jax.units import duration, gib, milliseconds, quantity


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  config: str = setting(help="config file, FILE.py or FILE.py:ARG")
  topology: str = setting(help="devices: v5e:16x16, v5p:4x4x8 or h100:4x8")
  slices: int = setting(1, "number of such TPU slices", least=1, most=2**10)
  vocab_size: int = setting(
    128_256, "number of tokens, without data.path", least=2, most=2**24
  )
  seq_len: int | None = setting(
    None,
    "tokens in a row, without data.path (default: model.max_seq_len)",
    least=1,
    most=2**24,
  )
  pieces: int = setting(
    1, "documents in a row, without data.path", least=1, most=2**10
  )
  sweep: bool = setting(False, "rank meshes and microbatches")
  budget: float = setting(3600.0, "time limit of the sweep, in seconds")
  output: str | None = setting(None, "path to a JSON file", read=cli.here)


def table(found: Sequence[Estimate]) -> str:
  """Lays out programs side by side; times and bytes are per device and step."""
  columns = {e.name: _column(e) for e in found}
  # In the order of the longest column.
  longest = max(columns.values(), key=len)
  names = dict.fromkeys([*longest, *(n for c in columns.values() for n in c)])
  rows = [[n, *(c.get(n) for c in columns.values())] for n in names]
  return tables.text(rows, ["", *columns])


def _column(e: Estimate) -> dict[str, str]:
  memory, work, tokens = e.memory, e.work, e.rows * e.seq_len
  out = {
    "rows x tokens": f"{e.rows:,} x {e.seq_len:,}",
    "attention by": e.attention,
    "memory needed": _part_of(memory.needed, memory.limit),
  }
  if memory.fits:
    out["  arguments"] = gib(memory.arguments)
    out["  temporaries"] = gib(memory.temporaries)
  else:
    out["  too much by"] = gib(memory.needed - memory.limit)
  out["FLOPs per token"] = quantity(work.total / tokens)
  out["FLOPs per step"] = quantity(work.total)
  for name, part in dataclasses.asdict(work).items():
    name += " attention" * (name in ("causal", "bidirectional"))
    out[f"  {name}"] = f"{quantity(part)} ({part / work.total:.0%})"
  if e.seconds:
    done = e.executed * e.devices
    times = {name: milliseconds(s) for name, s in e.seconds.items()}
    out["  executed"] = f"{quantity(done)} ({done / work.total:.0%})"
    out["compute"] = f"{quantity(e.executed, 'FLOPs')}, {times['compute']}"
    out["memory"] = f"{quantity(e.moved, 'B')}, {times['memory']}"
    out["network"] = times["network"]
    for c in e.collectives:
      sent = f"{quantity(c['sent'], 'B')}, {milliseconds(c['seconds'])}"
      out[f"  {c['kind']} over {c['axes']}"] = f"{c['times']} x: {sent}"
    if e.unknown_loops:
      out["loops counted once"] = str(e.unknown_loops)
    out["bound"] = e.bound
    out["best MFU"] = f"{e.mfu():.1%}"
    out["most tokens/s"] = quantity(tokens / e.step_seconds)
  if isinstance(e.forecast, Forecast):
    f = e.forecast
    out["forecast"] = _between(f.range, f.seconds, milliseconds)
    for name in ("instructions", "attention", "network"):
      out[f"  {name}"] = milliseconds(getattr(f, name))
    out["  MFU"] = f"{e.mfu(f.seconds):.1%}"
  elif e.forecast:
    out["forecast"] = f"none: {e.forecast}"
  return out | {"compiled in": duration(e.compile_seconds)}


def _between(ends, seconds: float, write: Callable[[float], str]) -> str:
  """Writes a forecast and its range, if that is known."""
  if not ends:
    return write(seconds)
  return f"{write(seconds)} ({' to '.join(map(write, ends))})"


def sweep_table(rows: Sequence[dict]) -> str:
  """Lays out the sweep's meshes, the fastest first."""
  out = []
  for row in rows:
    mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    speed = ["does not fit", None, None]
    if row["fits"]:
      speed = [milliseconds(row["seconds"]), row["bound"], f"{row['mfu']:.1%}"]
    memory = _part_of(row["needed"], row["limit"])
    out.append([mesh, row["microbatches"], memory, *speed])
  head = ("mesh", "microbatches", "memory", "step", "bound", "best MFU")
  return tables.text(out, head)


def _part_of(needed: int, limit: int) -> str:
  return f"{gib(needed)} ({needed / limit:.0%})"


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(
    description=__doc__,
    epilog="Any setting: --config.KEY=VALUE; `antlm train --help` lists them.",
  )
  settings.add_arguments(parser, Settings)
  args, overrides = parser.parse_with_overrides(argv)
  args = settings.from_args(Settings, args)
  if args.output:
    files.check_writable(args.output)
  devices = topology.devices(args.topology, args.slices)
  if args.slices > 1 and not chips.of(devices[0]).dcn:
    raise UserError(
      f"the network between slices of {args.topology} is not published: plan"
      " one slice"
    )
  sizes = args.vocab_size, args.seq_len, args.pieces
  pod = Pod(args.config, tuple(overrides), devices, *sizes)
  run = pod.run()
  about = _about(args, overrides, run)
  found, fits = _sweep(args, pod, run) if args.sweep else _plan(pod, run)
  if args.output:
    files.write_json(args.output, about | found, indent=1)
    print(f"wrote {args.output}")
  if not fits:
    sys.exit(1)


def _about(args: Settings, overrides: Sequence[str], run: Run) -> dict:
  """Prints the run's setup and returns it for the file."""
  mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
  slices = f"{args.slices} x " if args.slices > 1 else ""
  print(
    f"{args.config} on {slices}{args.topology}, {run.mesh.size} devices:"
    f" {mesh}; {quantity(run.model.size)} parameters"
  )
  about = {
    "config": args.config,
    "topology": args.topology,
    "slices": args.slices,
    "overrides": overrides,
    "devices": run.mesh.size,
    "mesh": dict(run.mesh.shape),
    "parameters": run.model.size,
    "date": datetime.date.today().isoformat(),
    "jax": jax.__version__,
  }
  if run.config.data.path:
    print(f"data: {run.config.data.path}")
  else:
    rows = run.sources.rows
    print(
      f"no data.path: {rows.vocab_size:,} tokens, rows of {rows.seq_len:,} in"
      f" {rows.pieces} (--vocab_size, --seq_len, --pieces)"
    )
    about |= {"vocab_size": rows.vocab_size, "pieces": rows.pieces}
  for line in sharding.undivided(run.mesh, run.model.axes, run.model.shapes):
    print(line)
  return about


def _sweep(args: Settings, pod: Pod, run: Run) -> tuple[dict, bool]:
  """Prints the sweep; returns it for the file, and whether any mesh fits."""
  rows = search.sweep(pod, run, args.budget)
  if not rows:
    raise UserError(
      f"--budget={args.budget:g} seconds ended before any program was compiled"
    )
  print(sweep_table(rows))
  return {"sweep": rows}, any(row["fits"] for row in rows)


def _plan(pod: Pod, run: Run) -> tuple[dict, bool]:
  """Prints the plan; returns it for the file, and whether the run fits."""
  found = list(estimate_all(run, run.programs(), forecasts=True))
  print(table(found), flush=True)
  out = {"programs": [e.to_json() for e in found]}
  if all(e.memory.fits for e in found):
    print(f"{run.curriculum.steps:,} steps: {_time(found)}")
    return out, True
  changes, seen = search.advise(pod, run, found)
  fits = bool(seen) and all(e.memory.fits for e in seen)
  flags = " ".join(f"--config.{change}" for change in changes) or "none"
  if fits:
    print(f"does not fit, but does with\n  {flags}")
  else:
    print(f"does not fit, nor with any setting tried; the last: {flags}")
  if seen:
    print(table(seen))
  tried = [e.to_json() for e in seen]
  advice = {"settings": changes, "fits": fits, "programs": tried}
  return out | {"advice": advice}, False


def _time(found: Sequence[Estimate]) -> str:
  """Returns the run's time: its lower bound and, if known, its forecast."""
  bound = duration(sum(e.steps * e.step_seconds for e in found))
  bound += " at the published peaks, a bound"
  if not all(isinstance(e.forecast, Forecast) for e in found):
    return f"{bound}, and no forecast"
  seconds = sum(e.steps * e.forecast.seconds for e in found)
  ends = [
    sum(e.steps * end for e, end in zip(found, each, strict=True))
    for each in zip(*(e.forecast.range or () for e in found), strict=True)
  ]
  forecast = _between(ends, seconds, duration)
  return f"{forecast} by the forecast, {bound}"


if __name__ == "__main__":
  cli.run(main)
