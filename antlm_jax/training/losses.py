"""Cross-entropy at the targets, in chunks: `[B, T, V]` is never in memory.

The gradient is computed together with the loss, while a chunk's scores are in
memory: they are neither kept for the backward pass nor computed again (as in
Liger Kernel, arXiv 2410.10989, section 3.2).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from antlm_jax.attention.devices import device
from antlm_jax.models.layers import likeliest


@jax.named_scope("head")
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
    hidden: State that predicts each target, `[S, C, D]` (S data shards).
    places: Index of that state in the microbatch, int32 `[S, C]`.
    targets: int32 `[S, C]`.
    weights: float32 `[S, C]`; 0 for padding.
    objective_ids: Each target's objective, int32 `[S, C]`.
    num_objectives: Number of objectives K.
    chunk: Largest number of a shard's targets whose scores are in memory; 0
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

  # Every chunk has the same size, so that one program computes them all. The
  # last one is filled up with targets of weight 0.
  def split(x):  # [S, C, ...] to [chunks, S, size, ...], padded with zeros
    pad = [(0, 0), (0, chunks * size - capacity)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad).reshape(x.shape[0], chunks, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  arrays = hidden, places, targets, weights, objective_ids
  hidden, *about = map(split, arrays)
  # The head's parameters become arguments, so that they have a gradient.
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
    each = jax.lax.stop_gradient(each).items()
    return loss.sum(), {k: jnp.einsum("sc,sck->k", v, by_kind) for k, v in each}

  return _scan_sum_with_grad(sums, params, hidden, about)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_sum_with_grad(f, params, xs, aux):
  """Sums `f(params, xs[i], *aux[i])` over i, and its gradient with it.

  `f` returns a scalar, which alone has a gradient, and other sums. The gradient
  is computed in the forward pass, and the backward pass scales it.
  """
  sums, _ = _scan_sum(lambda x, aux: (f(params, x, *aux), None), xs, aux)
  return sums


def _forward(f, params, xs, aux):
  value_and_grad = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)

  def of_chunk(x, aux):
    value, (of_params, of_x) = value_and_grad(params, x, *aux)
    return (value, of_params), of_x

  (sums, of_params), of_xs = _scan_sum(of_chunk, xs, aux)
  return sums, (of_params, of_xs)


def _backward(f, grads, cotangents):
  scale, _ = cotangents
  scaled = jax.tree.map(lambda g: (scale * g).astype(g.dtype), grads)
  return *scaled, None


_scan_sum_with_grad.defvjp(_forward, _backward)


def _scan_sum(f, xs, aux):
  """Sums the first and stacks the second result of `f(xs[i], aux[i])`."""
  first = jax.tree.map(lambda x: x[0], (xs, aux))
  shapes, _ = jax.eval_shape(f, *first)

  def body(total, part):
    summed, stacked = f(*part)
    return jax.tree.map(jnp.add, total, summed), stacked

  zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  return jax.lax.scan(body, zero, (xs, aux), unroll=len(xs) == 1)
