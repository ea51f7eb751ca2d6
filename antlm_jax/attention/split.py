"""Division of attention over the axes of a mesh."""

import math
from typing import NamedTuple

import jax

Axes = str | tuple[str, ...] | None


class Split(NamedTuple):
  """Mesh axes that split rows and heads; None if each device has all."""

  rows: Axes = None
  heads: Axes = None  # key/value heads, and the query heads that use them

  def here(self, rows: int, kv_heads: int) -> "Split":
    """Returns this split, or `WHOLE` on one device or inside a shard.

    Raises:
      ValueError: The mesh lacks an axis, or the axes do not divide a size.
    """
    mesh = _mesh()
    if mesh is None:
      return WHOLE
    for name, axes, size in zip(
      self._fields, self, (rows, kv_heads), strict=True
    ):
      if not set(_names(axes)) <= set(mesh.axis_names):
        raise ValueError(f"split.{name}={axes!r} is no axis of {mesh.shape}")
      if size % parts(axes):
        raise ValueError(f"split.{name}={axes!r} does not divide {size} {name}")
    return self


WHOLE = Split()


def parts(axes: Axes) -> int:
  """Returns the number of parts into which mesh axes split an array."""
  return math.prod(_mesh().shape[name] for name in _names(axes))


def on_shards(f, in_specs, out_specs):
  """Makes f run on each device's part of the arguments, if there is a mesh."""
  if _mesh() is None:
    return f
  return jax.shard_map(
    f, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )


def _mesh():
  """Returns the mesh; None on one device or inside a shard."""
  mesh = jax.sharding.get_abstract_mesh()
  return None if mesh.empty or mesh.size == 1 or mesh.manual_axes else mesh


def _names(axes: Axes) -> tuple[str, ...]:
  return (axes,) if isinstance(axes, str) else axes or ()
