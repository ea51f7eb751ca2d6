"""Norms and gated activations on GPUs, each in one pass through memory.

XLA computes a norm and its gradient in several kernels, and each of them reads
the hidden states again. So do the two gradients of a gated activation. These
kernels, in Pallas' Triton form, read and write every array once. They take
bfloat16 only. Elsewhere, the functions are the plain formulas.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from antlm_jax import mesh as mesh_lib
from antlm_jax.models import layers

# Compute capabilities that the kernels were compiled for: A100, Ada, Hopper and
# B200. JAX 0.12 cannot lower them for an absent RTX 3090 (8.6) or 5090 (12.0).
COMPILED = (8.0, 8.9, 9.0, 10.0)
_ELEMENTS = 1024  # of a gated activation in a thread block
_ROWS = 4  # hidden states that a norm's thread block holds
_STEPS = 16  # number of times that it does so in the backward pass
_WIDEST = 4096  # elements of a state; more would not fit into registers


@dataclasses.dataclass(frozen=True)
class NormKind:
  """Static properties of a norm."""

  centered: bool  # whether it subtracts the mean
  rounded: bool  # whether it rounds before it scales, as in Llama
  eps: float = 0.0
  interpret: bool = False  # on a CPU


# Exact classes only, because a subclass may scale in another way.
NORMS = {
  layers.RMSNorm: NormKind(centered=False, rounded=True),
  layers.LayerNorm: NormKind(centered=True, rounded=False),
}


@functools.cache
def _triton():
  """Imports Pallas' Triton form, which is slow; None if JAX has none.

  JAX 0.12 announces that a later release will remove it.
  """
  try:
    from jax.experimental.pallas import triton
  except ImportError:
    return None
  return triton


def available(x: jax.Array) -> bool:
  """Whether the kernels can compute arrays like `[B, T, D]` on this device."""
  device = mesh_lib.device()
  if device.platform != "gpu" or x.dtype != jnp.bfloat16 or not _triton():
    return False
  return mesh_lib.capability(device.device_kind) in COMPILED


def residual_norm(
  norm: layers.RMSNorm | layers.LayerNorm,
  x: jax.Array,
  y: jax.Array | None = None,
  fused: bool = True,
) -> tuple[jax.Array, jax.Array]:
  """Returns x + y, or x without y, and its norm.

  Args:
    norm: The norm.
    x: Hidden states `[B, T, D]`.
    y: Output of a sublayer, `[B, T, D]`.
    fused: Whether a kernel may compute it.
  """
  kind = NORMS.get(type(norm))
  width = x.shape[-1]
  whole = _divides(width * _ROWS * _STEPS, x, _states_spec(x))
  whole = whole and width <= _WIDEST
  if not (fused and kind and whole and available(x)) or hasattr(norm, "bias"):
    states = x if y is None else x + y
    return states, norm(states)
  scale = jnp.ones(width)
  if hasattr(norm, "scale"):
    scale = norm.scale[...]
  with jax.named_scope("norm"):
    kind = dataclasses.replace(kind, eps=norm.eps)
    return norm_by_kernel(kind, x, y, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def norm_by_kernel(kind: NormKind, x, y, scale):
  """Computes `residual_norm` from a scale, float32 `[D]`."""
  return _norm_forward(kind, x, y, scale)[0]


def _norm_forward(kind, x, y, scale):
  arrays = [x] if y is None else [x, y]
  *sums, normed = _call(_norm_kernel, kind, arrays, scale, len(arrays), 1)
  total = sums[0] if sums else x
  return (total, normed), (total, y, scale)


def _norm_backward(kind, saved, grads):
  total, y, scale = saved
  arrays = [total, *grads]
  grad, parts = _call(_gradient_kernel, kind, arrays, scale, 1, _STEPS)
  return grad, None if y is None else grad, parts.sum(0)


norm_by_kernel.defvjp(_norm_forward, _norm_backward)


def _divides(elements: int, x: jax.Array, spec: PartitionSpec) -> bool:
  """Whether blocks of this size divide a shard, whose offsets are int32."""
  shards = math.prod(mesh_lib.number_of_shards(axes) for axes in spec)
  return x.size % (shards * elements) == 0 and x.size // shards < 2**31


def _states_spec(x):
  return mesh_lib.mesh_spec(x.shape, "batch", None, None)


def _call(kernel, kind, arrays, scale, results, steps):
  """Runs a norm's kernel on arrays `[B, T, D]`, and returns such arrays.

  A thread block takes `steps` times `_ROWS` states. With several steps, the
  last result is the sum over the states of each block, float32 `[blocks, D]`.
  """
  width = scale.shape[0]
  padded = pl.next_power_of_2(width)
  states = pl.BlockSpec((_ROWS * steps, padded), lambda i: (i, 0))
  sums = steps > 1

  def local(scale, *arrays):
    flat = [x.reshape(-1, width) for x in arrays]
    blocks = len(flat[0]) // (_ROWS * steps)
    like = jax.ShapeDtypeStruct(flat[0].shape, flat[0].dtype)
    parts = jax.ShapeDtypeStruct((blocks, width), jnp.float32)
    part = pl.BlockSpec((1, padded), lambda i: (i, 0))
    outputs = pl.pallas_call(
      functools.partial(kernel, kind, width),
      grid=(blocks,),
      in_specs=[
        *[states] * len(flat),
        pl.BlockSpec((1, padded), lambda i: (0, 0)),
      ],
      out_specs=[states] * results + [part] * sums,
      out_shape=[like] * results + [parts] * sums,
      compiler_params=_triton().CompilerParams(num_warps=4, num_stages=1),
      interpret=kind.interpret,
    )(*flat, scale[None])
    whole = [x.reshape(arrays[0].shape) for x in outputs[:results]]
    return [*whole, *outputs[results:]]

  spec = _states_spec(arrays[0])
  in_specs = PartitionSpec(), *[spec] * len(arrays)
  out_specs = [spec] * results + [PartitionSpec(spec[0])] * sums
  return mesh_lib.on_shards(local, in_specs, out_specs)(scale, *arrays)


def _normalize(kind, width, mask, x):
  """Returns normalized states, float32, and their inverse deviations."""
  if kind.centered:
    x = jnp.where(mask, x - x.sum(axis=1, keepdims=True) / width, 0)
  variance = (x * x).sum(axis=1, keepdims=True) / width
  inverse = jax.lax.rsqrt(variance + kind.eps)
  return x * inverse, inverse


def _load(ref, mask, rows=slice(None)):
  """Loads states as float32, with zeros beyond their width."""
  return _triton().load(ref.at[rows, :], mask=mask, other=0).astype(jnp.float32)


def _load_scale(kind, width, ref):
  scale = _load(ref, _mask(width, ref.shape))
  if kind.rounded:
    scale = scale.astype(jnp.bfloat16).astype(jnp.float32)
  return scale


def _mask(width, shape):
  return jax.lax.broadcasted_iota(jnp.int32, shape, 1) < width


def _norm_kernel(kind, width, *refs):
  """Adds states if there are two, and normalizes the sum."""
  *inputs, scale_ref, normed_ref = refs
  total_ref = None
  if len(refs) == 5:
    *inputs, scale_ref, total_ref, normed_ref = refs
  mask = _mask(width, normed_ref.shape)
  x = sum(_load(ref, mask) for ref in inputs)
  if total_ref is not None:
    total = x.astype(total_ref.dtype)
    _triton().store(total_ref.at[:, :], total, mask=mask)
    x = total.astype(jnp.float32)
  normed, _ = _normalize(kind, width, mask, x)
  if kind.rounded:
    normed = normed.astype(normed_ref.dtype).astype(jnp.float32)
  normed = normed * _load_scale(kind, width, scale_ref)
  _triton().store(
    normed_ref.at[:, :], normed.astype(normed_ref.dtype), mask=mask
  )


def _gradient_kernel(
  kind, width, total_ref, total_grad, normed_grad, scale_ref, out_ref, part_ref
):
  """Adds the gradient through a norm to that of the states."""
  mask = _mask(width, (_ROWS, out_ref.shape[1]))
  scale = _load_scale(kind, width, scale_ref)

  def step(i, scale_grad):
    rows = pl.ds(i * _ROWS, _ROWS)
    normed, inverse = _normalize(
      kind, width, mask, _load(total_ref, mask, rows)
    )
    grad = _load(normed_grad, mask, rows)
    scale_grad += grad * normed
    grad = grad * scale
    along = (grad * normed).sum(axis=1, keepdims=True) / width
    through = grad - normed * along
    if kind.centered:
      through -= grad.sum(axis=1, keepdims=True) / width
    out = through * inverse + _load(total_grad, mask, rows)
    _triton().store(out_ref.at[rows, :], out.astype(out_ref.dtype), mask=mask)
    return scale_grad

  scale_grad = jnp.zeros((_ROWS, out_ref.shape[1]), jnp.float32)
  scale_grad = jax.lax.fori_loop(0, _STEPS, step, scale_grad)
  part = scale_grad.sum(axis=0, keepdims=True)
  _triton().store(part_ref.at[:, :], part, mask=_mask(width, part.shape))


def gated_product(activation, gate, up, fused: bool = True) -> jax.Array:
  """Returns activation(gate) * up.

  Args:
    activation: Elementwise function.
    gate, up: Arrays `[B, T, F]`.
    fused: Whether a kernel may compute the gradients.
  """
  whole = _divides(_ELEMENTS, gate, _gate_spec(gate))
  if not (fused and whole and available(gate)):
    return activation(gate) * up
  return gated_by_kernel(activation, False, gate, up)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gated_by_kernel(activation, interpret: bool, gate, up):
  """Computes `gated_product`; `interpret` is for CPUs."""
  return activation(gate) * up


def _gated_forward(activation, interpret, gate, up):
  return activation(gate) * up, (gate, up)


def _gated_backward(activation, interpret, saved, grad):
  spec = _gate_spec(grad)

  def run(*arrays):
    block = pl.BlockSpec((_ELEMENTS,), lambda i: (i,))
    flat = jax.ShapeDtypeStruct((arrays[0].size,), arrays[0].dtype)
    grads = pl.pallas_call(
      functools.partial(_gated_kernel, activation),
      grid=(flat.size // _ELEMENTS,),
      in_specs=[block] * 3,
      out_specs=[block] * 2,
      out_shape=[flat] * 2,
      compiler_params=_triton().CompilerParams(num_warps=4, num_stages=1),
      interpret=interpret,
    )(*(x.reshape(-1) for x in arrays))
    return [x.reshape(arrays[0].shape) for x in grads]

  return mesh_lib.on_shards(run, (spec,) * 3, [spec] * 2)(*saved, grad)


gated_by_kernel.defvjp(_gated_forward, _gated_backward)


def _gate_spec(gate):
  return mesh_lib.mesh_spec(gate.shape, "batch", None, "mlp")


def _gated_kernel(activation, gate_ref, up_ref, grad_ref, gate_grad, up_grad):
  """Computes both gradients of a gated activation."""
  gate = gate_ref[...].astype(jnp.float32)
  grad = grad_ref[...].astype(jnp.float32)
  active_grad = grad * up_ref[...].astype(jnp.float32)
  if activation is layers.exact_gelu:
    active, slope = _gelu_and_slope(gate)
    through = active_grad * slope
  else:
    active, pull = jax.vjp(activation, gate)
    (through,) = pull(active_grad)
  gate_grad[...] = through.astype(gate_grad.dtype)
  up_grad[...] = (grad * active).astype(up_grad.dtype)


def _gelu_and_slope(x):
  """Computes the exact GELU and its derivative without erf, as Triton has none.

  The sum is within 1.5e-7 (Abramowitz and Stegun, 7.1.26).
  """
  t = 1 / (1 + 0.3275911 * 2**-0.5 * jnp.abs(x))
  total = jnp.zeros_like(x)
  for term in (1.061405429, -1.453152027, 1.421413741, -0.284496736):
    total = (total + term) * t
  density = jnp.exp(-0.5 * x * x)
  tail = 0.5 * (total + 0.254829592) * t * density
  share = jnp.where(x < 0, tail, 1 - tail)
  return x * share, share + x * density * (2 * math.pi) ** -0.5
