"""Entities of a sentence's tags, and scores of predicted tags."""

import collections
import functools
from collections.abc import Sequence

import numpy as np

from antlm_jax.evals.finetuning import classification
from antlm_jax.evals.finetuning.task import ClassCounts, Entity, mean_of


def entities(labels: Sequence[str]) -> list[Entity]:
  """Returns the entities of a sentence's labels.

  The labels are of any of `tag_schemes.SCHEMES`. An entity begins at `B`, `S`,
  `U` and `W`, after a label of another kind, and after `E`, `L`, `S`, `U` and
  `W`. The kind is empty if labels are letters alone.
  """
  out: list[Entity] = []
  ended = True
  for i, label in enumerate(labels):
    begin, _, kind = label.partition("-")
    last = out[-1] if out else None
    if label == "O":
      continue
    if begin in "IMEL" and not ended and (last.kind, last.stop) == (kind, i):
      out[-1] = last._replace(stop=i + 1)
    else:
      out.append(Entity(kind, i, i + 1))
    ended = begin in "ELSUW"
  return out


def entity_counts(
  names: Sequence[str],
  predictions: Sequence[Sequence[int]],
  labels: Sequence[Sequence[int]],
) -> dict[str, ClassCounts]:
  """Counts the entities of each kind, as conlleval and seqeval do.

  `names` are those of the classes.
  """
  kinds = {entity.kind for name in names for entity in entities([name])}
  predicted = collections.Counter()
  true = collections.Counter()
  correct = collections.Counter()
  for sentence in zip(predictions, labels, strict=True):
    x, y = (set(entities([names[c] for c in tags])) for tags in sentence)
    predicted.update(entity.kind for entity in x)
    true.update(entity.kind for entity in y)
    correct.update(entity.kind for entity in x & y)
  return {
    kind: ClassCounts(predicted[kind], true[kind], correct[kind])
    for kind in sorted(kinds)
  }


def entity_f1(
  names: Sequence[str],
  predictions: Sequence[Sequence[int]],
  labels: Sequence[Sequence[int]],
) -> float:
  """Returns the F1 of all sentences' entities, as conlleval and seqeval do.

  `names` are those of the classes. Without any entity, the F1 is 0.
  """
  counts = entity_counts(names, predictions, labels).values()
  return ClassCounts(*map(sum, zip(*counts, strict=True))).f1


# Mean of sentences' macro-F1, as in arXiv 2507.00994's code: over the classes
# that a sentence has or is predicted to have, with O. It is far above
# `entity_f1`, because most sentences have few entities or none.
sentence_f1 = functools.partial(mean_of, classification.macro_f1)


def word_accuracy(
  predictions: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
) -> float:
  """Returns the share of all words with the right label."""
  return classification.accuracy(*map(np.concatenate, (predictions, labels)))


def tag_counts(
  names: Sequence[str],
  predictions: Sequence[Sequence[int]],
  labels: Sequence[Sequence[int]],
) -> dict[str, ClassCounts]:
  """Counts the words of each tag."""
  words = map(np.concatenate, (predictions, labels))
  return classification.class_counts(names, *words)
