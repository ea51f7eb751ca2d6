"""Tags of words: their schemes, the entities that they mark, and scores.

A scheme says how a word's tag tells where an entity begins and ends.
"""

import collections
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import classification
from antlm_jax.evals.finetuning.task import ClassCounts, Entity, Ratio, mean_of


class Scheme(NamedTuple):
  """Scheme of a set's tags."""

  name: str
  tags: str  # pattern of each tag
  required: tuple[str, ...] = ()  # tags that are always there
  is_of_entities: bool = True


# Letters of the words of an entity: the first, those inside, the last, or the
# only word.
_LETTERS = {
  "IOB": "BI",
  "BIOES": "BIES",
  "BILOU": "BILU",
  "BMES": "BMES",
  "BMEWO": "BMEW",
}
# Name of the scheme whose tags are kinds of entity alone, such as PER.
WITHOUT_LETTERS = "kinds without letters"
# Never part of a tag: several tags of one word, and spaces.
_ONE = r"(?!\S*[,;|/][BI]-)\S"
# A kind of two letters or more, but not B_PER or PER-B.
_KIND = rf"(?![BIMELSUW][-_/:.])(?!\S*[-_/:.][BIMELSUW]$)(?=[^\W\d_]){_ONE}+\S"
_NUMBER = r"(?=\S*\d)[-+]?[\d.,]+(?:[eE][-+]?\d+)?%?"
# Schemes in the order in which they are tried.
SCHEMES = (
  *(Scheme(name, f"O|[{x}]-{_ONE}+") for name, x in _LETTERS.items()),
  *(Scheme(name, f"O|[{x}]", ("B",)) for name, x in _LETTERS.items()),
  Scheme("IOB", "O|I", ("O", "I")),
  Scheme(WITHOUT_LETTERS, f"O|{_KIND}", ("O",)),
  # Other tags, such as parts of speech. Of letters, O may be an object. Words
  # are no number, no list, and not CoNLL-U's mark of an empty column.
  Scheme("letters", r"[^\s\d_]", (), False),
  Scheme("words", rf"(?!O$|_$|{_NUMBER}$|\[.|[BbIi]-){_ONE}+", (), False),
)
_MARKED = re.compile("([BIMELSUW])(-.+)?")


def scheme_of(places: Mapping[str, str]) -> Scheme:
  """Returns the first scheme that allows all tags of a set.

  `places` has the place of each tag's first sentence, such as "train.txt, line
  3". Raises a UserError with such a place if no scheme allows all tags.
  """
  tags = sorted(places)
  allowed_tags = {
    scheme: [tag for tag in tags if re.fullmatch(scheme.tags, tag)]
    for scheme in SCHEMES
    if places.keys() >= {*scheme.required}
  }
  for scheme, allowed in allowed_tags.items():
    if allowed == tags:
      return scheme
  # The error names a tag that the nearest scheme does not allow.
  nearest = max(
    (
      allowed
      for scheme, allowed in allowed_tags.items()
      if scheme.is_of_entities or "O" not in places
    ),
    key=len,
  )
  odd = min(places.keys() - {*nearest})
  others = [tag for tag in nearest if tag != "O"]
  example = f", and others are like {others[0]!r:.40}" if others else ""
  raise UserError(
    f"{places[odd]}: the tag {odd!r:.60} is of no scheme that is read{example}:"
    " write all tags as one of IOB, BIOES, BILOU or BMES (B-PER, I-PER, O), or"
    " all without letters (PER, O)"
  )


def iob2(labels: Sequence[str], scheme: str = "") -> list[str]:
  """Returns a sentence's labels with `B-` at the start of each entity.

  `scheme` is their scheme's name, which matters for `WITHOUT_LETTERS`.
  """
  if scheme == WITHOUT_LETTERS:
    labels = [tag if tag == "O" else labels_of_kind(tag)[1] for tag in labels]
  out = ["O"] * len(labels)
  for kind, start, stop in entities(labels):
    first, inside = labels_of_kind(kind)
    out[start:stop] = [first, *[inside] * (stop - start - 1)]
  return out


def iob2_classes(kinds: Iterable[str]) -> tuple[str, ...]:
  """Returns the classes of kinds of entity, O first."""
  return "O", *(
    label for kind in sorted(kinds) for label in labels_of_kind(kind)
  )


def labels_of_kind(kind: str) -> tuple[str, str]:
  """Returns the labels of an entity's first word and of the words inside."""
  return tuple("-".join(filter(None, (letter, kind))) for letter in "BI")


def kind_of(tag: str) -> str:
  """Returns the kind of entity of a tag; empty if it is a letter alone."""
  return tag[2:] if _MARKED.fullmatch(tag) else tag


def entities(labels: Sequence[str]) -> list[Entity]:
  """Returns the entities of a sentence's labels, in order.

  A label is O, or a letter of `_LETTERS` with or without a kind, such as
  `B-PER` or `B`. An entity's kind is empty if its labels are letters alone.
  `iob2` adds letters to labels of the scheme `WITHOUT_LETTERS`.

  I, M, E and L continue the entity of the word before if the kind is the same
  and that entity is not complete. E, L, S, U and W complete an entity. All
  other labels begin an entity.
  """
  result: list[Entity] = []
  is_complete = True  # whether no label may continue the last entity
  for i, label in enumerate(labels):
    letter, _, kind = label.partition("-")
    last = result[-1] if result else None
    if label == "O":
      continue
    continues = letter in "IMEL" and not is_complete
    if continues and (last.kind, last.stop) == (kind, i):
      result[-1] = last._replace(stop=i + 1)
    else:
      result.append(Entity(kind, i, i + 1))
    is_complete = letter in "ELSUW"
  return result


def _entity_sets(
  names: Sequence[str], *sides: Sequence[int]
) -> list[set[Entity]]:
  """Returns the entities of a sentence's predicted and true classes."""
  return [set(entities([names[c] for c in tags])) for tags in sides]


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
    x, y = _entity_sets(names, *sentence)
    predicted.update(entity.kind for entity in x)
    true.update(entity.kind for entity in y)
    correct.update(entity.kind for entity in x & y)
  return {
    kind: ClassCounts(predicted[kind], true[kind], correct[kind])
    for kind in sorted(kinds)
  }


def entity_f1(names: Sequence[str]) -> Ratio:
  """Makes the F1 of all sentences' entities, as conlleval and seqeval do.

  `names` are those of the classes. Without any entity, the F1 is 0.
  """

  def parts(prediction: Sequence[int], label: Sequence[int]) -> tuple[int, int]:
    x, y = _entity_sets(names, prediction, label)
    return 2 * len(x & y), len(x) + len(y)

  return Ratio(parts)


# Mean of sentences' macro-F1, as in arXiv 2507.00994's code: over the classes
# that a sentence has or is predicted to have, with O. It is far above
# `entity_f1`, because most sentences have few entities or none.
sentence_f1 = mean_of(classification.macro_f1)


# Share of all words with the right label.
word_accuracy = Ratio(
  lambda prediction, label: (
    sum(map(operator.eq, prediction, label)),
    len(label),
  )
)


def tag_counts(
  names: Sequence[str],
  predictions: Sequence[Sequence[int]],
  labels: Sequence[Sequence[int]],
) -> dict[str, ClassCounts]:
  """Counts the words of each tag."""
  words = map(np.concatenate, (predictions, labels))
  return classification.class_counts(names, *words)
