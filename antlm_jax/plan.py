"""Plans a run on a TPU pod, on a machine that has none.

    python -m antlm_jax.plan --config=configs/encoders.py:size=1B \\
      --topology=v5p:4x4x8 --pieces=2

Compiles the run's own train step, for each kind of batch of its curriculum,
and its evaluations, and says what they need and what bounds their speed. That
is a roofline from published peaks: products, memory and network are each
thought to go on all the time, beside each other; a real step is slower.

Exit status 0 says that it fits into the memory, 1 that it does not: then more
of `fsdp`, recomputation and microbatches are tried, in this order, until it
does.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

import jax

from antlm_jax import cli, units
from antlm_jax import config as config_lib
from antlm_jax.errors import UserError
from antlm_jax.planning import topology
from antlm_jax.planning.estimate import (
  Foreseen,
  StandIn,
  assemble,
  foresee_all,
  programs,
)
from antlm_jax.runtime import chips, files, progress, sharding
from antlm_jax.training.run import Run

_EPOCH = 1000  # steps in an epoch of data that is not there
_MOST_FSDP = 64
_MOST_TRIED = 8  # settings, until one fits


# A plan, what to do where it does not fit, and which is the best.


@dataclasses.dataclass(frozen=True)
class Pod:
  """What a plan is for.

  Attributes:
    spec: The config file and its argument.
    overrides: `--config.key=value`.
    devices: The devices.
    vocab_size: Number of tokens, where there is no data.
    seq_len: Tokens in a row, likewise; None for as many as the model takes.
    pieces: Documents in a row, likewise.
  """

  spec: str
  overrides: tuple[str, ...]
  devices: Sequence[jax.Device]
  vocab_size: int
  seq_len: int | None = None
  pieces: int = 1

  def run(self, settings: Sequence[str] = ()) -> Run:
    """Builds the run with further `key=value`."""
    more = [f"--config.{setting}" for setting in settings]
    config = config_lib.load(self.spec, [*self.overrides, *more])
    length = self.seq_len or config.model.max_seq_len
    size = _EPOCH * config.train.batch_size
    stand_in = StandIn(self.vocab_size, length, self.pieces, size)
    return assemble(config, self.devices, stand_in)


def advise(pod: Pod, run: Run, found: Sequence[Foreseen]):
  """Tries settings until those programs that did not fit do.

  Returns:
    The settings `key=value` tried last, and what they make of the programs;
    the last of them does not fit if none was enough.
  """
  failed = {f.name for f in found if not f.memory.fits}
  over = max(f.memory.needed - f.memory.limit for f in found)
  tried, seen = (), []
  candidates = list(settings_that_save(run, over))[:_MOST_TRIED]
  for tried in progress.track(candidates, "setting", "tried", 0):
    other, seen = pod.run(tried), []
    chosen = [p for p in programs(other) if p.name in failed]
    for foreseen in foresee_all(other, chosen):
      seen.append(foreseen)
      if not foreseen.memory.fits:
        break
    else:
      break
  return tried, seen


def settings_that_save(run: Run, over: int) -> Iterator[tuple[str, ...]]:
  """Yields settings that take ever less memory, the cheapest first.

  Args:
    run: What does not fit.
    over: By how many bytes.
  """
  kept, mesh = (), run.mesh.shape
  state = 4 * run.model.size * (3 + bool(run.step.ema))
  state //= mesh["fsdp"] * mesh["tensor"]
  sizes = fsdp_sizes(run, mesh["tensor"])
  wider = [n for n in sizes if n > mesh["fsdp"]]
  enough = [n for n in wider if state * (1 - mesh["fsdp"] / n) > over]
  for size in (enough or wider[-1:])[:1]:
    kept = ("mesh.data=-1", f"mesh.fsdp={size}")
    yield kept
  for policy in {"none": ("dots", "block"), "dots": ("block",)}.get(
    run.config.model.remat, ()
  ):
    yield (*kept, f"model.remat={policy}")
  if run.config.model.remat != "block":
    kept = (*kept, "model.remat=block")
  for count in microbatches(run):
    if count > run.config.train.microbatches:
      yield (*kept, f"train.microbatches={count}")


def fsdp_sizes(run: Run, tensor: int) -> list[int]:
  """Sizes of the mesh's fsdp that the devices allow and that divide the width.

  Wider than 64 does not divide the published encoders.
  """
  width, out = run.model.config.width, []
  for size in (2**i for i in range(_MOST_FSDP.bit_length())):
    if width % size:
      continue
    sizes = {"data": -1, "fsdp": size, "tensor": tensor}
    with contextlib.suppress(UserError):
      sharding.make_mesh(sizes, list(run.mesh.devices.flat))
      out.append(size)
  return out


def microbatches(run: Run) -> list[int]:
  """Numbers of microbatches that divide every batch of a run."""
  layouts = [part.layout for part in run.order.parts]
  common = math.gcd(*(of.shard_rows * of.microbatches for of in layouts))
  return [n for n in range(1, common + 1) if common % n == 0]


def sweep(pod: Pod, run: Run, budget: float) -> list[dict]:
  """Foresees the train steps on every mesh, the fastest first.

  Of microbatches more are tried only until it fits: they cost time.

  Args:
    pod: What it is for.
    run: The run as it was asked for.
    budget: Seconds after which nothing further is compiled.
  """
  end, out = time.monotonic() + budget, []
  meshes = list(_meshes(run))
  for mesh in progress.track(meshes, "mesh", "sweep", 0):
    for count in _microbatches_on(pod, mesh):
      if time.monotonic() > end:
        break
      row = _of_sweep(pod.run((*mesh, f"train.microbatches={count}")))
      out.append(row)
      if row["fits"]:
        break
  return sorted(out, key=lambda row: row.get("seconds", math.inf))


def _meshes(run: Run) -> Iterator[tuple[str, ...]]:
  c = run.model.config
  for tensor in (1, 2, 4):
    if any(n % tensor for n in (c.heads, c.kv_heads, c.mlp_width)):
      continue
    for fsdp in fsdp_sizes(run, tensor):
      yield "mesh.data=-1", f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}"


def _microbatches_on(pod: Pod, mesh: tuple[str, ...]) -> list[int]:
  try:
    return microbatches(pod.run((*mesh, "train.microbatches=1")))
  except UserError:  # the batch is no multiple of the data shards
    return []


def _of_sweep(run: Run) -> dict:
  """A line of the sweep: all train steps of a run."""
  found = list(foresee_all(run, programs(run, evaluations=False)))
  fits = all(f.memory.fits for f in found)
  row = {
    "mesh": dict(run.mesh.shape),
    "microbatches": run.config.train.microbatches,
    "needed": max(f.memory.needed for f in found),
    "limit": found[0].memory.limit,
    "fits": fits,
  }
  if fits:
    steps = sum(f.steps for f in found)
    seconds = sum(f.steps * f.step_seconds for f in found) / steps
    work = sum(f.steps * f.work.total for f in found) / steps
    row["seconds"] = seconds
    row["bound"] = max(found, key=lambda f: f.steps).bound
    row["mfu"] = work / (seconds * found[0].devices * found[0].peak)
  return row


# What is printed.


def _unit(value: float, unit: str = "") -> str:
  sizes = (1e18, 1e15, 1e12, 1e9, 1e6, 1e3)
  for prefix, size in zip("EPTGMk", sizes, strict=True):
    if value >= size:
      return f"{value / size:.3g} {prefix}{unit}"
  return f"{value:.3g} {unit}".strip()


def _gib(size: float) -> str:
  return f"{size / 2**30:.2f} GiB"


def _ms(seconds: float) -> str:
  return f"{1e3 * seconds:,.1f} ms"


def _cells(f: Foreseen) -> dict[str, str]:
  """A column of the table, by its lines' names."""
  memory, work = f.memory, f.work
  share = f"({memory.needed / memory.limit:.0%})"
  out = {
    "rows x tokens": f"{f.rows:,} x {f.seq_len:,}",
    "attention by": f.attention,
    "memory needed": f"{_gib(memory.needed)} {share}",
  }
  if memory.fits:
    out["  arguments"] = _gib(memory.arguments)
    out["  temporaries"] = _gib(memory.temporaries)
  else:
    out["  too much by"] = _gib(memory.needed - memory.limit)
  out["FLOPs per token"] = _unit(work.total / (f.rows * f.seq_len))
  out["FLOPs per step"] = _unit(work.total)
  for name, part in dataclasses.asdict(work).items():
    name += " attention" * (name in ("causal", "bidirectional"))
    out[f"  {name}"] = f"{_unit(part)} ({part / work.total:.0%})"
  if f.seconds:
    out |= _speed_cells(f)
  out["compiled in"] = units.duration(f.compile_seconds)
  return out


def _speed_cells(f: Foreseen) -> dict[str, str]:
  done = f.executed * f.devices
  out = {
    "  executed": f"{_unit(done)} ({done / f.work.total:.0%})",
    "compute": f"{_unit(f.executed, 'FLOPs')}, {_ms(f.seconds['compute'])}",
    "memory": f"{_unit(f.moved, 'B')}, {_ms(f.seconds['memory'])}",
    "network": _ms(f.seconds["network"]),
  }
  for c in f.collectives:
    name = f"  {c['kind']} over {c['axes']}"
    said = f"{_unit(c['sent'], 'B')}, {_ms(c['seconds'])}"
    out[name] = f"{c['times']} x: {said}"
  if f.unknown_loops:
    out["loops counted once"] = str(f.unknown_loops)
  out["bound"] = f.bound
  out["best MFU"] = f"{f.mfu:.1%}"
  out["most tokens/s"] = _unit(f.rows * f.seq_len / f.step_seconds)
  return out


def table(found: Sequence[Foreseen]) -> str:
  """Writes programs side by side; times and bytes are a device's, per step."""
  columns = {f.name: _cells(f) for f in found}
  # The lines of all in the order of the one that has most.
  names = max(columns.values(), key=len).keys()
  names = list(
    dict.fromkeys([*names, *(n for c in columns.values() for n in c)])
  )
  rows = [["", *columns]]
  rows += [[n, *(c.get(n, "-") for c in columns.values())] for n in names]
  return _aligned(rows)


def sweep_table(rows: Sequence[dict]) -> str:
  """Writes the sweep's meshes, the fastest first."""
  out = [["mesh", "microbatches", "memory", "step", "bound", "best MFU"]]
  for row in rows:
    mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    memory = f"{_gib(row['needed'])} ({row['needed'] / row['limit']:.0%})"
    speed = ["does not fit", "-", "-"]
    if row["fits"]:
      speed = [_ms(row["seconds"]), row["bound"], f"{row['mfu']:.1%}"]
    out.append([mesh, str(row["microbatches"]), memory, *speed])
  return _aligned(out)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = (
    "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))
    for row in rows
  )
  return "\n".join(line.rstrip() for line in lines)


def _say_setup(args, pod: Pod, run: Run) -> None:
  mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
  slices = f"{args.slices} x " if args.slices > 1 else ""
  print(
    f"{args.config} on {slices}{args.topology}, {len(pod.devices)} devices:"
    f" {mesh}; {_unit(run.model.size)} parameters"
  )
  if run.config.data.path:
    print(f"data: {run.config.data.path}")
  else:
    rows = run.train_rows
    print(
      f"no data.path: {rows.vocab_size:,} tokens, rows of {rows.seq_len:,} in"
      f" {rows.pieces} (--vocab_size, --seq_len, --pieces)"
    )
  model = run.model
  for line in sharding.undivided(run.mesh, model.axes, model.shapes):
    print(line)


def _plan(pod: Pod, run: Run) -> dict:
  """Prints the plan; returns what its file says."""
  found = list(foresee_all(run, programs(run)))
  print(table(found), flush=True)
  out = {"programs": [f.to_json() for f in found]}
  if all(f.memory.fits for f in found):
    seconds = sum(f.steps * f.step_seconds for f in found)
    print(f"{run.curriculum.steps:,} steps: {units.duration(seconds)} at least")
    return out
  settings, seen = advise(pod, run, found)
  fits = bool(seen) and all(f.memory.fits for f in seen)
  flags = " ".join(f"--config.{setting}" for setting in settings)
  if fits:
    print(f"does not fit, but does with\n  {flags}")
  else:
    print(
      f"does not fit, nor with any setting tried; the last: {flags or 'none'}"
    )
  if seen:
    print(table(seen))
  tried = [f.to_json() for f in seen]
  return out | {
    "advice": {"settings": settings, "fits": fits, "programs": tried}
  }


def main(argv: Sequence[str]) -> None:
  """The command."""
  parser = cli.Parser(
    prog="python -m antlm_jax.plan",
    description=__doc__,
    epilog="Any setting: --config.KEY=VALUE. All keys: antlm_jax/config.py.",
  )
  add = parser.add_argument
  add("--config", required=True, help="a config file, FILE.py or FILE.py:ARG")
  add("--topology", required=True, help="such as v5e:16x16 or v5p:4x4x8")
  add("--slices", type=int, default=1, help="how many of these, joined")
  add("--vocab_size", type=int, default=128_256, help="without data.path")
  add("--seq_len", type=int, help="likewise (default: model.max_seq_len)")
  add("--pieces", type=int, default=1, help="likewise: documents in a row")
  add("--sweep", action="store_true", help="rank meshes and microbatches")
  add("--budget", type=float, default=3600, help="seconds for the sweep")
  add("--output", type=cli.here, help="a JSON file of all of it")
  args, rest = parser.parse_known_args(argv)
  for word in rest:
    if not word.startswith("--config."):
      parser.error(f"unknown argument {word!r}")
  for name in ("slices", "vocab_size", "seq_len", "pieces"):
    if getattr(args, name) is not None and getattr(args, name) < 1:
      parser.error(f"--{name} is positive")
  pod, run = _prepare(args, rest)
  _say_setup(args, pod, run)
  if args.sweep:
    rows = sweep(pod, run, args.budget)
    if not rows:
      raise UserError(f"--budget={args.budget:g} ended before any was compiled")
    print(sweep_table(rows))
    out, fits = {"sweep": rows}, any(row["fits"] for row in rows)
  else:
    out = _plan(pod, run)
    fits = "advice" not in out
  if args.output:
    _write(args, rest, pod, run, out)
  if not fits:
    sys.exit(1)


def _prepare(args, overrides) -> tuple[Pod, Run]:
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
  pod = Pod(
    spec=args.config,
    overrides=tuple(overrides),
    devices=devices,
    vocab_size=args.vocab_size,
    seq_len=args.seq_len,
    pieces=args.pieces,
  )
  return pod, pod.run()


def _write(args, overrides, pod: Pod, run: Run, out: dict) -> None:
  head = {
    "config": args.config,
    "overrides": overrides,
    "topology": args.topology,
    "slices": args.slices,
    "devices": len(pod.devices),
    "mesh": dict(run.mesh.shape),
    "parameters": run.model.size,
    "date": datetime.date.today().isoformat(),
    "jax": jax.__version__,
  }
  if not run.config.data.path:
    rows = run.train_rows
    head |= {"vocab_size": rows.vocab_size, "pieces": rows.pieces}
  path = pathlib.Path(args.output)
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_text(path, json.dumps(head | out, indent=1) + "\n")
  print(f"wrote {path}")


if __name__ == "__main__":
  cli.run(main)
