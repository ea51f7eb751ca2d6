"""Cross-entropy where a target stands, in chunks, so `[B, T, V]` never is.

Its gradient is formed with it, while a chunk's scores are in memory: they are
neither kept for the backward pass nor computed again there (as in Liger Kernel,
arXiv 2410.10989, section 3.2).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from antlm_jax.attention.devices import device
from antlm_jax.models.layers import likeliest


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
) -> tuple[jax.Array, dict[str, jax.Array]]:
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
    chunk: At most so many targets of a shard have their scores in memory; 0
      for 2048, or on CPU 256, whose scores mostly stay in its cache.
    z_loss: Weight of the squared log-partition in the loss, which keeps it
      near 0 (PaLM, arXiv 2204.02311, section 5).

  Returns:
    The summed loss in nats, float32 `[]`, which alone has a gradient; and
    float32 `[K]` each: `loss` (weighted, in nats), `weight`, and over the
    targets of positive weight `count`, `nats` (unweighted) and `correct`.
  """
  capacity = targets.shape[1]
  chunk = chunk or (256 if device().platform == "cpu" else 2048)
  chunks = -(-capacity // chunk)
  size = -(-capacity // chunks)

  # Every chunk has the same size, so that one program does them all; targets
  # that fill up the last one have weight 0 and count for nothing.
  def split(x):  # [S, C, ...] to [chunks, S, size, ...], padded with zeros
    pad = [(0, 0), (0, chunks * size - capacity)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad).reshape(x.shape[0], chunks, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  arrays = hidden, places, targets, weights, objective_ids
  hidden, *about = map(split, arrays)
  # With what it is computed from, such as the head, as arguments.
  logits_at, params = jax.closure_convert(logits_at, hidden[0], about[0][0])

  def sums(params, hidden, places, targets, weights, objective_ids):
    logits = logits_at(hidden, places, *params)
    at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    nats = log_partition - at_target
    loss = (nats + z_loss * log_partition**2) * weights
    real = (weights > 0).astype(jnp.float32)
    each = {
      "loss": loss,
      "weight": weights,
      "count": real,
      "nats": nats * real,
      "correct": (likeliest(logits) == targets) * real,
    }
    # A product with a table of zeros and ones: a scatter by objective would be
    # slow on a TPU.
    by_kind = jax.nn.one_hot(objective_ids, num_objectives, dtype=jnp.float32)
    each = jax.lax.stop_gradient(each)
    return loss.sum(), {
      k: jnp.einsum("sc,sck->k", v, by_kind) for k, v in each.items()
    }

  return _summed(sums, params, hidden, about)


def _summed(f, params, x, about):
  """Sums `f(params, x[i], *about[i])` over i, and its gradient with it.

  `f` returns a scalar, and what else is to be summed, which has no gradient.
  """

  def over_all(each, x):
    """Sums the first, and stacks the second, of what `each` returns."""
    parts = x, about
    shapes, _ = jax.eval_shape(each, *jax.tree.map(lambda a: a[0], parts))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(total, part):
      one, rest = each(*part)
      return jax.tree.map(jnp.add, total, one), rest

    return jax.lax.scan(body, zero, parts, unroll=len(x) == 1)

  @jax.custom_vjp
  def total(params, x):
    return over_all(lambda x, about: (f(params, x, *about), None), x)[0]

  def forward(params, x):
    def each(x, about):
      grad = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)
      out, (of_params, of_x) = grad(params, x, *about)
      return (out, of_params), of_x

    (out, of_params), of_x = over_all(each, x)
    return out, (of_params, of_x)

  def backward(grads, cotangents):
    scale, _ = cotangents
    return jax.tree.map(lambda g: (scale * g).astype(g.dtype), grads)

  total.defvjp(forward, backward)
  return total(params, x)
