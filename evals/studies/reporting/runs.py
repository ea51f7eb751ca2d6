"""Trained runs as training left them: settings, summary, held-out losses."""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from antlm_jax import config as config_lib
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.curriculum import Curriculum, Phase
from antlm_jax.runtime import files
from antlm_jax.training import metrics
from antlm_jax.training.metrics import HALVES, REPORT

# Errors of a block that reads a damaged or foreign file.
_WRONG = LookupError, AttributeError, TypeError, ValueError

Losses = Mapping[str, Mapping[int, float]]  # by objective and step


@dataclasses.dataclass(frozen=True)
class TrainedRun:
  """One seed of a variant."""

  variant: str
  seed: str  # the folder's name
  folder: pathlib.Path
  config: Mapping[str, Any]  # resolved
  # Settings of objectives by name in the curriculum, such as M and M30.
  known_objectives: Mapping[str, Mapping[str, Any]]
  # Held-out losses in nats, by the objective's logged name and step; NaN where
  # a loss was not finite.
  losses: Losses
  # The same on each half of the held-out rows, by `HALVES`.
  halves: Mapping[str, Losses]
  summary: Mapping[str, Any] | None = None  # None before its end
  curriculum: Curriculum | None = None  # in steps, equal neighbours joined

  @property
  def text(self) -> str:
    """The curriculum's string."""
    return self.config["curriculum"]

  @functools.cached_property
  def names(self) -> dict[str, str]:
    """The objectives' logged names, by name in the curriculum."""
    known = self.known_objectives
    return {name: settings["name"] for name, settings in known.items()}

  @functools.cached_property
  def objectives(self) -> tuple[str, ...]:
    """The objectives that the curriculum has, in order."""
    return curriculum.objective_names(self.text, list(self.names))

  @property
  def attention(self) -> str:
    """The attention of its only or first objective."""
    return self.known_objectives[self.objectives[0]]["attention"]

  @property
  def trained_names(self) -> set[str]:
    """The logged names of all objectives with an attention that it trained."""
    known = self.known_objectives
    trained = {known[name]["attention"] for name in self.objectives}
    return {x["name"] for x in known.values() if x["attention"] in trained}

  @property
  def loss_names(self) -> list[str]:
    """The logged names of the objectives whose held-out loss was measured."""
    return [loss_name for loss_name in self.losses if self.held_out(loss_name)]

  def held_out(self, loss_name: str, half: str = "") -> dict[int, float]:
    """Returns finite losses by step, of an objective's logged name.

    Args:
      loss_name: The logged name.
      half: One of `HALVES`; all held-out rows by default.
    """
    losses = (self.halves.get(half, {}) if half else self.losses).get(
      loss_name, {}
    )
    return {s: loss for s, loss in losses.items() if not math.isnan(loss)}

  def last(self, loss_name: str) -> int:
    """Returns the last step at which an objective's loss was measured."""
    return max(self.losses.get(loss_name, ()), default=0)

  def best(
    self, loss_name: str, after: int, report: str = REPORT
  ) -> int | None:
    """Returns the best step after others, by half of the held-out rows.

    `report` is the other half, which measures it. On the half that chose the
    step, its loss would be too low by chance.
    """
    (choose,) = set(HALVES) - {report}
    losses = self.held_out(loss_name, choose)
    measured = self.held_out(loss_name, report)
    steps = [s for s in losses if s in measured and (s > after or not after)]
    return min(steps, key=losses.get, default=None)

  def end(self, loss_name: str, half: str = REPORT) -> float | None:
    """Returns an objective's last loss, if it is finite.

    It is on all held-out rows if their halves were not measured.
    """
    half = half if loss_name in self.halves.get(half, {}) else ""
    return self.held_out(loss_name, half).get(self.last(loss_name))

  def shared_steps(self, other: "TrainedRun", same_settings: bool) -> int:
    """Returns the number of first steps that this run shares with another.

    These are the steps up to the first difference of the curricula, if the
    settings are the same, or those with the same losses. It is 0 for equal
    runs.
    """
    steps = sorted(itertools.chain(*self.losses.values()))
    shared = 0
    for step in steps:
      if self._losses_after(step) != other._losses_after(step):
        break
      shared = step
    curricula = self.curriculum, other.curriculum
    if same_settings and None not in curricula:
      shared = max(shared, _same_phases(*curricula))
    return shared if shared < max(steps, default=0) else 0

  def _losses_after(self, step: int) -> list[tuple]:
    """Returns all finite losses that were measured after a step."""
    return [
      (half, loss_name, self.held_out(loss_name, half).get(step))
      for half in ("", *self.halves)
      for loss_name in self.loss_names
    ]


def _same_phases(curriculum: Curriculum, other: Curriculum) -> int:
  """Returns the number of first steps with the same objectives."""
  if curriculum.steps != other.steps:  # their learning rates differ
    return 0
  starts = {phase.start for c in (curriculum, other) for phase in c.phases}
  for step in sorted(starts):
    if curriculum.at(step).shares != other.at(step).shares:
      return step
  return curriculum.steps


def ended(runs: Sequence[TrainedRun]) -> list[TrainedRun]:
  """Returns the runs at their end that have the first such one's curriculum."""
  runs = [run for run in runs if run.curriculum is not None]
  return [run for run in runs if run.text == runs[0].text]


def with_shared_steps(
  run: TrainedRun, runs: Mapping[str, Sequence[TrainedRun]]
) -> TrainedRun:
  """Returns a run with the losses of the steps that it shares with another.

  A branch (evals/studies/branches.py) begins in a checkpoint of another
  variant's run, and has no losses from before. `runs` are those of a study.
  """
  init = run.config.get("init") or {}
  begun = re.search(
    r"([^/]+)/([^/]+)/checkpoints/(\d+)/*$", init.get("checkpoint") or ""
  )
  if not begun or init.get("step") != "keep":
    return run
  variant, seed, step = begun.groups()

  def joined(early: Losses, late: Losses) -> Losses:
    out = dict(late)
    for loss_name, losses in early.items():
      before = {s: loss for s, loss in losses.items() if s < int(step)}
      out[loss_name] = before | dict(late.get(loss_name, {}))
    return out

  losses = run.losses
  halves = run.halves
  for trunk in runs.get(variant, ()):
    if trunk.seed == seed:
      trunk = with_shared_steps(trunk, runs)
      losses = joined(trunk.losses, losses)
      halves = {h: joined(trunk.halves.get(h, {}), halves[h]) for h in halves}
  return dataclasses.replace(run, losses=losses, halves=halves)


def chosen_runs(
  folder: pathlib.Path,
  runs: Mapping[str, Sequence[TrainedRun]],
  rows: Collection[str],
) -> dict[str, list[TrainedRun]]:
  """Returns the runs of rows, each as `with_shared_steps` returns it.

  Raises:
    UserError: There are none.
  """
  chosen = {
    name: [with_shared_steps(run, runs) for run in runs[name]]
    for name in rows
    if runs.get(name)
  }
  if not chosen:
    row = next(iter(rows), "ROW")
    raise UserError(
      f"--runs={folder} holds no run of {', '.join(rows)}: they are expected in"
      f" ROW/SEED/, such as {row}/0/config.json"
    )
  return chosen


# -------------------------------------------------------------------- reading


def read_runs(
  folder: pathlib.Path, variants: Mapping
) -> dict[str, list[TrainedRun]]:
  """Reads every run, `FOLDER/VARIANT/SEED/`; variants without are left out.

  Raises:
    UserError: if there is none, or one of their files cannot be read.
  """
  if absent := files.absent(folder):
    raise UserError(f"--runs={folder}: {absent}")
  runs = {}
  for name in variants:
    paths = [path.parent for path in (folder / name).glob("*/config.json")]
    # 0, 1, ..., 10, then names.
    paths.sort(key=lambda p: (not p.name.isdecimal(), len(p.name), p.name))
    if paths:
      runs[name] = [read_run(name, path) for path in paths]
  return runs


def read_run(variant: str, path: pathlib.Path) -> TrainedRun:
  """Reads a run's folder.

  Raises:
    UserError: if one of its files cannot be read.
  """
  halves = _read_losses(path)
  losses = halves.pop("", {})
  with reading_file(path / "config.json") as config:
    run = TrainedRun(
      variant,
      seed=path.name,
      folder=path,
      config=config,
      known_objectives=config_lib.stored_objectives(config),
      losses=losses,
      halves=halves,
    )
    if not isinstance(run.attention, str):
      raise ValueError("an objective has no attention")
  if not (path / metrics.SUMMARY).is_file():
    return run
  with reading_file(path / metrics.SUMMARY) as summary:
    return with_summary(run, summary)


def with_summary(
  run: TrainedRun, summary: Mapping[str, Any] | None
) -> TrainedRun:
  """Returns a run with its summary; without one, it is not at its end.

  Raises:
    LookupError: If the summary lacks a field.
    ValueError: If one of its numbers is not finite.
  """
  if summary is None:
    return run
  for name in ("steps", "parameters", "unigram_entropy"):
    finite_number(summary, name)
  if "seconds" in summary:  # only comparisons of runs show them
    finite_number(summary["seconds"], "total")
  phases = _curriculum(run, summary)
  return dataclasses.replace(run, summary=summary, curriculum=phases)


def _read_losses(path: pathlib.Path) -> dict[str, dict[str, dict[int, float]]]:
  """Reads losses on all held-out rows (""), and on each half of them."""
  pattern = re.compile(f"eval/(.+)/loss(?:/({'|'.join(HALVES)}))?")
  by_half = {}
  for record in metrics.read_records(path):
    for key, loss in record.items():
      if match := pattern.fullmatch(key):
        loss_name, half = match.groups(default="")
        losses = by_half.setdefault(half, {}).setdefault(loss_name, {})
        # A diverged model's loss may be infinite or NaN, which JSON can hold.
        losses[record["step"]] = loss if math.isfinite(loss) else math.nan
  return by_half


def _curriculum(run: TrainedRun, summary: Mapping) -> Curriculum:
  # The config does not say how many steps an epoch has. With any number of
  # them, the phases and their shares are the same; only lengths are not.
  shape = curriculum.parse_curriculum(run.text, list(run.names), 1000.0, 1000)
  shares = [shape.at(step).shares for step in (0, *shape.switches)]
  # In which steps phases end is known at the run's end alone: it says so.
  bounds = [0, *summary["switches"], summary["steps"]]
  if run.config["eval"].get("patience"):
    # It may have ended in an earlier phase.
    shares = shares[: len(bounds) - 1]
  spans = zip(itertools.pairwise(bounds), shares, strict=True)
  return Curriculum(tuple(Phase(*span, share) for span, share in spans))


@contextlib.contextmanager
def reading_file(
  path: pathlib.Path, read: Callable = files.read_json
) -> Iterator:
  """Reads a file for a block, and names it where the block finds it wrong.

  Raises:
    UserError: if the file cannot be read, or lacks a field that the block
    needs.
  """
  try:
    yield read(path, "the file")
  except (UserError, *_WRONG) as error:
    why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    prefix = "" if str(path) in why else f"cannot read {path}: "
    raise UserError(f"{prefix}{why}: make it again, or leave it out") from error


def finite_number(values: Mapping[str, Any], name: str) -> float:
  """Returns a finite number of a file; raises a ValueError for all else."""
  value = values[name]
  if not isinstance(value, int | float) or not math.isfinite(value):
    raise ValueError(f"{name} is {value!r}, not a finite number")
  return value
