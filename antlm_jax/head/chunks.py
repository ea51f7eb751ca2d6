"""The head's loss in plain XLA, in chunks: `[S, C, V]` is never in memory.

The gradient is computed together with the loss, while a chunk's scores are in
memory: they are neither kept for the backward pass nor computed again (as in
Liger Kernel, arXiv 2410.10989, section 3.2).
"""

import functools

import jax
import jax.numpy as jnp

from antlm_jax.mesh import device

_MOST = 2**29  # scores of a chunk: 2 GiB
_LEAST = -1e38  # below every score; the difference of two is a number


def chunk_size(vocab_size: int) -> int:
  """Returns the number of a shard's targets in a chunk, if none is set."""
  # On CPU a chunk's scores mostly stay in its cache. Elsewhere every chunk
  # reads and writes the kernel's gradient.
  if device().platform == "cpu":
    return 256
  return max(256, _MOST // vocab_size)


def forward(settings, states, kernel, bias, targets, weights, gradient: bool):
  """Scores the states, as `losses` says; `saved` are the gradients."""
  capacity = targets.shape[1]
  count = -(-capacity // (settings.chunk or chunk_size(kernel.shape[1])))
  size = -(-capacity // count)

  # Every chunk has the same size, so that one program computes them all. The
  # last chunk is filled up with targets of weight 0.
  def split(x):  # [S, C, ...] to [count, S, size, ...], padded with zeros
    pad = [(0, 0), (0, count * size - capacity)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad).reshape(x.shape[0], count, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  def join(x):
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :capacity]

  # Rounded once, for all chunks. Its gradient adds up in float32.
  rounded = kernel.astype(states.dtype)
  of_chunk = functools.partial(
    _of_chunk, settings.z_loss, rounded, bias, gradient
  )

  def body(total, arrays):
    chunk, chunk_sums = of_chunk(*arrays)
    return jax.tree.map(jnp.add, total, chunk_sums), chunk

  zero = None
  if gradient:
    zero = jax.tree.map(jnp.zeros_like, (kernel, bias))
  parts = tuple(map(split, (states, targets, weights)))
  total, stacked = jax.lax.scan(body, zero, parts, unroll=count == 1)
  *statistics, grad_states = jax.tree.map(join, stacked)
  return statistics, (grad_states, *total) if gradient else None


def backward(settings, saved, grad):
  """Returns the gradients of states, kernel and bias."""
  return jax.tree.map(lambda g: (grad * g).astype(g.dtype), saved)


def _of_chunk(z_loss, kernel, bias, gradient, states, targets, weights):
  """Returns arrays of each target, and the sums of the kernel and bias."""
  # A training step on a GPU is limited by its memory, and the scores are its
  # largest arrays. So they are rounded there as the states are. The gradients
  # have the same errors (docs/explanation/speed.md).
  rounded = gradient and device().platform == "gpu"
  scores = jnp.matmul(
    states,
    kernel,
    preferred_element_type=states.dtype if rounded else jnp.float32,
  ).astype(jnp.float32)
  if bias is not None:
    scores += bias
  at_target = jnp.take_along_axis(scores, targets[..., None], axis=-1)
  top, total, correct = _statistics(scores, at_target, targets[..., None])
  log_partition = jnp.log(total) + top
  statistics = [x[..., 0] for x in (log_partition, at_target, correct)]
  if not gradient:
    return (*statistics, None), None
  weights = weights[..., None]
  scale = weights * (1 + 2 * z_loss * log_partition)
  grad_scores = jnp.exp(scores - top) * (scale / total)
  is_target = jnp.arange(kernel.shape[1]) == targets[..., None]
  grad_scores = jnp.where(is_target, grad_scores - weights, grad_scores)
  grad_bias = None if bias is None else grad_scores.sum((0, 1))
  grad_scores = grad_scores.astype(states.dtype)
  # On flat rows, as XLA's CPU backend cannot run the transpose of a 3-D product
  # in bfloat16 (jax 0.11.2, on CPUs with avx512_bf16).
  flat = [x.reshape(-1, x.shape[-1]) for x in (states, grad_scores)]
  grad_kernel = jnp.matmul(
    flat[0].T, flat[1], preferred_element_type=jnp.float32
  )
  return (*statistics, grad_scores @ kernel.T), (grad_kernel, grad_bias)


def _statistics(scores, at_target, targets):
  """Returns maximum, sum of exp(score - maximum), and whether it is first."""
  earlier = jnp.where(jnp.arange(scores.shape[-1]) < targets, scores, _LEAST)
  if device().platform == "cpu":
    top = scores.max(axis=-1, keepdims=True)
    total = jnp.exp(scores - top).sum(axis=-1, keepdims=True)
    before = earlier.max(axis=-1, keepdims=True)
  else:  # one pass through memory, with two exponentials for each score
    arrays = scores, jnp.ones_like(scores), earlier
    least = jnp.float32(_LEAST)
    statistics = jax.lax.reduce(
      arrays, (least, jnp.float32(0), least), _join_maxima, (2,)
    )
    top, total, before = (x[..., None] for x in statistics)
  return top, total, (at_target == top) & (before < top)


def _join_maxima(a, b):
  """Joins maxima, sums of exp(score - maximum), and maxima of others."""
  top = jnp.maximum(a[0], b[0])
  total = a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)
  return top, total, jnp.maximum(a[2], b[2])
