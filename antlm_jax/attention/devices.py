"""Properties of devices that attention is compiled for, present or absent."""

import re

import jax

# Compute capability of absent GPUs, by a part of their kind. JAX knows the
# capability of present GPUs.
_CAPABILITIES = {
  10.0: ("B200", "B300"),
  9.0: ("H100", "H200"),
  8.0: ("A100", "A10", "L4"),
  7.0: ("T4", "V100"),
}


def device():
  """Returns a device of the mesh, or the default device.

  An absent device has only a platform and a kind.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.abstract_device is None:
    return jax.devices()[0]
  return mesh.abstract_device


def vector_memory() -> int:
  """Returns the bytes of vector memory of a TPU core; 16 MiB if unknown.

  Source: `jax._src.pallas.mosaic.tpu_info`.
  """
  kind = device().device_kind
  if kind in ("TPU v5", "TPU v5p", "TPU7x"):
    return 64 * 2**20
  return (128 if re.match("TPU v(5|6)", kind) else 16) * 2**20


def kernel_memory() -> int:
  """Returns the bytes of vector memory that a kernel may use.

  The compiler allows 16 MiB by default. The rest of the program needs some too.
  """
  return max(16 * 2**20, vector_memory() * 3 // 4)


def capability(kind: str) -> float | None:
  """Returns the compute capability of a kind of GPU, or None if unknown."""
  try:
    gpus = jax.devices("gpu")
  except RuntimeError:  # no GPU
    gpus = []
  here = {gpu.device_kind: gpu.compute_capability for gpu in gpus}
  named = (c for c, n in _CAPABILITIES.items() if any(x in kind for x in n))
  try:
    return float(here.get(kind, next(named, "")))
  except ValueError:  # unknown, or a name such as AMD's gfx942
    return None
