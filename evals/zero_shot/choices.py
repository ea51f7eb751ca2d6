"""Tasks in which a model chooses, and the figures of its choices.

The model chooses the text with the highest score. An item is right if that is
its first choice; a tie is wrong (BabyLM's pipelines give it to the good one).
As there, the result is the unweighted mean over UIDs, unless stated otherwise.
"""

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from antlm_jax import tables
from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot import metrics, pipelines
from antlm_jax.evals.zero_shot.command import (
  Outcome,
  PipelineSettings,
  Reported,
  Task,
)
from antlm_jax.evals.zero_shot.metrics import ACCURACY, Metric
from antlm_jax.inference import pairs
from antlm_jax.inference.pairs import Choice, Item
from antlm_jax.inference.scoring import REDUCTIONS
from antlm_jax.settings import setting

_RULE = __doc__.split("\n\n", 1)[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceSettings(PipelineSettings):
  """The arguments of these tasks."""

  reduction: str | None = setting(
    None,
    "Sum or mean over the tokens of a choice; the pipeline's by default",
    choices=REDUCTIONS,
  )
  temperature: tuple[float, ...] = setting(
    (1.0,),
    "Divisors of the logits; items.jsonl has the scores at the first",
    over=0,
    most=1e30,
    metavar="T[,T2,...]",
  )
  paradigms: bool = setting(False, "Print every UID, not only their groups")
  apart: ClassVar = PipelineSettings.apart | {"paradigms"}

  def __post_init__(self):
    if not self.temperature:
      raise UserError("--temperature is empty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """How a task's items become figures."""

  glue: str = " "  # between a context and a choice, in `ours` and 2025
  metric: Metric = ACCURACY  # of each UID
  # Beginnings of UIDs. If there are some, the result is the mean over them of
  # the means over UIDs, not the mean over UIDs.
  splits: tuple[str, ...] = ()
  with_context: bool = False  # in predictions of 2025
  # Names the task of some items in predictions of 2024.
  name_2024: Callable[[Sequence[Item]], str] | None = None

  def split(self, uid: str) -> str:
    """Returns the split of a UID, or ""."""
    return next((s for s in self.splits if uid.startswith(s)), "")


def task(
  about: str,
  read: Callable[[ChoiceSettings], list[Item]],
  settings: type[ChoiceSettings] = ChoiceSettings,
  reported: Sequence[Reported] = (),
  **rules,
) -> Task:
  """Returns a task of items with choices; `rules` are those of `Rules`."""
  rules = Rules(**rules)
  return Task(
    about=f"{about.strip()}\n\n{_RULE}\n{pipelines.NOTES}",
    read=read,
    score=functools.partial(score, rules),
    figure=f"macro_{rules.metric.key}",
    table=functools.partial(table, rules),
    settings=settings,
    reported=reported,
  )


def score(rules: Rules, loaded, items, asked: ChoiceSettings) -> Outcome:
  """Scores the choices."""
  options = dict(pipelines.options(asked.pipeline, asked.mode))
  if options["text_format"].separator == " ":  # else it is the pipeline's own
    form = dataclasses.replace(options["text_format"], separator=rules.glue)
    options["text_format"] = form
  if asked.reduction:
    options["reduction"] = asked.reduction
  found = pairs.scores(
    loaded,
    items,
    asked.mode,
    temperature=asked.temperature,
    **options,
    **asked.batches,
  )
  results = Results(items, found, asked.temperature, rules)
  own = {"2024": results.files_2024, "2025": results.files_2025}
  files = own.get(asked.pipeline, dict)()
  return Outcome(results.summary(), results.lines(), files)


def table(rules: Rules, summary: Mapping, asked: ChoiceSettings) -> str:
  """Lays out the metric in percent: first the means, then by group.

  Groups are phenomena, or else splits, or else the UIDs themselves.
  """
  count, key, uids = summary["pairs"], rules.metric.key, summary["by_uid"]
  over = "splits" if rules.splits else "UIDs"
  rows = [
    (f"mean over {over}", count, summary[f"macro_{key}"]),
    ("mean over pairs", count, summary[f"pair_{key}"]),
  ]
  swept = summary["by_temperature"]
  rows += [
    (f"mean at temperature {t['temperature']:g}", count, t[f"macro_{key}"])
    for t in swept * (len(swept) > 1)
  ]
  groups = collections.defaultdict(list)
  for uid, about in sorted(uids.items()):
    group = about["term"] or rules.split(uid)
    groups[group].append((uid, about["pairs"], about[key]))
  every = asked.paradigms or not any(groups)
  for group, those in sorted(groups.items()):
    if group:
      _, counts, shares = zip(*those, strict=True)
      rows.append((group, sum(counts), np.mean(shares)))
    for uid, *row in those if every or not group else ():
      rows.append(("  " * bool(group) + uid, *row))
  shown = tables.text(
    [(name, count, f"{100 * share:.2f}") for name, count, share in rows],
    head=("", "pairs", f"{key} (%)"),
    align="<>",
  )
  return shown + f"\n--paradigms shows all {len(uids)} UIDs" * (not every)


@dataclasses.dataclass(frozen=True)
class Results:
  """n items and the scores of their choices at K temperatures."""

  items: Sequence[Item]
  scores: np.ndarray  # float64 `[C, n, K]`, of `pairs.scores`
  temperatures: Sequence[float]
  rules: Rules = Rules()

  def mean_by(self, group: str) -> dict[str, np.ndarray]:
    """Returns the metric `[K]` by the values of a group."""
    return {
      name: self._metric(rows)
      for name, rows in pairs.rows_by(group, self.items).items()
    }

  def _metric(self, rows: Sequence[int]) -> np.ndarray:
    items = [self.items[row] for row in rows]
    return self.rules.metric.of(items, self.scores[:, rows])

  @functools.cached_property
  def by_uid(self) -> dict[str, np.ndarray]:
    """Metric `[K]` of each UID."""
    return self.mean_by("UID")

  @functools.cached_property
  def by_split(self) -> dict[str, np.ndarray]:
    """Unweighted mean over the UIDs of each split that has some, `[K]`."""
    found = collections.defaultdict(list)
    for uid, value in self.by_uid.items():
      found[self.rules.split(uid)].append(value)
    splits = (split for split in self.rules.splits if split in found)
    return {split: np.mean(found[split], axis=0) for split in splits}

  @functools.cached_property
  def macro(self) -> np.ndarray:
    """Unweighted mean over UIDs, or splits, `[K]`: BabyLM's number."""
    return np.mean([*(self.by_split or self.by_uid).values()], axis=0)

  @functools.cached_property
  def best(self) -> int:
    """Index of the temperature with the highest `macro`, the first if equal."""
    # A correlation is NaN where all shares are equal: never the highest.
    return int(np.nan_to_num(self.macro, nan=-np.inf).argmax())

  def summary(self) -> dict:
    """Returns the figures; those by UID are at the first temperature."""
    key, macro = self.rules.metric.key, self.macro
    whole = self._metric(range(len(self.items)))
    terms = {item.uid: item.term for item in self.items}
    counts = collections.Counter(item.uid for item in self.items)
    ties = self.scores[0] == self.scores[1:].max(axis=0)
    return {
      "pairs": len(self.items),
      "ties": int(ties[:, 0].sum()),
      f"macro_{key}": float(macro[0]),
      f"pair_{key}": float(whole[0]),
      "best_temperature": self.temperatures[self.best],
      **{f"{split}_{key}": float(v[0]) for split, v in self.by_split.items()},
      "by_uid": {
        uid: {"term": terms[uid], "pairs": counts[uid], key: float(value[0])}
        for uid, value in self.by_uid.items()
      },
      "by_temperature": [
        {"temperature": t, f"macro_{key}": float(m), f"pair_{key}": float(w)}
        for t, m, w in zip(self.temperatures, macro, whole, strict=True)
      ],
    }

  def lines(self) -> Iterator[dict]:
    """Yields every item with its scores at the first temperature."""
    correct = pairs.correct(self.scores[:, :, 0])
    for i, item in enumerate(self.items):
      contexts = [choice.context for choice in item.choices]
      yield {
        "uid": item.uid,
        "id": item.item_id,
        "correct": bool(correct[i]),
        "scores": self.scores[: len(contexts), i, 0].tolist(),
        **({"contexts": contexts} if any(contexts) else {}),
        "choices": [choice.text for choice in item.choices],
      }

  def files_2024(self) -> dict[str, str]:
    """Returns the task's part of the file that collect_results.py writes."""
    chosen = self._predictions(0, lambda choice: f" {choice.text}")
    name = self.rules.name_2024(self.items)
    return {"predictions.json": json.dumps({name: chosen})}

  def files_2025(self) -> dict[str, str]:
    """Returns the files of sentence_zero_shot, at the best temperature."""

    def shown(choice: Choice) -> str:
      lead = choice.context if self.rules.with_context else ""
      return lead + self.rules.glue * bool(choice.context) + choice.text

    metric, ranked = self.rules.metric, self.rules.metric is metrics.SPEARMAN

    def figure(value: np.ndarray) -> str:
      return f"{metric.scale * value[self.best]:.2f}"

    lines = [f"TEMPERATURE: {self.temperatures[self.best]:.2f}", ""]
    for group in dict.fromkeys(g for item in self.items for g in item.groups):
      found = self.mean_by(group) | (self.by_split if group == "UID" else {})
      lines += [
        f"### {group.upper()} {metric.title}",
        *(f"{'avg' if ranked else n}: {figure(v)}" for n, v in found.items()),
        "",
      ]
    lines += [f"### AVERAGE {metric.title}", figure(self.macro), "", ""]
    return {
      "predictions.json": json.dumps(self._predictions(self.best, shown)),
      "best_temperature_report.txt": "\n".join(lines),
    }

  def _predictions(self, which: int, shown: Callable[[Choice], str]) -> dict:
    """Returns the choices at a temperature, by UID, in both years' form."""
    out = collections.defaultdict(lambda: {"predictions": []})
    scores = self.scores[:, :, which]
    best = np.where(pairs.correct(scores), 0, 1 + scores[1:].argmax(axis=0))
    shares = metrics.first_probability(scores)
    for item, choice, share in zip(self.items, best, shares, strict=True):
      found = out[item.uid]["predictions"]
      # Numbered anew: these ids are places in the file, not the data's names.
      one = {"id": f"{item.uid}_{len(found)}"}
      one["pred"] = shown(item.choices[choice])
      if self.rules.metric is metrics.SPEARMAN:
        one["prob"] = float(share)
      found.append(one)
    return out
