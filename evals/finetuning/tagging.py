"""Tagging: a label for each word of a sentence, such as that of its entity.

A file has a word a line, in columns, and an empty line after each sentence:
CoNLL-2003's, Universal NER's, OntoNotes' in CoNLL's form. What the study of
arXiv 2507.00994 does: words are joined by spaces, every token has the label of
its word, and a word is what most of its tokens are.
"""

import collections
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import batching
from antlm_jax.evals.finetuning.batching import Example, Rows
from antlm_jax.evals.finetuning.classification import cross_entropy, macro_f1
from antlm_jax.evals.finetuning.task import PerToken, Suite, Task
from antlm_jax.runtime import files as io

_NOWHERE = -1  # the word, and the label, of a token that is of no word
OUTSIDE = 0  # the class O: of no entity

# ------------------------------------------------------------------- the heads


class Tags(PerToken):
  """A class for each token whose label is not -1."""

  def loss(self, outputs, labels, weights) -> jax.Array:
    """The mean cross-entropy in nats over those tokens."""
    weights = weights[:, None] * (labels != _NOWHERE)
    return cross_entropy(outputs, jnp.maximum(labels, 0), weights)

  def reduce(self, outputs) -> jax.Array:
    """Returns each token's class, int32 `[B, T]`."""
    return jnp.argmax(outputs, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Tagger(Tags):
  """Classes of words; transformers' ForTokenClassification."""

  labels: tuple[str, ...]  # names of the C classes, O first
  kind: ClassVar[str] = "tagger"

  @property
  def num_outputs(self) -> int:
    """One a class."""
    return len(self.labels)

  def encode(self, loaded, examples, max_length) -> Rows:
    """Makes a row a sentence; words that are too many have no tokens."""
    found = (_tokens(loaded.tokenizer, e.texts) for e in examples)
    *made, words, cut = batching.labelled(loaded, found, _NOWHERE, max_length)
    known = (e.label or [OUTSIDE] * len(e.texts) for e in examples)
    # The last one is that of -1.
    labels = [
      np.array([*one, _NOWHERE], np.int32)[of]
      for one, of in zip(known, words, strict=True)
    ]
    return Rows(*made, np.stack(labels), True, examples, words, cut)

  def decode(self, reduced: np.ndarray, rows: Rows) -> list[list[int]]:
    """Returns each word's class: that of most of its tokens, O of none."""
    votes = [[collections.Counter() for _ in e.texts] for e in rows.examples]
    for found, of, counts in zip(reduced, rows.about, votes, strict=True):
      for label, word in zip(found.tolist(), of.tolist(), strict=True):
        if word != _NOWHERE:
          counts[word][label] += 1
    # Of equals the one that came first in the word.
    return [[max(v, key=v.get) if v else OUTSIDE for v in of] for of in votes]


def _tokens(tokenizer, words: Sequence[str]) -> tuple[list[int], list[int]]:
  """Returns the tokens of words, and which word each is of."""
  ends = list(itertools.accumulate(len(word) + 1 for word in words))
  ids, spans = tokenizer.encode_offsets(" ".join(words))
  starts = [start for start, _ in spans]
  return ids.tolist(), np.searchsorted(ends, starts, side="right").tolist()


# --------------------------------------------------------------------- metrics


class Entity(NamedTuple):
  """Words from `start` up to `stop` of a sentence, and what they are."""

  kind: str
  start: int
  stop: int


def entities(labels: Sequence[str]) -> list[Entity]:
  """Reads a sentence's entities off its labels, IOB1 or IOB2.

  One begins at `B-`, and where the label before is of another kind.
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
  """Returns a sentence's labels with `B-` at the begin of each entity."""
  out = ["O"] * len(labels)
  for kind, start, stop in entities(labels):
    out[start:stop] = [f"B-{kind}", *[f"I-{kind}"] * (stop - start - 1)]
  return out


def entity_f1(
  names: Sequence[str],
  predictions: Sequence[Sequence[int]],
  labels: Sequence[Sequence[int]],
) -> float:
  """F1 over all sentences' entities, as conlleval's and seqeval's; 0 of none.

  Predictions and labels are classes, whose names are given.
  """
  right = count = 0
  for those in zip(predictions, labels, strict=True):
    found, there = (set(entities([names[c] for c in one])) for one in those)
    right += len(found & there)
    count += len(found) + len(there)
  return 2 * right / count if count else 0.0


def sentence_f1(
  predictions: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
) -> float:
  """The measure of arXiv 2507.00994's code: the mean of sentences' macro-F1.

  Over the classes that a sentence has or is predicted to have, O included:
  far above `entity_f1`, since most sentences have few entities or none.
  """
  return float(np.mean(list(map(macro_f1, predictions, labels))))


# --------------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class Format:
  """How a set of sentences is written."""

  kinds: tuple[str, ...]  # of entities
  files: Mapping[str, tuple[str, ...]]  # by split: the first that is there
  word: int = 0  # the column
  label: int = -1

  @property
  def classes(self) -> tuple[str, ...]:
    """The names of the classes."""
    return "O", *(f"{b}-{kind}" for kind in self.kinds for b in "BI")


def _splits(
  name: str, *patterns: str, parts=("train", "dev", "test")
) -> dict[str, tuple[str, ...]]:
  splits = "train", f"{name}-dev", f"{name}-test"
  return {
    split: tuple(pattern.format(part) for pattern in patterns)
    for split, part in zip(splits, parts, strict=True)
  }


_ONTONOTES = (
  *("CARDINAL", "DATE", "EVENT", "FAC", "GPE", "LANGUAGE", "LAW", "LOC"),
  *("MONEY", "NORP", "ORDINAL", "ORG", "PERCENT", "PERSON", "PRODUCT"),
  *("QUANTITY", "TIME", "WORK_OF_ART"),
)
FORMATS = {
  "conll": Format(
    ("LOC", "MISC", "ORG", "PER"),
    _splits("conll", "conll2003/eng.{}", parts=("train", "testa", "testb")),
  ),
  "uner": Format(
    ("LOC", "ORG", "PER"),
    _splits("uner", "uner_en_ewt/en_ewt-ud-{}.iob2"),
    word=1,
    label=2,
  ),
  "ontonotes": Format(
    _ONTONOTES, _splits("ontonotes", "ontonotes/{}.conll", "ontonotes/{}.txt")
  ),
}
# The run's best epoch and rate are chosen on the first.
SCORES = {name: (f"{name}-dev", f"{name}-test") for name in FORMATS}


def make(folder, name: str, options: object, attention: str) -> Task:
  """Makes a task, a key of `FORMATS`, of what is found in a folder.

  Raises:
    UserError: if a file of it is absent.
  """
  form = FORMATS[name]
  found = {}
  for split, names in form.files.items():
    paths = [pathlib.Path(folder) / name for name in names]
    if not any(path.is_file() for path in paths):
      raise UserError(f"{split} is absent: {paths[0]} does not exist")
    found[split] = next(path for path in paths if path.is_file())
  classes = form.classes
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


SUITE = Suite("tagging", SCORES, make)


def load(path: pathlib.Path, form: Format, split: str) -> list[Example]:
  """Reads sentences, with each word's class.

  Raises:
    UserError: if it cannot be read, or a line has other columns or labels.
  """
  classes = {name: i for i, name in enumerate(form.classes)}
  out = []
  for sentence in _sentences(path, form):
    words, labels = zip(*sentence, strict=True)
    known = [classes[label] for label in iob2(labels)]
    out.append(Example(words, known, f"{split}_{len(out)}"))
  return out


def _sentences(path: pathlib.Path, form: Format) -> Iterator[list[tuple]]:
  """Yields sentences as words with their labels."""
  # Where numbers stand before words, no word can be taken for a comment.
  aside = ("#", "-DOCSTART-") if form.word else ("-DOCSTART-",)
  sentence = []
  for number, line in enumerate(io.read_text(path, "sentences").split("\n"), 1):
    columns = line.split()
    if columns and not line.startswith(aside):
      sentence.append(_word(columns, form, f"{path}, line {number}"))
    elif not columns and sentence:
      yield sentence
      sentence = []
  if sentence:
    yield sentence


def _word(columns: Sequence[str], form: Format, where: str) -> tuple[str, str]:
  least = max(form.word, form.label) + 1
  if len(columns) < max(least, 2):
    raise UserError(
      f"{where}: {len(columns)} columns, not a word and its label"
    )
  word, label = columns[form.word], columns[form.label]
  begin, _, kind = label.partition("-")
  if label != "O" and (begin not in ("B", "I") or kind not in form.kinds):
    raise UserError(
      f"{where}: the label {label!r:.60} is not O, and not B- or I- with one of"
      f" {', '.join(form.kinds)}"
    )
  return word, label
