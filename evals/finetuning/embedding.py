"""Embedders of your own texts: positive pairs, or texts alone.

`pairs` learns from records of a query, a positive text and maybe negatives
(InfoNCE, with the other texts of the batch as negatives, too). `simcse` learns
from texts alone: a positive pair is the same text twice, with different dropout
(unsupervised SimCSE, arXiv 2104.08821). A text is one vector, or one for each
token (late interaction, arXiv 2004.12832). In the held-out tenth, a query has
to find its positive text, or the first half of a text the second half.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from antlm_jax.data import text_files
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import own, retrieval
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.task import Suite, Task, mean_of
from antlm_jax.settings import setting


@dataclasses.dataclass(frozen=True)
class Options:
  """Command-line options of embedders."""

  query_column: str = setting("query", "your own pairs: column of the query")
  positive_column: str = setting(
    "positive", "your own pairs: column of the text that the query is to find"
  )
  negative_column: tuple[str, ...] = setting(
    (), "your own pairs: columns of texts that it is not to find, with commas"
  )
  query_prompt: str = setting("", "prefix of each query, such as 'query: '")
  document_prompt: str = setting("", "prefix of each other text")
  token_size: int = setting(
    0,
    "size of a vector for each token, which MaxSim compares (late interaction),"
    " such as 128; 0 for one vector for each text",
    least=0,
  )


def pairs(
  data: own.Data,
  name: str,
  attention: str,
  towers: retrieval.Options,
  options: Options,
) -> Task:
  """Makes a task of records of a query, a positive and maybe negatives.

  Raises a UserError if there are none, one has no text, or they differ in their
  number of texts.
  """
  columns = dict.fromkeys(options.negative_column, "negative_column")
  query, positive = options.query_column, options.positive_column
  columns = {query: "query_column", positive: "positive_column"} | columns
  if len(columns) < 2 + len(options.negative_column):
    raise UserError(
      f"--query_column={query}, --positive_column={positive} and"
      f" --negative_column={','.join(options.negative_column)} must differ"
    )
  sets = {
    split: list(_records(sources, columns))
    for split, sources in own.by_split(data).items()
  }
  if len({len(one.texts) for one in sets.get("train", ())}) > 1:
    raise UserError(
      f"{own.named(data)}: some records have more texts in --negative_column"
      " than others"
    )
  return _task(data, sets, _asked, towers, options)


def simcse(
  data: own.Data,
  name: str,
  attention: str,
  towers: retrieval.Options,
  options: Options,
  files: own.Options,
) -> Task:
  """Makes a task of texts: lines, or records' --text_column.

  Raises a UserError if there are none, or several text columns.
  """
  if len(files.text_column) != 1:
    raise UserError("simcse reads one --text_column")
  (column,) = files.text_column
  if isinstance(data, str):
    corpus = text_files.find([data], documents="line", column=column)
    splits = (split for split in ("train", "dev") if getattr(corpus, split))
    texts = {split: (p.text for p in corpus.pieces(split)) for split in splits}
  else:
    texts = {
      split: (text for (text,) in own.texts_of(source, [column]))
      for split, (source,) in own.by_split(data).items()
    }
  sets = {split: [Example((t,) * 2) for t in of] for split, of in texts.items()}
  return _task(data, sets, _halves, towers, options)


PAIRS = Suite(
  "pairs",
  "an embedder of your own pairs: a query, a positive text and maybe negatives;"
  " held out as for classification",
  {"own": ("own",)},
  pairs,
  settings=(retrieval.Options, Options),
  in_memory=True,
)
SIMCSE = Suite(
  "simcse",
  "an embedder of your own texts, lines or records' --text_column; a pair is"
  " one text twice, with different dropout",
  {"own": ("own",)},
  simcse,
  settings=(retrieval.Options, Options, own.Options),
  defaults={"own": {"encoder_dropout": 0.1, "lrs": (3e-5,), "epochs": 1}},
  in_memory=True,
)


def _task(
  data: own.Data,
  sets: dict[str, list[Example]],
  asked: Callable[[Sequence[Example]], list[Example]],
  towers: retrieval.Options,
  options: Options,
) -> Task:
  """Makes a task; `asked` makes a set's queries and documents."""
  prompts = options.query_prompt, options.document_prompt
  head = retrieval.Towers(towers.temperature, prompts)
  if options.token_size:
    head = retrieval.TokenTowers(*dataclasses.astuple(head), options.token_size)
  return retrieval.task(
    **own.of_sets(data, sets, asked),
    head=head,
    metrics={
      "ndcg": retrieval.METRICS["ndcg"],
      "accuracy": functools.partial(mean_of, retrieval.first_is_right),
    },
    also=("accuracy",),
  )


def _records(
  sources: Sequence[str | own.Memory], columns: Mapping[str, str]
) -> Iterator[Example]:
  """Yields (query, positive, negatives ...); a value may be a list of texts."""
  for source in sources:
    for where, values in own.records(source, columns):
      lists = [v if isinstance(v, list) else [v] for v in values]
      texts = [text for one in lists for text in one]
      if not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(f"{source}, {where}: no text to read")
      if len(lists[0]) != 1 or len(lists[1]) != 1:
        raise UserError(f"{source}, {where}: not one query and one positive")
      yield Example(tuple(texts), id=where)


def _asked(examples: Sequence[Example]) -> list[Example]:
  """Makes queries of pairs, and documents of all their other texts."""
  texts = dict.fromkeys(text for e in examples for text in e.texts[1:])
  names = {text: f"d{i}" for i, text in enumerate(texts)}
  wanted = collections.defaultdict(dict)
  for query, positive, *_ in (example.texts for example in examples):
    wanted[query][names[positive]] = 1.0
  queries = [
    Example((query,), relevant, f"q{i}")
    for i, (query, relevant) in enumerate(wanted.items())
  ]
  return queries + [Example((t,), None, name) for t, name in names.items()]


def _halves(examples: Sequence[Example]) -> list[Example]:
  """Makes a query of each text's first half, and a document of its second."""
  halves = []
  for example in examples:
    words = example.texts[0].split()
    if half := len(words) // 2:
      halves += [Example((" ".join(words[:half]), " ".join(words[half:])))]
  return _asked(halves)
