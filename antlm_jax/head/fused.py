"""The head's loss by the TPU kernel (`head.tpu`), over a mesh.

Over a mesh, each data shard has its own targets. If `tensor` splits the
vocabulary, each part has its own maximum, sum and acc, which are then scaled to
the common maximum.

The gradient of the states is made together with the loss, and that of the
kernel in the backward pass, where it is first used.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from antlm_jax import mesh as mesh_lib
from antlm_jax.head import tpu as head_tpu
from antlm_jax.mesh import on_shards


def obstacle(states, kernel) -> str | None:
  """Returns a requirement of the kernel that the head does not meet, or None.

  The arrays are states `[S, C, D]` and the head's kernel `[D, V]`.
  """
  width, tokens = kernel.shape
  if states.dtype not in (jnp.float32, jnp.bfloat16):
    return f"float32 or bfloat16, not {states.dtype}"
  if head_tpu.HeadBlocks.of(1, tokens, width, states.dtype) is None:
    return f"blocks in vector memory, too small for a width of {width}"
  return None


def forward(settings, states, kernel, bias, targets, weights, gradient: bool):
  """Scores the states, as `losses` says."""
  rounded = kernel.T.astype(states.dtype)  # `[V, D]`, a copy if it is rounded
  rows, tokens, specs = _specs(states, rounded, bias)
  saved = states, rounded, bias, targets, weights
  local = functools.partial(_local_arrays, settings.z_loss, gradient, tokens)
  by_target = PartitionSpec(rows)
  out_specs = (*(by_target,) * 3, by_target if gradient else None)
  *statistics, grad_states = on_shards(local, specs, out_specs)(*saved)
  return statistics, (*saved, statistics[0], grad_states) if gradient else None


def backward(settings, saved, grad):
  """Returns the gradients of states, kernel and bias."""
  states, rounded, bias, targets, weights, log_partition, grad_states = saved
  weights = grad * weights
  scale = weights * (1 + 2 * settings.z_loss * log_partition)
  rows, tokens, specs = _specs(states, rounded, bias)

  def local(states, kernel, bias, targets, *numbers):
    part_targets = targets - _first_token(tokens, kernel)
    flat = (x.reshape(-1) for x in (part_targets, *numbers))
    states = states.reshape(-1, states.shape[2])
    grads = head_tpu.gradients_by_token(states, kernel, bias, *flat)
    return jax.tree.map(lambda x: _over(rows, jax.lax.psum, x), grads)

  by_target = PartitionSpec(rows)
  by_token = PartitionSpec(tokens)
  in_specs = (*specs[:4], *(by_target,) * 3)
  local = on_shards(local, in_specs, (by_token, by_token))
  grad_kernel, grad_bias = local(
    states, rounded, bias, targets, log_partition, scale, weights
  )
  return (grad * grad_states).astype(states.dtype), grad_kernel.T, grad_bias


def _specs(states, kernel, bias):
  """Mesh axes of targets and tokens, and the arguments' PartitionSpecs."""
  rows = mesh_lib.mesh_spec(states.shape, "batch", None, None)[0]
  tokens = mesh_lib.mesh_spec(kernel.shape, "vocab", "embed", but=("fsdp",))[0]
  by_target = PartitionSpec(rows)
  by_token = PartitionSpec(tokens)
  bias_spec = None if bias is None else by_token
  return rows, tokens, (by_target, by_token, bias_spec, by_target, by_target)


def _first_token(axis, kernel):
  """Returns the first token of this part of the vocabulary."""
  return 0 if axis is None else jax.lax.axis_index(axis) * len(kernel)


def _over(axes, reduce, x):
  """Combines the values of the parts that mesh axes make, if any."""
  return x if axes is None else reduce(x, axes)


def _local_arrays(
  z_loss, gradient, axis, states, kernel, bias, targets, weights
) -> tuple[jax.Array | None, ...]:
  """Makes `forward`'s arrays from a part of the targets and of the tokens."""
  shape = targets.shape
  over = functools.partial(_over, axis)
  states = states.reshape(-1, states.shape[2])
  part_targets = targets.reshape(-1) - _first_token(axis, kernel)
  results = head_tpu.loss_by_target(states, kernel, bias, gradient)
  top = over(jax.lax.pmax, results.top)
  shrink = jnp.exp(results.top - top)
  total = over(jax.lax.psum, results.total * shrink)
  log_partition = jnp.log(total) + top
  # How far the first of the highest scores is from the target.
  far = jnp.where(results.top == top, results.best - part_targets, 2**30)
  correct = over(jax.lax.pmin, far) == 0
  # The targets' rows. They are zeros if another part has them.
  inside = (part_targets >= 0) & (part_targets < len(kernel))
  place = jnp.where(inside, part_targets, 0)
  rows = kernel[place].astype(jnp.float32) * inside[:, None]
  at_target = (states.astype(jnp.float32) * rows).sum(axis=1)
  if bias is not None:
    at_target += bias[place] * inside
  at_target = over(jax.lax.psum, at_target)
  statistics = [x.reshape(shape) for x in (log_partition, at_target, correct)]
  if not gradient:
    return *statistics, None
  weights = weights.reshape(-1)
  scale = weights * (1 + 2 * z_loss * log_partition) * shrink / total
  grad_states = (results.acc * scale).T - weights[:, None] * rows
  return *statistics, over(jax.lax.psum, grad_states).reshape(*shape, -1)
