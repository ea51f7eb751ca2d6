"""What a report reads: its variants, trained runs, and their results.

Every format of a run's folder is read here and nowhere else in the report:
those of `antlm_jax.train`, `evals.blimp`, `evals.ewok` and `evals.finetune`.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import pathlib
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.curriculum import Curriculum, Phase
from antlm_jax.runtime import files
from antlm_jax.training import metrics


class Benchmark(NamedTuple):
  """A zero-shot benchmark."""

  name: str  # in the report
  folder: str  # the name of its data's folder
  pairs: int  # how many it has in full, as BabyLM filters it


BENCHMARKS = (
  Benchmark("BLiMP", "blimp_filtered", 59_875),
  Benchmark("BLiMP supplement", "blimp_supplement_filtered", 5_218),
  Benchmark("EWoK", "ewok", 7_618),
)
BLIMP = BENCHMARKS[0]
ODDS = " (log-odds)"  # after a benchmark's name: by how much pairs are right
_TUNED = ("finetune", "finetune-study")  # folders of fine-tuned tasks


# --------------------------------------------------------------- the results


@dataclasses.dataclass(frozen=True)
class Items:
  """What a run gets of each item of a benchmark."""

  key: str  # digest of the items' names in order; results of one key compare
  uids: tuple[str, ...]  # in order of appearance
  strata: np.ndarray  # index of each item's UID, int `[n]`
  scores: np.ndarray  # `[n]`, as bool whether it is right

  @classmethod
  def of(cls, names: Sequence[tuple[str, str]], scores: Sequence) -> "Items":
    """Makes them of each item's UID and id."""
    # The same names in the same order are the same items.
    text = "\n".join(map("\t".join, names))
    uids = tuple(dict.fromkeys(uid for uid, _ in names))
    index = {uid: i for i, uid in enumerate(uids)}
    return cls(
      key=hashlib.sha256(text.encode()).hexdigest(),
      uids=uids,
      strata=np.array([index[uid] for uid, _ in names]),
      scores=np.array(scores),
    )


@dataclasses.dataclass(frozen=True)
class Result:
  """The score of a run on a task."""

  step: int  # the checkpoint's
  score: float  # in [0, 1]; MCC in [-1, 1]
  complete: bool  # whether the task's data were there in full
  items = None


@dataclasses.dataclass(frozen=True)
class ZeroShot(Result):
  """A benchmark scored in one mode: the unweighted mean over its UIDs."""

  pairs: int  # how many were scored
  parts: Mapping[str, str]  # of each UID the phenomenon, if it is named
  folder: pathlib.Path

  @property
  def items(self) -> Items | None:
    """Which items it got right, or None if that is not known."""
    return self._read[0] if self._read else None

  @property
  def odds(self) -> Result | None:
    """The log-odds of right choices, in nats: more than whether one is right.

    The score of the right choice minus that of the best other one.
    """
    if self._read is None:
      return None
    items = self._read[1]
    by_uid = np.bincount(items.strata, items.scores)
    score = float(np.mean(by_uid / np.bincount(items.strata)))
    return Odds(self.step, score, self.complete, self.parts, items)

  @functools.cached_property
  def _read(self) -> tuple[Items, Items] | None:
    path = self.folder / "items.jsonl"
    if not path.is_file():
      return None
    with _reading(path, files.read_jsonl) as lines:
      found = [item for _, item in lines]
      names = [(item["uid"], item["id"]) for item in found]
      odds = [i["scores"][0] - max(i["scores"][1:]) for i in found]
      correct = [item["correct"] for item in found]
      return Items.of(names, correct), Items.of(names, odds)


@dataclasses.dataclass(frozen=True)
class Odds(Result):
  """The mean over a benchmark's UIDs of the log-odds of right choices."""

  parts: Mapping[str, str]
  items: Items


@dataclasses.dataclass(frozen=True)
class TunedSeed(Result):
  """One run of a fine-tuned task."""

  evaluation: str  # the name of the evaluation set
  index: int  # of the run, among those of the task
  folder: pathlib.Path
  parts: ClassVar[Mapping[str, str]] = types.MappingProxyType({})  # none

  @functools.cached_property
  def items(self) -> Items | None:
    """The main metric of each example; None if it is no mean over them."""
    path = self.folder / "items.jsonl"
    if not path.is_file():
      return None
    found = [
      item
      for item in _tuned_items(path)
      if item["evaluation"] == self.evaluation and "scores" in item
    ]
    names = [(self.evaluation, item["id"]) for item in found]
    scores = [item["scores"][self.index] for item in found]
    return Items.of(names, scores) if found else None


@functools.lru_cache(maxsize=4)
def _tuned_items(path: pathlib.Path) -> list[dict]:
  with _reading(path, files.read_jsonl) as lines:
    return [item for _, item in lines]


@dataclasses.dataclass(frozen=True)
class Tuned(Result):
  """A fine-tuned task at its best learning rate, a mean over its seeds."""

  metric: str  # the main one, which `score` is
  baseline: float  # what the best answer gets that is always the same
  collapsed: Sequence[str]  # the runs at this rate that give nearly one answer
  seeds: Mapping[str, TunedSeed]  # at this rate
  rates: Mapping[float, Sequence[float]]  # the seeds' scores, by rate


# ------------------------------------------------------------------ the runs


@dataclasses.dataclass(frozen=True)
class TrainedRun:
  """One seed of a variant, as its folder tells."""

  variant: str  # the variant's name
  seed: str  # the folder's name
  config: Mapping  # resolved
  summary: Mapping | None  # what training wrote at its end, or None before
  records: Sequence[Mapping]  # its metrics by step
  # By pipeline, benchmark's name and mode; by evaluation set and attention.
  zero_shot: Mapping[tuple[str, str, str], ZeroShot]
  tuned: Mapping[tuple[str, str], Tuned]
  looks: Mapping[int, Mapping[tuple[str, str], Tuned]]  # all of these, by step

  def results(self, pipeline: str) -> dict[tuple[str, str], Result]:
    """Returns all results by task and mode, or attention if fine-tuned."""
    found = {k[1:]: r for k, r in self.zero_shot.items() if k[0] == pipeline}
    for (task, mode), result in list(found.items()):
      if task == BLIMP.name and result.odds:
        found[task + ODDS, mode] = result.odds
    return found | dict(self.tuned)

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
    return curriculum.names(self.text, list(self.names))

  @functools.cached_property
  def _shape(self) -> Curriculum:
    # The config does not say how many steps an epoch has. With any number of
    # them, the phases and their shares are the same; only lengths are not.
    return curriculum.parse(self.text, list(self.names), 1000.0, 1000)

  @functools.cached_property
  def curriculum(self) -> Curriculum | None:
    """The phases in steps, equal neighbours joined; None before its end."""
    if self.summary is None:
      return None
    shares = [self._shape.phases[0].shares]
    shares += [self._shape.at(s).shares for s in self._shape.switches]
    # In which steps phases end is known at the run's end alone: it says so.
    bounds = [0, *self.summary["switches"], self.summary["steps"]]
    phases = (
      Phase(start, stop, part)
      for (start, stop), part in zip(
        itertools.pairwise(bounds), shares[: self._phases], strict=True
      )
    )
    return Curriculum(tuple(phases))

  @property
  def _phases(self) -> int | None:
    """How many phases a run has that may have ended early; None for all."""
    early = self.config["eval"].get("patience")
    return len(self.summary["switches"]) + 1 if early else None

  @property
  def attention(self) -> str:
    """That of its only or first objective."""
    return self.config["objectives"][self.objectives[0]]["attention"]

  def check(self) -> None:
    """Raises an error if its files lack a value that reports need."""
    needed = [self.attention]
    if self.summary is not None:
      needed += [self.summary["parameters"], self.summary["unigram_entropy"]]
      needed += self.curriculum.phases
    if None in needed:
      raise ValueError("a value is null")

  @property
  def seen(self) -> set[str]:
    """The logged names of all objectives with an attention that it trained."""
    every = self.config["objectives"]
    trained = {every[name]["attention"] for name in self.objectives}
    return {o["name"] for o in every.values() if o["attention"] in trained}

  @property
  def kinds(self) -> list[str]:
    """The logged names of the objectives whose held-out loss was measured."""
    keys = dict.fromkeys(key for record in self.records for key in record)
    found = (re.fullmatch("eval/(.+)/loss", key) for key in keys)
    return [match[1] for match in found if match]

  def held_out(self, kind: str) -> dict[int, float]:
    """Returns an objective's losses in nats by step, by its logged name."""
    key = f"eval/{kind}/loss"
    return {r["step"]: r[key] for r in self.records if key in r}


def read_runs(folder, variants: Mapping) -> dict[str, list[TrainedRun]]:
  """Reads every run, `FOLDER/VARIANT/SEED/`; variants without are left out.

  Raises:
    UserError: if there is none, or one of their files cannot be read.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise UserError(f"--runs={folder}: no such folder")
  found = {
    name: [
      read_run(name, path)
      # 0, 1, ..., 10, then names.
      for path in sorted(
        (folder / name).glob("*"),
        key=lambda p: (not p.name.isdecimal(), len(p.name), p.name),
      )
      if (path / "config.json").is_file()
    ]
    for name in variants
  }
  found = {name: runs for name, runs in found.items() if runs}
  if not found:
    raise UserError(
      f"--runs={folder} holds no run: they are expected in ROW/SEED/, such as"
      f" {next(iter(variants), 'ROW')}/0/config.json"
    )
  return found


def pipelines(runs: Mapping[str, Sequence[TrainedRun]]) -> list[str]:
  """Returns the pipelines that pairs were scored by, the most used first."""
  every = (run for those in runs.values() for run in those)
  counts = collections.Counter(key[0] for run in every for key in run.zero_shot)
  return [name for name, _ in counts.most_common()]


def strangers(folder, variants: Mapping) -> list[str]:
  """Returns the folders that hold runs of no variant."""
  configs = pathlib.Path(folder).glob("*/*/config.json")
  return sorted({path.parent.parent.name for path in configs} - set(variants))


def read_run(variant: str, path: pathlib.Path) -> TrainedRun:
  """Reads a run's folder.

  Raises:
    UserError: if one of its files cannot be read.
  """
  zero_shot = _latest(_zero_shot(path / "evals"))
  looks = collections.defaultdict(dict)
  for folder in _TUNED:
    for key, result in _tuned(path / "evals" / folder):
      looks[result.step][key] = result
  tuned = {k: r for step in sorted(looks) for k, r in looks[step].items()}
  with _reading(path / "config.json") as settings:
    run = TrainedRun(
      variant=variant,
      seed=path.name,
      config=settings,
      summary=None,
      records=metrics.read_records(path),
      zero_shot=zero_shot,
      tuned=tuned,
      looks=dict(looks),
    )
    run.check()
  if (path / "summary.json").is_file():
    with _reading(path / "summary.json") as summary:
      run = dataclasses.replace(run, summary=summary)
      run.check()
  return run


def _latest(results: Iterator[tuple[tuple, Result]]) -> dict:
  """Keeps of each key the result of the last step evaluated."""
  found = {}
  for key, result in results:
    if key not in found or found[key].step < result.step:
      found[key] = result
  return found


def _zero_shot(evals: pathlib.Path) -> Iterator[tuple[tuple, ZeroShot]]:
  for benchmark in BENCHMARKS:
    for path in sorted((evals / benchmark.folder).glob("*/summary.json")):
      with _reading(path) as summary:
        request, by_uid = summary["request"], summary["by_uid"]
        result = ZeroShot(
          step=request["step"],
          score=summary["macro_accuracy"],
          complete=summary["pairs"] == benchmark.pairs,
          pairs=summary["pairs"],
          parts={uid: by_uid[uid]["term"] for uid in by_uid},
          folder=path.parent,
        )
        yield (request["pipeline"], benchmark.name, request["mode"]), result


def _tuned(folder: pathlib.Path) -> Iterator[tuple[tuple, Tuned]]:
  for path in sorted(folder.glob("*/*/summary.json")):
    with _reading(path) as summary:
      attention = summary["request"]["attention"]
      for name, result in _at_best_lr(path.parent, summary):
        yield (name, attention), result


def _at_best_lr(folder, summary: Mapping) -> Iterator[tuple[str, Tuned]]:
  """Yields each evaluation set of a task; the task's own has the collapses."""
  metric, lr, every = (
    summary["main_metric"],
    summary["best_lr"],
    summary["runs"],
  )
  step, complete = summary["request"]["step"], not summary["request"]["limit"]
  (best,) = (entry for entry in summary["by_lr"] if entry["lr"] == lr)
  collapsed = [
    f"seed {run['seed']} at rate {lr:g}"
    for run in every
    if run["lr"] == lr and run["collapsed"]
  ]
  for name, about in summary["evaluations"].items():
    scores = [run["scores"][name][metric] for run in every]
    rates = collections.defaultdict(list)
    for run, score in zip(every, scores, strict=True):
      rates[run["lr"]].append(score)
    yield (
      name,
      Tuned(
        step=step,
        score=best["scores"][name]["mean"],
        complete=complete,
        metric=metric,
        baseline=about["baseline"][metric],
        collapsed=(
          collapsed if name.removesuffix("-test") == summary["task"] else ()
        ),
        seeds={
          str(run["seed"]): TunedSeed(
            step, scores[i], complete, name, i, folder
          )
          for i, run in enumerate(every)
          if run["lr"] == lr
        },
        rates=dict(rates),
      ),
    )


@contextlib.contextmanager
def _reading(path: pathlib.Path, read: Callable = files.read_json) -> Iterator:
  """Reads a file for a block, and names it where the block finds it wrong."""
  try:
    yield read(path, "the file")
  except (UserError, LookupError, TypeError, ValueError) as error:
    why = str(error) if isinstance(error, UserError) else repr(error)
    where = "" if str(path) in why else f"cannot read {path}: "
    advice = "make it again, or remove it"
    raise UserError(f"{where}{why}: {advice}") from error
