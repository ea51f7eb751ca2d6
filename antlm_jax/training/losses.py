"""Cross-entropy where a target stands, in chunks, so `[B, T, V]` never is."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def cross_entropy(
  logits_at: Callable[[jax.Array, jax.Array], jax.Array],
  hidden: jax.Array,
  places: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
  objective_ids: jax.Array,
  num_objectives: int,
  chunk: int,
  z_loss: float = 0.0,
) -> dict[str, jax.Array]:
  """Sums the cross-entropy of targets by objective.

  Args:
    logits_at: Maps hidden states `[..., D]` and their places `[...]` to
      scores float32 `[..., V]`.
    hidden: Where each target is predicted, `[S, C, D]` (S data shards).
    places: Where that is in the microbatch, int32 `[S, C]`.
    targets: int32 `[S, C]`.
    weights: float32 `[S, C]`; 0 for padding.
    objective_ids: Each target's objective, int32 `[S, C]`.
    num_objectives: Number of objectives K.
    chunk: At most so many targets of a shard have their scores in memory.
    z_loss: Weight of the squared log-partition in the loss, which keeps it
      near 0 (PaLM, arXiv 2204.02311, section 5).

  Returns:
    Float32 `[K]` each: `loss` (weighted, in nats), `weight`, and over the
    targets of positive weight `count`, `nats` (unweighted) and `correct`.
  """

  def sums(hidden, places, targets, weights, objective_ids):
    logits = logits_at(hidden, places)
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    nats = log_partition - at_target
    real = (weights > 0).astype(jnp.float32)
    correct = (jnp.argmax(logits, axis=-1) == targets) * real
    each = {
      "loss": (nats + z_loss * log_partition**2) * weights,
      "weight": weights,
      "count": real,
      "nats": nats * real,
      "correct": correct,
    }
    # A product with a table of zeros and ones: a scatter by objective would be
    # slow on a TPU.
    by_kind = jax.nn.one_hot(objective_ids, num_objectives, dtype=jnp.float32)
    return {k: jnp.einsum("sc,sck->k", v, by_kind) for k, v in each.items()}

  arrays = hidden, places, targets, weights, objective_ids
  capacity = targets.shape[1]
  chunks = -(-capacity // chunk)
  if chunks == 1:
    return sums(*arrays)

  # Every chunk has the same size, so that one program does them all; targets
  # that fill up the last one have weight 0 and count for nothing.
  def split(x):  # [S, C, ...] to [chunks, S, chunk, ...], padded with zeros
    size = -(-capacity // chunks)
    pad = [(0, 0), (0, chunks * size - capacity)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad).reshape(x.shape[0], chunks, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  # Scores are computed again in the backward pass: kept, those of all chunks
  # would be in memory together after all.
  def body(total, part):
    return jax.tree.map(jnp.add, total, jax.checkpoint(sums)(*part)), None

  names = ("loss", "weight", "count", "nats", "correct")
  zero = {name: jnp.zeros(num_objectives) for name in names}
  return jax.lax.scan(body, zero, jax.tree.map(split, arrays))[0]
