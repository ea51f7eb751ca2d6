"""What the config of a study consists of: its rows, and its scales.

A study is a config file with `ROWS` (by name), `SCALES` (by name) and a
`get_config` whose argument takes `row`, `scale` and `seed`: see
configs/antlm_table.py and configs/study.py. `evals.study` makes it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from antlm_jax import config as config_lib
from antlm_jax.errors import UserError

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
