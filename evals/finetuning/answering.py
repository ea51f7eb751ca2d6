"""Answering questions with a part of a text, as SQuAD asks them.

Two heads: `Spans` predicts an answer's first and last token and reads a long
text in windows, as BERT does (arXiv 1810.04805, section 4.2); `Inside` tags the
answer's tokens, as the code of arXiv 2507.00994 does.
"""

import collections
import dataclasses
import functools
import math
import pathlib
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import batching
from antlm_jax.evals.finetuning.batching import Example, Rows
from antlm_jax.evals.finetuning.classification import cross_entropy
from antlm_jax.evals.finetuning.tagging import Tags
from antlm_jax.evals.finetuning.task import PerToken, Suite, Task, split_of
from antlm_jax.inference.model import Loaded
from antlm_jax.runtime import files as io
from antlm_jax.settings import setting

_QUESTION = 64  # tokens of a question, at most
# What a token's label says, added up.
_MAY, _FIRST, _LAST = 1, 2, 4

# ------------------------------------------------------------------- the heads


class _Window(NamedTuple):
  """A part of an example's text in a row."""

  example: int
  at: int  # the row's first token of the text
  spans: list[tuple[int, int]]  # where in the text its tokens stand


@dataclasses.dataclass(frozen=True)
class Spans(PerToken):
  """An answer's first and last token; the row's first token is no answer.

  Attributes:
    stride: Tokens from one window of a long text to the next, at most: none is
      left out between two.
    longest: Tokens of an answer, at most.
    may_be_none: Whether a question may have no answer.
    null_score: What no answer's score has to be ahead by.
  """

  stride: int = 128
  longest: int = 30
  may_be_none: bool = True
  null_score: float = 0.0
  kind: ClassVar[str] = "spans"
  num_outputs: ClassVar[int] = 2  # scores of being the first and the last

  def loss(self, outputs, labels, weights) -> jax.Array:
    """The mean of both ends' cross-entropies, in nats."""
    may = (labels & _MAY) > 0
    scores = jnp.where(may[..., None], outputs, -jnp.inf)
    ends = (jnp.argmax((labels & end) > 0, axis=1) for end in (_FIRST, _LAST))
    first, last = (
      cross_entropy(scores[..., i], end, weights) for i, end in enumerate(ends)
    )
    return (first + last) / 2

  def encode(self, loaded, examples, max_length) -> Rows:
    """Makes rows of a question and a window of its text."""
    before, after = loaded.frame
    limit = batching.longest(loaded, max_length)
    most = min(_QUESTION, limit // 2)  # of a question: the rest is for the text
    tokens, labels, windows, cut = [], [], [], 0
    for number, example in enumerate(examples):
      question, text, spans = _encoded(loaded, example)
      cut += len(question) > most
      lead = [*before, *question[:most], *after]
      room = limit - len(lead) - len(after)
      answer = _answer(example, spans)
      stride = min(self.stride, room)
      # The last window reaches the end.
      for start in range(0, max(1, len(text) - room + stride), stride):
        stop = min(start + room, len(text))
        tokens.append([*lead, *text[start:stop], *after])
        windows.append(_Window(number, len(lead), spans[start:stop]))
        labels.append(_labels(len(lead), start, stop, answer, len(after)))
    tokens, lengths = batching.padded(tokens)
    labels, _ = batching.padded(labels)
    return Rows(tokens, lengths, labels, True, examples, windows, cut)

  def decode(self, reduced: np.ndarray, rows: Rows) -> list[str]:
    """Returns the answers' texts; empty where there is none."""
    best = [(-math.inf, "")] * len(rows.examples)
    none = [math.inf] * len(rows.examples)
    for scores, window in zip(reduced, rows.about, strict=True):
      text = rows.examples[window.example].texts[1]
      found = self._best(scores, window, text)
      best[window.example] = max(best[window.example], found)
      null = float(scores[0].sum())
      none[window.example] = min(none[window.example], null)
    return [
      "" if self.may_be_none and null > score + self.null_score else answer
      for (score, answer), null in zip(best, none, strict=True)
    ]

  def _best(self, scores, window: _Window, text: str) -> tuple[float, str]:
    """Returns a window's best answer that is not empty, and its score."""
    if not window.spans:
      return -math.inf, ""
    stop = window.at + len(window.spans)
    first, last = scores[window.at : stop].astype(np.float64).T
    begins, ends = np.array(window.spans).T
    # Row i, column k: from token i to i + k; none of them reaches past the end.
    reach = np.arange(len(first))[:, None] + np.arange(self.longest)
    last = np.append(last, np.full(self.longest, -np.inf))
    ends = np.append(ends, np.zeros(self.longest, ends.dtype))
    # A token is empty where it is but the space that one may begin with.
    said = ends[reach] > begins[:, None]
    both = np.where(said, first[:, None] + last[reach], -np.inf)
    i, k = np.unravel_index(np.argmax(both), both.shape)
    return float(both[i, k]), text[begins[i] : ends[i + k]]


@dataclasses.dataclass(frozen=True)
class Inside(Tags):
  """Whether each token is of the answer, as in arXiv 2507.00994's code.

  The question and its text are one text, which loses what is too long at its
  end; a loss of all tokens, the question's as well. Predictions are tokens'
  indices, the first token's where none is inside, beside those of the answer:
  `{"found": [...], "there": [...]}`. An answer that is lost is at -1, where
  nothing is found: else all that is too long would be right without a token.
  """

  kind: ClassVar[str] = "inside"
  num_outputs: ClassVar[int] = 2  # logits of being outside and inside

  def encode(self, loaded, examples, max_length) -> Rows:
    """Makes a row an example; labels are 0 outside, 1 inside, -1 of padding."""
    parts = []
    for example in examples:
      question, text, spans = _encoded(loaded, example, _TEMPLATE)
      first, last = _answer(example, spans) or (len(text), -1)
      inside = [int(first <= i <= last) for i in range(len(text))]
      parts.append(([*question, *text], [0] * len(question) + inside))
    *made, cut = batching.labelled(loaded, parts, 0, max_length)
    return Rows(*made, True, examples, cut=cut)

  def decode(self, reduced: np.ndarray, rows: Rows) -> list[dict]:
    """Returns the indices of tokens inside, found and there."""
    return [
      {
        "found": _where(found[:length] == 1),
        "there": _where(label == 1, none=-1 if example.label else 0),
      }
      for found, label, length, example in zip(
        reduced, rows.labels, rows.lengths, rows.examples, strict=True
      )
    ]


_TEMPLATE = "Question: {question}\nContext: "


def _where(inside: np.ndarray, none: int = 0) -> list[int]:
  return np.flatnonzero(inside).tolist() or [none]


def _encoded(loaded: Loaded, example: Example, template: str = "{question}"):
  """Returns a question's tokens, its text's, and where those stand in it."""
  question, text = example.texts
  asked = loaded.tokenizer.encode(template.format(question=question))
  ids, spans = loaded.tokenizer.encode_offsets(text)
  return asked.tolist(), ids.tolist(), spans


def _answer(example: Example, spans) -> tuple[int, int] | None:
  """Returns the first answer's first and last token; None if there is none."""
  if not example.label:
    return None
  text, begin = example.label[0]
  end = begin + len(text)
  inside = [i for i, (a, b) in enumerate(spans) if a < end and b > begin]
  return (inside[0], inside[-1]) if inside else None


def _labels(lead: int, start: int, stop: int, answer, after: int) -> list[int]:
  """Returns what each token of a window may be, and is."""
  out = [_MAY] + [0] * (lead - 1) + [_MAY] * (stop - start) + [0] * after
  whole = answer and start <= answer[0] and answer[1] < stop
  first, last = (lead + i - start for i in answer) if whole else (0, 0)
  out[first] |= _FIRST
  out[last] |= _LAST
  return out


# --------------------------------------------------------------------- metrics

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> list[str]:
  """Returns an answer's words, without case, punctuation and articles."""
  plain = text.lower().translate(_NO_PUNCTUATION)
  return _ARTICLES.sub(" ", plain).split()


def word_f1(found: str, there: str) -> float:
  """F1 of two answers' words; of no words, whether both have none."""
  x, y = normalized(found), normalized(there)
  if not x or not y:
    return float(x == y)
  both = sum((collections.Counter(x) & collections.Counter(y)).values())
  return 2 * both / (len(x) + len(y))


def same(found: str, there: str) -> float:
  """Whether two answers are the same, normalized."""
  return float(normalized(found) == normalized(there))


def best_of(
  score: Callable[[str, str], float],
  predictions: Sequence[str],
  labels: Sequence[Sequence],
) -> float:
  """The mean of scores by SQuAD's rules: each that of the best of the answers.

  A label is the answers, each `[text, begin]`; none are the empty answer.
  """
  each = (
    max(score(found, text) for text, _ in label or [["", 0]])
    for found, label in zip(predictions, labels, strict=True)
  )
  return float(np.mean(list(each)))


def index_f1(predictions: Sequence[dict], labels: Sequence) -> float:
  """The mean F1 of tokens' indices, as arXiv 2507.00994's code; see `Inside`.

  The labels are in the predictions: what a token is depends on the model.
  """
  del labels
  each = [(set(p["found"]), set(p["there"])) for p in predictions]
  return float(np.mean([2 * len(x & y) / (len(x) + len(y)) for x, y in each]))


# ----------------------------------------------------------------------- tasks


@dataclasses.dataclass(frozen=True)
class Options:
  """The settings of answering that a command offers."""

  answers: str = setting(
    "spans", "how they are predicted", choices=("spans", "inside")
  )
  stride: int = setting(128, "tokens from a window to the next", least=1)
  longest: int = setting(30, "tokens of an answer, at most", least=1)
  null_score: float = setting(0.0, "what no answer has to be ahead by")


# Each set's files; ReCoRD's in the same form.
FILES = {
  "squad": ("train-v1.1.json", "dev-v1.1.json"),
  "squad2": ("train-v2.0.json", "dev-v2.0.json"),
  "record": ("record-train.json", "record-dev.json"),
}
SCORES = {name: (f"{name}-dev", f"{name}-test") for name in FILES}


def make(folder, name: str, options: Options, attention: str) -> Task:
  """Makes a task, a key of `FILES`, of what is found in a folder.

  Of its training set a twentieth is the set that is chosen on; its own
  validation set is the test.

  Raises:
    UserError: if a file of it is absent.
  """
  paths = [pathlib.Path(folder) / file for file in FILES[name]]
  for path in paths:
    if not path.is_file():
      raise UserError(f"{name} is absent: {path} is not there")
  train, test = (functools.partial(read, path) for path in paths)
  return Task(
    name=name,
    load=functools.partial(split_of, train=train, test=test),
    evaluations=SCORES[name],
    files=tuple(paths),
    **_KINDS[options.answers](name, options),
  )


def _spans(name: str, options: Options) -> dict[str, Any]:
  head = Spans(
    options.stride, options.longest, name != "squad", options.null_score
  )
  return {
    "head": head,
    "metrics": {
      "f1": functools.partial(best_of, word_f1),
      "exact_match": functools.partial(best_of, same),
    },
    "main_metric": "f1",
    "baseline": "no answer",
    "trivial": lambda those: [[""] * len(those)],
    "right": lambda found, label: best_of(same, [found], [label]) == 1,
  }


def _inside(name: str, options: Options) -> dict[str, Any]:
  nothing = {"found": [0], "there": [1]}
  return {
    "head": Inside(),
    "metrics": {"index_f1": index_f1},
    "main_metric": "index_f1",
    "baseline": "no token",
    "trivial": lambda those: [
      [nothing if e.label else nothing | {"there": [0]} for e in those]
    ],
    "right": lambda found, label: found["found"] == found["there"],
  }


_KINDS = {"spans": _spans, "inside": _inside}
SUITE = Suite("question answering", SCORES, make)


def read(path: pathlib.Path) -> list[Example]:
  """Reads a file of SQuAD's form, 1.1 or 2.0.

  Raises:
    UserError: if it cannot be read, or an answer is not in its text.
  """
  data = io.read_json(path, "questions")
  out = []
  try:
    for article in data["data"]:
      for paragraph in article["paragraphs"]:
        for asked in paragraph["qas"]:
          out.append(_example(asked, paragraph["context"], path))
  except (AttributeError, KeyError, TypeError) as error:
    raise UserError(
      f"{path} is not of SQuAD's form, at question {len(out) + 1}: {error!r}"
    ) from error
  return out


def _example(asked: dict, text: str, path: pathlib.Path) -> Example:
  question, where = asked["question"], f"{path}: question {asked['id']}"
  if not isinstance(question, str) or not isinstance(text, str):
    raise UserError(f"{where}: it, or its text, is not text")
  answers = [] if asked.get("is_impossible") else asked["answers"]
  label = []
  for answer in answers:
    found, begin = answer["text"], answer["answer_start"]
    there = text[begin : begin + len(found)] if begin >= 0 else ""
    if not found or there != found:
      raise UserError(
        f"{where}: the answer {found!r:.60} is not in its text at character"
        f" {begin}"
      )
    label.append([found, begin])
  return Example((question, text), label, str(asked["id"]))
