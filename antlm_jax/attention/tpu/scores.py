"""A block of scores at a step of the TPU kernel.

Keys are along the sublanes and queries along the lanes. So bounds, maxima and
sums of queries are rows, as in memory, and a head narrower than 128 lanes
wastes no lane. Queries of all heads that share a key head are side by side, so
that keys and values are loaded once for the group.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from antlm_jax.attention import rope as rope_lib
from antlm_jax.attention.blocks import AttentionBlocks
from antlm_jax.attention.dropout import keep
from antlm_jax.attention.tpu.diagonals import Diagonals, dot
from antlm_jax.attention.tpu.grid import Step

_LOG2E = math.log2(math.e)


def rotate_heads(x: jax.Array, rope: jax.Array, sign: int = 1) -> jax.Array:
  """Rotates x `[..., H, _]` by cosines, then sines, `[..., H, _]` together.

  The sign -1 rotates back, for gradients.
  """
  cos, sin = jnp.split(rope, 2, axis=-2)
  return rope_lib.rotate_halves(x, cos, sign * sin, axis=-2)


@dataclasses.dataclass(frozen=True)
class KernelSettings:
  """Static settings of a kernel."""

  blocks: AttentionBlocks  # division of queries and keys
  causal: bool  # whether later keys are hidden
  scale: float  # factor of the scores
  rate: float = 0.0  # dropout rate of attention weights
  edges: tuple[int, ...] | None = None  # edges of position terms (`Relative`)
  interpret: bool = False  # interpret the kernel on any device, slowly


@dataclasses.dataclass(frozen=True)
class ScoreBlock:
  """Block of scores at a step, for some key heads and their query heads."""

  settings: KernelSettings
  step: Step
  refs: dict  # the step's part of the inputs, by name
  # Dropout seeds of all query heads, int32 `[B * K * G]`, or None.
  seeds: Any
  first_head: jax.Array  # index of the first key head of all B * K
  heads: int  # number of key heads
  group: int  # number of query heads per key head G

  def seed(self, h: int, g: int) -> jax.Array:
    """Returns the dropout seed of the g-th query head of the h-th key head."""
    return self.seeds[(self.first_head + h) * self.group + g]

  def visit(self, add: Callable[["HeadScores"], None]) -> None:
    """Calls `add` for each head."""

    def run(masked: bool):
      for h in range(self.heads):
        add(HeadScores(self, h, masked))

    # Compile two programs, because blocks without a hidden score need no
    # comparison with the mask. In long rows, most blocks have none.
    if self.step.masked is False:
      return run(False)
    work = self.step.work
    masked = self.step.masked
    pl.when(work & masked)(lambda: run(True))
    pl.when(work & ~masked)(lambda: run(False))

  @property
  def diagonals(self) -> tuple[Diagonals, Diagonals] | None:
    """Diagonals for the position terms of queries and of keys."""
    if self.settings.edges is None:
      return None
    one_hots = self.refs["one_hots"]
    return Diagonals(one_hots.at[0, 0]), Diagonals(one_hots.at[0, 1])

  def queries(self) -> jax.Array:
    """Returns the index of each query in its row, int32 `[1, lanes]`."""
    size = self.settings.blocks.q_size
    index = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    return self.join([self.step.q * size + index] * self.group)

  def join(self, parts) -> jax.Array:
    """Concatenates arrays of a group's query heads along the lanes."""
    return jnp.concatenate(parts, axis=1)

  def store_queries(
    self, ref, h: int, x: jax.Array, q: int = 0, rope=None
  ) -> None:
    """Writes `[H, lanes]` to block q of a head's `[G, H, queries]`.

    A `rope` `[1, H, queries]` rotates x back.
    """
    size = self.settings.blocks.q_size
    to = slice(q * size, min((q + 1) * size, ref.shape[-1]))
    for g in range(self.group):
      part = x[:, g * size : g * size + to.stop - to.start]
      if rope is not None:
        part = rotate_heads(part, rope[0, :, to], -1)
      ref[0, h, g, :, to] = part.astype(ref.dtype)

  def store_row(self, ref, h: int, row: jax.Array) -> None:
    """Writes `[1, lanes]` to a head's `[G, queries]`."""
    size = self.settings.blocks.q_size
    for g in range(self.group):
      ref[0, h, g : g + 1] = row[:, g * size : (g + 1) * size]


@dataclasses.dataclass(frozen=True)
class HeadScores:
  """Scores `[keys, lanes]` of one key head in a block.

  The lanes are the queries of the group's heads, side by side.
  """

  block: ScoreBlock
  h: int  # index of the head in the block
  masked: bool  # whether some key may be hidden from some query

  def scores(self) -> jax.Array:
    """Returns all scores, also hidden scores, in base 2, `[keys, lanes]`."""
    settings = self.block.settings
    scores = dot(self.keys("k"), self.queries("q"), 0, 0)
    if self.block.diagonals:
      # Scores beyond the ends are arbitrary, and `hide` replaces them later.
      refs = self.block.refs
      query_terms, key_terms = self.block.diagonals
      scores += query_terms.scores(refs["query_terms"][0, self.h, 0])
      scores += key_terms.scores(refs["key_terms"][0, self.h]).T
    # Since e^x = 2^(x log2 e), base 2 needs one multiplication in all.
    return scores * (settings.scale * _LOG2E)

  def weights_and_gradient(self) -> tuple[jax.Array, jax.Array]:
    """Returns the weights after dropout, and the gradient of the scores.

    Both lack a constant factor, dropout's scale or the scale of the scores. The
    kernel multiplies the sums by it when it writes them.
    """
    rate = self.block.settings.rate
    # The forward pass's log-sum-exp makes this the softmax. Weights of hidden
    # scores may be infinite until they are replaced.
    weights = jnp.exp2(self.scores() - self.row("lse"))
    weights = self.hide(weights, 0.0)
    gradient = dot(self.keys("v"), self.queries("do"), 0, 0)
    gradient = self.drop(gradient / (1.0 - rate) if rate else gradient)
    # The softmax's gradient is p (dp - sum of p dp). For each query, the sum
    # over all keys equals `delta`, the product of the output and its gradient.
    gradient = weights * (gradient - self.row("delta"))
    if self.block.settings.blocks.ragged_q:
      gradient = self.hide(gradient, 0.0)  # delta is arbitrary beyond the end
    return self.drop(weights), gradient

  def gradient_of(self, name: str, weights, grad_scores) -> jax.Array:
    """Returns the term that this block adds to the gradient of an input.

    It lacks the factor that `weights_and_gradient` omits, and RoPE's rotation
    back. The kernel applies both when it writes the sums.

    Args:
      name: Input: "q", "k", "v", "query_terms" or "key_terms".
      weights: Weights after dropout, `[keys, lanes]`.
      grad_scores: Gradient of the scores, `[keys, lanes]`.

    Returns:
      `[H, lanes]` for q, `[H, keys]` for k and v, `[C, lanes]` or `[C, keys]`
      for the position terms.
    """
    if name == "v":
      do = self.queries("do")
      return dot(do, weights.astype(do.dtype), 1, 1)
    if name == "k":
      q = self.queries("q")
      return dot(q, grad_scores.astype(q.dtype), 1, 1)
    if name == "q":
      k = self.keys("k")
      return dot(k, grad_scores.astype(k.dtype), 1, 0)
    query_terms, key_terms = self.block.diagonals
    if name == "query_terms":
      return query_terms.gradient(grad_scores)
    return key_terms.gradient(grad_scores.T)

  def hide(self, x: jax.Array, fill: float) -> jax.Array:
    """Replaces hidden scores by `fill`."""
    if not self.masked:
      return x
    block = self.block
    blocks = block.settings.blocks
    i = block.queries()
    j = self.key_index(0)
    # All conditions on a query's keys form one interval. Combine them in rows
    # `[1, lanes]`, and compare the whole block only once or twice.
    end = jnp.full_like(i, blocks.keys)
    if block.settings.causal:
      end = jnp.minimum(end, i + 1)
    if "end" in block.refs:
      end = jnp.minimum(end, block.join([block.refs["end"][0]] * block.group))
    if blocks.ragged_q:
      end = jnp.where(i < blocks.queries, end, 0)
    visible = j < end
    if "start" in block.refs:
      visible &= j >= block.join([block.refs["start"][0]] * block.group)
    return jnp.where(visible, x, fill)

  def drop(self, x: jax.Array) -> jax.Array:
    """Replaces dropped weights by 0."""
    block = self.block
    rate = self.block.settings.rate
    if not rate:
      return x
    # All passes compute the same bits, from a hash of the position.
    size = block.settings.blocks.q_size
    seeds = [
      jnp.full((1, size), block.seed(self.h, g)) for g in range(block.group)
    ]
    seeds = block.join(seeds).astype(jnp.uint32)
    keep_mask = keep(rate, seeds, block.queries(), self.key_index(0))
    return jnp.where(keep_mask, x, 0.0)

  def keys(self, name: str) -> jax.Array:
    """Returns the block's part of k or v, `[H, keys]`."""
    x = self.block.refs[name][0, self.h]
    if name == "k" and "rope_k" in self.block.refs:
      x = rotate_heads(x, self.block.refs["rope_k"][0])
    blocks = self.block.settings.blocks
    if not (self.masked and blocks.ragged_k):
      return x
    # Values beyond the end are arbitrary, and 0 times a value may be NaN.
    return jnp.where(self.key_index(1) < blocks.keys, x, 0)

  def queries(self, name: str) -> jax.Array:
    """Returns the block's part of q or do, `[H, lanes]`."""
    block = self.block
    blocks = self.block.settings.blocks
    parts = [block.refs[name][0, self.h, g] for g in range(block.group)]
    if name == "q" and "rope_q" in block.refs:
      parts = [rotate_heads(x, block.refs["rope_q"][0]) for x in parts]
    x = block.join(parts)
    if not (self.masked and blocks.ragged_q):
      return x
    return jnp.where(block.queries() < blocks.queries, x, 0)

  def row(self, name: str) -> jax.Array:
    """Returns the block's part of lse or delta, `[1, lanes]`."""
    x = self.block.refs[name][0, self.h]
    return self.block.join([x[g : g + 1] for g in range(self.block.group)])

  def key_index(self, axis: int) -> jax.Array:
    """Returns the index of each key in its row, int32, along `axis` of two."""
    size = self.block.settings.blocks.k_size
    shape = (1, size) if axis else (size, 1)
    index = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return self.block.step.k * size + index
