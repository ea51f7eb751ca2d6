"""The attention mask: an interval of visible keys per query."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
  """Key j is visible to query i when k_start[i] <= j < k_end[i].

  If `causal`, also j <= i. This is the encoder's attention-mask argument, and
  the only difference between causal and bidirectional. It covers packed
  documents, padding, sliding windows, prefix-LM, and rows of several kinds in
  one batch; see `antlm_jax.objectives`.

  A query with k_start = k_end sees nothing: attention gives it zeros. Bounds
  outside [0, S] and k_start > k_end are errors if their values are known. A
  compiled program clips such bounds, and sees nothing if k_start > k_end.
  """

  # Whether no query sees a later key. Static: part of the program.
  causal: bool = dataclasses.field(default=False, metadata={"static": True})
  k_start: jax.Array | None = None  # first visible key, int32 `[B, T]`, or 0
  k_end: jax.Array | None = None  # one past the last one, int32 `[B, T]`, or S

  @property
  def bounded(self) -> bool:
    """Whether the mask has bounds, and is not plainly causal or full."""
    return self.k_start is not None or self.k_end is not None

  def bounds(self, queries: int, keys: int, xp=jnp):
    """Returns first and one past last visible key, int32 `[B or 1, T]`.

    They include causality, and are within [0, S], for T queries and S keys.
    With `xp=numpy` they stay on the host.
    """
    start = xp.zeros((1, queries), xp.int32)
    end = xp.full((1, queries), keys, xp.int32)
    if self.causal:
      end = xp.minimum(end, xp.arange(1, queries + 1, dtype=xp.int32))
    if self.k_start is not None:
      start = xp.maximum(start, self.k_start)
    if self.k_end is not None:
      end = xp.minimum(end, self.k_end)
    return start, end

  def within(
    self, window: int, shape: Sequence[int], xp=jnp
  ) -> "AttentionMask":
    """Returns the mask limited to keys nearer than `window`.

    Key j stays visible to query i if |i - j| < window. There are as many keys
    as queries. `shape` is that of the bounds, `[..., T]`; `xp` as in `bounds`.
    """
    start, end = self.bounds(shape[-1], shape[-1], xp)
    index = xp.arange(shape[-1], dtype=xp.int32)
    end = xp.minimum(end, index + window)
    # A query that sees nothing has an empty interval, start = end.
    start = xp.minimum(xp.maximum(start, index - window + 1), end)
    start, end = (xp.broadcast_to(x, tuple(shape)) for x in (start, end))
    return AttentionMask(self.causal, start, end)

  def dense(self, queries: int, keys: int) -> jax.Array | None:
    """Returns visibility as bool `[B or 1, T, S]`, None if all is visible."""
    if not self.causal and not self.bounded:
      return None
    start, end = self.bounds(queries, keys)
    j = jnp.arange(keys)
    return (start[..., None] <= j) & (j < end[..., None])


CAUSAL = AttentionMask(causal=True)
BIDIRECTIONAL = AttentionMask(causal=False)
