"""Retrieval: finding the documents that are relevant to a query.

Files have BEIR's form: `corpus.jsonl`, `queries.jsonl`, `qrels/SPLIT.tsv`, or
training pairs. They may be compressed, or parquet. `ranking` has the head.
"""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from antlm_jax.data import readers, splits
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import record_values, sets
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.ranking import (
  RetrievalOptions,
  Towers,
  ranking_task,
)
from antlm_jax.evals.finetuning.task import Preset, Task
from antlm_jax.runtime import progress

PROMPTS = "Query: ", "Document: "
KNOWN = "nfcorpus", "scifact", "msmarco", "nq", "mldr"
SCORES = sets.dev_and_test(KNOWN) | {"nq": ("nq-test",)}


class _Set(NamedTuple):
  """A folder in BEIR's form."""

  name: str
  folder: pathlib.Path
  # Judgements by split, `train` and NAME-dev and NAME-test, or training pairs.
  paths: Mapping[str, pathlib.Path]

  @property
  def evaluations(self) -> tuple[str, ...]:
    """Its evaluation sets, dev first."""
    return tuple(split for split in self.paths if split != "train")

  @property
  def files(self) -> tuple[pathlib.Path, ...]:
    """Files that it consists of."""
    texts = (_table(self.folder / file) for file in ("corpus", "queries"))
    return *texts, *dict.fromkeys(self.paths.values())

  def load(self, split: str) -> list[Example]:
    """Reads a split, as `load_retrieval_examples` does."""
    return load_retrieval_examples(self.folder, self.paths, split)


def make_retrieval_task(
  folder, name: str, attention: str, options: RetrievalOptions
) -> Task:
  """Makes a task of a folder in BEIR's form: a known one in it, or itself.

  It is trained on pairs.jsonl or qrels/train.tsv. Without qrels/dev.tsv, a
  twentieth of the queries of train.tsv is held out to choose on. A folder with
  qrels/test.tsv alone is evaluated without training.
  """
  task_set = _find_retrieval_set(folder, name)
  return ranking_task(
    head=Towers(options.temperature, PROMPTS),
    name=task_set.name,
    load=task_set.load,
    evaluations=task_set.evaluations,
    files=task_set.files,
    trained="train" in task_set.paths,
  )


def with_test_sets(task: Task, folder, names: Sequence[str]) -> Task:
  """Returns a task that is also evaluated on the test sets of known sets.

  Says which of them are not in the folder.
  """
  test_sets = {}
  for name in names:
    test = f"{name}-test"
    try:
      test_set = _find_retrieval_set(folder, name)
    except sets.Absent:
      progress.say(f"warning: {task.name}: {name} is not in {folder}")
      continue
    if test not in test_set.paths:
      raise UserError(f"{test_set.folder} has no qrels/test.tsv to evaluate on")
    test_sets[test] = test_set._replace(paths={test: test_set.paths[test]})

  def load(split: str) -> Sequence[Example]:
    if split in test_sets:
      return test_sets[split].load(split)
    return task.load(split)

  further = (test_set.files for test_set in test_sets.values())
  return dataclasses.replace(
    task,
    load=load,
    evaluations=(*task.evaluations, *test_sets),
    files=(*task.files, *itertools.chain.from_iterable(further)),
  )


def _table(stem: pathlib.Path, usual: str = ".jsonl") -> pathlib.Path:
  """Returns the file of records with this name and any ending.

  It may not exist. Raises a UserError if there are several.
  """
  names = (
    f"{stem.name}{ending}{packed}"
    for ending, read in readers.READERS.items()
    for packed in ("", *readers.COMPRESSED)
    if read
  )
  paths = [stem.with_name(name) for name in names if readers.kind(name)]
  paths = [path for path in paths if path.is_file()]
  if len(paths) > 1:
    names = ", ".join(path.name for path in paths)
    raise UserError(f"{stem.parent} has {names}: keep one of them")
  return paths[0] if paths else stem.with_name(f"{stem.name}{usual}")


def _find_retrieval_set(folder, name: str) -> _Set:
  """Finds a known set in a folder, or the folder itself."""
  folder = pathlib.Path(folder).absolute()
  places = ("",) if name == sets.OWN else (f"retrieval/{name}/", f"{name}/")
  layouts = [
    {
      file: f"{place}{_table(folder / place / file).name}"
      for file in ("corpus", "queries")
    }
    for place in places
  ]
  inside = sets.find_set_files(folder, name, *layouts)["corpus"].parent
  if name == sets.OWN:
    name = sets.task_name(str(folder))
  names = "train", f"{name}-dev", f"{name}-test"
  train, test, *devs = (
    _table(inside / "qrels" / split, ".tsv")
    for split in ("train", "test", *splits.DEV)
  )
  dev = next((path for path in devs if path.is_file()), devs[0])
  qrels = [train, dev, test]
  paths = dict(zip(names, qrels, strict=True))
  if (pairs := _table(inside / "pairs")).is_file():
    if qrels[0].is_file():
      progress.say(f"{name}: trained on {pairs}; {qrels[0]} is not used")
    paths["train"] = pairs
  elif not qrels[1].is_file():
    paths[names[1]] = qrels[0]  # without the queries that are left out
  paths = {split: path for split, path in paths.items() if path.is_file()}
  if "train" in paths and names[1] not in paths:
    raise UserError(f"{inside}: give qrels/dev.tsv to choose the epoch on")
  if not paths:
    raise sets.Absent(
      f"{inside} has no judgements: looked for qrels/train.tsv, qrels/dev.tsv"
      " and qrels/test.tsv"
    )
  return _Set(name, inside, paths)


PRESET = Preset(
  "retrieval",
  "documents: --data is a folder in BEIR's form, or holds nfcorpus, scifact,"
  " msmarco, nq or mldr",
  SCORES | {sets.OWN: (sets.OWN,)},
  make_retrieval_task,
  heads=(Towers,),
  settings=(RetrievalOptions,),
)


def load_retrieval_examples(
  folder: pathlib.Path, paths: Mapping[str, pathlib.Path], split: str
) -> list[Example]:
  """Reads training pairs, or an evaluation set's queries and all documents.

  `paths` are the files of judgements, or of pairs, by split. Prints how many
  judged documents are missing: they count as never found. Raises a UserError if
  a file cannot be read, or judges a query that is missing.
  """
  path = paths[split]
  if path.name.startswith("pairs."):
    pairs = []
    columns = {"anchor": "", "positive": ""}
    for place, texts in sets.source_records(str(path), columns):
      record_values.nonempty(texts, place)
      pairs.append(Example(tuple(texts), id=place))
    with progress.quietly(True):  # the evaluation sets have its warnings
      queries = _texts_by_id(_table(folder / "queries"))
    _warn_of_shared_queries(queries, paths, (pair.texts[0] for pair in pairs))
    return pairs
  corpus = _table(folder / "corpus")
  queries = _texts_by_id(_table(folder / "queries"))
  documents = _texts_by_id(corpus)
  relevant = _relevant(path, queries)
  judged = [name for judgements in relevant.values() for name in judgements]
  if missing := sum(name not in documents for name in judged):
    progress.say(
      f"warning: {path}: {missing:,} of {len(judged):,} judgements are of"
      f" documents that {corpus.name} lacks; they count as not found"
    )
  if missing == len(judged):
    raise UserError(f"{path} judges no document of {corpus}")
  if list(paths.values()).count(path) > 1:
    relevant = dict(
      sets.divide_training_set(list(relevant.items()))[split != "train"]
    )
  if split == "train":
    _warn_of_shared_queries(queries, paths, map(queries.get, relevant))
    return [
      Example((queries[query], documents[name]), None, f"{query} {name}")
      for query, judgements in relevant.items()
      for name, score in judgements.items()
      if score > 0 and name in documents
    ]
  return [
    *(Example((queries[q],), relevant[q], q) for q in relevant),
    *(Example((documents[name],), None, name) for name in documents),
  ]


def _warn_of_shared_queries(
  queries: Mapping[str, str],
  paths: Mapping[str, pathlib.Path],
  train_queries: Iterable[str],
) -> None:
  """Warns of queries of an evaluation set that are also trained on."""
  train = set(map(record_values.same_text, train_queries))
  with progress.quietly(True):  # the evaluation sets have their own warnings
    texts = {
      split: [queries[query] for query in _relevant(path, queries)]
      for split, path in paths.items()
      if path != paths["train"]
    }
  for split, of_split in texts.items():
    if shared := sum(record_values.same_text(x) in train for x in of_split):
      progress.say(
        f"warning: {split}: {shared:,} of {len(of_split):,} queries are also in"
        f" {paths['train'].name}"
      )


def _with_text(
  fields: Mapping[str, Any], names: Sequence[str], place: str
) -> dict[str, Any]:
  """Returns a record whose fields `names` are text, also for numbers.

  Raises a UserError if one of them is absent, or neither text nor a number.
  """
  numbers = {
    name: str(fields[name])
    for name in names
    if type(fields.get(name)) in (int, float)
  }
  record = {**fields, **numbers}
  sets.require_texts(record, names, place)
  return record


def _texts_by_id(path: pathlib.Path) -> dict[str, str]:
  """Reads titles and texts, joined, by id."""
  out = {}
  blank = 0
  for place, fields in sets.record_fields(path):
    line = _with_text(fields, ("_id",), place)
    sets.require_texts(line, ("text",), place)
    name = line["_id"]
    title = line.get("title")
    if title is not None:
      sets.require_texts(line, ("title",), place)
    if name in out:
      raise UserError(f"{place}: another line has the _id {name!r:.60}, too")
    # As in BEIR and MTEB.
    out[name] = f"{title or ''} {line['text']}".strip()
    blank += not out[name]
  if blank:
    progress.say(f"warning: {path}: {blank:,} of {len(out):,} texts are blank")
  return out


def _relevant(
  path: pathlib.Path, queries: Mapping
) -> dict[str, dict[str, float]]:
  """Reads the relevance of each query's documents."""
  out: dict[str, dict[str, float]] = {}
  columns = dict.fromkeys(("query-id", "corpus-id", "score"), "")
  for place, values in sets.source_records(str(path), columns):
    fields = dict(zip(columns, values, strict=True))
    query, document, score = _with_text(fields, [*columns], place).values()
    if query not in queries:
      queries_path = _table(path.parents[1] / "queries")
      raise UserError(f"{place}: {query!r:.60} is not in {queries_path}")
    try:
      relevance = float(score)
    except ValueError:
      relevance = math.nan
    if not math.isfinite(relevance):
      raise UserError(f"{place}: the score {score!r:.60} is not a number")
    judged = out.setdefault(query, {})
    if judged.setdefault(document, relevance) != relevance:
      raise UserError(
        f"{place}: the score is {relevance:g}, but another line judges"
        f" {document!r:.60} for {query!r:.60} as {judged[document]:g}"
      )
  if not out:
    raise UserError(f"{path} holds no judgements")
  irrelevant = sum(max(scores.values()) <= 0 for scores in out.values())
  if irrelevant == len(out):
    raise UserError(f"{path}: no score is above 0, so no document is relevant")
  if irrelevant:
    progress.say(
      f"warning: {path}: {irrelevant:,} of {len(out):,} queries have no"
      " relevant document; their score is 0, and training leaves them out"
    )
  return out
