"""How fast the devices of a mesh reach each other, from published peaks."""

from collections.abc import Sequence

import jax
import numpy as np

from antlm_jax.planning.hlo import Collective
from antlm_jax.runtime import chips


class Network:
  """The links between the devices of a mesh.

  Each collective is thought to use all links along the sides of the slice
  that its group spans, both ways where a side closes to a ring, and nothing
  to contend with it.
  """

  def __init__(self, mesh: jax.sharding.Mesh):
    self._mesh = mesh
    self._devices = list(mesh.devices.flat)
    self._chip = chips.of(self._devices[0])
    self._slice = self._sides(range(mesh.size))

  def axes(self, group: Sequence[int]) -> tuple[str, ...]:
    """Returns the mesh axes along which a group's devices differ."""
    if not group:
      return ("slices",)
    places = np.unravel_index(group, self._mesh.devices.shape)
    named = zip(self._mesh.axis_names, places, strict=True)
    return tuple(name for name, place in named if len(set(place)) > 1)

  def seconds(self, collective: Collective) -> float:
    """Returns how long a collective takes."""
    if collective.slices:
      return collective.sent / self._chip.dcn
    rate = self._rate(collective.group)
    if collective.kind == "collective-permute":  # to one neighbour
      rate = min(rate, self._chip.link)
    return collective.sent / rate

  def _rate(self, group: Sequence[int]) -> float:
    """Bytes a second that each device of a slice can send to the others."""
    rate = 0.0
    for size, whole in zip(self._sides(group), self._slice, strict=True):
      if size > 1:
        ring = size == whole and size % self._chip.closes == 0
        rate += self._chip.link * (2 if ring else 1)
    # The devices of one chip share its memory.
    return rate or self._chip.bandwidth

  def _sides(self, group: Sequence[int]) -> list[int]:
    """How many places of a slice's torus a group has along each side."""
    places = (self._devices[i].coords for i in group)
    return [len(set(side)) for side in zip(*places, strict=True)]
