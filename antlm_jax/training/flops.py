"""Number of floating-point operations that a batch needs."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from antlm_jax.masks import AttentionMask
from antlm_jax.models import Model, encoder
from antlm_jax.objectives.batch import Batch


@dataclasses.dataclass(frozen=True)
class Work:
  """Floating-point operations by purpose; a multiply-add counts as two."""

  blocks: float  # the blocks' matrices, on every token
  head: float  # on every target
  # Attention's two products, for every pair of a query and a visible key. Rows
  # are causal if no query sees a later key.
  causal: float
  bidirectional: float

  @property
  def total(self) -> float:
    """Sum of all parts."""
    return self.blocks + self.head + self.causal + self.bidirectional

  def __mul__(self, times: float) -> "Work":
    values = dataclasses.asdict(self)
    return Work(**{name: times * value for name, value in values.items()})


def train_step(model: Model, batch: Batch, filled: float = 1.0) -> float:
  """Counts a step's operations, without recomputation and padded targets.

  `filled` is the share of the batch's rows that have targets.
  """
  work = forward_work(model, batch)
  return 3 * (filled * (work.total - work.head) + work.head)


def forward_work(model: Model, batch: Batch) -> Work:
  """Counts the operations of a batch's evaluation."""
  c = model.config
  # Matrices have three axes, with that of the layers; norms and biases two.
  blocks = [x for p, x in model.shapes.items() if p.startswith("blocks/")]
  matrices = sum(x.size for x in blocks if x.ndim > 2)
  targets = int((batch.weights > 0).sum())
  shape = batch.inputs.shape
  masks = encoder.layer_masks(c, batch.mask, shape, np)
  causal, bidirectional = masks.total(lambda mask: visible_pairs(mask, shape))
  per_pair = 4.0 * c.heads * c.head_dim
  return Work(
    blocks=2.0 * matrices * batch.inputs.size,
    head=2.0 * c.width * c.vocab_size * targets,
    causal=per_pair * causal,
    bidirectional=per_pair * bidirectional,
  )


def visible_pairs(mask: AttentionMask, shape: Sequence[int]) -> tuple[int, int]:
  """Counts pairs of a query and a visible key, in rows `[..., T]`.

  Returns:
    Pairs in rows where no query sees a later key, and pairs in other rows.
  """
  # A query sees an interval of keys, so its length is the number of pairs.
  start, end = mask.bounds(shape[-1], shape[-1], np)
  start = np.broadcast_to(start, shape)
  end = np.broadcast_to(end, shape)
  pairs = np.maximum(end - start, 0).sum(axis=-1)
  causal = (end <= np.arange(1, shape[-1] + 1)).all(axis=-1)
  return int(pairs[causal].sum()), int(pairs[~causal].sum())
