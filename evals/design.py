"""A study as a value: its rows, its scales, and what its config says at one.

A study is a config file with `ROWS` (by name), `SCALES` (by name) and a
`get_config` whose argument takes `row`, `scale` and `seed`: see
configs/antlm_table.py and configs/clm_or_mlm.py. `evals.study` makes it.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from antlm_jax import config as config_lib
from antlm_jax.errors import UserError
from antlm_jax.evals import branches
from antlm_jax.evals.branches import Branch

CAUSAL = "causal"  # a mode, and an attention


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of a study's tables: a way of training, in several seeds.

  Attributes:
    family: Rows of a family have the same encoder, and are compared.
    title: What the report calls the row.
    curriculum: By scale; at others there is no such row.
    seeds: How many, by scale.
    settings: What else it changes of its family's config, by key.
    masked: The mode of `antlm_jax.inference.scoring` in which it is scored with
      masks, beside `causal`.
    attention: The attention with which it is fine-tuned.
    after: The row at whose end it begins, "" for none.
    looks: Steps whose checkpoints are kept and evaluated as well, by scale.
    against: Rows that it is claimed to be better than, in what each of them was
      trained in.
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

  @property
  def modes(self) -> tuple[str, str]:
    """The modes of `antlm_jax.inference.scoring` in which it is scored."""
    return CAUSAL, self.masked

  def mode(self, attention: str) -> str:
    """Returns the mode that is like training with an attention."""
    return CAUSAL if attention == CAUSAL else self.masked

  def __str__(self) -> str:
    return f"{self.family} {self.title}"


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """A command that evaluates a checkpoint.

  Attributes:
    about: What it is called while it runs.
    module: The command, run by `python -m`.
    options: Its options. In them {data} is the folder of the evaluations,
      {attention} the row's, and {mode} one of the two in which it is scored:
      then the command runs once for each.
    seeds: How many of a row's seeds are evaluated; 0 for all.
    looks: Whether it is of the checkpoints of `Row.looks` rather than the last.
  """

  about: str
  module: str
  options: tuple[str, ...]
  seeds: int = 0
  looks: bool = False


@dataclasses.dataclass(frozen=True)
class Text:
  """What the data will be, to say what trainings on it take."""

  vocab_size: int
  seq_len: int  # tokens of a row
  pieces: int = 1  # documents of a row
  rows: int = 0  # of an epoch, about, if curricula are in epochs


@dataclasses.dataclass(frozen=True)
class Scale:
  """How large a study is, but for its trainings.

  Attributes:
    prepare: Options of `antlm_jax.prepare`, by family: those with the same
      options share their data.
    text: What that will be.
    evaluations: Of every row.
    needs: Files and folders that the evaluations' folder must hold.
    config: The config's scale, where that is another.
    shrink: Whether the config is shrunk.
  """

  prepare: Mapping[str, tuple[str, ...]]
  text: Text
  evaluations: tuple[Evaluation, ...]
  needs: tuple[str, ...]
  config: str = ""
  shrink: bool = False


@dataclasses.dataclass(frozen=True)
class Study:
  """What a study's config says, at one scale."""

  path: pathlib.Path  # the config file
  name: str  # the scale's
  scale: Scale
  every: Mapping[str, Row]  # all that there are
  rows: Mapping[str, Row]  # those that are asked for, and what they begin at
  overrides: tuple[str, ...] = ()  # further arguments of every training

  @property
  def size(self) -> str:
    """The scale that its rows and its config know it by."""
    return self.scale.config or self.name

  @functools.cached_property
  def configs(self) -> dict[str, ConfigDict]:
    """The training configs of all rows, those of their first seed."""
    return {
      name: config_lib.load(
        f"{self.path}:{self.argument(name, 0)}", self.overrides
      )
      for name in self.every
    }

  def argument(self, row: str, seed: int) -> str:
    """Returns the config's argument."""
    shrink = ",shrink" if self.scale.shrink else ""
    return f"row={row},seed={seed},scale={self.size}{shrink}"

  def seeds(self, row: str) -> int:
    """Returns how many runs a row has."""
    return self.every[row].seeds[self.size]

  @functools.cached_property
  def plan(self) -> dict[str, Branch | None]:
    """Where each row begins in another's checkpoint; alike for all seeds.

    It is of all rows, whichever are asked for, so that a trunk keeps what
    those need that are asked for later. Rows that begin at the end of another
    only branch from each other.
    """
    groups = {}
    for name, row in self.every.items():
      key = row.family, row.after, self.seeds(name)
      groups.setdefault(key, {})[name] = self.configs[name]
    found = {}
    for configs in groups.values():
      found |= branches.plan(configs)
    return found

  @property
  def branches(self) -> dict[str, Branch | None]:
    """The plan of the rows; one whose trunk is not among them has no branch."""
    found = {name: self.plan[name] for name in self.rows}
    return {n: b if b and b.trunk in found else None for n, b in found.items()}

  def kept(self, row: str) -> list[int]:
    """Returns the steps whose checkpoints stay, as others need them."""
    asked = self.configs[row].checkpoint.at
    steps = {b.step for b in self.plan.values() if b and b.trunk == row}
    return sorted(steps.union(asked, self.looks(row)))

  def looks(self, row: str) -> tuple[int, ...]:
    """Returns the steps at which a row is evaluated before its end."""
    return self.every[row].looks.get(self.size, ())


def read(path, scale: str) -> tuple[Scale, dict[str, Row]]:
  """Returns a scale of a study's config, and the rows that there are at it.

  Raises:
    UserError: if there is no such file or scale, or it is no study there.
  """
  module = config_lib.module(str(path))
  for name in ("ROWS", "SCALES"):
    if not hasattr(module, name):
      raise UserError(f"--config={path} is no study: it defines no {name}")
  if scale not in module.SCALES:
    raise UserError(f"--scale={scale} is not one of {', '.join(module.SCALES)}")
  found = module.SCALES[scale]
  size = found.config or scale
  rows = {n: row for n, row in module.ROWS.items() if size in row.curriculum}
  if not rows:
    raise UserError(f"--config={path} has no rows at --scale={scale}")
  for name, row in rows.items():
    if row.after and row.after not in rows:
      raise UserError(
        f"--config={path}: {name} begins after {row.after}, which is no row at"
        f" --scale={scale}"
      )
  return found, rows
