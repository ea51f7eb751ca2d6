"""Trains a model.

    antlm train --config=quickstart --workdir=DIR \\
      --config.data.path=PREPARED [--config.key=value ...]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import math
import os
import pathlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from antlm_jax import cli, jax_flags, plugins
from antlm_jax.errors import UserError
from antlm_jax.runtime import signals
from antlm_jax.settings import Field, checked_names, require_path

if TYPE_CHECKING:
  from typing import TypeAlias

  import numpy.typing as npt
  from matplotlib.figure import Figure

  from antlm_jax.config import Config
  from antlm_jax.data.prepared_folder import PreparedData
  from antlm_jax.inference.model import Loaded
  from antlm_jax.page.history import History
  from antlm_jax.settings import Section, Setting
  from antlm_jax.training.checkpoint import Checkpoint
  from antlm_jax.training.hooks import Hook

  Data: TypeAlias = str | os.PathLike[str] | PreparedData | npt.ArrayLike


# Columns of a table, which are no sources of data.
_COLUMNS = {"attention_mask", "input_ids", "labels", "text", "token_type_ids"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
  """A run that has ended, with the figures of its summary.json.

  Only the first of several processes has the figures that have a default.
  """

  workdir: pathlib.Path
  steps: int
  parameters: int
  unigram_entropy: float = math.nan  # of the held-out tokens, in nats
  steps_per_epoch: float = math.nan
  switches: Sequence[int] = ()  # steps at which objectives or data changed
  best: Mapping[str, float] | None = None  # step and loss, with `eval.watch`
  # Last and best held-out loss, in nats, by objective.
  modes: Mapping[str, Mapping[str, float]] = dataclasses.field(
    default_factory=dict
  )
  advice: Sequence[str] = ()  # warnings, and a tip
  held_out: Sequence[Mapping[str, float]] = ()  # main evaluations, in order
  # By activity.
  seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
  mfu: float | None = None  # median of the logged MFU; None on a CPU

  @property
  def losses(self) -> dict[str, float]:
    """Held-out losses at the end in nats per target, by objective."""
    return {name: figures["loss"] for name, figures in self.modes.items()}

  def __repr__(self) -> str:
    losses = "".join(f", {n} {loss:.3f}" for n, loss in self.losses.items())
    from antlm_jax.runtime import files

    path = files.shown_path(self.workdir)
    return f"<run {path}, {self.steps:,} steps{losses}>"

  def __fspath__(self) -> str:
    return str(self.workdir)  # so that a run is a path to its model

  def load(self) -> Loaded:
    """Loads the model of the last step."""
    from antlm_jax.inference import model

    return model.load(self.workdir)

  def history(self, names: str = "*") -> History:
    """Returns the values that the run recorded: step, name and value.

    Args:
      names: Pattern of their names, such as `eval/*/loss`.

    Raises:
      UserError: No value has such a name.
    """
    from antlm_jax.page import history

    return history.read(self.workdir, names)

  def plot(self) -> Figure:
    """Draws the losses of the run: a figure, which notebooks show."""
    from antlm_jax.page import history

    return history.plot(self.workdir)


@checked_names
def train(
  config: str | os.PathLike[str] | Config,
  workdir: str | os.PathLike[str] | None = None,
  data: Data | Mapping[str, Data] | None = None,
  *,
  hooks: Sequence[Hook] = (),
  quiet: bool = False,
  command: str = "",
  **settings: Setting | Section,
) -> Trained:
  """Trains a model. The same call resumes a run that was stopped.

  Args:
    config: Name of a config, path to a config file (`FILE.py:ARG`), or a
      config.
    workdir: Path to the run's folder, which may be in a bucket; by default
      runs/NAME-DATE, a new folder for each call.
    data: Prepared data, the path to a prepared folder, which may be in a
      bucket, or rows of token ids `[N, T]`; of several sources, a mapping by
      name. Rows of `train` and `dev` are one source. By default `data.path`.
    hooks: Hooks to call in addition to the run's own.
    quiet: Show nothing.
    command: Command line to show on the run's page.
    **settings: Settings by their names, such as `curriculum="4C+16M+4C"`,
      `peak_lr=3e-3` or, if several end in the same name,
      `**{"eval.every": 100}`. `optimizer="muon"` keeps what the config sets
      and Muon has as well; `optimizer=antlm_jax.Muon()` replaces all of it. So
      do `model`, `schedule` and the other sections.

  Raises:
    UserError: Bad input, a workdir in use by another run, a loss that is not
      finite, or a failed save. It is an `errors.Unavailable` if a bucket fails
      for now: the same call resumes the run.
    Stopped: A signal ended the run. Its last step is saved.
  """
  from antlm_jax import config as config_lib
  from antlm_jax.page.hook import Page
  from antlm_jax.runtime import chips, files, progress
  from antlm_jax.training import loop
  from antlm_jax.training.hooks import Hook

  chips.take_memory()
  if workdir is None:
    workdir = _dated_folder(config)
  require_path(workdir, "workdir")
  quiet = Field(value_type=bool).accept(quiet, "quiet")
  command = Field().accept(command, "command")
  if not isinstance(hooks, Iterable):
    raise UserError(f"hooks={hooks!r:.80} is no list: give [MyHook()]")
  hooks = [*hooks]  # an iterator gives them once
  for hook in hooks:
    if not isinstance(hook, Hook):
      raise UserError(
        f"hooks: {hook!r:.80} is no Hook: give objects, [MyHook()]"
      )
  path, sources = _data_sources(data)
  if sources and {"path", "data.path"} & settings.keys():
    raise UserError("data and data.path are both given: leave out one of them")
  changed = config_lib.load_config(config, {**path, **settings})
  page = Page(command)
  # The config's file, which is read first, may also set flags.
  with jax_flags.library_flags(), progress.quietly(quiet):
    own_hooks, start = hooks_and_start(changed)
    hooks = [*own_hooks, *hooks, page]
    loop.train_run(changed, workdir, hooks, start, sources)
  return Trained(workdir=files.absolute_path(workdir), **page.summary)


def _dated_folder(config: str | os.PathLike[str] | Config) -> pathlib.Path:
  """Returns a new folder for a run of this config: runs/NAME-DATE-TIME."""
  from jax import distributed

  if distributed.is_initialized():
    raise UserError("give workdir: all processes of a run share its folder")
  is_named = isinstance(config, str | os.PathLike)
  file = os.fspath(config).partition(":")[0] if is_named else "run"
  date = f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
  return pathlib.Path("runs", f"{pathlib.Path(file).stem}-{date}")


def hooks_and_start(config: Config) -> tuple[list[Hook], Checkpoint | None]:
  """Returns a run's hooks from outside of training, and where it starts."""
  from antlm_jax.hf import import_
  from antlm_jax.inference.while_training import Pairs

  pairs = config.eval.pairs
  checkpoint = config.init.checkpoint
  start = import_.open_start(checkpoint) if checkpoint else None
  return [Pairs(pairs)] if pairs else [], start


def _data_sources(
  data: Data | Mapping[str, Data] | None,
) -> tuple[dict[str, str], dict[str, PreparedData]]:
  """Returns data as the setting `data.path`, or prepared data by name."""
  from antlm_jax.data import in_memory, splits
  from antlm_jax.data.prepared_folder import PreparedData

  if data is None:
    return {}, {}
  if isinstance(data, PreparedData) and data.folder:
    data = data.folder
  if isinstance(data, str | os.PathLike):
    return {"data.path": os.fspath(data)}, {}
  sources = data if isinstance(data, Mapping) else {"": data}
  if columns := sorted(_COLUMNS & sources.keys()):
    raise in_memory.columns_error("data has", columns)
  names = splits.split_names([*map(str, sources)], files=False)
  named = {name.split for name in names}
  if named & {"dev", "test"}:
    if named != {"train", "dev"}:
      raise UserError(
        f"data has the sets {', '.join(map(str, sources))}: give rows of train"
        " and dev, or sources to train on by other names"
      )
    by_split = splits.by_key(sources)
    sources = {"": in_memory.from_rows(by_split["train"], by_split["dev"])}
  prepared = {}
  for name, source in sources.items():
    if isinstance(source, str | os.PathLike):
      prepared[name] = PreparedData.open(source)
    elif isinstance(source, PreparedData):
      prepared[name] = source
    else:
      prepared[name] = in_memory.from_rows(source)
  return {}, prepared


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  with signals.listening():
    # Here, since they take seconds, in which a signal is to be heeded as well.
    from antlm_jax.runtime import processes

    with processes.joined():
      args, overrides = _parse_arguments(argv)
      # Slow to import: not for --help.
      from antlm_jax import config as config_lib
      from antlm_jax.page import summary

      config = config_lib.load_config(args.config, overrides)
      words = shlex.join([*plugins.plugin_arguments(), *argv])
      command = f"{summary.antlm_program()} train {words}"
      trained = train(config, args.workdir, command=command)
    # The forecast takes minutes, for which the other processes do not wait.
    if args.speed:
      run_words = [f"--config={args.config}", *overrides]
      _compare_with_forecast(trained, run_words, config.data.threads)


def _compare_with_forecast(
  trained: Trained, words: Sequence[str], threads: int
) -> None:
  """Shows the run's MFU next to that of `antlm plan` for these devices.

  `words` are the arguments of the config and its settings.
  """
  from antlm_jax.planning import machine
  from antlm_jax.runtime import progress
  from antlm_jax.training import notes

  if trained.mfu is None:  # as of all processes but the first
    progress.say("speed: no MFU, for lack of timed steps or a known peak")
    return
  try:
    forecast = machine.forecast_mfu(words)
  except UserError as error:
    progress.say(f"speed: {error}")
    return
  for line in notes.speed_advice(
    trained.mfu, forecast, trained.seconds, threads
  ):
    progress.say(line)


def done(argv: Sequence[str]) -> bool:
  """Returns whether the run has ended, and had these settings and rows.

  It reads neither the model nor the rows. If these are gone, they do not count.

  Raises:
    UserError: The arguments or the run's files cannot be read.
  """
  from antlm_jax import config as config_lib
  from antlm_jax.data import prepared_folder
  from antlm_jax.runtime import files
  from antlm_jax.training import metrics, saving

  config, workdir = read_run_arguments(argv)
  workdir = files.absolute_path(workdir)
  if not (workdir / metrics.SUMMARY).exists():
    return False
  before = files.read_text(workdir / saving.CONFIG, "the run's config")
  before = config_lib.config_from_json(before)
  if config_lib.config_differences(before, config):
    return False
  summary = files.read_json(workdir / metrics.SUMMARY, "the run's summary")
  with contextlib.suppress(UserError):
    sha256 = prepared_folder.hash_of_rows(config.data.path)
    return summary.get("data", sha256) == sha256
  return True


def read_run_arguments(argv: Sequence[str]) -> tuple[Config, str]:
  """Returns the config and the workdir that the command's arguments name."""
  from antlm_jax import config as config_lib

  args, overrides = _parse_arguments(argv)
  return config_lib.load_config(args.config, overrides), args.workdir


def _parse_arguments(
  argv: Sequence[str],
) -> tuple[argparse.Namespace, list[str]]:
  """Returns the command's arguments, and its `--config.KEY=VALUE` words."""
  from antlm_jax import config as config_lib
  from antlm_jax import config_help

  epilog = ""
  if {"-h", "--help"} & {*argv}:
    name = cli.value_of("--config", argv)
    config = None
    values = "defaults"
    purpose = ""
    if name:
      module = config_lib.config_module(name.partition(":")[0])
      purpose = f"{module.__doc__ or ''}\n"
      try:
        config = config_lib.load_config(name)
        values = f"the values of {name}"
      except UserError:
        if ":" in name:
          raise  # else it may need an argument
    settings = config_help.described(config)
    epilog = (
      f"{purpose}settings, each --config.KEY=VALUE, with {values}:\n{settings}"
    )
  parser = cli.Parser(
    description=(
      "Trains a model. The same command resumes a run.\n"
      "--config=NAME --help shows the settings of a config."
    ),
    epilog=epilog,
  )
  parser.add_argument(
    "--config",
    required=True,
    help="Name or path of a config, FILE.py or FILE.py:ARG",
  )
  parser.add_argument(
    "--workdir",
    required=True,
    help="Path to the run's folder; may be gs://BUCKET/RUN",
  )
  parser.add_argument(
    "--speed",
    action="store_true",
    help="At the end, compare MFU with antlm plan's forecast for this chip",
  )
  return parser.parse_with_overrides(argv, config_help.meant_setting)
