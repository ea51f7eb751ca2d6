"""Tagging: a label for each word of a sentence, such as its entity's.

A file has a word and its tag in each line, and an empty line after each
sentence. Or it is CoNLL-U, or has records of words and tags. Tags have one of
`tag_schemes.SCHEMES`; those of entities become IOB2. As in arXiv
2507.00994, spaces join the words, every token has its word's label, and a word
gets the label of most of its tokens. A long sentence has several rows, so that
every word is read.
"""

import collections
import dataclasses
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax.data import readers
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import (
  batching,
  conll,
  labelled,
  record_values,
  sets,
  tag_schemes,
)
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.evals.finetuning.classification import class_loss
from antlm_jax.evals.finetuning.tag_schemes import (
  entities,
  entity_counts,
  entity_f1,
  sentence_f1,
  tag_counts,
  word_accuracy,
)
from antlm_jax.evals.finetuning.task import (
  Answers,
  Examples,
  Param,
  Params,
  Preset,
  Task,
  TaskHead,
)
from antlm_jax.evals.zero_shot import perplexity
from antlm_jax.inference.model import Loaded
from antlm_jax.inference.scoring import EncodedText, Pass
from antlm_jax.runtime import progress
from antlm_jax.settings import Section, setting

_NOWHERE = -1  # word, and label, of a token outside of all words
OUTSIDE = 0  # class O: no entity
_FEW = 3  # sentences that may all have one word
_CONLLU = ".conllu"  # ending of Universal Dependencies' files
_LONG = 100  # words, above which a set's only sentence is probably several
_MASKED = Pass(masked=True, shift=0)


class PerToken(TaskHead):
  """Linear layer on every token.

  Attributes:
    num_outputs: Number of outputs for a token, C.
  """

  num_outputs: int

  def parameters(self, width: int) -> dict[str, Param]:
    """Declares a kernel from N(0, .02^2), cut at two deviations."""
    return {
      "classes/kernel": Param((width, self.num_outputs), ("embed", None), 0.02),
      "classes/bias": Param((self.num_outputs,), ("norm",)),
    }

  def __call__(self, params: Params, hidden, lengths, dropout_key=None):
    """Returns logits, float32 `[B, T, C]`."""
    hidden = hidden.astype(jnp.float32)
    return hidden @ params["classes/kernel"] + params["classes/bias"]


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
  def has_entities(self) -> bool:
    """Whether its classes are entities' labels, with O for no entity."""
    begin = any(x == "B" or x.startswith("B-") for x in self.labels)
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
    parts = []  # the tokens of a row, and the index of each one's word
    word_count = 0
    for example in examples:
      ids, words = _word_tokens(loaded, example.texts)
      words = words + word_count
      for window in _token_windows(ids, room) or [EncodedText(ids, 0, 0)]:
        # Tokens that are in another window, too, get their label there.
        row_words = np.full(len(window.tokens), _NOWHERE)
        row_words[window.start : window.stop] = words[: window.targets]
        words = words[window.targets :]
        parts.append((window.tokens.tolist(), row_words.tolist()))
      word_count += len(example.texts)
    tokens, lengths, words, _ = batching.frame_labelled(
      loaded, parts, _NOWHERE, max_length
    )
    word_labels = (e.label or [OUTSIDE] * len(e.texts) for e in examples)
    # The last label is for tokens of no word, -1.
    labels = np.array([*itertools.chain(*word_labels), _NOWHERE], np.int32)
    if len(unread := np.setdiff1d(np.arange(word_count), words)):
      texts = [text for example in examples for text in example.texts]
      progress.say(
        f"warning: words without a token, which get"
        f" {'O' if self.has_entities else 'no tag'}: {len(unread):,}"
        f" ({texts[unread[0]]!r:.40})"
      )
    return ExampleRows(tokens, lengths, labels[words], True, examples, words)

  def _refuse_columns(self, examples: Sequence[Example]) -> None:
    """Raises a UserError if texts are lines of words and tags."""
    ends = [e.texts[-1] for e in examples if e.label is None and e.texts]
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
    for classes, words in zip(reduced, rows.origins, strict=True):
      for label, word in zip(classes.tolist(), words.tolist(), strict=True):
        votes[word][label] += 1
    no_vote = {self.labels.index("O") if self.has_entities else _NOWHERE: 0}
    numbers = itertools.count()
    # If several are equal, the first class in the word wins.
    return [
      [max(v := votes.get(next(numbers), no_vote), key=v.get) for _ in e.texts]
      for e in rows.examples
    ]

  def example(self, texts: str | Sequence[str]) -> Example:
    """Returns a sentence's words: a sequence, or a text with spaces.

    A file's record is a sequence of one text. Raises a UserError if a word is
    no text, or blank.
    """
    if isinstance(texts, list | tuple) and len(texts) == 1:
      (texts,) = texts
    words = texts
    if isinstance(texts, str):
      # A sentence may have brackets, but not around quoted words.
      is_list = re.match(r"\s*\[['\"]", texts) and texts.rstrip()[-1] == "]"
      words = [None] if is_list else texts.split()
    if not isinstance(words, list | tuple) or not _are_words(words):
      raise UserError(
        f"{texts!r:.60} is not a sentence: give its text, or a list of words"
      )
    return Example(tuple(words))

  def prediction_fields(self, prediction: Sequence[int]) -> dict[str, tuple]:
    """Returns the names of the words' classes, and the entities."""
    labels = tuple(
      None if label == _NOWHERE else self.labels[label] for label in prediction
    )
    spans = tuple(entities(labels)) if self.has_entities else None
    return {"labels": labels, "entities": spans}


def _word_tokens(
  loaded: Loaded, words: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tokens of words that spaces join, and each one's word.

  As for transformers' `word_ids`, a token that is a space alone belongs to the
  word after it. White space at the ends of a word is no text.
  """
  words = [word.strip() for word in words]
  ids, spans = loaded.tokenizer.encode_offsets(" ".join(words))
  # Begin of each word, with the space before it.
  ends = itertools.accumulate((len(w) + 1 for w in words[:-1]), initial=-1)
  starts = [start for start, _ in spans]
  return ids, np.searchsorted([*ends], starts, side="right") - 1


def _token_windows(ids: np.ndarray, room: int) -> list[EncodedText]:
  """Returns windows of tokens, which score each token once."""
  return [*perplexity.windows(EncodedText(ids, 0, len(ids)), [_MASKED], room)]


_SPLITS = "train", "dev", "test"


class KnownSet(NamedTuple):
  """Files of a known set, its form, and its kinds of entity."""

  files: tuple[str, ...]  # of a split, in one layout or several
  kinds: str
  columns: conll.Columns
  splits: tuple[str, ...] = _SPLITS  # in the files' names


_WORD_TO_LAST = conll.Columns(tag=-1, width=0)
STUDY = {  # sets of arXiv 2507.00994
  "conll": KnownSet(
    ("conll2003/eng.{}", "eng.{}"),
    "LOC MISC ORG PER",
    _WORD_TO_LAST,
    ("train", "testa", "testb"),
  ),
  "uner": KnownSet(
    ("uner_en_ewt/en_ewt-ud-{}.iob2", "en_ewt-ud-{}.iob2"),
    "LOC ORG PER",
    conll.Columns(word=1, tag=2, width=0, comments=True),
  ),
  "ontonotes": KnownSet(
    ("ontonotes/{}.conll", "ontonotes/{}.txt"),
    "CARDINAL DATE EVENT FAC GPE LANGUAGE LAW LOC MONEY NORP ORDINAL ORG"
    " PERCENT PERSON PRODUCT QUANTITY TIME WORK_OF_ART",
    _WORD_TO_LAST,
  ),
}
KNOWN = STUDY | {
  "wnut17": KnownSet(
    ("wnut17/{}", "{}"),
    "corporation creative-work group location person product",
    conll.Columns(),
    ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated"),
  ),
  "panx": KnownSet(("panx/{}",), "LOC ORG PER", conll.Columns(language=True)),
}
SCORES = sets.dev_and_test(KNOWN)


@dataclasses.dataclass(frozen=True)
class TagOptions(Section):
  """Command-line options of your own sentences."""

  tokens_column: str = setting(
    "",
    "Column of the words in your own sentences: a name, by default tokens, or"
    " in files of columns a number, by default 1 (2 in .conllu)",
  )
  tags_column: str = setting(
    "",
    "Column of the tags in your own sentences: a name, by default tags, or in"
    " files of more than two columns a number, by default 4 (UPOS) in .conllu",
  )

  @property
  def record_columns(self) -> tuple[str, str]:
    """Returns the columns of the words and the tags in records."""
    return self.tokens_column or "tokens", self.tags_column or "tags"

  def file_columns(self, path: str) -> conll.Columns:
    """Returns the columns of the words and the tags in a file of columns."""
    is_conllu = path.endswith(_CONLLU)
    if not (self.tokens_column or self.tags_column or is_conllu):
      return conll.Columns()
    defaults = ("2", "4") if is_conllu else ("1", "2")
    names = "tokens_column", "tags_column"
    numbers = []
    for name, default in zip(names, defaults, strict=True):
      column = getattr(self, name) or default
      if not column.isdecimal() or int(column) == 0:
        raise UserError(
          f"{name}={column}: columns of files without records have numbers,"
          " from 1"
        )
      numbers.append(int(column) - 1)
    word, tag = numbers
    if word == tag:
      raise UserError(f"words and tags are both in column {word + 1}")
    return conll.Columns(word, tag, 0, comments=True, numbered=is_conllu)


def known_task(data: str, name: str, classes: tuple[str, ...] = ()) -> Task:
  """Makes a task of a set of `KNOWN`, of its files in a folder.

  Raises a UserError if a file is missing.
  """
  known_set = KNOWN[name]
  classes = classes or tag_schemes.iob2_classes(known_set.kinds.split())
  layouts = [
    dict(zip(_SPLITS, map(file.format, known_set.splits), strict=True))
    for file in known_set.files
  ]
  paths = sets.find_set_files(data, name, *layouts)

  def examples(path: pathlib.Path, split: str) -> list[Example]:
    sentences = conll.read_known(path, known_set.columns)
    return _examples(_in_iob2(sentences), split, classes)

  return _entity_task(classes, sets.known_task_fields(name, paths, examples))


def own_task(
  data: sets.Data,
  options: TagOptions = TagOptions(),
  classes: tuple[str, ...] = (),
) -> Task:
  """Makes a task of the user's own sentences.

  Tags of entities, in any scheme, become IOB2 labels and are scored as
  entities. Other tags are scored by word. Raises a UserError if the sets have
  no tags, or tags of no known scheme.

  Args:
    data: The sets, or their path.
    options: Columns of the words and the tags.
    classes: Names of the classes, in order; by default those that a dataset
      keeps, or else all tags of the sets.
  """
  sources = sets.open_data(data, any_kind=True)
  files = [*itertools.chain(*sources.values())]
  words_column, tags_column = options.record_columns
  dataset_classes = (sets.class_names(source, tags_column) for source in files)
  classes = classes or next(filter(None, dataset_classes), ())
  sentences = {
    split: [
      sentence
      for source in sources[split]
      for sentence in _read_sentences(source, options, classes)
    ]
    for split in sources
  }
  scheme = _scheme_of_set(data, sentences)
  if scheme.is_of_entities:
    sentences = {
      split: _in_iob2(sentences[split], scheme.name) for split in sentences
    }
  tags = {
    tag
    for sentence in itertools.chain(*sentences.values())
    for tag in sentence.label
  }
  if scheme.is_of_entities:
    classes = _entity_classes(tags, classes)
    kinds = [*map(tag_schemes.kind_of, classes)]
  else:
    classes = classes or tuple(sorted(tags))
    kinds = [*map(str, classes)]
  examples = {
    split: _examples(sentences[split], split, classes) for split in sentences
  }
  record_values.warn_of_twins(sets.path_or_name(data), tags)
  fields = sets.own_task_fields(
    data,
    examples,
    classes_of=lambda sentence: [kinds[label] for label in {*sentence.label}],
  )
  # Predictions from files of records read the words from the same column.
  if all(isinstance(file, str) and not _is_columns(file) for file in files):
    fields["columns"] = (words_column,)
  if not scheme.is_of_entities:
    progress.say(
      f"{fields['name']}: tags such as {min(tags):.40} are not entity tags"
      " (B-X, I-X), so the score is the accuracy over words"
    )
    return _word_task(classes, fields)
  labels = "/".join(tag_schemes.labels_of_kind("" if "B" in classes else "X"))
  progress.say(f"{fields['name']}: tags are {scheme.name}, read as {labels}")
  return _entity_task(classes, fields)


def _in_iob2(sentences: Iterable[Example], scheme: str = "") -> list[Example]:
  return [
    sentence._replace(label=tag_schemes.iob2(sentence.label, scheme))
    for sentence in sentences
  ]


def _scheme_of_set(
  data: sets.Data, sentences: Mapping[str, Sequence[Example]]
) -> tag_schemes.Scheme:
  """Returns the scheme of an own set.

  Raises a UserError if it has no tags, or they are of no known scheme.
  """
  name = sets.path_or_name(data)
  all_sentences = [*itertools.chain(*sentences.values())]
  if len(all_sentences) > _FEW and all(
    len(x.texts) == 1 for x in all_sentences
  ):
    raise UserError(
      f"{all_sentences[0].id}: each sentence of {name} has one word: give its"
      " lists of words and of tags, or an empty line only at its end"
    )
  for split, split_sentences in sentences.items():
    words = sum(len(sentence.texts) for sentence in split_sentences)
    if len(split_sentences) == 1 and words > _LONG:
      progress.say(
        f"warning: {name}: {split} is one sentence of {words:,} words: write an"
        " empty line after each sentence"
      )
  places = {}
  for sentence in all_sentences:
    for tag in sentence.label:
      places.setdefault(tag, sentence.id)
  if not places.keys() - {"O"}:
    raise UserError(
      f"{name} holds {'only the tag O' if places else 'no sentences'}"
    )
  scheme = tag_schemes.scheme_of(places)
  if len(places) == 1 and not scheme.is_of_entities:
    raise UserError(f"{name} holds only the tag {min(places)!r:.60}")
  return scheme


def _entity_classes(
  tags: set[str], classes: tuple[str, ...]
) -> tuple[str, ...]:
  """Returns the classes of IOB2 tags.

  Given classes keep their numbers. IOB2 labels of their kinds follow, if tags
  are not among them.
  """
  if classes and tags <= {*classes}:
    return classes
  kinds = {tag_schemes.kind_of(tag) for tag in classes or tags if tag != "O"}
  return tuple(dict.fromkeys([*classes, *tag_schemes.iob2_classes(kinds)]))


def _word_task(classes: tuple[str, ...], fields: Mapping[str, Any]) -> Task:
  return Task(
    **fields,
    head=Tagger(classes),
    metrics={"accuracy": word_accuracy},
    main_metric="accuracy",
    texts=functools.partial(_prediction_files, classes),
    by_class=functools.partial(tag_counts, classes),
    baseline="one tag",
    trivial=lambda examples: [
      [[tag] * len(e.texts) for e in examples] for tag in range(len(classes))
    ],
  )


def _entity_task(classes: tuple[str, ...], fields: Mapping[str, Any]) -> Task:
  classes = tuple(dict.fromkeys([*classes, "O"]))
  outside = classes.index("O")
  return Task(
    **fields,
    head=Tagger(classes),
    metrics={"entity_f1": entity_f1(classes), "sentence_f1": sentence_f1},
    main_metric="entity_f1",
    texts=functools.partial(_prediction_files, classes),
    by_class=functools.partial(entity_counts, classes),
    baseline="all O",
    trivial=lambda examples: [[[outside] * len(e.texts) for e in examples]],
  )


def _prediction_files(
  classes: Sequence[str], examples: Examples, predictions: Answers
) -> dict[str, str]:
  """Returns a file of columns of each set: a word, its tag, and the predicted.

  A word without a prediction has the tag `_`.
  """
  names = {_NOWHERE: "_", **dict(enumerate(classes))}
  out = {}
  for name in examples:
    lines = []
    for sentence, predicted in zip(
      examples[name], predictions[name], strict=True
    ):
      rows = zip(sentence.texts, sentence.label, predicted, strict=True)
      for word, tag, guess in rows:
        # A word of records may have tabs.
        parts = " ".join(word.split()), names[tag], names[guess]
        lines.append("\t".join(parts) + "\n")
      lines.append("\n")
    out[f"{name}.conll"] = "".join(lines)
  return out


def _examples(
  sentences: Iterable[Example], split: str, classes: Sequence[str]
) -> list[Example]:
  """Gives sentences the classes of their labels, and names."""
  indices = {name: index for index, name in enumerate(classes)}
  out = []
  for sentence in sentences:
    if unknown := {*sentence.label} - indices.keys():
      raise UserError(
        f"{sentence.id}: unknown tag {min(unknown)!r:.60}: name all tags with"
        f" labels ({', '.join(classes):.200})"
      )
    label = [indices[tag] for tag in sentence.label]
    out.append(Example(sentence.texts, label, f"{split}_{len(out)}"))
  return out


def _make_task(
  data: sets.Data,
  name: str,
  attention: str,
  options: TagOptions,
  classes: labelled.Classes,
) -> Task:
  if name == sets.OWN:
    return own_task(data, options, classes.names)
  return known_task(data, name, classes.names)


PRESET = Preset(
  "tagging",
  "tags of words: your own sentences, --data is a file of words and tags or of"
  " records, or a folder of files named train, dev and test; or a folder with"
  " CoNLL-2003, Universal NER, OntoNotes, WNUT-17 or PAN-X",
  SCORES | {sets.OWN: (sets.OWN,)},
  _make_task,
  heads=(Tagger,),
  settings=(TagOptions, labelled.Classes),
  in_memory=True,
)


def _is_columns(path: str) -> bool:
  kind = readers.kind(path)
  return kind == ".tsv" or readers.READERS.get(kind) is None


def read_words(
  path: str, columns: Sequence[str], tags: Collection[str]
) -> list[Example] | None:
  """Reads the sentences to tag of a file of columns; None for another file.

  A file of two columns is read as for training.

  Args:
    path: Path to the file.
    columns: Number of the words' column, if the user has chosen it.
    tags: Names of the model's tags.

  Raises:
    UserError: The user must choose a column, or it cannot be read.
  """
  is_packed = path.lower().endswith((*readers.COMPRESSED,))
  if is_packed or not (os.path.isfile(path) and _is_columns(path)):
    return None
  is_conllu = path.endswith(_CONLLU)
  number = "2" if is_conllu and not columns else ",".join(columns)
  form = conll.Columns()
  if number.isdecimal() and int(number):
    word = int(number) - 1
    form = conll.Columns(word, word, 0, comments=True, numbered=is_conllu)
  else:
    # A .tsv without a number has records.
    is_tsv = readers.kind(path) == ".tsv"
    width = 0 if is_tsv else conll.column_count(path, tags)
    if not width:
      return None
    if width != form.width or columns:
      raise UserError(
        f"{path} has columns, not sentences: choose the number of the words'"
        " column (from 1) as text_column"
      )
  return [Example(sentence.texts) for sentence in conll.read_own(path, form)]


def _read_sentences(
  source: sets.Source, options: TagOptions, names: Sequence[str]
) -> Iterator[Example]:
  """Yields a source's sentences, whose labels are the names of tags."""
  if isinstance(source, str) and _is_columns(source):
    for sentence in conll.read_own(source, options.file_columns(source)):
      tags = _tag_names(sentence.label, names, sentence.id)
      yield sentence._replace(label=tags)
    return
  columns = dict(
    zip(options.record_columns, ("tokens_column", "tags_column"), strict=True)
  )
  for place, values in sets.source_records(source, columns):
    words, tags = (_sequence(value, place) for value in values)
    for word in words or [""]:
      if not _are_words([word]):
        raise UserError(f"{place}: the word {word!r:.40} is blank, or not text")
    if len(words) != len(tags):
      raise UserError(f"{place}: {len(words)} words, but {len(tags)} tags")
    yield Example(tuple(words), _tag_names(tags, names, place), place)


def _sequence(value: object, place: str) -> list:
  """Returns a record's words or tags: a sequence, or a text with spaces."""
  if isinstance(value, str):
    # As pandas writes lists to csv.
    if re.match(r"\[\S", value) and value[-1] == "]":
      raise record_values.list_as_text(f"{place}:", value)
    return value.split()
  return value if isinstance(value, list) else [None]


def _are_words(values: Iterable[object]) -> bool:
  return all(isinstance(value, str) and value.strip() for value in values)


def _tag_names(
  tags: Sequence, names: Sequence[str], place: str
) -> tuple[str, ...]:
  """Returns the names of tags, which are texts, or numbers of `names`."""
  numbers = []
  texts = []
  for index, tag in enumerate(tags, start=1):
    if record_values.is_missing(tag) and tag not in names:
      raise UserError(
        f"{place}: word {index} has no tag ({tag!r:.20}): give each word a tag,"
        " or leave out the sentence"
      )
    if isinstance(tag, str):
      is_name = tag in names or not any(map(str.isalnum, tag))
      if tag[-1:] in ",;|" and not is_name:
        raise record_values.list_as_text(f"{place}: the tag", tag)
      text = tag.strip()
      # In csv, and in columns, numbers are text.
      is_number = text.isdecimal() and text not in names and len(text) < 10
      (numbers if is_number else texts).append(int(text) if is_number else text)
    elif type(tag) is int:
      numbers.append(tag)
    else:
      raise UserError(f"{place}: the tag {tag!r:.40} is no text and no number")
  if numbers and texts:
    raise UserError(
      f"{place}: tags are names and numbers: {texts[0]!r:.40}, {numbers[0]}"
    )
  for number in numbers:
    if not 0 <= number < len(names):
      raise UserError(
        f"{place}: the tag {number} has no name: name all tags, from 0, with"
        " labels=O,B-PER,..."
      )
  return tuple(texts or [names[number] for number in numbers])
