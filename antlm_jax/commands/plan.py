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
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax

from antlm_jax import cli, plugins, tables
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
    programs = self.advised
    return bool(programs) and all(e.memory.fits for e in programs)

  @property
  def to_launch(self) -> list[str]:
    """The launch command with a heading, as a part of the printed plan."""
    return ["launch, in a checkout:", self.launch] if self.launch else []

  def __repr__(self) -> str:
    fits = "fits" if self.fits else "does not fit"
    setup = self.about
    return f"<plan of {setup['config']} on {setup['topology']}: {fits}>"

  def __str__(self) -> str:
    if self.meshes:
      return sweep_table(self.meshes)
    if not self.steps:  # checked, and not compiled
      line = "{config} suits {topology}: {rows:,} rows a step, {objectives}"
      return line.format_map(self.about)
    parts = [estimates_table(self.programs)]
    if self.fits:
      parts += [str(self.cost), str(self.reads)]
      if each := self.about.get("steps_per_epoch"):
        parts.append(
          f"warning: without data, each epoch is taken for {each:,} steps: for"
          " the hours of your text, add --config.data.path, or write the"
          " curriculum in steps"
        )
      return "\n".join([*parts, *self.to_launch])
    flags = " ".join(f"--config.{c}" for c in self.changes) or "none"
    if self.advice_fits:
      parts.append(f"does not fit, but does with\n  {flags}")
    else:
      parts.append(
        f"does not fit, nor with any setting tried; the last: {flags}"
      )
    if self.advised:
      parts.append(estimates_table(self.advised))
    return "\n".join([*parts, *self.to_launch])

  def to_json(self) -> dict[str, object]:
    """Returns all of it as plain JSON."""
    if self.meshes:
      return {**self.about, "sweep": self.meshes}
    values = {**self.about, "programs": [e.to_json() for e in self.programs]}
    if self.cost:
      values["cost"] = self.cost.to_json()
      values["reads"] = dataclasses.asdict(self.reads)
    if not self.fits:
      tried = [e.to_json() for e in self.advised]
      fits = {"settings": self.changes, "fits": self.advice_fits}
      values["advice"] = {**fits, "programs": tried}
    return values


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
    if sweep or fit:
      raise UserError(
        f"check compiles nothing: leave out {'sweep' if sweep else 'fit'}, or"
        " check"
      )
    setup = check_lib.check_launch(config, settings, topology, slices)
    return Plan(about=setup, steps=0)
  devices = topology_lib.topology_devices(topology, slices)
  if slices > 1 and not chips.chip_of(devices[0]).dcn:
    raise UserError(
      f"the network between slices of {topology} is not published: plan one"
      " slice"
    )
  overrides = whole_keys(config_lib.load_config(config, settings), settings)
  if fit:
    overrides |= _dividing_batch(config, overrides, len(devices))
  pod = Pod(config, overrides, devices, vocab_size, seq_len, pieces)
  with progress.quietly(quiet):
    run = pod.build_run()
    setup = _show_setup(pod, run, topology, slices)
    if sweep:
      return _sweep(pod, run, setup, budget)
    result = _estimate(pod, run, setup, price_per_hour)
  # A config that is a value has no name to launch it by.
  return _with_launch(result) if fit and isinstance(config, str) else result


def _sweep(
  pod: Pod, run: Run, setup: Mapping[str, object], budget: float
) -> Plan:
  """Ranks meshes and numbers of microbatches, within seconds of budget."""
  meshes = search.sweep_meshes(pod, run, budget)
  if not meshes:
    raise UserError(
      f"--budget={budget:g} seconds ended before any program was compiled"
    )
  return Plan(about=setup, steps=run.curriculum.steps, meshes=tuple(meshes))


def _estimate(
  pod: Pod, run: Run, setup: Mapping[str, object], price_per_hour: float | None
) -> Plan:
  """Compiles the run's programs; if they do not fit, tries other settings."""
  kinds = run.batch_kinds()
  names = ", ".join(kind.name for kind in kinds)
  progress.say(f"programs to compile: {names}")
  programs = tuple(estimate_all(run, kinds, forecasts=True))
  result = Plan(about=setup, steps=run.curriculum.steps, programs=programs)
  if result.fits:
    cost = Cost.of(programs, setup["topology"], setup["slices"], price_per_hour)
    reads = Reads.of(run, programs)
    return dataclasses.replace(result, cost=cost, reads=reads)
  progress.say("does not fit: trying settings that need less memory")
  advice, advised = search.advise_settings(pod, run, programs)
  return dataclasses.replace(result, changes=advice, advised=tuple(advised))


def _with_launch(result: Plan) -> Plan:
  """Adds the command that launches the run, if it fits with some settings."""
  if not (result.fits or result.advice_fits):
    return result
  setup = result.about
  words = [*plugins.plugin_arguments(), f"--config={setup['config']}"]
  words += setup["overrides"]
  words += [f"--config.{change}" for change in result.changes]
  command = places.launch(setup["topology"], setup["slices"], words)
  return dataclasses.replace(result, launch=command)


def whole_keys(
  config: Config, overrides: Mapping[str, Setting | Section]
) -> dict[str, str]:
  """Returns a config's overrides as `--config.KEY=VALUE` has them."""
  leaves = config_lib.leaves(config)
  keys = settings_lib.by_name(leaves)
  values: dict[str, Any] = {}
  for name, value in overrides.items():
    if isinstance(value, Section):
      section = settings_lib.to_dict(value)
      values |= {f"{name}.{part}": section[part] for part in section}
    elif f"{name}.name" in leaves:
      values[name] = value  # an implementation
    else:
      values[keys[name][0] if name in keys else name] = value
  return {key: str(settings_lib.text(value)) for key, value in values.items()}


def _dividing_batch(
  config: ConfigOrName, overrides: Mapping[str, Setting], devices: int
) -> dict[str, str]:
  """Returns the nearest batch size that the devices divide, if it differs."""
  changed = config_lib.load_config(config, overrides)
  batch_size = changed.train.batch_size
  parts = devices * changed.train.microbatches // max(1, changed.mesh.tensor)
  rows = places.nearest_rows(batch_size, parts)
  return {} if rows == batch_size else {"train.batch_size": str(rows)}


def estimates_table(programs: Sequence[Estimate]) -> str:
  """Lays out programs side by side; times and bytes are per device and step."""
  columns = {program.name: _column(program) for program in programs}
  # In the order of the longest column.
  longest = max(columns.values(), key=len)
  names = dict.fromkeys(longest)
  for column in columns.values():
    names |= dict.fromkeys(column)
  rows = [[n, *(column.get(n) for column in columns.values())] for n in names]
  return tables.text_table(rows, ["", *columns])


def _column(e: Estimate) -> dict[str, str]:
  """Returns a program's cells by the row's name; an indented row is a part.

  FLOPs and tokens are those of all devices. The columns compute, memory and
  network are about a single device.
  """
  memory = e.memory
  work = e.work
  tokens = e.rows * e.seq_len
  column = {
    "rows x tokens": f"{e.rows:,} x {e.seq_len:,}",
    "attention by": e.attention,
    "memory needed": _part_of(memory.needed, memory.limit),
  }
  if memory.fits:
    column["  arguments"] = gib(memory.arguments)
    column["  temporaries"] = gib(memory.temporaries)
  else:
    column["  too much by"] = gib(memory.needed - memory.limit)
  column["FLOPs per token"] = quantity(work.total / tokens)
  column["FLOPs per step"] = quantity(work.total)
  for name, part in dataclasses.asdict(work).items():
    if name in ("causal", "bidirectional"):
      name += " attention"
    column[f"  {name}"] = f"{quantity(part)} ({part / work.total:.0%})"
  if e.seconds:
    executed = e.executed * e.devices
    times = {name: milliseconds(s) for name, s in e.seconds.items()}
    column["  executed"] = f"{quantity(executed)} ({executed / work.total:.0%})"
    column["compute"] = f"{quantity(e.executed, 'FLOPs')}, {times['compute']}"
    column["memory"] = f"{quantity(e.moved, 'B')}, {times['memory']}"
    column["network"] = times["network"]
    for c in e.collectives:
      sent = f"{quantity(c['sent'], 'B')}, {milliseconds(c['seconds'])}"
      column[f"  {c['kind']} over {c['axes']}"] = f"{c['times']} x: {sent}"
    if e.unknown_loops:
      column["loops counted once"] = str(e.unknown_loops)
    column["bound"] = e.bound
    column["best MFU"] = f"{e.mfu():.1%}"
    column["most tokens/s"] = quantity(tokens / e.step_seconds)
  if isinstance(e.forecast, Forecast):
    f = e.forecast
    column["forecast"] = milliseconds(f.seconds)
    column["  MFU"] = f"{e.mfu(f.seconds):.1%}"
    if f.assumes:
      column["  assumes"] = f.assumes
  elif e.forecast:
    column["forecast"] = f"none: {e.forecast}"
  return column | {"compiled in": duration(e.compile_seconds)}


def sweep_table(rows: Sequence[dict]) -> str:
  """Lays out the sweep's meshes, the fastest first."""
  table_rows = []
  for row in rows:
    mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    speed = ["does not fit", None, None]
    if row["fits"]:
      speed = [milliseconds(row["seconds"]), row["bound"], f"{row['mfu']:.1%}"]
    memory = _part_of(row["needed"], row["limit"])
    table_rows.append([mesh, row["microbatches"], memory, *speed])
  head = ("mesh", "microbatches", "memory", "step", "bound", "best MFU")
  return tables.text_table(table_rows, head)


def _part_of(needed: int, limit: int) -> str:
  return f"{gib(needed)} ({needed / limit:.0%})"


def _show_setup(
  pod: Pod, run: Run, topology: str, slices: int
) -> dict[str, object]:
  """Prints the run's setup, and returns it for `Plan.about`."""
  config = pod.config if isinstance(pod.config, str) else run.config.model.name
  place = f"{slices} x {topology}" if slices > 1 else topology
  progress.say(f"{config} on {place}")
  mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
  progress.say(
    f"{run.mesh.size} devices: {mesh}; {quantity(run.model.size)} parameters"
  )
  setup = {
    "config": config,
    "topology": topology,
    "slices": slices,
    "overrides": [f"--config.{key}={x}" for key, x in pod.settings.items()],
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
    setup |= {"vocab_size": rows.vocab_size, "pieces": rows.pieces}
    # Whether the run's length follows from that of an epoch.
    each = run.order.steps_per_epoch
    if run.config.curriculum_for(2 * each).steps != run.curriculum.steps:
      setup["steps_per_epoch"] = round(each)
  for line in mesh_lib.undivided(run.mesh, run.model.axes, run.model.shapes):
    progress.say(line)
  return setup


def report(
  result: PythonOnly[Plan],
  *,
  output: files.LocalPath | None = None,
  where: bool = False,
  before: files.LocalPath | None = None,
) -> None:
  """Prints a plan, and writes it.

  Args:
    result: The plan.
    output: Path to a JSON file.
    where: Show the forecast by part of the step; with --output, draw it too.
    before: Path to an earlier plan's JSON file, to compare --where with.
  """
  print(result)
  earlier = where_lib.read_step_parts(before) if before else {}
  steps = earlier | result.parts
  if (where or before) and steps:
    print(f"\n{where_lib.step_parts_table(steps)}")
  if output:
    files.write_json(output, result.to_json(), indent=1)
    print(f"wrote {output}")
    if where and steps:
      picture = pathlib.Path(output).with_suffix(".png")
      title = "Step on {topology}, {config}".format_map(result.about)
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
  report_arguments = read_arguments(report, args)
  # Before minutes of compiling.
  if report_arguments["output"]:
    files.check_writable(report_arguments["output"])
  if report_arguments["before"]:
    where_lib.read_step_parts(report_arguments["before"])
  settings = config_lib.parse_overrides(overrides)
  result = plan(**read_arguments(plan, args), **settings)
  report(result, **report_arguments)
  if not result.fits:
    sys.exit(1)
