"""Embedders of one's own texts: pairs that belong together, or texts alone.

`pairs` learns from records of a query, what it is to find and, if there are,
texts that it is not to (InfoNCE, with the others of the batch). `simcse` has
text alone: each is its own pair, and differs by what dropout leaves of it
(unsupervised SimCSE, arXiv 2104.08821). What is held out is a ranking: of the
pairs, or of the texts' second halves by their first.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from antlm_jax.data import readers, text_files
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import own, retrieval
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.task import Suite, Task
from antlm_jax.settings import setting


@dataclasses.dataclass(frozen=True)
class Options:
  """The settings of embedders that a command offers."""

  query_column: str = setting("query", "own pairs: of what asks")
  positive_column: str = setting("positive", "own pairs: of what it is to find")
  negative_column: tuple[str, ...] = setting(
    (), "own pairs: of what it is not to find, if there is"
  )
  query_prompt: str = setting("", "stands before each query, such as 'query: '")
  document_prompt: str = setting("", "stands before each other text")


def pairs(data: str, name: str, options, attention: str) -> Task:
  """Makes a task of records of texts that belong together.

  Raises:
    UserError: if there are none, one has no text, or not as many as the others.
  """
  corpus = text_files.find([data])
  sets = {
    split: list(_records(sources, options))
    for split in ("train", "dev", "test")
    if (sources := getattr(corpus, split))
  }
  if len({len(one.texts) for one in sets["train"]}) > 1:
    raise UserError(
      f"{data}: some records have more texts in --negative_column than others"
    )
  return _task(data, sets, _asked, options)


def simcse(data: str, name: str, options, attention: str) -> Task:
  """Makes a task of texts: lines, or records' --text_column.

  Raises:
    UserError: if there are none, or several text columns.
  """
  if len(options.text_column) > 1:
    raise UserError("simcse reads one --text_column")
  reading = {"documents": "line", "column": options.text_column[0]}
  corpus = text_files.find([data], **reading)
  sets = {
    split: [Example((piece.text,) * 2) for piece in corpus.pieces(split)]
    for split in ("train", "dev")
    if getattr(corpus, split)
  }
  return _task(data, sets, _halves, options)


SUITES = {
  "pairs": Suite("pairs", {"own": ("own",)}, pairs),
  "simcse": Suite(
    "simcse",
    {"own": ("own",)},
    simcse,
    defaults={"own": {"encoder_dropout": 0.1, "lrs": (3e-5,), "epochs": 1}},
  ),
}


def _task(data: str, sets: dict[str, list[Example]], asked, options) -> Task:
  """Makes a task that learns from examples, and is asked for what they hold."""
  return Task(
    **own.of_sets(data, sets, asked),
    head=retrieval.Towers(
      options.temperature, (options.query_prompt, options.document_prompt)
    ),
    metrics={"ndcg": retrieval.METRICS["ndcg"], "accuracy": _accuracy},
    main_metric="ndcg",
    baseline="a random order",
    trivial=retrieval.random_order,
    references={"BM25": retrieval.by_words},
    right=retrieval.first_is_right,
    also=("accuracy",),
  )


def _accuracy(predictions, labels) -> float:
  """Share of queries whose first document is one that they ask for."""
  return float(np.mean([*map(retrieval.first_is_right, predictions, labels)]))


def _records(sources: Sequence[str], options) -> Iterator[Example]:
  """Yields (query, positive, negatives ...); a value may be a list of texts."""
  columns = {options.query_column: "query_column"}
  columns |= {options.positive_column: "positive_column"}
  columns |= dict.fromkeys(options.negative_column, "negative_column")
  for source in sources:
    for where, values in readers.records(source, columns):
      lists = [v if isinstance(v, list) else [v] for v in values]
      texts = [text for one in lists for text in one]
      if not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(f"{source}, {where}: no text to read")
      if len(lists[0]) != 1 or len(lists[1]) != 1:
        raise UserError(f"{source}, {where}: not one query and one positive")
      yield Example(tuple(texts), id=where)


def _asked(examples: Sequence[Example]) -> list[Example]:
  """Makes queries of pairs, and documents of all their other texts."""
  wanted = collections.defaultdict(dict)
  for query, positive, *_ in (example.texts for example in examples):
    wanted[query][positive] = 1.0
  texts = dict.fromkeys(text for e in examples for text in e.texts[1:])
  names = {text: f"d{i}" for i, text in enumerate(texts)}
  queries = [
    Example((query,), {names[text]: 1.0 for text in found}, f"q{i}")
    for i, (query, found) in enumerate(wanted.items())
  ]
  return queries + [Example((t,), None, name) for t, name in names.items()]


def _halves(examples: Sequence[Example]) -> list[Example]:
  """Makes a query of the first half of each text, which is to find the rest."""
  words = [example.texts[0].split() for example in examples]
  halves = [
    (" ".join(one[: len(one) // 2]), " ".join(one[len(one) // 2 :]))
    for one in words
    if len(one) > 1
  ]
  return _asked([Example(both) for both in halves])
