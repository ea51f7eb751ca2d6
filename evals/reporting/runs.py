"""What the report reads: the table's rows, training runs, and evaluations.

Every format that a run's folder has is read here and nowhere else in the
report: those of `antlm_jax.train`, `evals.blimp` and `evals.finetune`.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from antlm_jax import config
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.curriculum import Curriculum, Phase
from antlm_jax.training import metrics

CAUSAL, MASKED = "causal", "masked"
READINGS = (CAUSAL, MASKED)


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A zero-shot benchmark.

  Attributes:
    name: Its name in the report.
    folder: That of its data, by which a run's results are called.
    pairs: What it has in full, as BabyLM filters it.
  """

  name: str
  folder: str
  pairs: int


BENCHMARKS = (
  Benchmark("BLiMP", "blimp_filtered", 59_875),
  Benchmark("BLiMP supplement", "blimp_supplement_filtered", 5_218),
  Benchmark("EWoK", "ewok", 7_618),
)
BLIMP = BENCHMARKS[0]


# ------------------------------------------------------------------ the rows


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of the table that is to be.

  Attributes:
    name: That of its folder.
    family: The encoder.
    title: What the report calls it.
    masked: The mode of `evals.zero_shot.scoring` that is its masked reading.
  """

  name: str
  family: str
  title: str
  masked: str = "mlm"

  def mode(self, reading: str) -> str:
    """Returns the mode of `evals.zero_shot.scoring` of a reading."""
    return self.masked if reading == MASKED else reading


def read_rows(path) -> dict[str, Row]:
  """Reads the `ROWS` of a config file, in order.

  Raises:
    UserError: if there is no such file, or it defines no rows.
  """
  try:
    return {
      name: Row(name, row.family, row.title, row.masked)
      for name, row in config.module(str(path)).ROWS.items()
    }
  except AttributeError as error:
    raise UserError(
      f"--config={path} defines no ROWS, by name with family, title and masked:"
      f" {error}"
    ) from error


# ------------------------------------------------------------------ the runs


@dataclasses.dataclass(frozen=True)
class Items:
  """What a run got right.

  Attributes:
    key: Digest of the items' names in order; runs with the same one compare.
    uids: The UIDs, in order of appearance.
    strata: Index of each item's UID, int `[n]`.
    correct: bool `[n]`.
  """

  key: str
  uids: tuple[str, ...]
  strata: np.ndarray
  correct: np.ndarray


@dataclasses.dataclass(frozen=True)
class ZeroShot:
  """Results of one benchmark in one mode.

  Attributes:
    folder: Where they are.
    summary: What summary.json says.
  """

  folder: pathlib.Path
  summary: Mapping

  @property
  def score(self) -> float:
    """The unweighted mean over UIDs, in [0, 1]."""
    return self.summary["macro_accuracy"]

  @property
  def step(self) -> int:
    """The checkpoint's."""
    return self.summary["request"]["step"]

  @functools.cached_property
  def items(self) -> Items | None:
    """The items, or None if their file is absent."""
    path = self.folder / "items.jsonl"
    if not path.is_file():
      return None
    with _reading(path):
      found = json.loads(f"[{','.join(path.read_text('utf-8').splitlines())}]")
      names = [f"{item['uid']}\t{item['id']}" for item in found]
      index = {uid: i for i, uid in enumerate(dict.fromkeys(
        item["uid"] for item in found
      ))}  # fmt: skip
      return Items(
        hashlib.sha256("\n".join(names).encode()).hexdigest(),
        tuple(index),
        np.array([index[item["uid"]] for item in found]),
        np.array([item["correct"] for item in found]),
      )


@dataclasses.dataclass(frozen=True)
class Tuned:
  """A fine-tuned task, at its best learning rate.

  Attributes:
    step: Of the checkpoint.
    metric: The main metric.
    scores: By evaluation set, in [0, 1] (MCC: at most 1), means over seeds.
    majority: What always answering one class gets, by evaluation set.
    collapsed: The runs at this rate that give nearly one answer.
    full: Whether all of the training set was there to train on.
  """

  step: int
  metric: str
  scores: Mapping[str, float]
  majority: Mapping[str, float]
  collapsed: Sequence[str]
  full: bool


@dataclasses.dataclass(frozen=True)
class Run:
  """A seed of a row.

  Attributes:
    row: The row's name.
    seed: The folder's name.
    config: The resolved config.
    summary: What it says of itself, or None if it is not at its end.
    records: Its metrics by step.
    zero_shot: By pipeline, benchmark (its folder's name) and mode.
    tuned: By attention and task.
  """

  row: str
  seed: str
  config: Mapping
  summary: Mapping | None
  records: Sequence[Mapping]
  zero_shot: Mapping[tuple[str, str, str], ZeroShot]
  tuned: Mapping[tuple[str, str], Tuned]

  @property
  def text(self) -> str:
    """The curriculum's string."""
    return self.config["curriculum"]

  @functools.cached_property
  def names(self) -> dict[str, str]:
    """The objectives' logged names, by name in the curriculum."""
    objectives = self.config["objectives"]
    return {name: about["name"] for name, about in objectives.items()}

  @functools.cached_property
  def objectives(self) -> tuple[str, ...]:
    """The objectives that the curriculum has, in order."""
    return self._shape.objectives

  @functools.cached_property
  def _shape(self) -> Curriculum:
    # Phases in their proportions: an epoch's steps are not in the config.
    return curriculum.parse(self.text, list(self.names), 1000.0, 1000)

  @functools.cached_property
  def curriculum(self) -> Curriculum | None:
    """The phases in steps, those alike that follow one another as one."""
    if self.summary is None:
      return None
    shares = [self._shape.phases[0].shares]
    shares += [self._shape.at(s).shares for s in self._shape.switches]
    bounds = [0, *self.summary["switches"], self.summary["steps"]]
    phases = (
      Phase(start, stop, part)
      for (start, stop), part in zip(
        itertools.pairwise(bounds), shares, strict=True
      )
    )
    return Curriculum(self.text, tuple(phases))

  @functools.cached_property
  def reading(self) -> str:
    """How its only or first objective sees the text."""
    about = self.config["objectives"][self.objectives[0]]
    return CAUSAL if about["attention"] == CAUSAL else MASKED

  def held_out(self, kind: str) -> list[tuple[int, float]]:
    """Returns (step, loss in nats) of an objective, by its logged name."""
    key = f"eval/{kind}/loss"
    return [(r["step"], r[key]) for r in self.records if key in r]


def read_runs(folder, rows: Mapping[str, Row]) -> dict[str, list[Run]]:
  """Reads every run, `FOLDER/ROW/SEED/`, by row; rows without are left out.

  Raises:
    UserError: if there is none, or one of their files cannot be read.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise UserError(f"--runs={folder}: no such folder")
  found = {
    name: [
      _read_run(name, path)
      for path in sorted((folder / name).glob("*"), key=_in_order)
      if (path / "config.json").is_file()
    ]
    for name in rows
  }
  found = {name: runs for name, runs in found.items() if runs}
  if not found:
    raise UserError(
      f"--runs={folder} holds no run: they are expected in ROW/SEED/, such as"
      f" {next(iter(rows), 'ROW')}/0/config.json"
    )
  return found


def pipelines(runs: Mapping[str, Sequence[Run]]) -> list[str]:
  """Names the pipelines that pairs were scored by, the most used first."""
  every = (run for those in runs.values() for run in those)
  counts = collections.Counter(key[0] for run in every for key in run.zero_shot)
  return [name for name, _ in counts.most_common()]


def strangers(folder, rows: Mapping[str, Row]) -> list[str]:
  """Names the folders that hold runs of rows that the table does not have."""
  found = {path.parent.parent.name for path in _configs(folder)}
  return sorted(found - set(rows))


def _configs(folder) -> Iterator[pathlib.Path]:
  return pathlib.Path(folder).glob("*/*/config.json")


def _in_order(path: pathlib.Path) -> tuple:
  """0, 1, ..., 10, then names."""
  number = path.name.isdecimal()
  return not number, int(path.name) if number else 0, path.name


def _read_run(row: str, path: pathlib.Path) -> Run:
  evals = path / "evals"
  run = Run(
    row=row,
    seed=path.name,
    config=_json(path / "config.json"),
    summary=_json(path / "summary.json"),
    records=metrics.read_records(path),
    zero_shot=_zero_shot(evals),
    tuned=_tuned(evals / "finetune"),
  )
  with _reading(path / "config.json"):
    _ = run.objectives
  return run


def _zero_shot(evals: pathlib.Path) -> dict[tuple[str, str, str], ZeroShot]:
  """Reads the results of the last step evaluated."""
  found = {}
  for benchmark in BENCHMARKS:
    for folder, summary in _summaries(evals / benchmark.folder, "*"):
      with _reading(folder / "summary.json"):
        about = summary["request"]
        key = about["pipeline"], benchmark.folder, about["mode"]
        before = found.get(key)
        if before is None or before.step < about["step"]:
          found[key] = ZeroShot(folder, summary)
  return found


def _tuned(folder: pathlib.Path) -> dict[tuple[str, str], Tuned]:
  found = {}
  for path, summary in _summaries(folder, "*/*"):
    with _reading(path / "summary.json"):
      key = summary["request"]["attention"], summary["task"]
      tuned = _at_best_lr(summary)
    if key not in found or found[key].step < tuned.step:
      found[key] = tuned
  return found


def _at_best_lr(summary: Mapping) -> Tuned:
  metric, lr = summary["main_metric"], summary["best_lr"]
  best = next(entry for entry in summary["by_lr"] if entry["lr"] == lr)
  about = summary["evaluations"]
  return Tuned(
    step=summary["request"]["step"],
    metric=metric,
    scores={name: found["mean"] for name, found in best["scores"].items()},
    majority={name: found["majority"][metric] for name, found in about.items()},
    collapsed=[
      f"seed {run['seed']} at rate {lr:g}"
      for run in summary["runs"]
      if run["lr"] == lr and run["collapsed"]
    ],
    full=not summary["request"]["limit"],
  )


def _summaries(folder: pathlib.Path, depth: str) -> Iterator[tuple]:
  for path in sorted(folder.glob(f"{depth}/summary.json")):
    yield path.parent, _json(path)


def _json(path: pathlib.Path) -> dict | None:
  if not path.is_file():
    return None
  with _reading(path):
    return json.loads(path.read_text(encoding="utf-8"))


@contextlib.contextmanager
def _reading(path: pathlib.Path):
  """Names the file that is not what it should be."""
  try:
    yield
  except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
    raise UserError(
      f"cannot read {path}: {error!r}: make it again, or remove it"
    ) from error
