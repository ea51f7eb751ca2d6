"""Cross-entropy in Pallas for TPU: the scores `[N, V]` are never in memory.

Scores exist one block at a time, in vector memory, as a block's tokens by its
targets. Softmax and gradients are those of FlashAttention-2 (arXiv 2307.08691)
with states h as queries, and rows of the head's kernel w as keys and values.
Two passes make four products, where one pass over scores in memory makes three:

    by target  m, l, best  maximum, sum and place of the maximum, so far
               acc = sum over v of exp(s - m) w[v]
    by token   dw[v] = sum over targets of ds h,
               ds = scale exp(s - lse) - weight (v is the target)

A block's side is up to 1,024: then reading the other operand, once for each
block, takes less time than the products. The first pass runs with the loss, the
second in the backward pass, where the gradient of the kernel is first used.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from antlm_jax.attention.tpu.diagonals import dot
from antlm_jax.mesh import device, kernel_memory

# The names of the kernels, and the axes of a grid of blocks.
NAMES = "head_(statistics|states_gradient|kernel_gradient)"
TARGETS = 0
TOKENS = 1
UNIT = 128  # lanes of a register
_LARGEST = 1024  # most targets, and most tokens, of a block
_HIDDEN = -1e38  # score of a token beyond the end


class HeadBlocks(NamedTuple):
  """Division of N targets and V tokens into blocks."""

  targets: int  # of a block
  tokens: int  # of a block
  grid: tuple[int, int]  # numbers of blocks of targets and of tokens

  @classmethod
  def of(
    cls, targets: int, tokens: int, width: int, dtype
  ) -> "HeadBlocks | None":
    """Chooses blocks for N targets and V tokens, with states of width D.

    Returns None if the smallest do not fit into vector memory.
    """
    itemsize = jnp.dtype(dtype).itemsize

    def needed_bytes(size: int) -> int:
      # Two inputs and a float32 sum, each twice, to be moved while the other is
      # computed.
      moved = 2 * size * width * (2 * itemsize + 4)
      # The scores, their exponentials, and those in bfloat16.
      return moved + size**2 * (4 + 4 + 2)

    size = _LARGEST
    while needed_bytes(size) > 0.85 * kernel_memory():
      size //= 2
      if size < UNIT:
        return None
    # An even number: v4 and v5p divide the blocks between two cores.
    target_blocks = 2 * pl.cdiv(targets, 2 * size) if targets > UNIT else 1
    targets_each = _up(pl.cdiv(targets, target_blocks))
    # No block of tokens extends beyond the end if a large enough size divides.
    sizes = range(size, size // 2, -UNIT)
    least = _up(pl.cdiv(tokens, pl.cdiv(tokens, size)))
    tokens_each = next((n for n in sizes if tokens % n == 0), least)
    grid = target_blocks, pl.cdiv(tokens, tokens_each)
    return cls(targets_each, tokens_each, grid)

  def moved(self, outer: int, width: int, itemsize: int) -> int:
    """Returns the bytes that a kernel reads and writes, without its rows."""
    sizes = [n * size for n, size in zip(self.grid, self[:2], strict=True)]
    read = self.grid[outer] * sizes[1 - outer] + sizes[outer]
    return width * (read * itemsize + sizes[outer] * 4)


def _up(size: int) -> int:
  return pl.cdiv(size, UNIT) * UNIT


# The passes: the work on each block of scores `[tokens, targets]`.


class PassResults(NamedTuple):
  """Results of a pass over all tokens, for each target."""

  top: jax.Array  # highest score, float32 `[N]`
  total: jax.Array  # sum of exp(score - top), float32 `[N]`
  best: jax.Array  # first token with the highest score, int32 `[N]`
  acc: jax.Array | None  # float32 `[D, N]`, for the gradient of the states


def loss_by_target(states, kernel, bias, gradient: bool) -> PassResults:
  """Runs the pass of the loss, with or without the states' gradient.

  Args:
    states: `[N, D]`.
    kernel: `[V, D]`, of the same dtype.
    bias: float32 `[V]`, or None.
    gradient: Whether to make `acc`.
  """
  count = len(states)
  tokens = len(kernel)
  blocks = HeadBlocks.of(count, *kernel.shape, states.dtype)
  size = blocks.grid[0] * blocks.targets
  row = jax.ShapeDtypeStruct((1, size), jnp.float32)
  place = jax.ShapeDtypeStruct((1, size), jnp.int32)
  acc = jax.ShapeDtypeStruct((kernel.shape[1], size), jnp.float32)
  results = _run_on_blocks(
    "head_states_gradient" if gradient else "head_statistics",
    functools.partial(_by_target, tokens),
    blocks,
    _scored(blocks, states, kernel, bias),
    [_HeadArray(x, 1, TARGETS) for x in (row, row, place, acc)[: 3 + gradient]],
    tokens_inside=True,
    products=1 + gradient,
  )
  *rows, acc = results if gradient else (*results, None)
  acc = acc[:, :count] if gradient else None
  return PassResults(*(x[0, :count] for x in rows), acc)


def _by_target(tokens, states, kernel, bias, top, total, best, acc=None):
  """Adds a block of tokens to the results so far, by an online softmax.

  The arrays are those of a block, and V is `tokens`. `top`, `total`, `best` and
  `acc` are the results m, l, best and acc of the module's text. They stay while
  the inner loop goes over the blocks of tokens.
  """
  first = pl.program_id(1) * len(kernel)

  @pl.when(pl.program_id(1) == 0)
  def _begin():
    top[...] = jnp.full_like(top, _HIDDEN)
    for x in (total, best) if acc is None else (total, best, acc):
      x[...] = jnp.zeros_like(x)

  scores = _block_scores(states, kernel, bias)
  token = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
  if tokens % len(scores):  # the last block extends beyond the end
    scores = jnp.where(token < tokens - first, scores, _HIDDEN)
  old_top = top[...]
  block_top = scores.max(axis=0, keepdims=True)
  # The first of several equal scores counts, in a block and among blocks.
  is_top = scores == block_top
  place = jnp.where(is_top, token, len(scores)).min(axis=0, keepdims=True)
  best[...] = jnp.where(block_top > old_top, first + place, best[...])
  new_top = jnp.maximum(old_top, block_top)
  # The sums so far are of exp(s - old_top).
  shrink = jnp.exp(old_top - new_top)
  exps = jnp.exp(scores - new_top)
  top[...] = new_top
  total[...] = total[...] * shrink + exps.sum(axis=0, keepdims=True)
  if acc is not None:
    part = dot(kernel[...], exps.astype(kernel.dtype), 0, 0)
    acc[...] = acc[...] * shrink + part


def gradients_by_token(states, kernel, bias, targets, lse, scale, weights):
  """Returns the gradients of the kernel, float32 `[V, D]`, and of the bias.

  The gradient of a target's score s is scale exp(s - lse), less the weight at
  the target's own token. The arguments are those of `loss_by_target`, and
  targets int32 `[N]` and float32 `[N]` each.
  """
  blocks = HeadBlocks.of(len(states), *kernel.shape, states.dtype)
  padding = 0, blocks.grid[0] * blocks.targets - len(states)
  rows = (jnp.pad(x, padding)[None] for x in (targets, lse, scale, weights))
  shapes = kernel.shape, (len(kernel), 1)
  grads = _run_on_blocks(
    "head_kernel_gradient",
    _by_token,
    blocks,
    _scored(blocks, states, kernel, bias)
    + [_HeadArray(x, 1, TARGETS) for x in rows],
    [
      _HeadArray(jax.ShapeDtypeStruct(shape, jnp.float32), 0, TOKENS)
      for shape in shapes[: 1 if bias is None else 2]
    ],
    tokens_inside=False,
    products=2,
  )
  return grads[0], None if bias is None else grads[1][:, 0]


def _by_token(
  states,
  kernel,
  bias,
  targets,
  lse,
  scale,
  weights,
  grad_kernel,
  grad_bias=None,
):
  @pl.when(pl.program_id(1) == 0)
  def _begin():
    for x in (grad_kernel,) if grad_bias is None else (grad_kernel, grad_bias):
      x[...] = jnp.zeros_like(x)

  s = _block_scores(states, kernel, bias)
  token = jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
  target = targets[...] - pl.program_id(0) * len(s)
  ds = jnp.exp(s - lse[...]) * scale[...]
  ds -= jnp.where(token == target, weights[...], 0.0)
  grad_kernel[...] += dot(ds.astype(states.dtype), states[...], 1, 0)
  if grad_bias is not None:
    grad_bias[...] += ds.sum(axis=1, keepdims=True)


def _block_scores(states, kernel, bias):
  s = dot(kernel[...], states[...], 1, 1)
  return s if bias is None else s + bias[...]


# The call.


class _HeadArray(NamedTuple):
  """An array, cut along an axis into blocks of targets or of tokens."""

  array: jax.Array | jax.ShapeDtypeStruct
  axis: int
  over: int


def _scored(
  blocks: HeadBlocks, states, kernel, bias
) -> list[_HeadArray | None]:
  """The inputs of every pass, with zeros for targets and tokens at the end."""

  def part(x, over):
    pad = blocks.grid[over] * blocks[over] - len(x)
    return _HeadArray(jnp.pad(x, [(0, pad), (0, 0)]), 0, over)

  column = None if bias is None else part(bias[:, None], TOKENS)
  return [part(states, TARGETS), part(kernel, TOKENS), column]


def _run_on_blocks(
  name, body, blocks, inputs, outputs, *, tokens_inside, products
):
  """Runs `body(*inputs, *outputs)` on every block of scores.

  The inner loop is over blocks of tokens, or of targets. A block of an output
  stays in vector memory for the whole inner loop, and adds up there.
  """

  def spec(part: _HeadArray | None):
    if part is None:
      return None
    shape = list(part.array.shape)
    shape[part.axis] = blocks[part.over]

    def index(*ids):
      block = ids[part.over if tokens_inside else 1 - part.over]
      return (block, 0) if part.axis == 0 else (0, block)

    return pl.BlockSpec(tuple(shape), index)

  arrays = [part and part.array for part in inputs]
  shapes = [part.array for part in outputs]
  pairs = math.prod(blocks.grid) * blocks.targets * blocks.tokens
  moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
  return pl.pallas_call(
    body,
    out_shape=shapes,
    grid=blocks.grid if tokens_inside else blocks.grid[::-1],
    in_specs=[spec(part) for part in inputs],
    out_specs=[spec(part) for part in outputs],
    compiler_params=pltpu.CompilerParams(
      # The outer loop may be divided between two cores.
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=kernel_memory(),
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * products * pairs * inputs[0].array.shape[1],
      transcendentals=pairs,
      bytes_accessed=moved + sum(x.size * x.dtype.itemsize for x in shapes),
    ),
    interpret=device().platform != "tpu",
    name=name,
  )(*arrays)
