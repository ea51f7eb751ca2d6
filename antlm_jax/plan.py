"""Plans a run on TPUs or GPUs, on a machine that has none.

    antlm plan --config=encoders:size=1B \\
      --topology=v5p:4x4x8 --pieces=2

Compiles the run's own train step, for each kind of batch of its curriculum,
and its evaluations, and says what they need and what bounds their speed. That
is a roofline from published peaks: products, memory and network are each
thought to go on all the time, beside each other; a real step is slower. How
much slower it may be, a forecast says. GPUs are h100:8, h200:8 or b200:8, or
several nodes of them, h100:4x8.

Exit status 0 says that it fits into the memory, 1 that it does not: then more
of `fsdp`, recomputation and microbatches are tried, in this order, until it
does.
"""

import dataclasses
import datetime
import sys
from collections.abc import Sequence

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

  config: str = setting(help="a config file, FILE.py or FILE.py:ARG")
  topology: str = setting(help="such as v5e:16x16, v5p:4x4x8 or h100:4x8")
  slices: int = setting(1, "how many of these, of TPUs", least=1, most=2**10)
  vocab_size: int = setting(
    128_256, "without data.path: number of tokens", least=2, most=2**24
  )
  seq_len: int | None = setting(
    None,
    "likewise: tokens in a row (default: model.max_seq_len)",
    least=1,
    most=2**24,
  )
  pieces: int = setting(1, "likewise: documents in a row", least=1, most=2**10)
  sweep: bool = setting(False, "rank meshes and microbatches")
  budget: float = setting(3600.0, "seconds for the sweep")
  output: str | None = setting(None, "a JSON file of all of it", read=cli.here)


# ------------------------------------------------------------------- the tables


def table(found: Sequence[Estimate]) -> str:
  """Writes programs side by side; times and bytes are a device's, per step."""
  columns = {e.name: _cells(e) for e in found}
  # The lines of all, in the order of the program that has most.
  longest = max(columns.values(), key=len)
  names = dict.fromkeys([*longest, *(n for c in columns.values() for n in c)])
  rows = [[n, *(c.get(n) for c in columns.values())] for n in names]
  return tables.text(rows, ["", *columns])


def _cells(e: Estimate) -> dict[str, str]:
  """A column of the table, by its lines' names."""
  memory, work = e.memory, e.work
  out = {
    "rows x tokens": f"{e.rows:,} x {e.seq_len:,}",
    "attention by": e.attention,
    "memory needed": _share_of(memory.needed, memory.limit),
  }
  if memory.fits:
    out["  arguments"] = gib(memory.arguments)
    out["  temporaries"] = gib(memory.temporaries)
  else:
    out["  too much by"] = gib(memory.needed - memory.limit)
  out["FLOPs per token"] = quantity(work.total / (e.rows * e.seq_len))
  out["FLOPs per step"] = quantity(work.total)
  for name, part in dataclasses.asdict(work).items():
    name += " attention" * (name in ("causal", "bidirectional"))
    out[f"  {name}"] = f"{quantity(part)} ({part / work.total:.0%})"
  if e.seconds:
    out |= _speed_cells(e)
  return out | {"compiled in": duration(e.compile_seconds)}


def _speed_cells(e: Estimate) -> dict[str, str]:
  done = e.executed * e.devices
  times = {name: milliseconds(s) for name, s in e.seconds.items()}
  out = {
    "  executed": f"{quantity(done)} ({done / e.work.total:.0%})",
    "compute": f"{quantity(e.executed, 'FLOPs')}, {times['compute']}",
    "memory": f"{quantity(e.moved, 'B')}, {times['memory']}",
    "network": times["network"],
  }
  for c in e.collectives:
    sent = f"{quantity(c['sent'], 'B')}, {milliseconds(c['seconds'])}"
    out[f"  {c['kind']} over {c['axes']}"] = f"{c['times']} x: {sent}"
  if e.unknown_loops:
    out["loops counted once"] = str(e.unknown_loops)
  out["bound"] = e.bound
  out["best MFU"] = f"{e.mfu():.1%}"
  out["most tokens/s"] = quantity(e.rows * e.seq_len / e.step_seconds)
  return out | (_forecast_cells(e) if e.forecast else {})


def _forecast_cells(e: Estimate) -> dict[str, str]:
  if isinstance(e.forecast, str):
    return {"forecast": f"none: {e.forecast}"}
  seconds, parts = e.forecast.seconds, ("instructions", "attention", "network")
  return {
    "forecast": _between(e.forecast.range, seconds, milliseconds),
    **{f"  {name}": milliseconds(getattr(e.forecast, name)) for name in parts},
    "  MFU": f"{e.mfu(seconds):.1%}",
  }


def _between(ends: Sequence[float] | None, seconds: float, write) -> str:
  """Writes a forecast and its range, if that is known."""
  if not ends:
    return write(seconds)
  return f"{write(seconds)} ({' to '.join(map(write, ends))})"


def sweep_table(rows: Sequence[dict]) -> str:
  """Writes the sweep's meshes, the fastest first."""
  out = []
  for row in rows:
    mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    speed = ["does not fit", None, None]
    if row["fits"]:
      speed = [milliseconds(row["seconds"]), row["bound"], f"{row['mfu']:.1%}"]
    memory = _share_of(row["needed"], row["limit"])
    out.append([mesh, row["microbatches"], memory, *speed])
  head = ("mesh", "microbatches", "memory", "step", "bound", "best MFU")
  return tables.text(out, head)


def _share_of(needed: int, limit: int) -> str:
  return f"{gib(needed)} ({needed / limit:.0%})"


# ------------------------------------------------------------------ the command


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(
    description=__doc__,
    epilog="Any setting: --config.KEY=VALUE. All keys: antlm_jax/config.py.",
  )
  settings.add_arguments(parser, Settings)
  args, rest = parser.parse_with_overrides(argv)
  args = settings.from_args(Settings, args)
  if args.output:
    files.check_writable(args.output)
  pod = _pod(args, rest)
  run = pod.run()
  _say_setup(args, run)
  found, fits = _sweep(args, pod, run) if args.sweep else _plan(pod, run)
  if args.output:
    files.write_json(args.output, _about(args, rest, run) | found, indent=1)
    print(f"wrote {args.output}")
  if not fits:
    sys.exit(1)


def _pod(args: Settings, overrides: Sequence[str]) -> Pod:
  devices = topology.devices(args.topology, args.slices)
  chip = chips.of(devices[0])
  if chip is None:
    raise UserError(
      f"what {devices[0].device_kind} can do is not known: add it to"
      " antlm_jax/runtime/chips.py"
    )
  if args.slices > 1 and not chip.dcn:
    raise UserError(
      f"how fast slices of {args.topology} reach each other is not published"
    )
  text = args.vocab_size, args.seq_len, args.pieces
  return Pod(args.config, tuple(overrides), devices, *text)


def _say_setup(args: Settings, run: Run) -> None:
  mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
  slices = f"{args.slices} x " if args.slices > 1 else ""
  print(
    f"{args.config} on {slices}{args.topology}, {run.mesh.size} devices:"
    f" {mesh}; {quantity(run.model.size)} parameters"
  )
  if run.config.data.path:
    print(f"data: {run.config.data.path}")
  else:
    rows = run.sources.rows
    print(
      f"no data.path: {rows.vocab_size:,} tokens, rows of {rows.seq_len:,} in"
      f" {rows.pieces} (--vocab_size, --seq_len, --pieces)"
    )
  for line in sharding.undivided(run.mesh, run.model.axes, run.model.shapes):
    print(line)


def _sweep(args: Settings, pod: Pod, run: Run) -> tuple[dict, bool]:
  """Prints the sweep; returns what its file says, and whether any mesh fits."""
  rows = search.sweep(pod, run, args.budget)
  if not rows:
    raise UserError(f"--budget={args.budget:g} ended before any was compiled")
  print(sweep_table(rows))
  return {"sweep": rows}, any(row["fits"] for row in rows)


def _plan(pod: Pod, run: Run) -> tuple[dict, bool]:
  """Prints the plan; returns what its file says, and whether the run fits."""
  found = list(estimate_all(run, run.programs(), forecasts=True))
  print(table(found), flush=True)
  out = {"programs": [e.to_json() for e in found]}
  if all(e.memory.fits for e in found):
    print(f"{run.curriculum.steps:,} steps: {_whole(found)}")
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


def _whole(found: Sequence[Estimate]) -> str:
  """How long the run takes: the bound, and the forecast if there is one."""
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


def _about(args: Settings, overrides: Sequence[str], run: Run) -> dict:
  """The beginning of the file: what the plan is of."""
  asked = ("config", "topology", "slices")
  head = {name: getattr(args, name) for name in asked} | {
    "overrides": overrides,
    "devices": run.mesh.size,
    "mesh": dict(run.mesh.shape),
    "parameters": run.model.size,
    "date": datetime.date.today().isoformat(),
    "jax": jax.__version__,
  }
  if not run.config.data.path:
    rows = run.sources.rows
    head |= {"vocab_size": rows.vocab_size, "pieces": rows.pieces}
  return head


if __name__ == "__main__":
  cli.run(main)
