"""Embedders of your own texts: positive pairs, or texts alone.

`pairs_task` learns from records of a query, a positive text and maybe negatives
(InfoNCE, with the other texts of the batch as negatives, too). `simcse` learns
from texts alone: a positive pair is the same text twice, with different dropout
(unsupervised SimCSE, arXiv 2104.08821). In the held-out tenth, a query has to
find its positive text, or the first half of a text the second half.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from antlm_jax.data import readers
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import labelled, ranking, record_values, sets
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.task import Preset, Task, mean_of
from antlm_jax.settings import Section, setting


@dataclasses.dataclass(frozen=True)
class EmbedderOptions(Section):
  """Command-line options of embedders."""

  query_column: str = setting("query", "Column of the query")
  positive_column: str = setting(
    "positive", "Column of the positive text, which the query should find"
  )
  negative_column: tuple[str, ...] = setting(
    (), "Columns of negative texts, separated by commas"
  )
  query_prompt: str = setting("", "Prefix of each query, such as 'query: '")
  document_prompt: str = setting("", "Prefix of each other text")


def pairs_task(
  data: sets.Data,
  name: str,
  attention: str,
  towers: ranking.RetrievalOptions,
  options: EmbedderOptions,
) -> Task:
  """Makes a task of records of a query, its positives and maybe negatives.

  Raises a UserError if there are no records, a record lacks a text, or records
  differ in their number of texts.
  """
  columns = {
    options.query_column: "query_column",
    options.positive_column: "positive_column",
    **dict.fromkeys(options.negative_column, "negative_column"),
  }
  if len(columns) < 2 + len(options.negative_column):
    raise UserError(
      f"query_column={options.query_column},"
      f" positive_column={options.positive_column} and"
      f" negative_column={','.join(options.negative_column)} must differ"
    )
  # A folder in BEIR's form may have pairs next to it, named train.
  folder = pathlib.Path(sets.path_or_name(data))
  if (folder / "qrels").is_dir() and not any(folder.glob("train.*")):
    raise UserError(
      f"{folder} is in BEIR's form, with corpus, queries and qrels: give"
      " preset=retrieval"
    )
  examples = sets.read_own_set(data, functools.partial(_pair_records, columns))
  if len({len(example.texts) for example in examples.get("train", ())}) > 1:
    raise UserError(
      f"{sets.path_or_name(data)}: some records have more texts in"
      " negative_column than others"
    )
  return _embedding_task(data, examples, _pair_queries, towers, options)


def simcse(
  data: sets.Data,
  name: str,
  attention: str,
  towers: ranking.RetrievalOptions,
  options: EmbedderOptions,
  files: labelled.Columns,
) -> Task:
  """Makes a task of texts: lines, or records' --text_column.

  Raises a UserError if there are none, or several text columns.
  """
  column = files.text_column
  if len(column) != 1:
    raise UserError("simcse reads one text_column")

  def read(source: sets.Source) -> Iterator[Example]:
    for (text,) in sets.source_texts(source, column):
      if text := text.strip():
        yield Example((text, text))

  examples = sets.read_own_set(data, read)
  return _embedding_task(
    data, examples, _halves, towers, options, columns=column
  )


PAIRS = Preset(
  "pairs",
  "an embedder of your own pairs: a query, a positive text and maybe negatives;"
  " held out as for classification",
  {"own": ("own",)},
  pairs_task,
  settings=(ranking.RetrievalOptions, EmbedderOptions),
  in_memory=True,
)
SIMCSE = Preset(
  "simcse",
  "an embedder of your own texts, lines or records' --text_column; a pair is"
  " one text twice, with different dropout",
  {"own": ("own",)},
  simcse,
  settings=(ranking.RetrievalOptions, EmbedderOptions, labelled.Columns),
  defaults={"own": {"encoder_dropout": 0.1, "lrs": (3e-5,), "epochs": 1}},
  in_memory=True,
)


def _embedding_task(
  data: sets.Data,
  examples: Mapping[str, list[Example]],
  make_queries: Callable[[Sequence[Example]], list[Example]],
  towers: ranking.RetrievalOptions,
  options: EmbedderOptions,
  **fields,
) -> Task:
  """Makes a task; `make_queries` makes a set's queries and documents."""
  prompts = options.query_prompt, options.document_prompt
  return ranking.ranking_task(
    **sets.own_task_fields(
      data, examples, make_queries, key=lambda e: e.texts[:1]
    ),
    head=ranking.Towers(towers.temperature, prompts),
    metrics={
      "ndcg": ranking.METRICS["ndcg"],
      "accuracy": mean_of(ranking.first_is_right),
    },
    also=("accuracy",),
    **fields,
  )


def _pair_records(
  columns: Mapping[str, str], source: sets.Source
) -> Iterator[Example]:
  """Yields (query, positive, negatives ...); a value may be a list of texts.

  A record with several positives gives an example for each of them.
  """
  counts = range(len(columns), sys.maxsize)  # further values are negatives
  is_table = isinstance(source, str) and readers.kind(source) in readers.TABLES
  for place, values in sets.source_records(source, columns, counts):
    lists = [v if isinstance(v, list) else [v] for v in values]
    record_values.nonempty(itertools.chain(*lists), place)
    for text in itertools.chain(*lists) if is_table else ():
      record_values.refuse_list(text, place)
    lists = [[text.strip() for text in texts] for texts in lists]
    query, positives, *negatives = lists
    if len(query) != 1 or not positives:
      raise UserError(f"{place}: not one query and a positive")
    for positive in positives:
      texts = query[0], positive, *itertools.chain(*negatives)
      yield Example(texts, id=place.rpartition(", ")[2])


def _pair_queries(examples: Sequence[Example]) -> list[Example]:
  """Makes queries of pairs, and documents of all their other texts.

  Texts that are equal, except for case and spaces, are one query or document.
  """
  same = functools.cache(record_values.same_text)
  queries: dict[str, Example] = {}
  documents: dict[str, Example] = {}
  for example in examples:
    query, positive, *negatives = example.texts
    for text in (positive, *negatives):
      document = Example((text,), None, f"d{len(documents)}")
      documents.setdefault(same(text), document)
    new_query = Example((query,), {}, f"q{len(queries)}")
    relevant = queries.setdefault(same(query), new_query).label
    relevant[documents[same(positive)].id] = 1.0
  return [*queries.values(), *documents.values()]


def _halves(examples: Sequence[Example]) -> list[Example]:
  """Makes a query of each text's first half, and a document of its second."""
  halves = []
  for example in examples:
    words = example.texts[0].split()
    space = " "
    if len(words) == 1 and not words[0].isascii():
      # A text without spaces, as in Chinese: its characters are the words.
      words = words[0]
      space = ""
    if half := len(words) // 2:
      halves += [Example((space.join(words[:half]), space.join(words[half:])))]
  return _pair_queries(halves)
