"""A study as a value: its rows, its scales, and its trainings at one scale.

A study is a config file with `ROWS` and `SCALES` by name, and a `get_config`
whose argument takes `row`, `scale` and `seed`. The configs in configs/studies
are studies. evals/studies/make.py makes them.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from flax import traverse_util
from ml_collections import ConfigDict

from antlm_jax import config as config_lib
from antlm_jax.config import Config
from antlm_jax.errors import UserError
from antlm_jax.evals.studies import branches
from antlm_jax.evals.studies.branches import Branch

CAUSAL = "causal"  # a mode, and an attention


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of a study's tables: a way of training, with several seeds.

  Attributes:
    family: Rows of a family have the same encoder, and are compared.
    title: Title in the report.
    curriculum: Curriculum by scale. The row does not exist at other scales.
    seeds: Number of seeds by scale.
    settings: Further changes to its family's config, by key.
    masked: Mode of `antlm_jax.inference.scoring`, in addition to `causal`.
    attention: Attention for fine-tuning.
    after: The row at whose end it begins, "" for none.
    looks: Steps whose checkpoints are kept and evaluated as well, by scale.
    against: Rows that it should beat, each in its `measured` objectives.
    measured: Objectives whose losses compare it; by default, those it trains.
  """

  family: str
  title: str
  curriculum: Mapping[str, str]
  seeds: Mapping[str, int]
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  masked: str = "mlm"
  attention: str = "bidirectional"
  after: str = ""
  looks: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
  against: tuple[str, ...] = ()
  measured: tuple[str, ...] = ()

  @property
  def changes(self) -> dict[str, Any]:
    """Its settings in groups, for `ConfigDict.update`."""
    return traverse_util.unflatten_dict(dict(self.settings), sep=".")

  @property
  def modes(self) -> tuple[str, str]:
    """The modes of `antlm_jax.inference.scoring` in which it is scored."""
    return CAUSAL, self.masked

  def mode(self, attention: str) -> str:
    """Returns the mode that corresponds to training with an attention."""
    return CAUSAL if attention == CAUSAL else self.masked

  def __str__(self) -> str:
    return f"{self.family} {self.title}"


def row_of(arg: ConfigDict, rows: Mapping[str, Row]) -> Row:
  """Returns the row that a config's argument names, by `row` and `scale`.

  Raises:
    UserError: There is no such row, or it does not exist at that scale.
  """
  if arg.row not in rows:
    raise UserError(f"row={arg.row!r} is not one of {', '.join(rows)}")
  if arg.scale not in rows[arg.row].curriculum:
    raise UserError(f"scale={arg.scale} has no row {arg.row}")
  return rows[arg.row]


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """A command that evaluates a checkpoint.

  Attributes:
    title: Name of the job in the output.
    command: Its command of `antlm`, such as `eval blimp`.
    options: Options of the command. {data} is the folder of evaluation sets,
      {attention} the row's attention, and {mode} one of its two modes: then the
      command runs once for each.
    seeds: Number of a row's seeds to evaluate; 0 for all.
    looks: Evaluate the checkpoints of `Row.looks` instead of the last.
  """

  title: str
  command: str
  options: tuple[str, ...]
  seeds: int = 0
  looks: bool = False


@dataclasses.dataclass(frozen=True)
class ExpectedText:
  """The expected data, from which a dry run estimates the cost."""

  vocab_size: int
  seq_len: int  # tokens in a row
  pieces: int = 1  # documents in a row
  rows: int = 0  # in an epoch, approximately, for curricula in epochs


@dataclasses.dataclass(frozen=True)
class Scale:
  """The size of a study, apart from its trainings.

  Attributes:
    prepare: Options of `antlm prepare` by family. Families with the same
      options share their data.
    text: The data that these options make.
    evaluations: Evaluations of every row.
    needs: Files and folders that the folder of evaluation sets must hold.
    config: The config's scale, if its name differs.
    shrink: Shrink the config.
  """

  prepare: Mapping[str, tuple[str, ...]]
  text: ExpectedText
  evaluations: tuple[Evaluation, ...]
  needs: tuple[str, ...]
  config: str = ""
  shrink: bool = False


@dataclasses.dataclass(frozen=True)
class Study:
  """A study's config at one scale."""

  path: pathlib.Path  # the config file
  name: str  # of the scale
  scale: Scale
  scale_rows: Mapping[str, Row]  # all rows of the scale
  rows: Mapping[str, Row]  # the rows to make, and those that they begin after
  overrides: tuple[str, ...] = ()  # further arguments of every training
  pretrainings: int = 0  # seeds of every row; 0 for `Row.seeds`

  @property
  def config_name(self) -> str:
    """The config in commands: a name that any machine knows, or a path."""
    named = config_lib.named_configs().get(self.path.stem)
    is_named = named and named.resolve() == self.path.resolve()
    return self.path.stem if is_named else str(self.path)

  @property
  def size(self) -> str:
    """The name of the scale in the rows and in the config."""
    return self.scale.config or self.name

  @functools.cached_property
  def configs(self) -> dict[str, Config]:
    """The training configs of all rows, with their first seed."""
    return {
      name: config_lib.load_config(self.spec(name, 0), self.overrides)
      for name in self.scale_rows
    }

  def spec(self, row: str, seed: int) -> str:
    """Returns the config file with the argument of a run."""
    return f"{self.path}:{self.argument(row, seed)}"

  def argument(self, row: str, seed: int) -> str:
    """Returns the config's argument."""
    shrink = ",shrink" if self.scale.shrink else ""
    return f"row={row},seed={seed},scale={self.size}{shrink}"

  def seeds(self, row: str) -> int:
    """Returns the number of runs of a row."""
    return self.pretrainings or self.scale_rows[row].seeds[self.size]

  @functools.cached_property
  def plan(self) -> dict[str, Branch | None]:
    """The checkpoint of another row where each row begins, for every seed.

    It covers all rows, so that a trunk keeps the checkpoints of rows that are
    made later. Rows that begin at the end of another branch only from each
    other.
    """
    groups = {}
    for name, row in self.scale_rows.items():
      key = row.family, row.after, self.seeds(name)
      groups.setdefault(key, {})[name] = self.configs[name]
    plans = map(branches.plan_branches, groups.values())
    return {name: branch for plan in plans for name, branch in plan.items()}

  @property
  def branches(self) -> dict[str, Branch | None]:
    """The plan of the rows to make; None if a row's trunk is not made."""
    return {
      name: branch if branch and branch.trunk in self.rows else None
      for name, branch in self.plan.items()
      if name in self.rows
    }

  def row_starts(self, row: str) -> list[str]:
    """Returns the rows at whose checkpoints a row begins."""
    branch = self.plan[row]
    starts = branch and branch.trunk, self.scale_rows[row].after
    return [name for name in starts if name]

  def kept_steps(self, row: str) -> list[int]:
    """Returns the steps whose checkpoints stay."""
    by_config = self.configs[row].checkpoint.at
    steps = {b.step for b in self.plan.values() if b and b.trunk == row}
    return sorted(steps.union(by_config, self.looks(row)))

  def looks(self, row: str) -> tuple[int, ...]:
    """Returns the steps at which a row is evaluated before its end."""
    return self.scale_rows[row].looks.get(self.size, ())


def read_scale(
  path: str | pathlib.Path, scale: str
) -> tuple[Scale, dict[str, Row]]:
  """Reads a scale of a study's config, and the rows at that scale by name.

  Raises:
    UserError: There is no such file or scale, the file is not a study, or a row
      begins after a row that the scale lacks.
  """
  module = config_lib.config_module(str(path))
  for name in ("ROWS", "SCALES"):
    if not hasattr(module, name):
      raise UserError(f"--config={path} is no study: it defines no {name}")
  if scale not in module.SCALES:
    raise UserError(f"--scale={scale} is not one of {', '.join(module.SCALES)}")
  scale_settings = module.SCALES[scale]
  # Several scales may share the rows and the config of another scale.
  size = scale_settings.config or scale
  rows = {
    name: row for name, row in module.ROWS.items() if size in row.curriculum
  }
  if not rows:
    raise UserError(f"--config={path} has no rows at --scale={scale}")
  for name, row in rows.items():
    if row.after and row.after not in rows:
      raise UserError(
        f"--config={path}: {name} begins after {row.after}, which is no row at"
        f" --scale={scale}"
      )
  return scale_settings, rows


def read_study(
  config: str,
  scale: str,
  rows: Sequence[str] = (),
  seeds: int = 0,
  overrides: Sequence[str] = (),
) -> Study:
  """Reads a study's config.

  Args:
    config: Name or path of the study's config.
    scale: Scale of the study.
    rows: Rows to make; all by default.
    seeds: Pretrainings of each row; 0 for as many as its config says.
    overrides: `--config.KEY=VALUE` for every training.

  Raises:
    UserError: The config has no such scale or row.
  """
  path = pathlib.Path(config_lib.find_config(config)).absolute()
  scale_settings, scale_rows = read_scale(path, scale)
  for name in rows:
    if name not in scale_rows:
      raise UserError(f"--rows: {name!r} is not one of {', '.join(scale_rows)}")
  needed = set()
  for name in rows or scale_rows:
    while name and name not in needed:  # also the row that it begins after
      needed.add(name)
      name = scale_rows[name].after
  return Study(
    path=path,
    name=scale,
    scale=scale_settings,
    scale_rows=scale_rows,
    rows={name: row for name, row in scale_rows.items() if name in needed},
    overrides=tuple(overrides),
    pretrainings=seeds,
  )
