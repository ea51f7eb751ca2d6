"""Layers that several encoders share.

An `nnx.Param` declares a parameter once, with its shape, logical axes and
initial values. Sharding, weight decay and Hugging Face names are tables over
the paths and axes (`antlm_jax.mesh`, `antlm_jax.optim`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from antlm_jax import attention
from antlm_jax import mesh as mesh_lib
from antlm_jax.attention.dropout import keep


def normal(rngs: nnx.Rngs, shape, axes, std) -> nnx.Param:
  """Declares a parameter drawn from N(0, std^2), with its logical axes."""
  return nnx.Param(std * jax.random.normal(rngs.params(), shape), axes=axes)


def truncated_normal(rngs: nnx.Rngs, shape, axes, std) -> nnx.Param:
  """Like `normal`, but truncated at 2 std, without rescaling."""
  draws = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape)
  return nnx.Param(std * draws, axes=axes)


def vector(values: jax.Array, axis: str, **metadata) -> nnx.Param:
  """Declares a parameter with one axis and these initial values."""
  return nnx.Param(values, axes=(axis,), **metadata)


class Linear(nnx.Module):
  """Maps `[..., i]` to `[..., o]` with a kernel `[i, o]`, optionally a bias."""

  def __init__(self, kernel: nnx.Param, bias: bool = False):
    self.kernel = kernel
    self.axes = kernel.get_metadata("axes")
    if bias:
      self.bias = vector(jnp.zeros(kernel.shape[-1]), "bias")

  def __call__(self, x: jax.Array) -> jax.Array:
    kernel = self.kernel[...].astype(x.dtype)
    y = matmul(x, mesh_lib.gathered(kernel, *self.axes))
    return y + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else y


def published_as(tensor: str, *linears: Linear) -> None:
  """Marks layers' kernels and biases as parts of one published tensor.

  Only LAMB uses the mark: it scales each published tensor by its norm.
  """
  for linear in linears:
    linear.kernel.set_metadata("tensor", f"{tensor}/kernel")
    if hasattr(linear, "bias"):
      linear.bias.set_metadata("tensor", f"{tensor}/bias")


@jax.custom_vjp
def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Multiplies `[..., i]` by `[i, o]`, with a weight gradient fast on CPU.

  XLA's CPU backend transposes the left operand slowly inside a product. This
  gradient transposes it first, so that a small encoder's step takes about a
  fifth less time.
  """
  return x @ kernel


def _matmul_forward(x, kernel):
  # Do not call `matmul`, because remat policies must see the product itself.
  return x @ kernel, (x, kernel)


def _matmul_backward(residual, grad):
  x, kernel = residual

  def on_cpu(x, grad):
    rows = jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
    return rows @ grad.reshape(-1, grad.shape[-1])

  def elsewhere(x, grad):
    # A reshape to `[B * T, i]` would copy arrays that are in the attention
    # kernel's layout, `[B, i, T]`.
    return jnp.tensordot(x, grad, axes=(tuple(range(x.ndim - 1)),) * 2)

  kernel_grad = jax.lax.platform_dependent(
    x, grad, cpu=on_cpu, default=elsewhere
  )
  return grad @ kernel.T, kernel_grad


matmul.defvjp(_matmul_forward, _matmul_backward)


def likeliest(logits: jax.Array) -> jax.Array:
  """Returns the first index of the maximum of `[..., V]`, int32 `[...]`.

  `jnp.argmax` would take as long on CPU as the computation of the logits.
  """
  last = logits.shape[-1] - 1
  best = logits == jnp.max(logits, axis=-1, keepdims=True)
  return jnp.min(jnp.where(best, jnp.arange(last + 1), last), axis=-1)


def exact_gelu(x: jax.Array) -> jax.Array:
  """Computes GELU by the error function, not by its tanh approximation."""
  return jax.nn.gelu(x, approximate=False)


class RMSNorm(nnx.Module):
  """Root-mean-square norm over the last axis, in float32.

  The result is cast back before it is scaled, as in Llama.
  """

  def __init__(self, width: int, eps: float):
    self.scale = vector(jnp.ones(width), "norm")
    self.eps = eps

  @jax.named_scope("norm")
  def __call__(self, x: jax.Array) -> jax.Array:
    return self.normed(x).astype(x.dtype) * self.scale[...].astype(x.dtype)

  def normed(self, x: jax.Array) -> jax.Array:
    """Returns x normalized but not scaled, in float32."""
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)


class LayerNorm(nnx.Module):
  """Layer norm over the last axis, in float32; not affine by default."""

  def __init__(
    self, width: int, eps: float, affine: bool = False, bias: bool = True
  ):
    self.eps = eps
    if affine:
      self.scale = vector(jnp.ones(width), "norm")
    if affine and bias:
      self.bias = vector(jnp.zeros(width), "norm")

  @jax.named_scope("norm")
  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    if hasattr(self, "scale"):
      y = y * self.scale[...]
    if hasattr(self, "bias"):
      y = y + self.bias[...]
    return y.astype(x.dtype)


def split_key(key: jax.Array | None, count: int):
  """Splits a key into `count` keys; None becomes `count` times None."""
  return (None,) * count if key is None else jax.random.split(key, count)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Drops a share `rate` of x and scales the rest; x without a key."""
  if key is None or rate == 0.0:
    return x
  keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
  return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


class DropoutPlaces(NamedTuple):
  """Seed and places that determine the dropout of hidden states."""

  seed: jax.Array  # uint32 `[]`
  # Index of each state `[..., D]` in the microbatch, int32 `[...]`.
  index: jax.Array


def dropout_at(
  x: jax.Array, rate: float, places: DropoutPlaces | None
) -> jax.Array:
  """Like `dropout`, but independent of the division into shards."""
  if places is None or rate == 0.0:
    return x
  features = jnp.arange(x.shape[-1])
  keep_mask = keep(rate, places.seed, places.index[..., None], features)
  return jnp.where(keep_mask, x / (1.0 - rate), 0).astype(x.dtype)


def attention_dropout(
  rate: float, key: jax.Array | None, rows: int
) -> attention.Dropout | None:
  """Returns the dropout of attention weights of B rows; None without a key."""
  if key is None or rate == 0.0:
    return None
  return attention.Dropout(rate, jax.random.bits(key, (rows,), jnp.uint32))


def split_heads(x: jax.Array, width: int) -> jax.Array:
  """Reshapes `[..., N * H]` to `[..., N, H]`."""
  return x.reshape(*x.shape[:-1], -1, width)
