"""Blocks of scores that the GPU kernels visit, in order.

Each thread block owns a block of queries or of keys. It visits the blocks of
the other kind that it needs. Blocks without hidden scores are first, so that
the loop over them needs no mask.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from antlm_jax.attention.blocks import UNIT, AttentionBlocks, visibility
from antlm_jax.masks import AttentionMask


class Visits(NamedTuple):
  """Blocks to visit for each outer block of queries or keys."""

  blocks: jax.Array  # indices, needed blocks first, int32 `[B, outer, inner]`
  counts: jax.Array  # number visible wholly, and needed, int32 `[B, outer, 2]`

  @property
  def share(self) -> jax.Array:
    """Share of the blocks that are visited."""
    return self.counts[..., 1].sum() / self.blocks.size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VisitSchedule:
  """Mask in the form that the kernels read."""

  # First visible key, and last plus 1, int32 `[B, 2, T]`. Queries that see
  # nothing pad T to a multiple of `UNIT`.
  bounds: jax.Array
  by_query: Visits
  by_key: Visits


def make_visit_schedule(
  mask: AttentionMask, rows: int, queries: int, keys: int
) -> VisitSchedule:
  """Returns the schedule of a mask whose bounds, if any, are `[rows, T]`."""
  blocks = AttentionBlocks(queries, keys, UNIT, UNIT)
  bounds = jnp.stack(
    [jnp.broadcast_to(x, (rows, queries)) for x in mask.bounds(queries, keys)],
    axis=1,
  )
  over = blocks.q_count * UNIT - queries
  bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, over)))
  needed, unmasked = visibility(mask, rows, blocks)
  by_key = _list_visits(needed.mT, unmasked.mT)
  return VisitSchedule(bounds, _list_visits(needed, unmasked), by_key)


def _list_visits(needed: jax.Array, unmasked: jax.Array) -> Visits:
  """Lists blocks by whether they are needed, bool `[B, outer, inner]`."""
  rank = jnp.where(unmasked, 0, jnp.where(needed, 1, 2))
  counts = jnp.stack([unmasked.sum(-1), needed.sum(-1)], axis=-1)
  order = jnp.argsort(rank, axis=-1, stable=True)
  return Visits(order.astype(jnp.int32), counts.astype(jnp.int32))
