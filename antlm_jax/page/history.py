"""Measurements of a run, as a table and as a picture of its curves."""

import contextlib
import fnmatch
import itertools
import math
import os
import re
from typing import NamedTuple

from antlm_jax import config as config_lib
from antlm_jax import tables
from antlm_jax.config import Config
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum as curriculum_lib
from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.page import plots
from antlm_jax.runtime import files
from antlm_jax.settings import Field
from antlm_jax.training import metrics

_SHOWN = 5  # first and last values that a long table shows


class Measurement(NamedTuple):
  """A value that a run recorded."""

  step: int  # number of training steps before it
  name: str  # such as `eval/clm/loss`
  value: float


class History(list[Measurement]):
  """Measurements of a run, in order; notebooks show them as a table.

  `pandas.DataFrame(history)` has the columns step, name and value.
  """

  def __repr__(self) -> str:
    return tables.text_table(self._rows(), Measurement._fields, "><>")

  def _repr_html_(self) -> str:
    return tables.html(self._rows(), Measurement._fields)

  def _rows(self) -> list[tuple]:
    rows = [(f"{m.step:,}", m.name, f"{m.value:.6g}") for m in self]
    if len(rows) > 2 * _SHOWN + 1:
      rows[_SHOWN:-_SHOWN] = [("...", f"{len(rows):,} values", "...")]
    return rows


def read(folder: str | os.PathLike[str], names: str = "*") -> History:
  """Reads the measurements of a run's folder whose names match a pattern.

  Raises a UserError if the folder has none, or none of these names.
  """
  names = Field().accept(names, "names")
  rows = _metrics_by_step(folder)
  history = History(
    Measurement(step, name, value)
    for step, row in rows.items()
    for name, value in row.items()
    if fnmatch.fnmatchcase(name, names)
  )
  if not history:
    recorded = dict.fromkeys(itertools.chain(*rows.values()))
    raise UserError(f"{names!r} is none of {', '.join(recorded)}")
  return history


def plot(folder: str | os.PathLike[str]):
  """Returns the picture of a run's curves, a figure of matplotlib.

  Notebooks show it. Raises a UserError if the folder has no measurements.
  """
  from antlm_jax.training import saving  # slow to import: not for --help

  rows = _metrics_by_step(folder)
  folder = files.absolute_path(folder)
  text = files.read_text(folder / saving.CONFIG, "the run's config")
  config = config_lib.config_from_json(text)
  summary = {}
  with contextlib.suppress(UserError):  # a run that has not ended has none
    summary = files.read_json(folder / metrics.SUMMARY, "the summary")
  phases, mix = _schedules(config, summary.get("steps_per_epoch"))
  unigram = summary.get("unigram_entropy", math.nan)
  return plots.draw_run_curves(config, phases, mix, rows, unigram)


def _metrics_by_step(
  folder: str | os.PathLike[str],
) -> dict[int, dict[str, float]]:
  rows = metrics.by_step(metrics.read_records(files.absolute_path(folder)))
  if not rows:
    raise UserError(
      f"{os.fspath(folder)} has no measurements of a run: it holds no"
      f" {metrics.METRICS}"
    )
  return rows


def _schedules(
  config: Config, per_epoch: float | None
) -> tuple[Curriculum | None, Curriculum | None]:
  """Returns a run's schedules of objectives and of sources of data.

  They are None without a number of steps per epoch, which gives their lengths.
  Only a run that has ended has it, in its summary.
  """
  if per_epoch is None:
    return None, None
  train = config.train
  objectives = list(config.known_objectives)
  length = train.steps or round(train.epochs * per_epoch) or None
  curriculum = curriculum_lib.parse_curriculum(
    config.curriculum, objectives, per_epoch, length
  )
  if not config.data.mix:
    return curriculum, None
  text = config.data.mix
  names = re.findall(curriculum_lib.NAME, text)
  mix = curriculum_lib.parse_curriculum(
    text, names, per_epoch, curriculum.steps, kind="source"
  )
  return curriculum, mix
