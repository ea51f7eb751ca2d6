"""Question answering with a part of a text, as in SQuAD.

The head `Spans` predicts an answer's first and last token, and reads a long
text in windows, as BERT does (arXiv 1810.04805, section 4.2). `Inside` tags the
answer's tokens, as the code of arXiv 2507.00994 does.
"""

import collections
import dataclasses
import functools
import itertools
import math
import pathlib
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax.data import readers
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import batching, record_values, sets
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.evals.finetuning.classification import class_loss
from antlm_jax.evals.finetuning.tagging import PerToken, Tags
from antlm_jax.evals.finetuning.task import (
  Prediction,
  Preset,
  Ratio,
  Task,
  mean_of,
)
from antlm_jax.inference.model import Loaded
from antlm_jax.runtime import files as io
from antlm_jax.settings import Section, setting

_QUESTION = 64  # largest number of tokens of a question
_COLUMNS = "question", "context"
# Bits of a token's label: it may be an answer's end, is the first, is the last.
_MAY = 1
_FIRST = 2
_LAST = 4


class _Window(NamedTuple):
  """Part of an example's text in a row."""

  example: int  # index
  offset: int  # index of its first token in the row
  spans: list[tuple[int, int]]  # characters of its tokens in the text


@dataclasses.dataclass(frozen=True)
class Spans(PerToken):
  """An answer's first and last token; the row's first token means no answer."""

  # Tokens from one window of a long text to the next; fewer if a window is
  # shorter, so that windows leave out no token.
  stride: int = 128
  longest: int = 30  # largest number of tokens in an answer
  may_be_none: bool = True  # whether a question may have no answer
  null_score: float = 0.0  # margin by which the score of no answer must win
  kind: ClassVar[str] = "spans"
  evaluating: ClassVar[tuple[str, ...]] = "stride", "longest", "null_score"
  columns: ClassVar[tuple[str, ...]] = _COLUMNS
  num_outputs: ClassVar[int] = 2  # scores of being the first and the last

  def loss(self, outputs, labels, weights) -> jax.Array:
    """Returns the mean of both ends' cross-entropies, in nats."""
    may_be_end = (labels & _MAY) > 0
    scores = jnp.where(may_be_end[..., None], outputs, -jnp.inf)
    ends = (jnp.argmax((labels & end) > 0, axis=1) for end in (_FIRST, _LAST))
    first, last = (
      class_loss(scores[..., i], end, weights) for i, end in enumerate(ends)
    )
    return (first + last) / 2

  def encode(self, loaded, examples, max_length) -> ExampleRows:
    """Makes rows of a question and a window of its text each."""
    before, after = loaded.frame
    limit = batching.longest(loaded, max_length)
    question_limit = min(_QUESTION, limit // 2)
    tokens = []
    labels = []
    windows = []
    cut = 0
    for number, example in enumerate(examples):
      question, text, spans = _encode_question(loaded, example)
      cut += len(question) > question_limit
      lead = [*before, *question[:question_limit], *after]
      room = limit - len(lead) - len(after)
      answer = _answer(example, spans)
      stride = min(self.stride, room)
      # The last window reaches the text's end.
      for start in range(0, max(1, len(text) - room + stride), stride):
        stop = min(start + room, len(text))
        tokens.append([*lead, *text[start:stop], *after])
        windows.append(_Window(number, len(lead), spans[start:stop]))
        labels.append(
          _window_labels(len(lead), start, stop, answer, len(after))
        )
    tokens, lengths = batching.pad_rows(tokens)
    labels, _ = batching.pad_rows(labels)
    cut = cut, len(examples)
    return ExampleRows(tokens, lengths, labels, True, examples, windows, cut)

  def decode(self, reduced: np.ndarray, rows: ExampleRows) -> list[str]:
    """Returns the answers' texts; an empty text is no answer."""
    answers, margins = self._margins(reduced, rows)
    return [
      "" if self.may_be_none and margin > self.null_score else answer
      for answer, margin in zip(answers, margins, strict=True)
    ]

  def further_scores(self, reduced, rows) -> dict[str, float]:
    """Returns the highest F1 over all values of `null_score`, and that value.

    They are best_f1 and best_f1_thresh of SQuAD 2.0's evaluation script. If
    every question must have an answer, the result is empty.
    """
    if not self.may_be_none:
      return {}
    answers, margins = self._margins(reduced, rows)
    labels = [example.label for example in rows.examples]
    # Sum of F1 if all predictions are empty.
    unanswered_sum = sum(not label for label in labels)
    # Change of this sum by each prediction that is not empty.
    gains = [
      closest(word_f1, answer, label) - (not label)
      for answer, label in zip(answers, labels, strict=True)
    ]
    best_sum, threshold = _best_threshold(margins, gains, unanswered_sum)
    return {"best_f1": best_sum / len(labels), "best_null_score": threshold}

  def _margins(self, reduced, rows) -> tuple[list[str], list[float]]:
    """Returns the best answers, and their margins.

    A margin is the score of no answer minus that of the best answer.
    """
    best = [(-math.inf, "")] * len(rows.examples)
    none = [math.inf] * len(rows.examples)
    for scores, window in zip(reduced, rows.origins, strict=True):
      text = rows.examples[window.example].texts[1]
      answer = self._best(scores, window, text)
      best[window.example] = max(best[window.example], answer)
      null = float(scores[0].sum())
      none[window.example] = min(none[window.example], null)
    margins = [
      null - score for (score, _), null in zip(best, none, strict=True)
    ]
    return [answer for _, answer in best], margins

  def prediction_fields(self, prediction: str) -> dict[str, str]:
    """Returns the answer."""
    return {"answer": prediction}

  def _best(self, scores, window: _Window, text: str) -> tuple[float, str]:
    """Returns the score of a window's best nonempty answer, and its text."""
    if not window.spans:
      return -math.inf, ""
    stop = window.offset + len(window.spans)
    first, last = scores[window.offset : stop].astype(np.float64).T
    begins, ends = np.array(window.spans).T
    # Row i, column k: tokens i to i + k, of which none is past the end.
    reach = np.arange(len(first))[:, None] + np.arange(self.longest)
    last = np.append(last, np.full(self.longest, -np.inf))
    ends = np.append(ends, np.zeros(self.longest, ends.dtype))
    # A token is empty if it is only the space that a word may begin with.
    is_nonempty = ends[reach] > begins[:, None]
    sums = np.where(is_nonempty, first[:, None] + last[reach], -np.inf)
    i, k = np.unravel_index(np.argmax(sums), sums.shape)
    return float(sums[i, k]), text[begins[i] : ends[i + k]]


@dataclasses.dataclass(frozen=True)
class Inside(Tags):
  """Whether each token is in the answer, as in arXiv 2507.00994's code.

  The question and its text are one text, which is cut at its end. The loss
  includes the question's tokens.

  A prediction is `{"found": [...], "there": [...], "answer": ""}`. `found` has
  the indices of the predicted tokens, and `there` those of the true answer.
  Index 0 means no token. Index -1 means an answer that was cut off; `found`
  never has it. `answer` is the text of the longest run of predicted tokens.
  """

  kind: ClassVar[str] = "inside"
  columns: ClassVar[tuple[str, ...]] = _COLUMNS
  num_outputs: ClassVar[int] = 2  # logits of being outside and inside

  def encode(self, loaded, examples, max_length) -> ExampleRows:
    """Makes a row of each example; labels are 1 inside the answer, else 0."""
    parts = []
    places = []  # index of the text's first token, and its tokens' characters
    for example in examples:
      question, text, spans = _encode_question(loaded, example, _TEMPLATE)
      places.append((len(loaded.frame[0]) + len(question), spans))
      first, last = _answer(example, spans) or (len(text), -1)
      inside = [int(first <= i <= last) for i in range(len(text))]
      parts.append(([*question, *text], [0] * len(question) + inside))
    tokens, lengths, labels, cut = batching.frame_labelled(
      loaded, parts, 0, max_length
    )
    return ExampleRows(tokens, lengths, labels, True, examples, places, cut)

  def predictions(self, outputs, rows) -> list[Prediction]:
    """Returns the longest run of tokens found in each text."""
    answers = _longest_runs(np.asarray(self.reduce(outputs)), rows)
    return [
      Prediction(texts=example.texts, answer=answer)
      for example, answer in zip(rows.examples, answers, strict=True)
    ]

  def decode(self, reduced: np.ndarray, rows: ExampleRows) -> list[dict]:
    """Returns a prediction for each row, as `Inside` documents it."""
    answers = _longest_runs(reduced, rows)

    def token_indices(is_inside: np.ndarray, placeholder: int = 0) -> list[int]:
      return np.flatnonzero(is_inside).tolist() or [placeholder]

    # If an example has an answer but no token of it, the answer was cut off.
    return [
      {
        "found": token_indices(classes[:length] == 1),
        "there": token_indices(labels == 1, -1 if example.label else 0),
        "answer": answer,
      }
      for classes, labels, length, example, answer in zip(
        reduced, rows.labels, rows.lengths, rows.examples, answers, strict=True
      )
    ]


def _longest_runs(reduced: np.ndarray, rows: ExampleRows) -> Iterator[str]:
  """Yields the text of each row's longest run of tokens that are inside."""
  for tags, example, (lead, spans) in zip(
    reduced, rows.examples, rows.origins, strict=True
  ):
    inside = tags[lead : lead + len(spans)] == 1
    places = itertools.groupby(range(len(inside)), inside.__getitem__)
    runs = [list(run) for is_inside, run in places if is_inside]
    run = max(runs, key=len, default=[])
    text = example.texts[1]
    yield text[spans[run[0]][0] : spans[run[-1]][1]].strip() if run else ""


_TEMPLATE = "Question: {question}\nContext: "


def _encode_question(
  loaded: Loaded, example: Example, template: str = "{question}"
):
  """Returns a question's tokens, its text's, and the latter's characters."""
  if len(example.texts) != 2:
    raise UserError(
      f"{' '.join(example.texts)!r:.60} is not a question and its text: give"
      " both as a tuple"
    )
  question, text = example.texts
  question = template.format(question=question.strip())
  question_ids = loaded.tokenizer.encode(question)
  # White space at the ends of a text is no text; offsets count it.
  ids, spans = loaded.tokenizer.encode_offsets(text.strip())
  leading = len(text) - len(text.lstrip())
  spans = [(start + leading, stop + leading) for start, stop in spans]
  return question_ids.tolist(), ids.tolist(), spans


def _answer(example: Example, spans) -> tuple[int, int] | None:
  """Returns the first answer's first and last token; None if there is none."""
  if not example.label:
    return None
  text, begin = example.label[0]
  end = begin + len(text)
  inside = [i for i, (a, b) in enumerate(spans) if a < end and b > begin]
  return (inside[0], inside[-1]) if inside else None


def _window_labels(
  lead: int, start: int, stop: int, answer, after: int
) -> list[int]:
  """Returns the labels of a window's tokens."""
  out = [_MAY] + [0] * (lead - 1) + [_MAY] * (stop - start) + [0] * after
  is_inside = answer and start <= answer[0] and answer[1] < stop
  first, last = (lead + i - start for i in answer) if is_inside else (0, 0)
  out[first] |= _FIRST
  out[last] |= _LAST
  return out


def normalized(text: str) -> list[str]:
  """Returns an answer's words, without case, punctuation and articles."""
  plain = text.lower().translate(str.maketrans("", "", string.punctuation))
  return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def word_f1(predicted: str, true: str) -> float:
  """Returns the F1 of two answers' words, or whether both have no words."""
  x = normalized(predicted)
  y = normalized(true)
  if not x or not y:
    return float(x == y)
  shared = collections.Counter(x) & collections.Counter(y)
  return 2 * shared.total() / (len(x) + len(y))


def same_answer(predicted: str, true: str) -> bool:
  """Whether two answers are equal when normalized."""
  return normalized(predicted) == normalized(true)


def _best_threshold(
  margins: Sequence[float], gains: Sequence[float], base: float
) -> tuple[float, float]:
  """Returns the highest sum over all thresholds, and its threshold.

  The sum is `base`, plus the gains whose margin is at most the threshold.
  """
  order = np.argsort(margins, kind="stable")
  sorted_margins = np.minimum(
    np.array(margins)[order], np.finfo(np.float32).max
  )
  # Element i includes the gains of the i smallest margins.
  sums = np.cumsum([base, *np.array(gains)[order]])
  middles = (sorted_margins[1:] + sorted_margins[:-1]) / 2
  thresholds = np.array([sorted_margins[0] - 1, *middles, sorted_margins[-1]])
  # No threshold separates equal margins.
  is_tie = [False, *(sorted_margins[1:] == sorted_margins[:-1]), False]
  best = int(np.argmax(np.where(is_tie, -np.inf, sums)))
  return float(sums[best]), float(thresholds[best])


def closest(
  score: Callable[[str, str], float], predicted: str, label: Sequence
) -> float:
  """Returns the score with the closest answer, by SQuAD's rules.

  A label is a list of answers `[text, begin]`; none means the empty answer.
  """
  return max(score(predicted, text) for text, _ in label or [["", 0]])


def _mean_where(
  has_answer: bool, score: Callable, predictions, labels
) -> float:
  """Returns the mean score of questions with, or without, an answer.

  It is 0 if there are none.
  """
  pairs = zip(predictions, labels, strict=True)
  scores = [score(*pair) for pair in pairs if bool(pair[1]) == has_answer]
  return float(np.mean(scores)) if scores else 0.0


def _mean_of_text(score: Callable) -> Ratio:
  """Makes the mean score of the answers' texts that `Inside` predicts."""
  return mean_of(lambda prediction, label: score(prediction["answer"], label))


def index_f1(prediction: dict, label: Any) -> float:
  """Returns the F1 of tokens' indices, as in arXiv 2507.00994's code.

  `Inside` predicts both sides, because tokens depend on the model.
  """
  predicted_indices = set(prediction["found"])
  true_indices = set(prediction["there"])
  shared_indices = predicted_indices & true_indices
  total = len(predicted_indices) + len(true_indices)
  return 2 * len(shared_indices) / total


@dataclasses.dataclass(frozen=True)
class AnsweringOptions(Section):
  """Command-line options of answering."""

  answers: str = setting(
    "spans",
    "Head that predicts answers: spans finds both ends, inside tags tokens",
    choices=("spans", "inside"),
  )
  stride: int = setting(
    128, "Number of tokens from one window of a long text to the next", least=1
  )
  longest: int = setting(30, "Largest number of tokens in an answer", least=1)
  null_score: float = setting(
    0.0, "Margin by which the score of no answer must exceed the best answer's"
  )


# Training and test files; those of ReCoRD are in SQuAD's form.
FILES = {
  "squad": ("train-v1.1.json", "dev-v1.1.json"),
  "squad2": ("train-v2.0.json", "dev-v2.0.json"),
  "record": ("record-train.json", "record-dev.json"),
}
SCORES = sets.dev_and_test(FILES)


def make_answering_task(
  data: sets.Data, name: str, attention: str, options: AnsweringOptions
) -> Task:
  """Makes a task of `FILES`, or of the user's own questions.

  The dev set of a known task is a twentieth of the training set, and the test
  set is SQuAD's validation set.
  """
  if name != sets.OWN:
    layout = dict(zip(("train", "test"), FILES[name], strict=True))
    paths = sets.find_set_files(data, name, layout)
    fields = sets.known_task_fields(
      name, paths, lambda path, set_name: read_squad(path)
    )
    return _question_task(name != "squad", options, **fields)
  examples = sets.read_own_set(data, _question_examples, any_kind=True)
  labels = [e.label for e in itertools.chain(*examples.values())]
  if not labels:
    raise UserError(f"{sets.path_or_name(data)} holds no questions")
  may_be_none = not all(labels)

  def kind(example: Example) -> list[str]:
    return ["an answer" if example.label else "no answer"]

  # A text is in one part, with all its questions.
  fields = sets.own_task_fields(
    data,
    examples,
    key=lambda example: example.texts[1:],
    classes_of=kind if may_be_none else None,
  )
  return _question_task(may_be_none, options, **fields)


def _question_task(
  may_be_none: bool, options: AnsweringOptions, **fields
) -> Task:
  """Makes a task; `may_be_none` says whether some questions have no answer."""
  f1 = functools.partial(closest, word_f1)
  exact = functools.partial(closest, same_answer)
  if options.answers == "inside":
    no_token = {"found": [0], "answer": ""}
    return Task(
      **fields,
      head=Inside(),
      metrics={
        "index_f1": mean_of(index_f1),
        "f1": _mean_of_text(f1),
        "exact_match": _mean_of_text(exact),
      },
      main_metric="index_f1",
      also=("f1", "exact_match"),
      baseline="no token",
      trivial=lambda examples: [
        [no_token | {"there": [int(bool(e.label))]} for e in examples]
      ],
    )
  kinds = {}
  if may_be_none:
    kinds = {
      "has_answer_f1": functools.partial(_mean_where, True, f1),
      "has_answer_exact_match": functools.partial(_mean_where, True, exact),
      "no_answer_exact_match": functools.partial(_mean_where, False, exact),
    }
  return Task(
    **fields,
    head=Spans(
      options.stride, options.longest, may_be_none, options.null_score
    ),
    metrics={"f1": mean_of(f1), "exact_match": mean_of(exact), **kinds},
    main_metric="f1",
    also=("exact_match", *kinds),
    baseline="no answer",
    trivial=lambda examples: [[""] * len(examples)],
  )


PRESET = Preset(
  "question answering",
  "answers in a text: your own files in SQuAD's form, --data is one, or a"
  " folder of some named train, dev and test; or a folder with SQuAD 1.1, 2.0"
  " or ReCoRD",
  SCORES | {sets.OWN: (sets.OWN,)},
  make_answering_task,
  heads=(Spans, Inside),
  settings=(AnsweringOptions,),
  in_memory=True,
)


def read_squad(path: str | pathlib.Path) -> list[Example]:
  """Reads a file of SQuAD's form, 1.1 or 2.0.

  Raises a UserError if an answer is not in its text.
  """
  return _squad_examples(path, io.read_json(path, "questions"))


def _squad_examples(path: str | pathlib.Path, data: Any) -> list[Example]:
  out = []
  try:
    for article in data["data"]:
      for paragraph in article["paragraphs"]:
        for question in paragraph["qas"]:
          place = f"{path}: question {question['id']}"
          answers = _possible(question, place)
          texts = question["question"], paragraph["context"]
          out.append(_example(texts, answers, place, str(question["id"])))
  except (AttributeError, KeyError, TypeError) as error:
    raise UserError(
      f"{path} is not of SQuAD's form, at question {len(out) + 1}: {error!r}"
    ) from error
  return out


def _possible(question: Mapping[str, Any], place: str) -> object:
  """Returns a question's answers, none if it is impossible.

  Raises a UserError if `is_impossible` contradicts the answers.
  """
  value = question.get("is_impossible")
  impossible = record_values.truth(value)
  if impossible is None and value is not None:
    raise UserError(
      f"{place}: is_impossible is {value!r:.40}: give true or false"
    )
  answers = question.get("answers") if impossible else question["answers"]
  has_answers = answers not in (None, "") and bool(_answers(answers, place))
  if impossible is not None and impossible == has_answers:
    has = "has answers" if has_answers else "has no answer"
    raise UserError(
      f"{place}: is_impossible is {str(impossible).lower()}, but the question"
      f" {has}: correct one of the two"
    )
  return [] if impossible else answers


def _question_examples(source: sets.Source) -> Iterator[Example]:
  """Yields the examples of a source, in SQuAD's form or records.

  The key `data` of a JSON file may have records, as run_qa.py of transformers
  reads them.
  """
  kind = readers.kind(source) if isinstance(source, str) else ""
  if kind is None:
    yield from read_squad(source)
    return
  if kind == ".json":
    _, value = next(readers.mappings(source, {}), ("", None))
    data = value.get("data") if isinstance(value, dict) else None
    first = data[0] if isinstance(data, list) and data else None
    if isinstance(first, dict) and "context" in first:
      source = sets.InMemory(source, data)
    elif data is not None:
      yield from _squad_examples(source, value)
      return
  columns = dict.fromkeys((*_COLUMNS, "answers"), "")
  for place, (*texts, answers, start, impossible) in sets.source_records(
    source, columns, optional=("answer_start", "is_impossible")
  ):
    if isinstance(start, str):  # of csv; blank for none
      number = record_values.finite_number(start)
      start = start.strip() or None if number is None else number
    texts_only = answers if isinstance(answers, list) else [answers]
    if start is not None and all(isinstance(x, str) for x in texts_only):
      answers = {"text": answers, "answer_start": start}
    question = {"answers": answers, "is_impossible": impossible}
    answers = _possible(question, place)
    yield _example(tuple(texts), answers, place, place.rpartition(", ")[2])


def _example(
  texts: tuple[str, str], answers: object, place: str, name: str
) -> Example:
  """Makes an example of the answers in one of the forms of `_answers`."""
  texts = record_values.plain_python([*texts], place)
  answers = record_values.plain_python(answers, place)
  if not all(isinstance(text, str) for text in texts):
    raise UserError(f"{place}: it, or its text, is not text")
  for text, column in zip(texts, _COLUMNS, strict=True):
    if not text.strip():
      raise UserError(f"{place}: the {column} is blank: leave out the question")
  label = [
    [text, _answer_start(text, start, texts[1], place)]
    for text, start in _answers(answers, place)
  ]
  return Example(tuple(texts), label, name)


def _answers(answers: object, place: str) -> list[tuple[str, object]]:
  """Returns each answer's text, and its start, or None if none is given.

  They are a text, a mapping `{"text": ..., "answer_start": ...}`, a list of
  these, or a mapping of lists, as Hugging Face's datasets have them.
  """
  if isinstance(answers, Mapping) and isinstance(answers.get("text"), list):
    texts = answers["text"]
    starts = answers.get("answer_start")
    starts = [None] * len(texts) if starts is None else starts
    if not isinstance(starts, list) or len(starts) != len(texts):
      raise UserError(f"{place}: {len(texts)} answers, but starts {starts!r}")
    answers = [
      {"text": text, "answer_start": start}
      for text, start in zip(texts, starts, strict=True)
    ]
  out = []
  for answer in answers if isinstance(answers, list) else [answers]:
    fields = answer if isinstance(answer, Mapping) else {"text": answer}
    text = fields.get("text")
    if not isinstance(text, str) or not text.strip():
      raise UserError(
        f"{place}: the answer {text!r:.40} is no text; a question without an"
        " answer has an empty list of answers"
      )
    out.append((text, fields.get("answer_start")))
  return out


def _answer_start(answer: str, start: object, text: str, place: str) -> int:
  """Returns the first character of an answer, which it finds if it is None."""
  name = f"{place}: the answer {answer!r:.60}"
  if start is None:
    begin = text.find(answer)
    if begin < 0:
      raise UserError(f"{name} is not in its text")
    if text.find(answer, begin + 1) >= 0:
      raise UserError(
        f"{name} is in its text more than once: give the character where it"
        " starts, as answer_start"
      )
    return begin
  is_integer = isinstance(start, float) and start.is_integer()
  begin = int(start) if is_integer else start
  if not isinstance(begin, int) or isinstance(begin, bool):
    raise UserError(f"{name} starts at {start!r:.40}: give a whole number")
  if begin < 0 or not text.startswith(answer, begin):
    raise UserError(f"{name} is not in its text at character {begin}")
  return begin
