"""Known positives: documents of a batch that are no negatives of a query.

In a batch, the documents of other rows are a query's negatives. Some of them
are relevant: other known positives of the query, or texts that are equal to one
of them, or to the query. The loss leaves them out.
"""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from antlm_jax.evals.finetuning import sets
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.runtime import progress


def with_positives(examples: Sequence[Example]) -> list[Example]:
  """Labels examples (query, positive, ...) with all positives of the query.

  Queries that are equal, except for case and spaces, share their positives.
  """
  same = functools.cache(sets.same_text)
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
  same = functools.cache(sets.same_text)
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
