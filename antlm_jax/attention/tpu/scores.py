"""A block of scores at a step of the TPU kernel's grid.

Keys are along the sublanes and queries along the lanes. A query's bounds,
maximum and sum are then rows, as in memory, and a head narrower than the 128
lanes wastes none of them. The queries of all heads that share a key head are
side by side, so that keys and values are loaded once for the group.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from antlm_jax.attention import rope as rope_lib
from antlm_jax.attention.blocks import Blocks
from antlm_jax.attention.dropout import keep
from antlm_jax.attention.tpu.diagonals import Diagonals, dot
from antlm_jax.attention.tpu.grid import Step

_LOG2E = math.log2(math.e)


def rotated(x: jax.Array, rope: jax.Array, sign: int = 1) -> jax.Array:
  """Rotates `[..., H, _]` by cosines and sines, `[..., H, _]` together.

  The sign -1 rotates back, as a gradient needs.
  """
  cos, sin = jnp.split(rope, 2, axis=-2)
  return rope_lib.rotated(x, cos, sign * sin, axis=-2)


@dataclasses.dataclass(frozen=True)
class KernelSettings:
  """Static settings of a kernel, in addition to its arguments' shapes."""

  blocks: Blocks  # how queries and keys are cut
  causal: bool  # whether no query sees a later key
  scale: float  # multiplies the scores
  rate: float = 0.0  # share of the attention weights that is dropped
  edges: tuple[int, ...] | None = None  # of position terms, as in `Relative`
  interpret: bool = False  # run on any device, slowly


@dataclasses.dataclass(frozen=True)
class ScoreBlock:
  """The block of scores at a step, of some key heads and all their queries."""

  settings: KernelSettings
  step: Step
  refs: dict  # the step's part of the inputs, by name
  seed: Callable  # `seed(h, g)` is a head's seed of dropout
  heads: int  # number of key heads
  group: int  # query heads per key head G

  def visit(self, add: Callable[["HeadScores"], None]) -> None:
    """Calls `add` for each head."""

    def run(masked: bool):
      for h in range(self.heads):
        add(HeadScores(self, h, masked))

    # Two programs: blocks without a hidden score, as most are in long rows,
    # need no comparisons with the mask.
    if self.step.masked is False:
      return run(False)
    work, masked = self.step.work, self.step.masked
    pl.when(work & masked)(lambda: run(True))
    pl.when(work & ~masked)(lambda: run(False))

  @property
  def diagonals(self) -> tuple[Diagonals, Diagonals] | None:
    """For the position terms of the queries, and of the keys."""
    if self.settings.edges is None:
      return None
    one_hots = self.refs["one_hots"]
    return Diagonals(one_hots.at[0, 0]), Diagonals(one_hots.at[0, 1])

  def queries(self) -> jax.Array:
    """Index in its row of each query, int32 `[1, lanes]`."""
    size = self.settings.blocks.q_size
    at = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    return self.join([self.step.q * size + at] * self.group)

  def join(self, parts) -> jax.Array:
    """Puts arrays of a group's query heads side by side."""
    return jnp.concatenate(parts, axis=1)

  def store_queries(
    self, ref, h: int, x: jax.Array, q: int = 0, rope=None
  ) -> None:
    """Writes `[H, lanes]` to block q of a head's `[G, H, queries]`.

    With a `rope` `[1, H, queries]`, x is rotated back.
    """
    size = self.settings.blocks.q_size
    to = slice(q * size, min((q + 1) * size, ref.shape[-1]))
    for g in range(self.group):
      part = x[:, g * size : g * size + to.stop - to.start]
      if rope is not None:
        part = rotated(part, rope[0, :, to], -1)
      ref[0, h, g, :, to] = part.astype(ref.dtype)

  def store_row(self, ref, h: int, row: jax.Array) -> None:
    """Writes `[1, lanes]` to a head's `[G, queries]`."""
    size = self.settings.blocks.q_size
    for g in range(self.group):
      ref[0, h, g : g + 1] = row[:, g * size : (g + 1) * size]


@dataclasses.dataclass(frozen=True)
class HeadScores:
  """A block's scores `[keys, lanes]` of one key head.

  The lanes are the queries, those of the group's heads side by side.
  """

  block: ScoreBlock
  h: int  # the head, within the block
  masked: bool  # whether some key may be hidden from some query

  def scores(self) -> jax.Array:
    """The scores in base 2, float32 `[keys, lanes]`, also hidden ones."""
    settings = self.block.settings
    scores = dot(self.keys("k"), self.queries("q"), 0, 0)
    if self.block.diagonals:
      # Beyond the ends scores are arbitrary, and hidden later.
      refs, (of_query, of_key) = self.block.refs, self.block.diagonals
      scores += of_query.scores(refs["of_query"][0, self.h, 0])
      scores += of_key.scores(refs["of_key"][0, self.h]).T
    # e^x is 2^(x log2 e): in base 2 one multiplication does for both constants.
    return scores * (settings.scale * _LOG2E)

  def weights_and_gradient(self) -> tuple[jax.Array, jax.Array]:
    """The weights after dropout, and the gradient of the scores.

    The weights lack dropout's scale, and the gradient that of the scores: a sum
    is multiplied once, when it is written out.
    """
    rate = self.block.settings.rate
    # With the forward pass's log-sum-exp, this is the softmax. A hidden score's
    # weight may be infinite until it is hidden.
    weights = jnp.exp2(self.scores() - self.row("lse"))
    weights = self.hide(weights, 0.0)
    gradient = dot(self.keys("v"), self.queries("do"), 0, 0)
    gradient = self.drop(gradient / (1.0 - rate) if rate else gradient)
    # The softmax's gradient is p (dp - sum of p dp). The sum over all keys is
    # `delta`, the product of the output and its gradient: a number per query.
    gradient = weights * (gradient - self.row("delta"))
    if self.block.settings.blocks.ragged_q:
      gradient = self.hide(gradient, 0.0)  # delta is arbitrary beyond the end
    return self.drop(weights), gradient

  def gradient_of(self, name: str, weights, of_scores) -> jax.Array:
    """A block's part of the gradient of an input, `[_, lanes]` or `[_, keys]`.

    The arguments are those that `weights_and_gradient` returns.
    """
    if name == "v":
      do = self.queries("do")
      return dot(do, weights.astype(do.dtype), 1, 1)
    if name == "k":
      q = self.queries("q")
      return dot(q, of_scores.astype(q.dtype), 1, 1)
    if name == "q":
      k = self.keys("k")
      return dot(k, of_scores.astype(k.dtype), 1, 0)
    of_query, of_key = self.block.diagonals
    if name == "of_query":
      return of_query.gradient(of_scores)
    return of_key.gradient(of_scores.T)

  def hide(self, x: jax.Array, fill: float) -> jax.Array:
    """Replaces hidden scores by `fill`."""
    if not self.masked:
      return x
    block = self.block
    blocks, i, j = block.settings.blocks, block.queries(), self.key_index(0)
    # A query's conditions on keys are one interval: rows `[1, lanes]` are
    # reduced first, and the whole block is compared once or twice.
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
    block, rate = self.block, self.block.settings.rate
    if not rate:
      return x
    # A hash of the place: every pass over a block computes the same bits.
    size = block.settings.blocks.q_size
    seeds = [
      jnp.full((1, size), block.seed(self.h, g)) for g in range(block.group)
    ]
    seeds = block.join(seeds).astype(jnp.uint32)
    kept = keep(rate, seeds, block.queries(), self.key_index(0))
    return jnp.where(kept, x, 0.0)

  def keys(self, name: str) -> jax.Array:
    """The keys' part of k or v, `[H, keys]`."""
    x = self.block.refs[name][0, self.h]
    if name == "k" and "rope_k" in self.block.refs:
      x = rotated(x, self.block.refs["rope_k"][0])
    blocks = self.block.settings.blocks
    if not (self.masked and blocks.ragged_k):
      return x
    # Values beyond the end are arbitrary, and 0 times a value may be NaN.
    return jnp.where(self.key_index(1) < blocks.keys, x, 0)

  def queries(self, name: str) -> jax.Array:
    """The queries' part of q or do, `[H, lanes]`."""
    block, blocks = self.block, self.block.settings.blocks
    parts = [block.refs[name][0, self.h, g] for g in range(block.group)]
    if name == "q" and "rope_q" in block.refs:
      parts = [rotated(x, block.refs["rope_q"][0]) for x in parts]
    x = block.join(parts)
    if not (self.masked and blocks.ragged_q):
      return x
    return jnp.where(block.queries() < blocks.queries, x, 0)

  def row(self, name: str) -> jax.Array:
    """The queries' part of lse or delta, `[1, lanes]`."""
    x = self.block.refs[name][0, self.h]
    return self.block.join([x[g : g + 1] for g in range(self.block.group)])

  def key_index(self, axis: int) -> jax.Array:
    """Index in its row of each key, int32, along `axis` of two."""
    size = self.block.settings.blocks.k_size
    shape = (1, size) if axis else (size, 1)
    at = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return self.block.step.k * size + at
