"""Tagging: a label for each word of a sentence, such as its entity's.

A file has a word in each line, in columns, and an empty line after each
sentence, or records of words and tags. Tags are IOB1, IOB2 or BIOES, which all
become IOB2, or any others, such as parts of speech. As in arXiv 2507.00994,
spaces join the words, every token has its word's label, and a word gets the
label of most of its tokens.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax.data import readers
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import batching, classification, labelled, sets
from antlm_jax.evals.finetuning.batching import Example, Rows
from antlm_jax.evals.finetuning.classification import cross_entropy, macro_f1
from antlm_jax.evals.finetuning.task import (
  Entity,
  PerToken,
  Suite,
  Task,
  mean_of,
)
from antlm_jax.runtime import files as io
from antlm_jax.runtime import progress
from antlm_jax.settings import setting

_NOWHERE = -1  # word, and label, of a token outside of all words
OUTSIDE = 0  # class O: no entity
_MARK = "\ufeff"  # byte-order mark, which WNUT-17 has in its lines
_ENTITY = re.compile("O|[BIESLU]-.+")
_RECORDS = ".jsonl", ".ndjson", ".csv", ".parquet"


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
    """Makes a row of each sentence, and cuts the end of long sentences."""
    parts = []  # tokens, and the index of each one's word
    for example in examples:
      ends = list(itertools.accumulate(len(word) + 1 for word in example.texts))
      ids, spans = loaded.tokenizer.encode_offsets(" ".join(example.texts))
      of = np.searchsorted(ends, [start for start, _ in spans], side="right")
      parts.append((ids.tolist(), of.tolist()))
    *made, words, cut = batching.labelled(loaded, parts, _NOWHERE, max_length)
    known = (e.label or [OUTSIDE] * len(e.texts) for e in examples)
    # The last label is for words of index -1.
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
    # If several are equal, the first class in the word wins.
    return [[max(v, key=v.get) if v else OUTSIDE for v in of] for of in votes]

  def example(self, texts: str | Sequence[str]) -> Example:
    """Returns a sentence's words: a sequence, a JSON list or divided by spaces.

    A file's record is a sequence of one text.
    """
    if not isinstance(texts, str) and len(texts) == 1:
      (texts,) = texts
    if not isinstance(texts, str):
      return Example(tuple(texts))
    with contextlib.suppress(ValueError):
      words = json.loads(texts) if texts.startswith('["') else None
      if words and all(isinstance(w, str) and w.strip() for w in words):
        return Example(tuple(words))
    return Example(tuple(texts.split()))

  def told(self, prediction: Sequence[int]) -> dict[str, tuple]:
    """Returns the names of the words' classes, and the entities."""
    labels = tuple(self.labels[label] for label in prediction)
    return {"labels": labels, "entities": tuple(entities(labels))}


def entities(labels: Sequence[str]) -> list[Entity]:
  """Returns the entities of a sentence's labels: IOB1, IOB2, BIOES or BILOU.

  An entity begins at `B-`, `S-` and `U-`, after a label of another kind, and
  after `E-`, `L-`, `S-` and `U-`.
  """
  out: list[Entity] = []
  ended = True
  for i, label in enumerate(labels):
    begin, _, kind = label.partition("-")
    last = out[-1] if out else None
    if label == "O":
      continue
    if begin in "IEL" and not ended and (last.kind, last.stop) == (kind, i):
      out[-1] = last._replace(stop=i + 1)
    else:
      out.append(Entity(kind, i, i + 1))
    ended = begin in "ELSU"
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


def word_accuracy(
  predictions: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
) -> float:
  """Returns the share of all words with the right label."""
  return classification.accuracy(*map(np.concatenate, (predictions, labels)))


_SPLITS = "train", "dev", "test"


class Format(NamedTuple):
  """Files of a known set, and its kinds of entity."""

  files: tuple[str, ...]  # of a split, in one layout or several
  kinds: str
  splits: tuple[str, ...] = _SPLITS  # in the files' names
  word: int = 0  # column
  tag: int = -1  # column


FORMATS = {
  "conll": Format(
    ("conll2003/eng.{}",), "LOC MISC ORG PER", ("train", "testa", "testb")
  ),
  "uner": Format(
    ("uner_en_ewt/en_ewt-ud-{}.iob2",), "LOC ORG PER", word=1, tag=2
  ),
  "ontonotes": Format(
    ("ontonotes/{}.conll", "ontonotes/{}.txt"),
    "CARDINAL DATE EVENT FAC GPE LANGUAGE LAW LOC MONEY NORP ORDINAL ORG"
    " PERCENT PERSON PRODUCT QUANTITY TIME WORK_OF_ART",
  ),
}
SCORES = sets.dev_and_test(FORMATS)


@dataclasses.dataclass(frozen=True)
class Options:
  """Command-line options of your own sentences."""

  tokens_column: str = setting(
    "tokens",
    "Column of the words in your own records; in files of columns its number"
    " from 1, or else the first column",
  )
  tags_column: str = setting(
    "tags",
    "Column of the tags in your own records; in files of columns its number"
    " from 1, or else the last column",
  )


_CLASSES = labelled.Classes()


def make(
  data: sets.Data,
  name: str,
  attention: str,
  options: Options = Options(),
  given: labelled.Classes = _CLASSES,
) -> Task:
  """Makes a task of `FORMATS`, or of the user's own sentences.

  The task `own` reads files of columns or records, or records in memory. Its
  classes are those in all its sets. Raises a UserError if there are none.
  """
  if name != sets.OWN:
    form = FORMATS[name]
    classes = given.labels or _iob2_of(form.kinds.split())
    layouts = [
      dict(zip(_SPLITS, map(of.format, form.splits), strict=True))
      for of in form.files
    ]
    paths = sets.find(data, name, *layouts)

    def examples(path: pathlib.Path, which: str) -> list[Example]:
      return _examples(columns(path, form.word, form.tag), which, classes)

    return _of_entities(classes, sets.known(name, paths, examples))
  read = functools.partial(_read, options, given)
  found = sets.read(data, read, any_ending=True)
  tags = {tag for those in found.values() for one in those for tag in one.label}
  others = sorted(tag for tag in tags if not _ENTITY.fullmatch(tag))
  if tags <= {"O"} or len(tags) == len(others) == 1:
    one = f"only the tag {min(tags)!r:.60}" if tags else "no sentences"
    raise UserError(f"{sets.named(data)} holds {one}")
  kinds = {tag[2:] for tag in tags if tag != "O"}
  classes = given.labels or (tuple(sorted(tags)) if others else _iob2_of(kinds))
  made = {
    split: _examples(those, split, classes, not others)
    for split, those in found.items()
  }
  fields = sets.own(data, made)
  if not others:
    if any(tag[0] in "ESLU" for tag in tags):
      progress.say(
        f"{fields['name']}: BIOES tags become IOB2, so predictions are B-X, I-X"
      )
    return _of_entities(classes, fields)
  progress.say(
    f"{fields['name']}: tags such as {others[0]!r} are not entity tags (B-X,"
    " I-X), so the score is the accuracy over words"
  )
  return Task(
    **fields,
    head=Tagger(classes),
    metrics={"accuracy": word_accuracy},
    main_metric="accuracy",
    baseline="one tag",
    trivial=lambda those: [
      [[tag] * len(e.texts) for e in those] for tag in range(len(classes))
    ],
  )


def _of_entities(classes: tuple[str, ...], fields: Mapping[str, Any]) -> Task:
  return Task(
    **fields,
    head=Tagger(classes),
    metrics={
      "entity_f1": functools.partial(entity_f1, classes),
      "sentence_f1": sentence_f1,
    },
    main_metric="entity_f1",
    baseline="all O",
    trivial=lambda those: [[[OUTSIDE] * len(e.texts) for e in those]],
  )


def _iob2_of(kinds: Iterable[str]) -> tuple[str, ...]:
  """Returns the classes of kinds of entity, O first."""
  return "O", *(f"{begin}-{kind}" for kind in sorted(kinds) for begin in "BI")


def _examples(
  sentences: Iterable[Example],
  split: str,
  classes: Sequence[str],
  of_entities: bool = True,
) -> list[Example]:
  """Gives sentences the classes of their tags, and names."""
  index, out = {name: i for i, name in enumerate(classes)}, []
  for one in sentences:
    tags = iob2(one.label) if of_entities else one.label
    if unknown := {*tags} - index.keys():
      raise UserError(
        f"{one.id}: unknown tag {min(unknown)!r:.60}: name all tags with"
        f" --labels ({', '.join(classes):.200})"
      )
    known = [index[tag] for tag in tags]
    out.append(Example(one.texts, known, f"{split}_{len(out)}"))
  return out


SUITE = Suite(
  "tagging",
  "tags of words: your own sentences, --data is a file of columns or of records"
  " with the words and tags, or a folder of files named train, dev and test; or"
  " a folder with CoNLL-2003, Universal NER or OntoNotes",
  SCORES | {sets.OWN: (sets.OWN,)},
  make,
  heads=(Tagger,),
  settings=(Options, labelled.Classes),
  in_memory=True,
)


def columns(
  path: str | pathlib.Path, word: int = 0, tag: int = -1
) -> list[Example]:
  """Reads sentences from a file of columns, which tabs divide, or else spaces.

  Their labels are the words' tags, and their names their places. A byte-order
  mark is no word. In WikiAnn each word has its language before it (`en:Paris`),
  which is removed, with a note. Raises a UserError if a line has too few
  columns.
  """
  # A comment looks like a word unless a column precedes the words.
  aside = ("#", "-DOCSTART-") if word > 0 else ("-DOCSTART-",)
  least = max(word + 1, tag + 1, 2)
  out, pairs, where = [], [], ""  # pairs of a word and its tag, and their place
  lines = [*io.read_text(path, "sentences").split("\n"), ""]
  for number, line in enumerate(lines, start=1):
    line = line.replace(_MARK, "").strip("\r\n ")
    parts = line.split("\t") if "\t" in line else line.split()
    if not line.strip():
      out += [Example(*zip(*pairs, strict=True), where)] if pairs else []
      pairs = []
    elif not line.startswith(aside) and parts[word % len(parts)].strip():
      place = f"{path}, line {number}"
      if len(parts) < least:
        raise UserError(
          f"{place}: {len(parts)} columns, not a word and its tag"
        )
      where = where if pairs else place
      pairs.append((parts[word].strip(), parts[tag].strip()))
  texts = [text for one in out for text in one.texts]
  language = re.match("[a-z][a-z-]*:(?=.)", texts[0]) if texts else None
  if not language or not all(t.startswith(language[0]) for t in texts):
    return out
  progress.say(f"{path}: removed {language[0]!r} before each word")
  return [
    one._replace(texts=tuple(t[language.end() :] or t for t in one.texts))
    for one in out
  ]


def _read(
  options: Options, given: labelled.Classes, source: sets.Source
) -> Iterator[Example]:
  """Yields the sentences of a source, of columns or of records."""
  places = options.tokens_column, options.tags_column
  if isinstance(source, str) and readers.kind(source) not in _RECORDS:
    numbers = [
      int(place) - 1 if place.isdecimal() else usual
      for place, usual in zip(places, (0, -1), strict=True)
    ]
    yield from columns(source, *numbers)
    return
  asked = dict(zip(places, ("tokens_column", "tags_column"), strict=True))
  for where, both in sets.records(source, asked):
    words, tags = (x.split() if isinstance(x, str) else x or () for x in both)
    if not all(isinstance(word, str) and word.strip() for word in words):
      raise UserError(f"{where}: the words are not texts")
    if not 0 < len(words) == len(tags):
      raise UserError(f"{where}: {len(words)} words, but {len(tags)} tags")
    if isinstance(tags[0], int):
      if not 0 <= min(tags) <= max(tags) < len(given.labels):
        raise UserError(
          f"{where}: the tag {max(tags)} has no name: name all tags, from 0,"
          " with --labels=O,B-PER,..."
        )
      tags = [given.labels[tag] for tag in tags]
    yield Example(tuple(words), tuple(tags), where)
