"""Layers that several encoders share; each parameter is declared once.

A parameter's shape, logical axes and initial values stand together in the
`nnx.Param` that declares it. Sharding, weight decay and Hugging Face names are
tables over the same paths and axes (`antlm_jax.sharding`, `antlm_jax.optim`).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from antlm_jax import attention
from antlm_jax.masks import AttentionMask


def normal(rngs: nnx.Rngs, shape, axes, std: float = 0.02) -> nnx.Param:
  """Declares a parameter drawn from N(0, std^2), with its logical axes."""
  return nnx.Param(std * jax.random.normal(rngs.params(), shape), axes=axes)


class Linear(nnx.Module):
  """`[..., i]` to `[..., o]` without a bias."""

  def __init__(self, rngs: nnx.Rngs, shape, axes, std: float = 0.02):
    self.kernel = normal(rngs, shape, axes, std)

  def __call__(self, x: jax.Array) -> jax.Array:
    return matmul(x, self.kernel[...].astype(x.dtype))


@jax.custom_vjp
def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """`[..., i]` times `[i, o]`, with a weight gradient that is fast on CPU.

  XLA's CPU backend is slow where the left operand is to be transposed inside
  the product (a step of a small encoder gains about a fifth by this), so
  there it is transposed before.
  """
  return x @ kernel


def _matmul_forward(x, kernel):
  return matmul(x, kernel), (x, kernel)


def _matmul_backward(residual, grad):
  x, kernel = residual
  rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
  kernel_grad = jax.lax.platform_dependent(
    *rows,
    cpu=lambda x, g: jax.lax.optimization_barrier(x.T) @ g,
    default=lambda x, g: x.T @ g,
  )
  return grad @ kernel.T, kernel_grad


matmul.defvjp(_matmul_forward, _matmul_backward)


class RMSNorm(nnx.Module):
  """Root-mean-square norm over the last axis, in float32, then scaled.

  The cast back comes before the scale, as in Llama.
  """

  def __init__(self, width: int, eps: float):
    self.scale = nnx.Param(jnp.ones((width,)), axes=("norm",))
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    return y.astype(x.dtype) * self.scale[...].astype(x.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Zeroes a share `rate` of x and scales the rest; no key, no dropout."""
  if key is None or rate == 0.0:
    return x
  keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
  return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def attention_dropout(
  rate: float, key: jax.Array | None, rows: int
) -> attention.Dropout | None:
  """Says what is dropped of the attention weights of B rows; no key, none."""
  if key is None or rate == 0.0:
    return None
  return attention.Dropout(rate, jax.random.bits(key, (rows,), jnp.uint32))


def prepare_mask(
  config, mask: AttentionMask, rows: int, length: int, *, training: bool
) -> attention.Prepared:
  """Makes a mask ready, once, for the attention of all layers.

  Args:
    config: An encoder's, with heads, kv_heads, head_width, dtype, attention
      and attention_dropout.
    mask: The mask.
    rows: Rows of the batch B.
    length: Tokens of a row T.
    training: Whether attention weights may be dropped.
  """

  def like(heads):
    shape = (rows, length, heads, config.head_width)
    return jax.ShapeDtypeStruct(shape, config.dtype)

  return attention.prepare(
    mask,
    like(config.heads),
    like(config.kv_heads),
    config.attention,
    dropout=training and config.attention_dropout > 0,
  )


def rotary(positions: jax.Array, width: int, theta: float):
  """Returns RoPE's cosines and sines, each float32 `[B, T, 1, H/2]`."""
  frequencies = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
  angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates `[B, T, N, H]` by position; the pairs are (h, h + H/2)."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x.dtype)


def stack(make_block, rngs: nnx.Rngs, count: int) -> nnx.Module:
  """Makes `count` blocks as one, each parameter with a leading layer axis."""
  keys = jax.random.split(rngs.params(), count)
  return jax.vmap(lambda key: make_block(nnx.Rngs(params=key)))(keys)


REMAT_POLICIES = {
  "none": None,
  "block": jax.checkpoint_policies.nothing_saveable,
  "dots": jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(attention.SAVED),
  ),
}


def run_blocks(blocks, step, x: jax.Array, keys, *, scan: bool, remat: str):
  """Runs `x = step(block, x, key)` over stacked blocks.

  Args:
    blocks: A module from `stack`.
    step: The function of one block.
    x: The first block's input.
    keys: Dropout keys `[L]`, or None.
    scan: One compiled block in a loop (compiles fast), or all unrolled (runs
      faster on CPU). The parameters are the same.
    remat: A name of `REMAT_POLICIES`: what backward keeps of a block.
  """
  if remat != "none":
    step = jax.checkpoint(step, policy=REMAT_POLICIES[remat])
  if scan:
    body = lambda x, layer: (step(layer[0], x, layer[1]), None)  # noqa: E731
    return jax.lax.scan(body, x, (blocks, keys))[0]
  for layer, key in unstack((blocks, keys)):
    x = step(layer, x, key)
  return x


def unstack(tree):
  """Splits every leaf along its leading axis; yields one tree per index.

  Differentiates into one concatenation, where indexing would add up a whole
  stack of zeros per layer.
  """
  leaves, treedef = jax.tree.flatten(tree)
  split = [jax.lax.split(leaf, [1] * leaf.shape[0]) for leaf in leaves]
  for parts in zip(*split, strict=True):
    yield treedef.unflatten([part[0] for part in parts])
