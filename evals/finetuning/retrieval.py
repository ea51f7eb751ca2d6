"""Retrieval: finding the documents that are relevant to a query.

Queries and documents are encoded apart, each as the mean of its tokens' states
(arXiv 2507.00994). A query learns to be nearer to its own document than to the
others of the batch (multiple negatives, arXiv 1705.00652), except known
positives (`negatives`). Files have BEIR's form: `corpus.jsonl`,
`queries.jsonl`, `qrels/SPLIT.tsv`, or training pairs. They may be compressed,
or parquet.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import hashing
from antlm_jax.data import readers, splits
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import batching, bm25, negatives, sets
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.evals.finetuning.classification import pooled
from antlm_jax.evals.finetuning.task import (
  Param,
  Params,
  Suite,
  Task,
  TaskHead,
  mean_of,
)
from antlm_jax.runtime import files, progress
from antlm_jax.settings import Section, setting

TOP = 10  # documents that are ranked
PROMPTS = "Query: ", "Document: "
_AT_ONCE = 256  # queries whose scores of all documents are in memory


@dataclasses.dataclass(frozen=True)
class Towers(TaskHead):
  """Mean of a text's token states, scaled to length 1, without parameters.

  A training example is a query, one of its documents, and maybe negatives; its
  label is all known documents of the query. Otherwise an example is one text; a
  query's label is the relevance of its documents by id, and a document has no
  label. Predictions are the first documents among all, and among those that are
  relevant to any query: `{"all": [...], "labelled": [...]}`.
  """

  temperature: float  # divides similarities
  prompts: tuple[str, str] = ("", "")  # of queries, and of documents
  kind: ClassVar[str] = "towers"

  def parameters(self, width: int) -> dict[str, Param]:
    """Returns none."""
    return {}

  def __call__(self, params: Params, hidden, lengths, dropout_key=None):
    """Returns vectors of length 1, float32 `[B, D]`."""
    mean = pooled(hidden, lengths, "mean")
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

  def loss(self, outputs, labels, weights) -> jax.Array:
    """Returns the mean cross-entropy in nats of each query's document.

    `labels` say which documents are no negatives, bool `[B, (S - 1) * B]`, as
    `negatives.KnownPositives` does.
    """
    # Padding is no negative.
    candidates = jnp.tile(weights > 0, outputs.shape[1] - 1) & ~labels
    # [(S - 1) * B, D], positives first
    documents = outputs[:, 1:].swapaxes(0, 1).reshape(-1, outputs.shape[-1])
    cosines = outputs[:, 0] @ documents.T
    scores = jnp.where(candidates, cosines / self.temperature, -jnp.inf)
    nats = -jnp.diagonal(jax.nn.log_softmax(scores, axis=-1))
    return jnp.where(weights > 0, nats, 0).sum() / weights.sum()

  def encode(self, loaded, examples, max_length) -> ExampleRows:
    """Makes rows `[n, S, T]` of training examples, or `[n, T]` of texts."""
    query, document = self.prompts
    texts = []
    for example in examples:
      text, *documents = (text.strip() for text in example.texts)
      is_query = documents or example.label is not None
      texts += [((query if is_query else document) + text,)]
      texts += [(document + text,) for text in documents]
    tokens, lengths, cut = batching.frame_texts(loaded, texts, max_length)
    labels = np.zeros(len(tokens), np.int32)  # unused
    if (text_count := len(examples[0].texts)) > 1:
      tokens = tokens.reshape(len(examples), text_count, -1)
      lengths = lengths.reshape(len(examples), text_count)
      labels = negatives.known_positives(examples, tokens, lengths)
    predicted = _only_queries(examples) or examples
    return ExampleRows(tokens, lengths, labels, False, predicted, examples, cut)

  def decode(self, reduced: np.ndarray, rows: ExampleRows) -> list[dict]:
    """Ranks documents by their similarity to each query."""
    is_query = np.array([e.label is not None for e in rows.origins])
    cosines = _cosines(reduced[is_query], reduced[~is_query])
    return ranked(rows.origins, cosines)


def _cosines(
  queries: np.ndarray, documents: np.ndarray
) -> Iterator[np.ndarray]:
  """Yields each query's cosines with all documents, `[documents]`."""
  for start in range(0, len(queries), _AT_ONCE):
    yield from queries[start : start + _AT_ONCE] @ documents.T


def ranked(
  examples: Sequence[Example], scores: Iterable[np.ndarray]
) -> list[dict[str, list[str]]]:
  """Makes predictions of each query's scores of all documents `[documents]`.

  Documents are those of the examples, in their order, which ties keep. A query
  never finds the document with its own id, as in BEIR's evaluation: in ArguAna
  it is the query itself.
  """
  names, pools = _pools(examples)
  out = []
  for query, cosines in zip(_only_queries(examples), scores, strict=True):
    ranking = {}
    for pool, places in pools.items():
      order = np.argsort(-cosines[places], kind="stable")[: TOP + 1]
      ranking[pool] = _without_itself(query, names[places[order]])
    out.append(ranking)
  return out


def random_order(examples: Sequence[Example]) -> list[list[dict]]:
  """Ranks each query's documents in a random order."""
  names, pools = _pools(examples)

  def drawn(number: int, places: np.ndarray) -> np.ndarray:
    first = np.arange(min(TOP + 1, len(places)))
    return names[places[hashing.permute(first, len(places), number)]]

  return [
    [
      {
        pool: _without_itself(query, drawn(number, places))
        for pool, places in pools.items()
      }
      for number, query in enumerate(_only_queries(examples))
    ]
  ]


def _only_queries(examples: Sequence[Example]) -> list[Example]:
  return [e for e in examples if e.label is not None]


def _pools(examples: Sequence[Example]) -> tuple[np.ndarray, dict]:
  """Returns the documents' names, and places of those that are ranked."""
  names = np.array([e.id for e in examples if e.label is None])
  relevant = {name for e in _only_queries(examples) for name in e.label}
  labelled = np.flatnonzero(np.isin(names, list(relevant)))
  return names, {"all": np.arange(len(names)), "labelled": labelled}


def _without_itself(query: Example, names: np.ndarray) -> list[str]:
  # Queries and documents may have numbers of their own, from 0.
  left_out = query.id if query.label.get(query.id, 0) <= 0 else None
  return [name for name in names.tolist() if name != left_out][:TOP]


def ndcg(ranking: Sequence[str], relevant: Mapping[str, float]) -> float:
  """NDCG@10 of a ranking, as in trec_eval: the gain is the relevance itself."""
  return _gain_ratio(
    [relevant.get(name, 0) for name in ranking], relevant.values()
  )


def ndcg_of_ranked(ranking: Sequence[str], relevant: Mapping[str, float]):
  """NDCG@10 as in arXiv 2507.00994's code, far above `ndcg`.

  The ideal is the best order of the ten that were found, without those that
  were missed, and relevance is 0 or 1.
  """
  gains = [float(relevant.get(name, 0) >= 1) for name in ranking]
  return _gain_ratio(gains, gains)


def _gain_ratio(gains: Sequence[float], possible: Iterable[float]) -> float:
  best = _discounted(sorted(possible, reverse=True))
  return _discounted(gains) / best if best else 0.0


def _discounted(gains: Sequence[float]) -> float:
  # Some sets have judgements below 0, worse than irrelevant.
  gains = np.maximum(np.asarray(gains[:TOP], np.float64), 0)
  return float((gains / np.log2(np.arange(len(gains)) + 2)).sum())


def _mean_score(score, pool: str, predictions, labels) -> float:
  rankings = [prediction[pool] for prediction in predictions]
  return mean_of(score, rankings, labels)


METRICS = {
  "ndcg": functools.partial(_mean_score, ndcg, "all"),
  "ndcg_labelled": functools.partial(_mean_score, ndcg, "labelled"),
  "ndcg_of_ranked": functools.partial(_mean_score, ndcg_of_ranked, "labelled"),
}


@dataclasses.dataclass(frozen=True)
class RetrievalOptions(Section):
  """Command-line options of retrieval."""

  temperature: float = setting(
    0.05, "Temperature, which divides similarities", over=0
  )
  train_on: str = setting(
    "",
    "Set to train on instead, of which the dev set chooses the epoch: path to a"
    " folder in BEIR's form, or a known set in --data",
  )


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
  qrels/test.tsv alone is evaluated without training, or trained on another set
  (`RetrievalOptions.train_on`).
  """
  task_set = _find_retrieval_set(folder, name)
  head = Towers(options.temperature, PROMPTS)
  fields = {"head": head, "name": task_set.name}
  if options.train_on:
    training_set = _training_set(folder, task_set.name, options.train_on)
    if training_set.folder != task_set.folder:
      return ranking_task(**fields, **_trained_on(training_set, task_set))
  return ranking_task(
    **fields,
    load=task_set.load,
    evaluations=task_set.evaluations,
    files=task_set.files,
    trained="train" in task_set.paths,
  )


def _trained_on(training_set: _Set, task_set: _Set) -> dict[str, Any]:
  """Returns the fields of a task that trains on another set than its own."""
  dev = f"{training_set.name}-dev"
  test = f"{task_set.name}-test"
  if test not in task_set.paths:
    raise UserError(f"{task_set.folder} has no qrels/test.tsv to evaluate on")
  test_set = task_set._replace(paths={test: task_set.paths[test]})
  training_set = training_set._replace(
    paths={split: training_set.paths[split] for split in ("train", dev)}
  )

  def load(split: str) -> list[Example]:
    return (test_set if split == test else training_set).load(split)

  return {
    "load": load,
    "evaluations": (dev, test),
    "files": (*test_set.files, *training_set.files),
    "facts": {"trained_on": training_set.name},
    "trained_on": training_set.name,
  }


def _training_set(folder, name: str, train_on: str) -> _Set:
  """Finds the set that a task trains on instead of its own."""
  training_set = None
  path = pathlib.Path(train_on)
  if train_on in KNOWN:
    try:
      training_set = _find_retrieval_set(folder, train_on)
    except sets.Absent as error:
      if not path.is_dir():
        message = f"{name} trains on {train_on}: {error}"
        raise sets.Absent(message, train_on) from error
  if training_set is None:
    if not _table(path / "corpus").is_file():
      absent = files.absent(path) or "it has no corpus.jsonl"
      raise UserError(f"train_on={train_on}: {absent}")
    training_set = _find_retrieval_set(path, sets.OWN)
  if "train" not in training_set.paths:
    raise UserError(
      f"train_on={train_on}: {training_set.folder} has no pairs.jsonl or"
      " qrels/train.tsv"
    )
  return training_set


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


def ranking_task(
  load: Callable[[str], Sequence[Example]], head: Towers, **fields
) -> Task:
  """Makes a task of ranking documents, of the fields that are its own."""

  def load_with_positives(split: str) -> Sequence[Example]:
    examples = load(split)
    if split == "train":
      return negatives.with_positives(examples)
    return examples

  usual = {
    "load": load_with_positives,
    "head": head,
    "metrics": METRICS,
    "main_metric": "ndcg",
    "baseline": "a random order",
    "trivial": random_order,
    "references": {"BM25": by_words},
    "right": first_is_right,
  }
  return Task(**usual | fields)


SUITE = Suite(
  "retrieval",
  "documents: --data is a folder in BEIR's form, or holds nfcorpus, scifact,"
  " msmarco, nq or mldr",
  SCORES | {sets.OWN: (sets.OWN,)},
  make_retrieval_task,
  heads=(Towers,),
  settings=(RetrievalOptions,),
)


def first_is_right(prediction: Mapping, relevant: Mapping[str, float]) -> bool:
  """Whether the document that is ranked first is relevant."""
  return any(relevant.get(name, 0) > 0 for name in prediction["all"][:1])


def by_words(examples: Sequence[Example]) -> list[dict]:
  """Ranks documents by BM25, of their titles and texts."""
  queries = [e.texts[0] for e in _only_queries(examples)]
  documents = [e.texts[0] for e in examples if e.label is None]
  return ranked(examples, bm25.bm25_scores(queries, documents))


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
    for place, pair in sets.record_fields(path):
      texts = (pair.get("anchor"), pair.get("positive"))
      sets.nonempty(texts, place)
      pairs.append(Example(texts, id=place))
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


def _texts_by_id(path: pathlib.Path) -> dict[str, str]:
  """Reads titles and texts, joined, by id."""
  out = {}
  blank = 0
  for place, line in sets.record_fields(path, ("_id", "text")):
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
  columns = "query-id", "corpus-id", "score"
  for place, line in sets.record_fields(path, columns):
    # Parquet may hold numbers where the texts' ids are text.
    query, document = (str(line[column]) for column in columns[:2])
    score = line["score"]
    if query not in queries:
      queries_path = _table(path.parents[1] / "queries")
      raise UserError(f"{place}: {query!r:.60} is not in {queries_path}")
    try:
      relevance = float(score)
    except (TypeError, ValueError):
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
