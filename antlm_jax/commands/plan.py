"""Plans a run on TPUs or GPUs, on a machine that has none.

    antlm plan --config=encoders:size=1B \\
      --topology=v5p:4x4x8 --pieces=2

Compiles the run's train step for each kind of batch in its curriculum, and its
evaluations. Prints the memory that they need and a roofline from published
peaks: computation, memory and network never wait for each other, so a real step
is slower. A forecast estimates time, energy, price. A topology is a TPU and a
shape, or GPUs: h100:8 or rtx4090:1 for one node, h100:4x8 for four nodes.

`--check` compiles nothing, and only checks the config against the devices.

If the run fits into memory, the exit status is 0. If it does not, plan tries
more `fsdp`, recomputation and microbatches until it does, and exits with 1.
"""

import dataclasses
import datetime
import functools
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import jax

from antlm_jax import cli, tables
from antlm_jax import config as config_lib
from antlm_jax import mesh as mesh_lib
from antlm_jax import settings as settings_lib
from antlm_jax.arguments import add_arguments, read_arguments
from antlm_jax.config import Config, ConfigOrName
from antlm_jax.errors import UserError
from antlm_jax.planning import check as check_lib
from antlm_jax.planning import places, search
from antlm_jax.planning import topology as topology_lib
from antlm_jax.planning import where as where_lib
from antlm_jax.planning.cost import Cost, Reads
from antlm_jax.planning.estimate import Estimate, estimate_all
from antlm_jax.planning.forecast import Forecast
from antlm_jax.planning.search import Pod
from antlm_jax.runtime import chips, files, progress
from antlm_jax.settings import PythonOnly, Section, Setting, argument, checked
from antlm_jax.training.run import Run
from antlm_jax.units import duration, gib, milliseconds, quantity


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
  """Resources that a run needs on absent devices.

  Attributes:
    about: The run's setup: config, topology, devices, mesh, parameters.
    steps: Number of the run's steps.
    programs: Its compiled steps, one for each kind of batch.
    changes: Settings with which it fits, if it does not; `KEY=VALUE` each.
    advised: Its compiled steps with these.
    meshes: Ranked meshes and microbatches, if they were swept.
    launch: Command that launches a run that fits; empty without `fit`.
    cost: Hours, energy and price of a run that fits.
    reads: Rows, requests and bytes a second that it reads.
  """

  about: Mapping[str, object]
  steps: int
  programs: tuple[Estimate, ...] = ()
  changes: tuple[str, ...] = ()
  advised: tuple[Estimate, ...] = ()
  meshes: tuple[Mapping[str, object], ...] = ()
  launch: str = ""
  cost: Cost | None = None
  reads: Reads | None = None

  @property
  def fits(self) -> bool:
    """Whether the run, or any of the meshes, fits into memory."""
    fits = all(e.memory.fits for e in self.programs)
    return any(row["fits"] for row in self.meshes) if self.meshes else fits

  @property
  def parts(self) -> dict[str, Mapping[str, where_lib.Time]]:
    """The forecast of each train step, by part: see `planning.where.PARTS`."""
    return {
      e.name: e.forecast.parts
      for e in self.programs
      if e.steps and isinstance(e.forecast, Forecast)
    }

  @property
  def advice_fits(self) -> bool:
    """Whether the run fits with `changes`."""
    seen = self.advised
    return bool(seen) and all(e.memory.fits for e in seen)

  @property
  def to_launch(self) -> list[str]:
    """The launch command with a heading, as a part of the printed plan."""
    return ["launch, in a checkout:", self.launch] if self.launch else []

  def __repr__(self) -> str:
    fits = "fits" if self.fits else "does not fit"
    about = self.about
    return f"<plan of {about['config']} on {about['topology']}: {fits}>"

  def __str__(self) -> str:
    if self.meshes:
      return sweep_table(self.meshes)
    if not self.steps:  # checked, and not compiled
      about = "{config} suits {topology}: {rows:,} rows a step, {objectives}"
      return about.format_map(self.about)
    out = [estimates_table(self.programs)]
    if self.fits:
      out += [str(self.cost), str(self.reads)]
      return "\n".join([*out, *self.to_launch])
    flags = " ".join(f"--config.{c}" for c in self.changes) or "none"
    if self.advice_fits:
      out.append(f"does not fit, but does with\n  {flags}")
    else:
      out.append(f"does not fit, nor with any setting tried; the last: {flags}")
    if self.advised:
      out.append(estimates_table(self.advised))
    return "\n".join([*out, *self.to_launch])

  def to_json(self) -> dict[str, object]:
    """Returns all of it as plain JSON."""
    if self.meshes:
      return {**self.about, "sweep": self.meshes}
    out = {**self.about, "programs": [e.to_json() for e in self.programs]}
    if self.cost:
      out["cost"] = self.cost.to_json()
      out["reads"] = dataclasses.asdict(self.reads)
    if not self.fits:
      tried = [e.to_json() for e in self.advised]
      fits = {"settings": self.changes, "fits": self.advice_fits}
      out["advice"] = {**fits, "programs": tried}
    return out


@checked
def plan(
  config: ConfigOrName,
  topology: str,
  *,
  slices: Annotated[int, argument(least=1, most=2**10)] = 1,
  vocab_size: Annotated[int, argument(least=2, most=2**24)] = 128_256,
  seq_len: Annotated[int | None, argument(least=1, most=2**24)] = None,
  pieces: Annotated[int, argument(least=1, most=2**10)] = 1,
  sweep: bool = False,
  budget: float = 3600.0,
  fit: bool = False,
  check: bool = False,
  price_per_hour: Annotated[float | None, argument(least=0)] = None,
  quiet: PythonOnly[bool] = False,
  **settings: Setting | Section,
) -> Plan:
  """Plans a run on TPUs or GPUs, on a machine that has none.

  Args:
    config: Name of a config, path to a config file, or a config.
    topology: Devices, such as v5e:16x16, h100:8, h100:4x8 or rtx4090:1.
    slices: Number of such TPU slices.
    vocab_size: Vocabulary size, if there is no `data.path`.
    seq_len: Tokens in a row, if there is no `data.path`; by default
      `model.max_seq_len`, unless `train.batch_schedule` joins rows.
    pieces: Documents in a row, if there is no `data.path`.
    sweep: Rank meshes and numbers of microbatches.
    budget: Time limit of the sweep, in seconds.
    fit: Use the nearest batch size that the devices divide, and print the
      command that launches the run of a named config.
    check: Only check config, batch and mesh against the devices, in seconds.
    price_per_hour: Price of one chip for an hour, to print the run's price.
    quiet: Show nothing.
    **settings: Settings by their names, as for `train`.

  Raises:
    UserError: The topology or the settings cannot be used, or the compilers for
      these devices are not installed.
  """
  if isinstance(config, os.PathLike):
    config = os.fspath(config)
  if check:
    about = check_lib.check_launch(config, settings, topology, slices)
    return Plan(about=about, steps=0)
  devices = topology_lib.topology_devices(topology, slices)
  if slices > 1 and not chips.chip_of(devices[0]).dcn:
    raise UserError(
      f"the network between slices of {topology} is not published: plan one"
      " slice"
    )
  settings = whole_keys(config_lib.given_config(config, settings), settings)
  if fit:
    settings |= _dividing(config, settings, len(devices))
  pod = Pod(config, settings, devices, vocab_size, seq_len, pieces)
  with progress.quietly(quiet):
    run = pod.run()
    about = {
      "config": config if isinstance(config, str) else run.config.model.name,
      "topology": topology,
      "slices": slices,
      "overrides": [f"--config.{k}={v}" for k, v in settings.items()],
    }
    of = f"{slices} x {topology}" if slices > 1 else topology
    progress.say(f"{about['config']} on {of}")
    about |= _show_setup(run)
    result = functools.partial(Plan, about=about, steps=run.curriculum.steps)
    if sweep:
      if rows := search.sweep_meshes(pod, run, budget):
        return result(meshes=tuple(rows))
      raise UserError(
        f"--budget={budget:g} seconds ended before any program was compiled"
      )
    kinds = run.batch_kinds()
    names = ", ".join(kind.name for kind in kinds)
    progress.say(f"programs to compile: {names}")
    found = tuple(estimate_all(run, kinds, forecasts=True))
    words = [f"--config={about['config']}", *about["overrides"]]
    launched = fit and isinstance(config, str)  # else it has no name
    if all(e.memory.fits for e in found):
      line = places.launch(topology, slices, words) if launched else ""
      cost = Cost.of(found, topology, slices, price_per_hour)
      reads = Reads.of(run, found)
      return result(programs=found, launch=line, cost=cost, reads=reads)
    progress.say("does not fit: trying settings that need less memory")
    changes, seen = search.advise_settings(pod, run, found)
    advice = result(programs=found, changes=changes, advised=tuple(seen))
    if launched and advice.advice_fits:
      words += [f"--config.{change}" for change in changes]
      line = places.launch(topology, slices, words)
      advice = dataclasses.replace(advice, launch=line)
    return advice


def whole_keys(
  config: Config, changes: Mapping[str, Setting | Section]
) -> dict[str, str]:
  """Returns the changes that gave a config as `--config.KEY=VALUE` has them."""
  known, out = config_lib.leaves(config), {}
  names = settings_lib.by_name(known)
  for name, value in changes.items():
    own = {names[name][0] if name in names else name: value}
    if isinstance(value, Section):
      each = settings_lib.to_dict(value).items()
      own = {f"{name}.{part}": one for part, one in each}
    elif f"{name}.name" in known:
      own = {name: value}  # an implementation
    out |= {key: str(settings_lib.text(one)) for key, one in own.items()}
  return out


def _dividing(
  config: ConfigOrName, settings: Mapping[str, Setting], devices: int
) -> dict[str, Setting]:
  """Returns the nearest batch size that the devices divide, if it differs."""
  found = config_lib.given_config(config, settings)
  parts = devices * found.train.microbatches // max(1, found.mesh.tensor)
  rows = places.nearest_rows(found.train.batch_size, parts)
  same = rows == found.train.batch_size
  return {} if same else {"train.batch_size": rows}


def estimates_table(found: Sequence[Estimate]) -> str:
  """Lays out programs side by side; times and bytes are per device and step."""
  columns = {e.name: _column(e) for e in found}
  # In the order of the longest column.
  longest = max(columns.values(), key=len)
  names = dict.fromkeys([*longest, *(n for c in columns.values() for n in c)])
  rows = [[n, *(c.get(n) for c in columns.values())] for n in names]
  return tables.text_table(rows, ["", *columns])


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
    out["forecast"] = milliseconds(f.seconds)
    out["  MFU"] = f"{e.mfu(f.seconds):.1%}"
    if f.assumes:
      out["  assumes"] = f.assumes
  elif e.forecast:
    out["forecast"] = f"none: {e.forecast}"
  return out | {"compiled in": duration(e.compile_seconds)}


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
  return tables.text_table(out, head)


def _part_of(needed: int, limit: int) -> str:
  return f"{gib(needed)} ({needed / limit:.0%})"


def _show_setup(run: Run) -> dict[str, object]:
  """Shows the run's setup and returns it."""
  mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
  progress.say(
    f"{run.mesh.size} devices: {mesh}; {quantity(run.model.size)} parameters"
  )
  about = {
    "devices": run.mesh.size,
    "mesh": dict(run.mesh.shape),
    "parameters": run.model.size,
    "date": datetime.date.today().isoformat(),
    "jax": jax.__version__,
  }
  if run.config.data.path:
    progress.say(f"data: {run.config.data.path}")
  else:
    rows = run.sources.rows
    progress.say(
      f"no data.path: {rows.vocab_size:,} tokens, rows of {rows.seq_len:,} in"
      f" {rows.pieces} (--vocab_size, --seq_len, --pieces)"
    )
    about |= {"vocab_size": rows.vocab_size, "pieces": rows.pieces}
  for line in mesh_lib.undivided(run.mesh, run.model.axes, run.model.shapes):
    progress.say(line)
  return about


def report(
  found: PythonOnly[Plan],
  *,
  output: files.LocalPath | None = None,
  where: bool = False,
  before: files.LocalPath | None = None,
) -> None:
  """Prints a plan, and writes it.

  Args:
    found: The plan.
    output: Path to a JSON file.
    where: Show the forecast by part of the step; with --output, draw it too.
    before: Path to an earlier plan's JSON file, to compare --where with.
  """
  print(found)
  earlier = where_lib.read_step_parts(before) if before else {}
  steps = earlier | found.parts
  if (where or before) and steps:
    print(f"\n{where_lib.step_parts_table(steps)}")
  if output:
    files.write_json(output, found.to_json(), indent=1)
    print(f"wrote {output}")
    if where and steps:
      picture = pathlib.Path(output).with_suffix(".png")
      title = "Step on {topology}, {config}".format_map(found.about)
      where_lib.draw_step_parts(title, steps, picture)
      print(f"wrote {picture}")


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(
    description=__doc__,
    epilog="Any setting: --config.KEY=VALUE; `antlm train --help` lists them.",
  )
  for function in (plan, report):
    add_arguments(parser, function)
  args, overrides = parser.parse_with_overrides(argv)
  asked, shown = (read_arguments(f, args) for f in (plan, report))
  # Before minutes of compiling.
  if shown["output"]:
    files.check_writable(shown["output"])
  if shown["before"]:
    where_lib.read_step_parts(shown["before"])
  found = plan(**asked, **config_lib.parse_overrides(overrides))
  report(found, **shown)
  if not found.fits:
    sys.exit(1)
