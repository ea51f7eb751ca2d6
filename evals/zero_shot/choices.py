"""Tasks in which a model chooses, and what scoring the choices gives.

A pair is right when the good choice's score is the higher one; a tie is wrong
(BabyLM's pipelines give it to the choice that is listed first, the good one).
As there, the result is the unweighted mean of the accuracies by UID.
"""

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from antlm_jax import tables
from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.evals.zero_shot.command import Outcome, PipelineSettings, Task
from antlm_jax.evals.zero_shot.metrics import ACCURACY, Metric
from antlm_jax.inference import pairs
from antlm_jax.inference.pairs import Choice, Item
from antlm_jax.inference.scoring import REDUCTIONS
from antlm_jax.settings import setting

_RULE = __doc__.split("\n\n", 1)[1]
NOTES = f"{_RULE}\n{pipelines.NOTES}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(PipelineSettings):
  """The arguments of these tasks."""

  as_published: bool = setting(
    False, "for 2024, masked: give scores to other sentences, as it does"
  )
  reduction: str | None = setting(
    None,
    "over the tokens of a choice; the pipeline's by default",
    choices=REDUCTIONS,
  )
  temperature: tuple[float, ...] = setting(
    (1.0,),
    "divides the logits; items are of the first",
    over=0,
    most=1e30,
    metavar="T[,T2,...]",
  )
  paradigms: bool = setting(False, "show every UID, not only their groups")
  apart: ClassVar[tuple[str, ...]] = (*PipelineSettings.apart, "paradigms")

  def __post_init__(self):
    if not self.temperature:
      raise UserError("--temperature is empty")


@dataclasses.dataclass(frozen=True)
class Choices(Task):
  """A task: which items are read, and what their scores say.

  Attributes:
    about: What it is, for --help.
    items: Reads them, by the command's settings.
    glue: Stands between a context and a choice, in `ours` and 2025.
    metric: What is made of the scores.
    splits: Beginnings of UIDs. If there are some, what counts is the mean over
      them of the means over UIDs, not the mean over UIDs.
    with_context: Whether predictions of 2025 hold the context, too.
    known_as: Names the task of items in 2024's predictions, if it knows it.
    settings: Its arguments.
    notes: What --help says of its files, and of all of this.
  """

  about: str
  items: Callable[[Settings], list[Item]]
  glue: str = " "
  metric: Metric = ACCURACY
  splits: tuple[str, ...] = ()
  with_context: bool = False
  known_as: Callable[[Sequence[Item]], str] | None = None
  settings: type[Settings] = Settings
  notes: str = NOTES

  def read(self, asked: Settings) -> list[Item]:
    return self.items(asked)

  def score(self, loaded, items, asked, options, track) -> Outcome:
    plain = options["text_format"]
    if plain.separator == " ":  # else it is the pipeline's own
      plain = dataclasses.replace(plain, separator=self.glue)
    found = pairs.scores(
      loaded,
      items,
      asked.mode,
      temperature=asked.temperature,
      batch_tokens=asked.batch_tokens,
      track=track,
      **options | {"text_format": plain},
    )
    if asked.as_published:
      found = pipelines.misordered(items, found, loaded.tokenizer.encode_batch)
    results = Results(items, found, asked.temperature, self)
    files = {"2024": results.files_2024, "2025": results.files_2025}
    own = files.get(asked.pipeline, dict)()
    return Outcome(results.summary(), results.lines(), own)

  def table(self, summary, asked) -> str:
    """Lays the metric out in percent: first the means, then by group.

    Groups are phenomena, or else splits, or else the UIDs themselves.
    """
    count, key = summary["pairs"], self.metric.key
    over = "splits" if self.splits else "UIDs"
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
    for uid, about in sorted(summary["by_uid"].items()):
      group = about["term"] or self.split(uid)
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
    more = f"\n--paradigms shows all {len(summary['by_uid'])} UIDs"
    return shown if every else shown + more

  def split(self, uid: str) -> str:
    """Returns the split that a UID is of, or ""."""
    return next((s for s in self.splits if uid.startswith(s)), "")

  def prediction(self, choice: Choice) -> str:
    """Returns a choice as predictions of 2025 hold it."""
    lead = choice.context if self.with_context else ""
    return lead + self.glue * bool(choice.context) + choice.text


_PAIRS = Choices("minimal pairs", items=lambda asked: [])


@dataclasses.dataclass(frozen=True)
class Results:
  """n items and the scores of their choices at K temperatures."""

  items: Sequence[Item]
  scores: np.ndarray  # float64 `[C, n, K]`, of `pairs.scores`
  temperatures: Sequence[float]
  task: Choices = _PAIRS

  @functools.cached_property
  def correct(self) -> np.ndarray:
    """Which items are right, bool `[n, K]`."""
    return pairs.correct(self.scores)

  def mean_by(self, group: str) -> dict[str, tuple[int, np.ndarray]]:
    """Returns by a group's values the number of items and metric `[K]`."""
    return {
      name: (
        len(rows),
        self.task.metric.of(
          [self.items[r] for r in rows], self.scores[:, rows]
        ),
      )
      for name, rows in pairs.rows_by(group, self.items).items()
    }

  @functools.cached_property
  def by_uid(self) -> dict[str, tuple[int, np.ndarray]]:
    """Number of items and metric `[K]` of each UID."""
    return self.mean_by("UID")

  @property
  def by_split(self) -> dict[str, np.ndarray]:
    """Unweighted mean over the UIDs of each split that has some, `[K]`."""
    found = {split: [] for split in self.task.splits}
    for uid, (_, value) in self.by_uid.items():
      if found:
        found[self.task.split(uid)].append(value)
    return {name: np.mean(v, axis=0) for name, v in found.items() if v}

  @property
  def macro(self) -> np.ndarray:
    """Unweighted mean over UIDs, or splits, `[K]`: BabyLM's number."""
    values = [value for _, value in self.by_uid.values()]
    return np.mean(list(self.by_split.values()) or values, axis=0)

  @property
  def best(self) -> int:
    """Which temperature has the highest `macro`; of equal ones the first."""
    # A correlation is NaN where all shares are equal: never the highest.
    return int(np.nan_to_num(self.macro, nan=-np.inf).argmax())

  def summary(self) -> dict:
    """Returns the numbers; those by UID at the first temperature."""
    key, macro = self.task.metric.key, self.macro
    whole = self.task.metric.of(self.items, self.scores)
    terms = {item.uid: item.term for item in self.items}
    ties = self.scores[0] == self.scores[1:].max(axis=0)
    return {
      "pairs": len(self.items),
      "ties": int(ties[:, 0].sum()),
      f"macro_{key}": float(macro[0]),
      f"pair_{key}": float(whole[0]),
      "best_temperature": self.temperatures[self.best],
      **{f"{split}_{key}": float(v[0]) for split, v in self.by_split.items()},
      "by_uid": {
        uid: {"term": terms[uid], "pairs": count, key: float(value[0])}
        for uid, (count, value) in self.by_uid.items()
      },
      "by_temperature": [
        {"temperature": t, f"macro_{key}": float(m), f"pair_{key}": float(w)}
        for t, m, w in zip(self.temperatures, macro, whole, strict=True)
      ],
    }

  def lines(self) -> Iterator[dict]:
    """Yields every item with its scores at the first temperature."""
    for i, item in enumerate(self.items):
      contexts = [choice.context for choice in item.choices]
      count = len(contexts)
      yield {
        "uid": item.uid,
        "id": item.item_id,
        "correct": bool(self.correct[i, 0]),
        "scores": self.scores[:count, i, 0].tolist(),
        **({"contexts": contexts} if any(contexts) else {}),
        "choices": [choice.text for choice in item.choices],
      }

  # ------------------------------------------------- as the pipelines write it

  def files_2024(self) -> dict[str, str]:
    """The task's part of what collect_results.py writes."""
    chosen = self._predictions(0, lambda choice: f" {choice.text}")
    known = self.task.known_as(self.items)
    return {"predictions.json": json.dumps({known: chosen})}

  def files_2025(self) -> dict[str, str]:
    """What sentence_zero_shot writes, at the best temperature."""
    chosen = self._predictions(self.best, self.task.prediction)
    return {
      "predictions.json": json.dumps(chosen),
      "best_temperature_report.txt": self._report(self.best),
    }

  def _predictions(self, which: int, shown: Callable[[Choice], str]) -> dict:
    """Returns what was chosen at a temperature, by UID, as both lay it out."""
    out = collections.defaultdict(lambda: {"predictions": []})
    scores = self.scores[:, :, which]
    best = np.where(self.correct[:, which], 0, 1 + scores[1:].argmax(axis=0))
    details = self.task.metric.details(scores)
    for item, choice, detail in zip(self.items, best, details, strict=True):
      found, text = out[item.uid]["predictions"], shown(item.choices[choice])
      # Numbered anew: their ids are places in the file, not the data's names.
      found.append({"id": f"{item.uid}_{len(found)}", "pred": text, **detail})
    return out

  def _report(self, which: int) -> str:
    metric, scale = self.task.metric, self.task.metric.scale
    lines = [f"TEMPERATURE: {self.temperatures[which]:.2f}", ""]
    for group in dict.fromkeys(g for item in self.items for g in item.groups):
      lines.append(f"### {group.upper()} {metric.title}")
      found = {name: v for name, (_, v) in self.mean_by(group).items()}
      if group == "UID":
        found |= self.by_split
      for name, value in found.items():
        shown = metric.all_items or name
        lines.append(f"{shown}: {scale * value[which]:.2f}")
      lines.append("")
    average = f"{scale * self.macro[which]:.2f}"
    return "\n".join([*lines, f"### AVERAGE {metric.title}", average, "", ""])
