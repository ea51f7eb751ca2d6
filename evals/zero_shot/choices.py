"""Tasks in which a model chooses, and the figures of its choices.

The model chooses the text with the highest score. An item is right if that is
its first choice; a tie is wrong (2024's pipeline gives it to the good one, and
2026's draws). The result is the unweighted mean over UIDs, unless stated
otherwise.
"""

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from antlm_jax import tables
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.evals.zero_shot.task import (
  PipelineSettings,
  Reported,
  ZeroShotOutcome,
  ZeroShotTask,
)
from antlm_jax.inference import pairs
from antlm_jax.inference.pairs import Choice, Item
from antlm_jax.inference.scoring import REDUCTIONS
from antlm_jax.settings import setting

_RULE = __doc__.split("\n\n", 1)[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceSettings(PipelineSettings):
  """The settings of these tasks."""

  reduction: str | None = setting(
    None,
    "Sum or mean over the tokens of a choice; the pipeline's by default",
    choices=REDUCTIONS,
  )
  temperature: float = setting(1.0, "Divisor of the logits", over=0, most=1e30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """How a task's items become figures and predictions."""

  glue: str = " "  # between a context and a choice, in `ours` and 2026
  by_term: bool = False  # the result is the mean over terms of those over UIDs
  with_context: bool = False  # in predictions of 2026
  by_id: bool = False  # predictions of 2026 are by the items' ids, not UIDs
  # Names the task of some items in predictions of 2024.
  name_2024: Callable[[Sequence[Item]], str] | None = None


def choice_task(
  about: str,
  read: Callable[[ChoiceSettings], list[Item]],
  settings: type[ChoiceSettings] = ChoiceSettings,
  reported: Sequence[Reported] = (),
  in_memory: bool = False,
  **rules,
) -> ZeroShotTask:
  """Returns a task of items with choices; `rules` are those of `Rules`."""
  rules = Rules(**rules)
  return ZeroShotTask(
    about=f"{about.strip()}\n\n{_RULE}\n{pipelines.NOTES}",
    read=read,
    score=functools.partial(score_choices, rules),
    figure="macro_accuracy",
    table=functools.partial(accuracy_table, rules),
    settings=settings,
    reported=reported,
    in_memory=in_memory,
  )


def score_choices(
  rules: Rules, loaded, items, settings: ChoiceSettings
) -> ZeroShotOutcome:
  """Scores the choices."""
  options = dict(pipelines.options(settings.pipeline, settings.mode))
  if options["text_format"].separator == " ":  # else it is the pipeline's own
    form = dataclasses.replace(options["text_format"], separator=rules.glue)
    options["text_format"] = form
  if settings.reduction:
    options["reduction"] = settings.reduction
  options |= {"temperature": settings.temperature, **settings.batches}
  scores = pairs.choice_scores(loaded, items, settings.mode, **options)
  results = Results(items, scores, rules)
  files = results.files(settings.pipeline)
  return ZeroShotOutcome(results.summary(), results.lines(), files)


def accuracy_table(rules: Rules, summary: Mapping) -> str:
  """Lays out accuracies in percent: first the means, then by group.

  Groups are phenomena, or else the UIDs themselves.
  """
  count = summary["pairs"]
  over = "files" if rules.by_term else "UIDs"
  rows = [
    (f"mean over {over}", count, summary["macro_accuracy"]),
    ("mean over pairs", count, summary["pair_accuracy"]),
  ]
  groups = collections.defaultdict(list)
  for uid, figures in summary["by_uid"].items():
    groups[figures["term"] or uid].append(figures)
  for group, members in sorted(groups.items()):
    size = sum(figures["pairs"] for figures in members)
    share = np.mean([figures["accuracy"] for figures in members])
    rows.append((group, size, share))
  return tables.text_table(
    [(name, count, f"{100 * share:.2f}") for name, count, share in rows],
    head=("", "pairs", "accuracy (%)"),
    align="<>",
  )


@dataclasses.dataclass(frozen=True)
class Results:
  """n items and the scores of their choices."""

  items: Sequence[Item]
  scores: np.ndarray  # float64 `[C, n]`, of `pairs.choice_scores`
  rules: Rules = Rules()

  @functools.cached_property
  def right(self) -> np.ndarray:
    """Which items are right, bool `[n]`."""
    return pairs.correct(self.scores)

  def summary(self) -> dict:
    """Returns the figures."""
    by_uid = pairs.by_uid(self.items, self.right)
    terms = {item.uid: item.term for item in self.items}
    counts = collections.Counter(item.uid for item in self.items)
    means = [*by_uid.values()]
    if self.rules.by_term:
      means = [
        np.mean([share for uid, share in by_uid.items() if terms[uid] == term])
        for term in dict.fromkeys(terms.values())
      ]
    ties = self.scores[0] == self.scores[1:].max(axis=0)
    return {
      "pairs": len(self.items),
      "ties": int(ties.sum()),
      # BabyLM's number.
      "macro_accuracy": float(np.mean(means)),
      "pair_accuracy": float(self.right.mean()),
      "by_uid": {
        uid: {"term": terms[uid], "pairs": counts[uid], "accuracy": share}
        for uid, share in by_uid.items()
      },
    }

  def lines(self) -> Iterator[dict]:
    """Yields every item with its scores."""
    for i, item in enumerate(self.items):
      contexts = [choice.context for choice in item.choices]
      yield {
        "uid": item.uid,
        "id": item.item_id,
        "correct": bool(self.right[i]),
        "scores": self.scores[: len(contexts), i].tolist(),
        **({"contexts": contexts} if any(contexts) else {}),
        "choices": [choice.text for choice in item.choices],
      }

  def files(self, pipeline: str) -> dict[str, str]:
    """Returns a pipeline's predictions; no file for other rules.

    That of 2024 is the task's part of the file that collect_results.py writes;
    that of 2026 is sentence_zero_shot's.
    """

    if pipeline not in ("2024", "2026"):
      return {}

    def shown(choice: Choice) -> str:
      if pipeline == "2024":
        return f" {choice.text}"
      lead = f"{choice.context}{self.rules.glue}" * self.rules.with_context
      return lead + choice.text

    by_key = collections.defaultdict(lambda: {"predictions": []})
    best = np.where(self.right, 0, 1 + self.scores[1:].argmax(axis=0))
    for item, choice in zip(self.items, best, strict=True):
      key = item.item_id if self.rules.by_id else item.uid
      predictions = by_key[key]["predictions"]
      # Numbered anew: these ids are places in the file, not the data's names.
      number = f"{key}_{len(predictions)}"
      predictions.append({"id": number, "pred": shown(item.choices[choice])})
    if pipeline == "2024":
      by_key = {self.rules.name_2024(self.items): by_key}
    return {"predictions.json": json.dumps(by_key)}
