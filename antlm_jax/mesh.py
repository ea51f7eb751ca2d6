"""The device mesh: its devices, and the axes that split each logical axis.

Functions without the argument `mesh` use the current one, of `jax.set_mesh`.
They do nothing on one device and inside a `shard_map`.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec

from antlm_jax.errors import UserError
from antlm_jax.settings import Section, setting

MESH_AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")  # rows are split over both
_AUTO = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)

Axes = str | tuple[str, ...] | None  # of a mesh, that split an array's axis

# Compute capability of absent GPUs, by a part of their kind. JAX knows the
# capability of present GPUs.
_CAPABILITIES = {
  12.0: ("GeForce RTX 50",),
  10.0: ("B200", "B300"),
  9.0: ("H100", "H200"),
  8.9: ("L4", "GeForce RTX 40"),
  8.0: ("A100",),
  8.6: ("A10", "GeForce RTX 30"),
  7.5: ("T4",),
  7.0: ("V100",),
}

# Mesh axes for each logical axis: the first that divides it. Axes without a
# rule are whole on every device, so that an encoder may use other names.
RULES: dict[str, tuple[str | tuple[str, ...], ...]] = {
  "batch": (BATCH,),
  "vocab": ("tensor", "fsdp"),
  "embed": ("fsdp",),
  "mlp": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
}


@dataclasses.dataclass(frozen=True)
class Mesh(Section):
  """Devices; one size may be -1, for the remaining devices."""

  group = "mesh"

  data: int = setting(
    -1, "Number of parts of the batch; -1 for all other devices", least=-1
  )
  fsdp: int = setting(
    1, "Number of parts of the batch and parameters", least=-1
  )
  tensor: int = setting(1, "Number of parts of heads and widths", least=-1)

  def sizes(
    self, devices: int, slices: int = 1, have: str = "there are {}"
  ) -> tuple[int, ...]:
    """Returns the sizes of MESH_AXES on a number of devices.

    Raises a UserError if they do not multiply to it, or do not divide the
    slices. `have` says in the error where the devices are.
    """
    sizes = [self.data, self.fsdp, self.tensor]
    named = ", ".join(f"{a}={s}" for a, s in zip(MESH_AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or 0 in sizes:
      raise UserError(f"mesh ({named}): sizes are positive, at most one is -1")
    fixed = math.prod(s for s in sizes if s != -1)
    if -1 not in sizes and fixed != devices:
      raise UserError(
        f"mesh ({named}) is for {fixed} devices, but {have.format(devices)}:"
        " give the config the topology that you have, or set --config.mesh.data"
        " and the other sizes"
      )
    if devices % fixed:
      raise UserError(
        f"mesh ({named}) does not fit {devices} devices: the sizes must"
        f" multiply to {devices}"
      )
    shape = tuple(devices // fixed if s == -1 else s for s in sizes)
    if shape[0] % slices:
      raise UserError(
        f"mesh: data={shape[0]} is not a multiple of the {slices} slices"
      )
    return shape

  def build(
    self, devices: Sequence[jax.Device] | None = None
  ) -> jax.sharding.Mesh:
    """Makes the mesh `(data, fsdp, tensor)` of these devices, by default all.

    Raises a UserError if the sizes do not multiply to their number.
    """
    devices = devices or jax.devices()
    slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    have = f"this machine has {{}} of kind {devices[0].device_kind}"
    sizes = self.sizes(len(devices), slices, have)
    # jax.make_mesh splits no side of the torus of v4 and v5p, and so has no
    # fsdp=2 for 4x4x8.
    split = {"devices": devices, "allow_split_physical_axes": True}
    if devices[0].platform != "tpu" or slices == 1:
      grid = mesh_utils.create_device_mesh(sizes, **split)
    else:
      # Only gradients cross the slow network between slices.
      within = (sizes[0] // slices, *sizes[1:])
      grid = mesh_utils.create_hybrid_device_mesh(
        within, (slices, 1, 1), **split
      )
    return jax.sharding.Mesh(grid, MESH_AXES, axis_types=_AUTO)


def spec(mesh, axes: Sequence[str | None], shape: Sequence[int], but=()):
  """Returns the PartitionSpec of an array with these logical axes.

  It does not use the mesh axes in `but`. Each logical axis gets its first rule
  that is free and divides its size.
  """
  used: set[str] = set(but)
  entries = []
  for axis, size in zip(axes, shape, strict=True):
    entry = None
    for rule in RULES.get(axis, ()):
      names = (rule,) if isinstance(rule, str) else rule
      ways = math.prod(mesh.shape.get(name, 0) for name in names)
      if ways > 1 and size % ways == 0 and not used & set(names):
        used.update(names)
        entry = rule
        break
    entries.append(entry)
  return PartitionSpec(*entries)


def undivided(mesh, axes: Mapping, shapes: Mapping) -> list[str]:
  """Returns warnings of parameters' axes that no rule divides."""
  notes = {}
  for path, names in axes.items():
    shape = shapes[path].shape
    split = spec(mesh, names, shape)
    for axis, size, entry in zip(names, shape, split, strict=True):
      ways = [r for r in RULES.get(axis, ()) if mesh.shape[r] > 1]
      if entry is None and not set(ways) <= set(split) and ways:
        over = " or ".join(f"{r}={mesh.shape[r]}" for r in ways)
        note = f"warning: {axis} of {size} is not split over {over}: replicated"
        notes[note] = True
  return list(notes)


def constrain(x: jax.Array, *axes: str | None, but=()) -> jax.Array:
  """Shards `x` by its logical axes; does nothing without a mesh."""
  mesh = _current()
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, spec(mesh, axes, x.shape, but))


def gathered(x: jax.Array, *axes: str | None) -> jax.Array:
  """Gathers a parameter over fsdp, the axis that splits the rows."""
  # Otherwise XLA may split a matrix multiplication over the parameter's width,
  # and sum parts of its large result.
  return constrain(x, *axes, but=("fsdp",))


def mesh_spec(shape: Sequence[int], *axes: str | None, but=()) -> PartitionSpec:
  """Returns `spec` on the current mesh, or all None without a mesh."""
  mesh = _current()
  if mesh is None:
    return PartitionSpec(*[None] * len(axes))
  return spec(mesh, axes, shape, but)


def _current():
  """Returns the current mesh; None on one device and inside a `shard_map`."""
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty or mesh.size == 1 or mesh.manual_axes else mesh


def data_shards(mesh) -> int:
  """Returns the number of parts that the rows of a batch are split into."""
  return math.prod(mesh.shape[axis] for axis in BATCH)


def local_shards(mesh) -> tuple[int, ...]:
  """Returns the parts of a batch's rows on the devices of this process."""
  # Processes that share a part, such as over `tensor`, each make it.
  shape = (1, data_shards(mesh))
  slices = row_sharding(mesh).addressable_devices_indices_map(shape).values()
  return tuple(sorted({part.indices(2**30)[0] for _, part in slices}))


def abstract(mesh, batch):
  """Returns the shapes and shardings of the arrays of `place_batch`."""
  shards = data_shards(mesh)
  local = len(local_shards(mesh))

  def shape_of(x):
    shape = x.shape[0], x.shape[1] // local * shards, *x.shape[2:]
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=row_sharding(mesh))

  return jax.tree.map(shape_of, batch)


def place_batch(mesh, batch):
  """Puts this process's rows of a batch, on axis 1, onto its devices.

  The rows are those of `local_shards`, in that order. The result has the rows
  of all processes.
  """
  if not mesh.is_multi_process:
    return jax.device_put(batch, row_sharding(mesh))
  shards = data_shards(mesh)
  local = local_shards(mesh)

  def global_array(x):
    size = x.shape[1] // len(local)
    part = {s: x[:, i * size : (i + 1) * size] for i, s in enumerate(local)}
    shape = x.shape[0], size * shards, *x.shape[2:]
    return jax.make_array_from_callback(
      shape,
      row_sharding(mesh),
      lambda index: part[(index[1].start or 0) // size],
    )

  return jax.tree.map(global_array, batch)


def row_sharding(mesh) -> NamedSharding:
  """Returns the sharding of every array of a batch."""
  return NamedSharding(mesh, PartitionSpec(None, BATCH))


def replicated_sharding(mesh) -> NamedSharding:
  """Returns the sharding of arrays that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


class Split(NamedTuple):
  """Mesh axes that split rows and heads; None if each device has all."""

  rows: Axes = None
  heads: Axes = None  # key/value heads, and the query heads that use them

  def here(self, rows: int, kv_heads: int) -> "Split":
    """Returns this split, or `WHOLE` on one device or inside a shard.

    Raises:
      ValueError: The mesh lacks an axis, or the axes do not divide a size.
    """
    mesh = _current()
    if mesh is None:
      return WHOLE
    for name, axes, size in zip(
      self._fields, self, (rows, kv_heads), strict=True
    ):
      if not set(_axis_names(axes)) <= set(mesh.axis_names):
        raise ValueError(f"split.{name}={axes!r} is no axis of {mesh.shape}")
      if size % number_of_shards(axes):
        raise ValueError(f"split.{name}={axes!r} does not divide {size} {name}")
    return self


WHOLE = Split()


def number_of_shards(axes: Axes) -> int:
  """Returns the number of parts into which mesh axes split an array."""
  return math.prod(_current().shape[name] for name in _axis_names(axes))


def on_shards(f, in_specs, out_specs):
  """Makes f run on each device's part of the arguments, if there is a mesh."""
  if _current() is None:
    return f
  return jax.shard_map(
    f, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )


def _axis_names(axes: Axes) -> tuple[str, ...]:
  return (axes,) if isinstance(axes, str) else axes or ()


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
  capabilities = {gpu.device_kind: gpu.compute_capability for gpu in gpus}
  named = (c for c, n in _CAPABILITIES.items() if any(x in kind for x in n))
  try:
    return float(capabilities.get(kind, next(named, "")))
  except ValueError:  # unknown, or a name such as AMD's gfx942
    return None
