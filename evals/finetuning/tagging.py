"""Tagging: a label for each word of a sentence, such as its entity's.

A file has a word in each line, in columns, and an empty line after each
sentence, or records of words and tags. Tags of entities have one of `SCHEMES`
and become IOB2. Others are, for example, parts of speech. As in arXiv
2507.00994, spaces join the words, every token has its word's label, and a word
gets the label of most of its tokens. A long sentence has several rows, so that
every word is read.
"""

import ast
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
from antlm_jax.evals.finetuning import batching, conll, labelled, sets
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.evals.finetuning.classification import class_loss
from antlm_jax.evals.finetuning.conll import columns
from antlm_jax.evals.finetuning.tag_scores import (
  entities,
  entity_counts,
  entity_f1,
  sentence_f1,
  tag_counts,
  word_accuracy,
)
from antlm_jax.evals.finetuning.task import Entity, PerToken, Suite, Task
from antlm_jax.evals.zero_shot import perplexity
from antlm_jax.inference.model import Loaded
from antlm_jax.inference.scoring import EncodedText, Pass
from antlm_jax.runtime import progress
from antlm_jax.settings import setting

_NOWHERE = -1  # word, and label, of a token outside of all words
OUTSIDE = 0  # class O: no entity
# Letters of the schemes of tags, for the first word of an entity, the words
# inside, the last, and an entity of one word.
SCHEMES = {
  "IOB": "BI",
  "BIOES": "BIES",
  "BILOU": "BILU",
  "BMES": "BMES",
  "BMEWO": "BMEW",
}
PLAIN = "kinds without letters"
_MARKED = re.compile("([BIMELSUW])(-.+)?")
# Tags that are not read: B_PER and PER-B, or several of one word.
_OTHER_PLACE = re.compile("[BIMELSUW][_/:.].+|.+[-_/:.][BIMELSUW]")
_SEVERAL = re.compile(".*[,;|/ ][BI]-.+")
_FEW = 3  # sentences that may all have one word
_LONG = 100  # words, above which a set's only sentence is probably several
_MASKED = Pass(masked=True, shift=0)
_RECORDS = ".jsonl", ".ndjson", ".csv", ".parquet", readers.HUB


class Tags(PerToken):
  """Classes of the tokens whose label is not -1."""

  def loss(self, outputs, labels, weights) -> jax.Array:
    """Returns the mean cross-entropy in nats over those tokens."""
    weights = weights[:, None] * (labels != _NOWHERE)
    return class_loss(outputs, jnp.maximum(labels, 0), weights)

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

  @property
  def of_entities(self) -> bool:
    """Whether its classes are entities' labels, with O for no entity."""
    begin = any(one == "B" or one.startswith("B-") for one in self.labels)
    return begin and "O" in self.labels

  def encode(self, loaded, examples, max_length) -> ExampleRows:
    """Makes rows of sentences; a long sentence has several.

    Rows of a sentence overlap, so that tokens have text on both sides. Each
    token has a label, and a vote on its word, in one of them.
    """
    self._refuse_columns(examples)
    room = batching.longest(loaded, max_length) - sum(map(len, loaded.frame))
    if room < 1:
      raise UserError(f"max_length={max_length} leaves no room for a word")
    parts, count = [], 0  # tokens, and the index of each one's word in all
    for example in examples:
      ids, of = _word_tokens(loaded, example.texts)
      for part in _token_windows(ids, room) or [EncodedText(ids, 0, 0)]:
        marks = np.full(len(part.tokens), _NOWHERE)
        marks[part.start : part.stop] = count + of[: part.targets]
        of = of[part.targets :]
        parts.append((part.tokens.tolist(), marks.tolist()))
      count += len(example.texts)
    *made, words, _ = batching.labelled(loaded, parts, _NOWHERE, max_length)
    known = (e.label or [OUTSIDE] * len(e.texts) for e in examples)
    # The last label is for tokens of no word, -1.
    labels = np.array([*itertools.chain(*known), _NOWHERE], np.int32)
    if len(without := np.setdiff1d(np.arange(count), words)):
      texts = [text for example in examples for text in example.texts]
      progress.say(
        f"warning: words without a token, which get"
        f" {'O' if self.of_entities else 'no tag'}: {len(without):,}"
        f" ({texts[without[0]]!r:.40})"
      )
    return ExampleRows(*made, labels[words], True, examples, words)

  def _refuse_columns(self, examples: Sequence[Example]) -> None:
    """Raises a UserError if texts are lines of words and tags."""
    ends = [e.texts[-1] for e in examples if e.label is None]
    if len(ends) > 1 and {*ends} <= {*self.labels}:
      raise UserError(
        f"each text ends with a tag, such as {ends[0]}: give sentences without"
        " tags, or lists of words"
      )

  def decode(self, reduced: np.ndarray, rows: ExampleRows) -> list[list[int]]:
    """Returns each word's class: that of most of its tokens.

    A word without a token is O among entities' tags. Otherwise it is -1, which
    is no class and never right.
    """
    votes = collections.defaultdict(collections.Counter)
    for found, of in zip(reduced, rows.about, strict=True):
      for label, word in zip(found.tolist(), of.tolist(), strict=True):
        votes[word][label] += 1
    none = {self.labels.index("O") if self.of_entities else _NOWHERE: 0}
    words = itertools.count()
    # If several are equal, the first class in the word wins.
    return [
      [max(v := votes.get(next(words), none), key=v.get) for _ in e.texts]
      for e in rows.examples
    ]

  def example(self, texts: str | Sequence[str]) -> Example:
    """Returns a sentence's words: a sequence, a JSON list or divided by spaces.

    A file's record is a sequence of one text. Raises a UserError if a word is
    no text, or blank.
    """
    if isinstance(texts, list | tuple) and len(texts) == 1:
      (texts,) = texts
    words = _values(texts)
    if isinstance(texts, str) and not _are_words(words):
      words = texts.split()
    if not _are_words(words):
      raise UserError(
        f"{texts!r:.60} is not a sentence: give its text, or a list of words"
      )
    return Example(tuple(words))

  def told(self, prediction: Sequence[int]) -> dict[str, tuple]:
    """Returns the names of the words' classes, and the entities."""
    labels = tuple(
      None if label == _NOWHERE else self.labels[label] for label in prediction
    )
    found = tuple(entities(labels)) if self.of_entities else None
    return {"labels": labels, "entities": found}


def _word_tokens(
  loaded: Loaded, words: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tokens of words that spaces join, and each one's word.

  As for transformers' `word_ids`, a token that is a space alone belongs to the
  word after it.
  """
  ids, spans = loaded.tokenizer.encode_offsets(" ".join(words))
  # Begin of each word, with the space before it.
  ends = itertools.accumulate((len(w) + 1 for w in words[:-1]), initial=-1)
  starts = [start for start, _ in spans]
  return ids, np.searchsorted([*ends], starts, side="right") - 1


def _token_windows(ids: np.ndarray, room: int) -> list[EncodedText]:
  """Returns windows of tokens, which score each token once."""
  return [*perplexity.windows(EncodedText(ids, 0, len(ids)), [_MASKED], room)]


def iob2(labels: Sequence[str], of: str = "") -> list[str]:
  """Returns a sentence's labels with `B-` at the start of each entity.

  `of` is their scheme, which matters for `PLAIN`.
  """
  if of == PLAIN:
    labels = [tag if tag == "O" else _of_kind(tag)[1] for tag in labels]
  out = ["O"] * len(labels)
  for kind, start, stop in entities(labels):
    first, inside = _of_kind(kind)
    out[start:stop] = [first, *[inside] * (stop - start - 1)]
  return out


def _of_kind(kind: str) -> tuple[str, str]:
  """Returns the labels of an entity's first word and of the words inside."""
  return tuple("-".join(filter(None, (letter, kind))) for letter in "BI")


def tag_scheme(places: Mapping[str, str]) -> str:
  """Returns the name of the scheme of a set's tags, which have their places.

  It is one of `SCHEMES`, `PLAIN` for kinds of entity without a letter, or empty
  if tags are not entities', such as parts of speech. Raises a UserError if tags
  with O are of several schemes, or of an unknown scheme.
  """
  inside = sorted(places.keys() - {"O"})
  marked = [tag for tag in inside if _MARKED.fullmatch(tag)]
  bare = [tag for tag in marked if len(tag) == 1]

  def mixed(tag: str, others: Iterable[str] = ()) -> UserError:
    other = "".join(f", and others are like {x!r:.40}" for x in [*others][:1])
    return UserError(
      f"{places[tag]}: the tag {tag!r:.60} is of no scheme that is read{other}:"
      " write all tags as one of IOB1, IOB2, BIOES, BILOU or BMES (B-PER,"
      " I-PER, O), or all without letters (PER, O)"
    )

  if several := [tag for tag in inside if _SEVERAL.fullmatch(tag)]:
    raise mixed(several[0])
  if marked != inside:
    if "O" not in places and any(tag.startswith("B-") for tag in marked):
      raise mixed(next(tag for tag in inside if tag not in marked), marked)
    if "O" not in places or all(len(tag) == 1 for tag in inside):
      return ""
    if marked:
      raise mixed(next(tag for tag in inside if tag not in marked), marked)
    if all(map(_OTHER_PLACE.fullmatch, inside)):
      raise mixed(inside[0])
    return PLAIN
  if bare == inside and "B" not in bare and (bare != ["I"] or len(places) < 2):
    return ""
  if bare and bare != marked:
    raise mixed(bare[0], [tag for tag in marked if tag not in bare])
  letters = {tag[0] for tag in marked}
  for name, known in SCHEMES.items():
    if letters <= {*known}:
      return name
  last = max(marked, key=lambda tag: (tag[0] not in "BI", tag[0]))
  raise mixed(last, [t for t in marked if t[0] not in ("B", last[0])])


def _iob(sentences: Iterable[Sequence[str]]) -> str:
  """Returns the name of a scheme of B and I: IOB1, IOB2 or, without B, IO."""
  begins = collections.Counter()  # letters of entities, and B that is needed
  for labels in sentences:
    before = Entity("", 0, 0)
    for one in entities(labels):
      letter = labels[one.start][0]
      apart = (before.kind, before.stop) != (one.kind, one.start)
      begins[letter if apart or letter == "I" else "needed"] += 1
      before = one
  if not begins["B"] + begins["needed"]:
    return "IO"
  # Real files mix both.
  odd, name = ("I", "IOB2") if begins["I"] <= begins["B"] else ("B", "IOB1")
  some = f" ({begins[odd]:,} entities begin as in the other IOB)"
  return name + some * bool(begins[odd])


_SPLITS = "train", "dev", "test"


class TaggingFormat(NamedTuple):
  """Files of a known set, and its kinds of entity."""

  files: tuple[str, ...]  # of a split, in one layout or several
  kinds: str
  splits: tuple[str, ...] = _SPLITS  # in the files' names
  word: int = 0  # column
  tag: int = -1  # column


FORMATS = {
  "conll": TaggingFormat(
    ("conll2003/eng.{}",), "LOC MISC ORG PER", ("train", "testa", "testb")
  ),
  "uner": TaggingFormat(
    ("uner_en_ewt/en_ewt-ud-{}.iob2",), "LOC ORG PER", word=1, tag=2
  ),
  "ontonotes": TaggingFormat(
    ("ontonotes/{}.conll", "ontonotes/{}.txt"),
    "CARDINAL DATE EVENT FAC GPE LANGUAGE LAW LOC MONEY NORP ORDINAL ORG"
    " PERCENT PERSON PRODUCT QUANTITY TIME WORK_OF_ART",
  ),
}
SCORES = sets.dev_and_test(FORMATS)


@dataclasses.dataclass(frozen=True)
class TagOptions:
  """Command-line options of your own sentences."""

  tokens_column: str = setting(
    "",
    "Column of the words in your own sentences, by default tokens; in files of"
    " columns its name in the first line or its number from 1, by default the"
    " first column",
  )
  tags_column: str = setting(
    "",
    "Column of the tags in your own sentences, by default tags; in files of"
    " columns its name in the first line or its number from 1, by default the"
    " last column",
  )

  @property
  def of_records(self) -> tuple[str, str]:
    """Returns the columns of the words and the tags in records."""
    return self.tokens_column or "tokens", self.tags_column or "tags"


_CLASSES = labelled.Classes()


def make_tagging_task(
  data: sets.Data,
  name: str,
  attention: str,
  options: TagOptions = TagOptions(),
  given: labelled.Classes = _CLASSES,
) -> Task:
  """Makes a task of `FORMATS`, or of the user's own sentences.

  The task `own` reads files or records in memory. Its classes are those in all
  its sets. Raises a UserError if there are none.
  """
  if name != sets.OWN:
    form = FORMATS[name]
    classes = given.labels or _iob2_of(form.kinds.split())
    layouts = [
      dict(zip(_SPLITS, map(of.format, form.splits), strict=True))
      for of in form.files
    ]
    paths = sets.find_set_files(data, name, *layouts)

    def examples(path: pathlib.Path, which: str) -> list[Example]:
      found = columns(path, form.word, form.tag)
      made = (one._replace(label=iob2(one.label)) for one in found)
      return _examples(made, which, classes)

    return _of_entities(classes, sets.known_task_fields(name, paths, examples))
  read = functools.partial(_read_sentences, options, given, files := set())
  found = sets.read_own_set(data, read, any_ending=True, labelled=_has_tags)
  of, tags = _scheme_of_set(data, found)
  if of:
    found = {
      split: [one._replace(label=iob2(one.label, of)) for one in those]
      for split, those in found.items()
    }
  classes = given.labels or tuple(sorted(tags))
  if of:
    labels = {tag for those in found.values() for e in those for tag in e.label}
    classes = _tag_classes(labels, given.labels)
  made = {n: _examples(those, n, classes) for n, those in found.items()}
  fields = sets.own_task_fields(data, made)
  fields["columns"] = options.of_records[:1] if files == {True} else ()
  if of:
    like = "/".join(_of_kind("" if "B" in classes else "X"))
    become = f", become {like}" * (of != "IOB2")
    progress.say(f"{fields['name']}: tags are {of}{become}")
    return _of_entities(classes, fields)
  odd = min(tags - {"O"})
  progress.say(
    f"{fields['name']}: tags such as {odd!r:.40} are not entity tags (B-X,"
    " I-X), so the score is the accuracy over words"
  )
  return Task(
    **fields,
    head=Tagger(classes),
    metrics={"accuracy": word_accuracy},
    main_metric="accuracy",
    by_class=functools.partial(tag_counts, classes),
    baseline="one tag",
    trivial=lambda those: [
      [[tag] * len(e.texts) for e in those] for tag in range(len(classes))
    ],
  )


def _scheme_of_set(
  data: sets.Data, found: Mapping[str, Sequence[Example]]
) -> tuple[str, set[str]]:
  """Returns the scheme of an own set, "" for no entities, and its tags.

  Raises a UserError if it has no tags, or they are of no known scheme.
  """
  places, every = {}, [*itertools.chain(*found.values())]
  if len(every) > _FEW and all(len(one.texts) == 1 for one in every):
    raise UserError(
      f"{every[0].id}: each sentence of {sets.path_or_name(data)} has one word:"
      " give its lists of words and of tags, or an empty line only at its end"
    )
  for split, those in found.items():
    if len(those) == 1 and (words := len(those[0].texts)) > _LONG:
      progress.say(
        f"warning: {sets.path_or_name(data)}: {split} is one sentence of"
        f" {words:,} words: write an empty line after each sentence"
      )
  for one in every:
    places |= {tag: one.id for tag in one.label if tag not in places}
  of, tags = tag_scheme(places), {*places}
  if tags <= {"O"} or (len(tags) == 1 and not of):
    one = f"only the tag {min(tags)!r:.60}" if tags else "no sentences"
    raise UserError(f"{sets.path_or_name(data)} holds {one}")
  return _iob(e.label for e in every) if of == "IOB" else of, tags


def _tag_classes(labels: set[str], given: tuple[str, ...]) -> tuple[str, ...]:
  """Returns the classes of IOB2 labels.

  Given classes keep their numbers. IOB2 labels of their kinds follow, if labels
  are not among them.
  """
  if given and labels <= {*given}:
    return given
  kinds = {
    tag[2:] if _MARKED.fullmatch(tag) else tag
    for tag in given or labels
    if tag != "O"
  }
  return tuple(dict.fromkeys([*given, *_iob2_of(kinds)]))


def _of_entities(classes: tuple[str, ...], fields: Mapping[str, Any]) -> Task:
  outside = classes.index("O")
  return Task(
    **fields,
    head=Tagger(classes),
    metrics={
      "entity_f1": functools.partial(entity_f1, classes),
      "sentence_f1": sentence_f1,
    },
    main_metric="entity_f1",
    by_class=functools.partial(entity_counts, classes),
    baseline="all O",
    trivial=lambda those: [[[outside] * len(e.texts) for e in those]],
  )


def _iob2_of(kinds: Iterable[str]) -> tuple[str, ...]:
  """Returns the classes of kinds of entity, O first."""
  return "O", *(label for kind in sorted(kinds) for label in _of_kind(kind))


def _examples(
  sentences: Iterable[Example], split: str, classes: Sequence[str]
) -> list[Example]:
  """Gives sentences the classes of their labels, and names."""
  index, out = {name: i for i, name in enumerate(classes)}, []
  for one in sentences:
    if unknown := {*one.label} - index.keys():
      raise UserError(
        f"{one.id}: unknown tag {min(unknown)!r:.60}: name all tags with"
        f" labels ({', '.join(classes):.200})"
      )
    known = [index[tag] for tag in one.label]
    out.append(Example(one.texts, known, f"{split}_{len(out)}"))
  return out


SUITE = Suite(
  "tagging",
  "tags of words: your own sentences, --data is a file of columns or of records"
  " with the words and tags, or a folder of files named train, dev and test; or"
  " a folder with CoNLL-2003, Universal NER or OntoNotes",
  SCORES | {sets.OWN: (sets.OWN,)},
  make_tagging_task,
  heads=(Tagger,),
  settings=(TagOptions, labelled.Classes),
  in_memory=True,
)


def _is_columns(source: sets.Source) -> bool:
  return isinstance(source, str) and readers.kind(source) not in _RECORDS


def _has_tags(source: sets.Source) -> bool:
  """Whether a file has tags, and not words alone."""
  return not _is_columns(source) or conll.file_has_tags(source)


def _read_sentences(
  options: TagOptions, given: labelled.Classes, files: set, source: sets.Source
) -> Iterator[Example]:
  """Yields a source's sentences; tells `files` if it is a file of records."""
  names = "tokens_column", "tags_column"
  files.add(isinstance(source, str) and not _is_columns(source))
  if _is_columns(source):
    for one in columns(source, *(_column(options, name) for name in names)):
      yield one._replace(label=_named(one.label, given.labels, one.id))
    return
  asked = dict(zip(options.of_records, names, strict=True))
  for where, both in sets.source_records(source, asked):
    words, tags = map(_values, both)
    if not _are_words(words):
      raise UserError(f"{where}: the words are not texts")
    if not 0 < len(words) == len(tags):
      raise UserError(f"{where}: {len(words)} words, but {len(tags)} tags")
    yield Example(tuple(words), _named(tags, given.labels, where), where)


def _column(options: TagOptions, option: str) -> conll.Column:
  """Returns a column of a file, from 0 or by its name; None by default."""
  place = getattr(options, option)
  if place.isdecimal():
    if not int(place):
      raise UserError(f"{option}=0: columns are counted from 1")
    return int(place) - 1
  return place or None


def _values(found: object) -> list:
  """Returns a record's words or tags: a sequence, or a text of several.

  A text is a list of JSON or of Python, as pandas writes it to csv, or spaces
  divide it. Others give [None], such as a list of numpy, which has no commas.
  """
  if not isinstance(found, str):
    found = getattr(found, "tolist", lambda: found)()  # of numpy
    return list(found) if isinstance(found, list | tuple) else [None]
  if re.fullmatch(r"\[\s*\d+(\s+\d+)+\s*\]", found):  # pandas, of numpy
    return list(map(int, found[1:-1].split()))
  if not re.fullmatch(r"\[\S.*[,'\"].*\]|\[\d+\]", found, re.DOTALL):
    return found.split()
  with contextlib.suppress(ValueError):
    return json.loads(found)
  # Python joins two texts without a comma.
  if not re.search("['\"]\\s+['\"]", found):
    with contextlib.suppress(ValueError, SyntaxError):
      return list(ast.literal_eval(found))
  return [None]


def _are_words(found: Iterable[object]) -> bool:
  return all(isinstance(word, str) and word.strip() for word in found)


def _named(tags: Sequence, names: Sequence[str], where: str) -> tuple[str, ...]:
  """Returns the names of tags, which are texts, or numbers of `names`."""
  if all(isinstance(tag, str) and tag.strip() for tag in tags):
    tags = [tag.strip() for tag in tags]
    if not names or not all(x.isdecimal() and x not in names for x in tags):
      return tuple(tags)
    tags = list(map(int, tags))  # in csv, and in columns, numbers are text
  if odd := [tag for tag in tags if type(tag) is not int]:
    raise UserError(f"{where}: the tag {odd[0]!r:.40} is no text and no number")
  if unknown := [tag for tag in tags if not 0 <= tag < len(names)]:
    raise UserError(
      f"{where}: the tag {max(unknown)} has no name: name all tags, from 0,"
      " with labels=O,B-PER,..."
    )
  return tuple(names[tag] for tag in tags)
