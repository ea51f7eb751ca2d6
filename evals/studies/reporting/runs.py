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
from antlm_jax.objectives import curriculum as curriculum_lib
from antlm_jax.objectives.curriculum import Curriculum, Phase
from antlm_jax.runtime import files
from antlm_jax.training import metrics
from antlm_jax.training.metrics import HALVES, REPORT

# Errors of a block that reads a damaged or foreign file.
_WRONG = LookupError, AttributeError, TypeError, ValueError

Losses = Mapping[str, Mapping[int, float]]  # by objective and step
ALL = "all"  # held-out rows, next to `HALVES`


@dataclasses.dataclass(frozen=True)
class TrainedRun:
  """One seed of a variant.

  Attributes:
    variant: Name of the variant.
    seed: Name of the folder.
    folder: Path to the run.
    config: The resolved config, or the part of it that a report reads.
    known_objectives: Settings of objectives by name in the curriculum, such as
      M and M30.
    losses: Held-out losses in nats by `ALL` and `HALVES`, then by the
      objective's logged name and step; NaN where a loss was not finite.
    summary: The run's summary; None before its end.
    curriculum: Its phases in steps, equal neighbours joined; None before its
      end.
  """

  variant: str
  seed: str
  folder: pathlib.Path
  config: Mapping[str, Any]
  known_objectives: Mapping[str, Mapping[str, Any]]
  losses: Mapping[str, Losses]
  summary: Mapping[str, Any] | None = None
  curriculum: Curriculum | None = None

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
    return curriculum_lib.objective_names(self.text, list(self.names))

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
    return [name for name in self.losses[ALL] if self.held_out(name)]

  @property
  def has_halves(self) -> bool:
    """Whether losses on each half of the held-out rows are known."""
    return REPORT in self.losses

  def held_out(self, loss_name: str, half: str = ALL) -> dict[int, float]:
    """Returns finite losses by step, of an objective's logged name."""
    return self._finite_losses.get(half, {}).get(loss_name, {})

  @functools.cached_property
  def _finite_losses(self) -> dict[str, dict[str, dict[int, float]]]:
    return {
      half: {
        loss_name: {s: x for s, x in losses.items() if not math.isnan(x)}
        for loss_name, losses in by_name.items()
      }
      for half, by_name in self.losses.items()
    }

  def last_step(self, loss_name: str) -> int:
    """Returns the last step at which an objective's loss was measured."""
    return max(self.losses[ALL].get(loss_name, ()), default=0)

  def end(self, loss_name: str, half: str = REPORT) -> tuple[int, float] | None:
    """Returns the last step, and an objective's loss there, if it is finite.

    It is on all held-out rows if their halves were not measured.
    """
    half = half if loss_name in self.losses.get(half, {}) else ALL
    step = self.last_step(loss_name)
    loss = self.held_out(loss_name, half).get(step)
    return None if loss is None else (step, loss)

  def lowest(
    self, loss_name: str, half: str = REPORT, after: int = 0
  ) -> tuple[int, float] | None:
    """Returns an objective's lowest loss after some steps, and its step.

    One half of the held-out rows measures it, and the other chooses the step.
    On the half that chose the step, the loss would be too low by chance.
    """
    (choose,) = set(HALVES) - {half}
    measured = self.held_out(loss_name, half)
    losses = {
      step: loss
      for step, loss in self.held_out(loss_name, choose).items()
      if step in measured and (step > after or not after)
    }
    if not losses:
      return None
    step = min(losses, key=losses.get)
    return step, measured[step]

  def shared_steps(self, other: "TrainedRun", same_settings: bool) -> int:
    """Returns the number of first steps that this run shares with another.

    These are the steps up to the first difference of the curricula, if the
    settings are the same, or those with the same losses. It is 0 for equal
    runs.
    """
    steps = sorted(set().union(*self.losses[ALL].values()))
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
      for half in self.losses
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
  """Returns the ended runs that have the curriculum of the first of them."""
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
  for trunk in runs.get(variant, ()):
    if trunk.seed == seed:
      trunk = with_shared_steps(trunk, runs)
      losses = {
        half: joined(trunk.losses.get(half, {}), losses[half])
        for half in losses
      }
  return dataclasses.replace(run, losses=losses)


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
  losses = _read_losses(path)
  with reading_file(path / "config.json") as config:
    objectives = config_lib.stored_objectives(config)
    run = TrainedRun(variant, path.name, path, config, objectives, losses)
    if not isinstance(run.attention, str):
      raise ValueError("an objective has no attention")
  if not (path / metrics.SUMMARY).is_file():
    return run
  with reading_file(path / metrics.SUMMARY) as summary:
    return with_summary(run, summary)


def with_summary(run: TrainedRun, summary: Mapping[str, Any]) -> TrainedRun:
  """Returns a run that is at its end.

  Raises:
    LookupError: If the summary lacks a field.
    ValueError: If one of its numbers is not finite, or its phases are not those
      of the curriculum.
  """
  for name in ("steps", "parameters", "unigram_entropy"):
    finite_number(summary, name)
  if "seconds" in summary:  # only comparisons of runs show them
    finite_number(summary["seconds"], "total")
  phases = _curriculum(run, summary)
  return dataclasses.replace(run, summary=summary, curriculum=phases)


def _curriculum(run: TrainedRun, summary: Mapping) -> Curriculum:
  # The config does not say how many steps an epoch has. With any number of
  # them, the phases and their shares are the same; only lengths are not.
  names = list(run.names)
  shape = curriculum_lib.parse_curriculum(run.text, names, 1000.0, 1000)
  shares = [shape.at(step).shares for step in (0, *shape.switches)]
  # In which steps phases end is known at the run's end alone: it says so.
  bounds = [0, *summary["switches"], summary["steps"]]
  if run.config["eval"].get("patience"):
    # It may have ended in an earlier phase.
    shares = shares[: len(bounds) - 1]
  spans = zip(itertools.pairwise(bounds), shares, strict=True)
  return Curriculum(tuple(Phase(*span, share) for span, share in spans))


def _read_losses(path: pathlib.Path) -> dict[str, dict[str, dict[int, float]]]:
  """Reads losses on all held-out rows, and on each half of them."""
  pattern = re.compile(f"eval/(.+)/loss(?:/({'|'.join(HALVES)}))?")
  by_half = {ALL: {}}
  for record in metrics.read_records(path):
    for key, loss in record.items():
      if match := pattern.fullmatch(key):
        loss_name, half = match.groups(default=ALL)
        losses = by_half.setdefault(half, {}).setdefault(loss_name, {})
        # A diverged model's loss may be infinite or NaN, which JSON can hold.
        losses[record["step"]] = loss if math.isfinite(loss) else math.nan
  return by_half


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
