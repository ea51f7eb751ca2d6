"""Tagging: a label for each word of a sentence, such as its entity's.

A file has a word in each line, in columns, and an empty line after each
sentence: CoNLL-2003, Universal NER, and OntoNotes in CoNLL's form. As in arXiv
2507.00994, spaces join the words, every token has its word's label, and a word
gets the label of most of its tokens.
"""

import collections
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import batching
from antlm_jax.evals.finetuning.batching import Example, Rows
from antlm_jax.evals.finetuning.classification import cross_entropy, macro_f1
from antlm_jax.evals.finetuning.task import (
  Entity,
  PerToken,
  Suite,
  Task,
  dev_and_test,
  mean_of,
  require,
)
from antlm_jax.runtime import files as io

_NOWHERE = -1  # word, and label, of a token outside of all words
OUTSIDE = 0  # class O: no entity


class Tags(PerToken):
  """Classes of the tokens whose label is not -1."""

  def loss(self, outputs, labels, weights) -> jax.Array:
    """Returns the mean cross-entropy in nats over those tokens."""
    weights = weights[:, None] * (labels != _NOWHERE)
    return cross_entropy(outputs, jnp.maximum(labels, 0), weights)

  def reduce(self, outputs) -> jax.Array:
    """Returns each token's class, int32 `[B, T]`."""
    return jnp.argmax(outputs, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Tagger(Tags):
  """Classes of words, as in transformers' ForTokenClassification."""

  labels: tuple[str, ...]  # names of the C classes, O first
  kind: ClassVar[str] = "tagger"

  @property
  def num_outputs(self) -> int:
    """One output for each class."""
    return len(self.labels)

  def encode(self, loaded, examples, max_length) -> Rows:
    """Makes a row of each sentence; words at the end of long ones are cut."""
    parts = []  # tokens, and the index of each one's word
    for example in examples:
      ends = list(itertools.accumulate(len(word) + 1 for word in example.texts))
      ids, spans = loaded.tokenizer.encode_offsets(" ".join(example.texts))
      of = np.searchsorted(ends, [start for start, _ in spans], side="right")
      parts.append((ids.tolist(), of.tolist()))
    *made, words, cut = batching.labelled(loaded, parts, _NOWHERE, max_length)
    known = (e.label or [OUTSIDE] * len(e.texts) for e in examples)
    # The last one is for words of index -1.
    labels = [
      np.array([*one, _NOWHERE], np.int32)[of]
      for one, of in zip(known, words, strict=True)
    ]
    return Rows(*made, np.stack(labels), True, examples, words, cut)

  def decode(self, reduced: np.ndarray, rows: Rows) -> list[list[int]]:
    """Returns each word's class: that of most of its tokens, or O if cut."""
    votes = [[collections.Counter() for _ in e.texts] for e in rows.examples]
    for found, of, counts in zip(reduced, rows.about, votes, strict=True):
      for label, word in zip(found.tolist(), of.tolist(), strict=True):
        if word != _NOWHERE:
          counts[word][label] += 1
    # Among equals, the class that came first in the word.
    return [[max(v, key=v.get) if v else OUTSIDE for v in of] for of in votes]

  def example(self, texts: str | Sequence[str]) -> Example:
    """Returns the words of a sentence, which spaces divide, as an example."""
    return Example(tuple(texts.split() if isinstance(texts, str) else texts))

  def told(self, prediction: Sequence[int]) -> dict[str, tuple]:
    """Returns the names of the words' classes, and the entities."""
    labels = tuple(self.labels[label] for label in prediction)
    return {"labels": labels, "entities": tuple(entities(labels))}


def entities(labels: Sequence[str]) -> list[Entity]:
  """Returns the entities of a sentence's labels, IOB1 or IOB2.

  An entity begins at `B-`, and after a label of another kind.
  """
  out: list[Entity] = []
  for i, label in enumerate(labels):
    if label == "O":
      continue
    begin, _, kind = label.partition("-")
    last = out[-1] if out else None
    if begin == "I" and last and (last.kind, last.stop) == (kind, i):
      out[-1] = last._replace(stop=i + 1)
    else:
      out.append(Entity(kind, i, i + 1))
  return out


def iob2(labels: Sequence[str]) -> list[str]:
  """Returns a sentence's labels with `B-` at the start of each entity."""
  out = ["O"] * len(labels)
  for kind, start, stop in entities(labels):
    out[start:stop] = [f"B-{kind}", *[f"I-{kind}"] * (stop - start - 1)]
  return out


def entity_f1(
  names: Sequence[str],
  predictions: Sequence[Sequence[int]],
  labels: Sequence[Sequence[int]],
) -> float:
  """Returns the F1 of all sentences' entities, as conlleval and seqeval do.

  `names` are those of the classes. Without any entity, the F1 is 0.
  """
  right = count = 0
  for those in zip(predictions, labels, strict=True):
    found, there = (set(entities([names[c] for c in one])) for one in those)
    right += len(found & there)
    count += len(found) + len(there)
  return 2 * right / count if count else 0.0


# Mean of sentences' macro-F1, as in arXiv 2507.00994's code: over the classes
# that a sentence has or is predicted to have, with O. It is far above
# `entity_f1`, because most sentences have few entities or none.
sentence_f1 = functools.partial(mean_of, macro_f1)


@dataclasses.dataclass(frozen=True)
class Format:
  """Form of a set of sentences."""

  kinds: tuple[str, ...]  # of entities
  files: tuple[tuple[str, ...], ...]  # names that train, dev and test may have
  word: int = 0  # column
  label: int = -1  # column

  @property
  def classes(self) -> tuple[str, ...]:
    """Names of the classes."""
    return "O", *(f"{b}-{kind}" for kind in self.kinds for b in "BI")


_SPLITS = ("train", "dev", "test")
_ONTONOTES = (
  "CARDINAL DATE EVENT FAC GPE LANGUAGE LAW LOC MONEY NORP ORDINAL ORG PERCENT"
  " PERSON PRODUCT QUANTITY TIME WORK_OF_ART"
)
FORMATS = {
  "conll": Format(
    ("LOC", "MISC", "ORG", "PER"),
    tuple((f"conll2003/eng.{part}",) for part in ("train", "testa", "testb")),
  ),
  "uner": Format(
    ("LOC", "ORG", "PER"),
    tuple((f"uner_en_ewt/en_ewt-ud-{part}.iob2",) for part in _SPLITS),
    word=1,
    label=2,
  ),
  "ontonotes": Format(
    tuple(_ONTONOTES.split()),
    tuple((f"ontonotes/{x}.conll", f"ontonotes/{x}.txt") for x in _SPLITS),
  ),
}
SCORES = dev_and_test(FORMATS)


def make(folder, name: str, attention: str) -> Task:
  """Makes a task, a key of `FORMATS`, of the files in a folder."""
  form, classes = FORMATS[name], FORMATS[name].classes
  found = {}
  for split, names in zip(("train", *SCORES[name]), form.files, strict=True):
    paths = [pathlib.Path(folder, name) for name in names]
    there = next(filter(pathlib.Path.is_file, paths), paths[0])
    found[split] = require(split, there)
  return Task(
    name=name,
    load=lambda split: load(found[split], form, split),
    evaluations=SCORES[name],
    head=Tagger(classes),
    metrics={
      "entity_f1": functools.partial(entity_f1, classes),
      "sentence_f1": sentence_f1,
    },
    main_metric="entity_f1",
    baseline="all O",
    trivial=lambda those: [[[OUTSIDE] * len(e.texts) for e in those]],
    files=tuple(found.values()),
  )


SUITE = Suite(
  "tagging",
  "entities: CoNLL-2003, Universal NER, OntoNotes",
  SCORES,
  make,
  heads=(Tagger,),
)


def load(path: pathlib.Path, form: Format, split: str) -> list[Example]:
  """Reads sentences, with each word's class.

  Raises a UserError if a line has other columns or labels.
  """
  classes = {name: i for i, name in enumerate(form.classes)}
  # If numbers come before words, no word can be taken for a comment.
  aside = ("#", "-DOCSTART-") if form.word else ("-DOCSTART-",)
  least = max(form.word + 1, form.label + 1, 2)
  lines = io.read_text(path, "sentences").split("\n")
  sentences = [[]]  # pairs of a word and its label
  for number, line in enumerate(lines, 1):
    columns, where = line.split(), f"{path}, line {number}"
    if not columns:
      sentences.append([])
    elif not line.startswith(aside):
      if len(columns) < least:
        raise UserError(
          f"{where}: {len(columns)} columns, not a word and its label"
        )
      word, label = columns[form.word], columns[form.label]
      if label not in classes:
        raise UserError(
          f"{where}: the label {label!r:.60} is not O, and not B- or I- with"
          f" one of {', '.join(form.kinds)}"
        )
      sentences[-1].append((word, label))
  out = []
  for sentence in filter(None, sentences):
    words, labels = zip(*sentence, strict=True)
    known = [classes[label] for label in iob2(labels)]
    out.append(Example(words, known, f"{split}_{len(out)}"))
  return out
