"""Ranking of documents: the head that embeds texts, its loss and metrics.

Queries and documents are encoded apart, each as the mean of its tokens' states
(arXiv 2507.00994). A query learns to be nearer to its own document than to the
others of the batch (multiple negatives, arXiv 1705.00652). Some of those are
relevant: other known positives of the query, or texts that are equal to one of
them, or to the query. The loss leaves them out (`KnownPositives`).
"""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import hashing
from antlm_jax.evals.finetuning import batching, bm25, record_values
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.evals.finetuning.classification import pooled
from antlm_jax.evals.finetuning.task import (
  Param,
  Params,
  Ratio,
  Task,
  TaskHead,
  mean_of,
)
from antlm_jax.runtime import progress
from antlm_jax.settings import Section, setting

TOP = 10  # documents that are ranked
_AT_ONCE = 256  # queries whose scores of all documents are in memory


@dataclasses.dataclass(frozen=True)
class RetrievalOptions(Section):
  """Command-line options of retrieval."""

  temperature: float = setting(
    0.05, "Temperature, which divides similarities", over=0
  )


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
    `KnownPositives` does.
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
      labels = known_positives(examples, tokens, lengths)
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


def _mean_score(score, pool: str) -> Ratio:
  return mean_of(lambda prediction, relevant: score(prediction[pool], relevant))


METRICS = {
  "ndcg": _mean_score(ndcg, "all"),
  "ndcg_labelled": _mean_score(ndcg, "labelled"),
  "ndcg_of_ranked": _mean_score(ndcg_of_ranked, "labelled"),
}


def ranking_task(
  load: Callable[[str], Sequence[Example]], head: Towers, **fields
) -> Task:
  """Makes a task of ranking documents, of the fields that are its own."""

  def load_with_positives(split: str) -> Sequence[Example]:
    examples = load(split)
    if split == "train":
      return with_positives(examples)
    return examples

  usual = {
    "load": load_with_positives,
    "head": head,
    "metrics": METRICS,
    "main_metric": "ndcg",
    "baseline": "a random order",
    "trivial": random_order,
    "references": {"BM25": by_words},
  }
  return Task(**usual | fields)


def first_is_right(prediction: Mapping, relevant: Mapping[str, float]) -> bool:
  """Whether the document that is ranked first is relevant."""
  return any(relevant.get(name, 0) > 0 for name in prediction["all"][:1])


def by_words(examples: Sequence[Example]) -> list[dict]:
  """Ranks documents by BM25, of their titles and texts."""
  queries = [e.texts[0] for e in _only_queries(examples)]
  documents = [e.texts[0] for e in examples if e.label is None]
  return ranked(examples, bm25.bm25_scores(queries, documents))


def with_positives(examples: Sequence[Example]) -> list[Example]:
  """Labels examples (query, positive, ...) with all positives of the query.

  Queries that are equal, except for case and spaces, share their positives.
  """
  same = functools.cache(record_values.same_text)
  positives = collections.defaultdict(dict)
  for example in examples:
    query, positive, *_ = example.texts
    positives[same(query)][positive] = None
  labels = {query: tuple(texts) for query, texts in positives.items()}
  return [e._replace(label=labels[same(e.texts[0])]) for e in examples]


@dataclasses.dataclass(frozen=True, eq=False)
class KnownPositives:
  """Labels of the loss: which documents of a batch are no negatives.

  Attributes:
    numbers: Number of each text of n rows, int32 `[n, S]`, the query's first.
      Equal texts have the same number.
    positives: Numbers of the positives of each row's query, and its own.
  """

  numbers: np.ndarray
  positives: Sequence[np.ndarray]

  def __getitem__(self, rows: np.ndarray) -> np.ndarray:
    """Returns whether a row's query leaves documents out.

    Args:
      rows: Indices of the rows of batches, int `[..., B]`.

    Returns:
      bool `[..., B, (S - 1) * B]`: first the B positives, and then the
      negatives. A query's own positive is False.
    """
    size = rows.shape[-1]
    batches = [self._of_batch(batch) for batch in rows.reshape(-1, size)]
    return np.stack(batches).reshape(*rows.shape, -1)

  def _of_batch(self, rows: np.ndarray) -> np.ndarray:
    documents = self.numbers[rows, 1:].T.ravel()
    out = np.zeros((len(rows), len(documents)), bool)
    # Far faster than np.isin, for queries with many positives.
    is_positive = np.zeros(self.numbers.max() + 1, bool)
    for i, row in enumerate(rows):
      is_positive[self.positives[row]] = True
      out[i] = is_positive[documents]
      is_positive[self.positives[row]] = False
    np.fill_diagonal(out, False)
    return out


def known_positives(
  examples: Sequence[Example], tokens: np.ndarray, lengths: np.ndarray
) -> KnownPositives:
  """Finds equal texts and known positives of training examples.

  Texts are equal except for case and spaces, or if their rows of tokens are,
  after a long text is cut.

  Args:
    examples: Query, positive and maybe negatives, with the labels of
      `with_positives`.
    tokens: Rows of their texts, int32 `[n, S, T]`.
    lengths: Number of tokens of each, int32 `[n, S]`.
  """
  same = functools.cache(record_values.same_text)
  ids: dict[str | bytes, int] = {}
  numbers = np.zeros(lengths.shape, np.int32)
  for place in np.ndindex(lengths.shape):
    text = same(examples[place[0]].texts[place[1]])
    row = _digest(tokens[place][: lengths[place]])
    number = ids.get(text, ids.get(row, len(ids)))
    ids[text] = ids[row] = numbers[place] = number
  groups: dict[int, np.ndarray] = {}
  for example, (query, *_) in zip(examples, numbers.tolist(), strict=True):
    if query not in groups:
      groups[query] = np.array([query, *_known(example, ids, same)])
  positives = [groups[query] for query in numbers[:, 0].tolist()]
  if lengths.shape[1] > 2:
    rows = zip(numbers[:, 2:], positives, strict=True)
    if wrong := sum(int(np.isin(*row).sum()) for row in rows):
      progress.say(
        f"warning: {wrong:,} of {numbers[:, 2:].size:,} negatives are positives"
        " of their query, or equal to it; the loss leaves them out"
      )
  return KnownPositives(numbers, positives)


def _known(
  example: Example, ids: Mapping[str | bytes, int], same
) -> Iterable[int]:
  """Yields the numbers of a query's positives that are in some row."""
  for text in example.label or example.texts[1:2]:
    if (number := ids.get(same(text))) is not None:
      yield number


def _digest(row: np.ndarray) -> bytes:
  return hashlib.blake2b(row.tobytes(), digest_size=16).digest()
