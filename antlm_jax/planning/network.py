"""Time of collectives in a mesh, from published peaks."""

import collections
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from antlm_jax.planning.hlo import Collective
from antlm_jax.runtime import chips


class Network:
  """Links between the devices of a mesh.

  It assumes that collectives do not overlap each other. On TPUs, a collective
  uses all links along the sides of the slice that its group spans. A side that
  closes to a ring works in both directions. On GPUs, it is a ring through
  NVLink's switches and, between nodes, through the network cards of the group's
  GPUs.
  """

  def __init__(self, mesh: jax.sharding.Mesh):
    self._mesh = mesh
    self._devices = list(mesh.devices.flat)
    self._chip = chips.chip_of(self._devices[0])
    self._switched = not self._chip.closes
    self._slice = () if self._switched else self._sides(range(mesh.size))

  def axes(self, group: Sequence[int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group differ.

    It appends `nodes` for GPUs of several nodes. A group between slices has the
    axis `slices`.
    """
    if not group:
      return ("slices",)
    places = np.unravel_index(group, self._mesh.devices.shape)
    named = zip(self._mesh.axis_names, places, strict=True)
    axes = tuple(name for name, place in named if len(set(place)) > 1)
    nodes = self._switched and len(self._nodes(group)) > 1
    return (*axes, "nodes") if nodes else axes

  def seconds(self, collective: Collective) -> float:
    """Returns the seconds of a collective."""
    group = collective.group
    if collective.slices:
      return collective.sent / self._chip.dcn
    if self._switched:
      rate = self._chip.links * self._chip.link
      nodes = self._nodes(group)
      if len(nodes) > 1:
        rate = min(rate, min(nodes.values()) * self._chip.dcn)
      return collective.sent / rate
    rate = 0.0  # bytes per second from each device to the others
    for size, side in zip(self._sides(group), self._slice, strict=True):
      if size > 1:
        ring = size == side and size % self._chip.closes == 0
        rate += self._chip.link * (2 if ring else 1)
    rate = rate or self._chip.bandwidth  # devices of a chip share its memory
    if collective.kind == "collective-permute":  # uses a single link
      rate = min(rate, self._chip.link)
    return collective.sent / rate

  def total(self, collectives: Mapping[Collective, int]) -> float:
    """Returns the seconds of collectives that run one after another."""
    return sum(
      n * self.seconds(collective) for collective, n in collectives.items()
    )

  def _sides(self, group: Sequence[int]) -> list[int]:
    """Returns the number of a group's places along each side of the torus."""
    places = (self._devices[i].coords for i in group)
    return [len(set(side)) for side in zip(*places, strict=True)]

  def _nodes(self, group: Sequence[int]) -> dict[int, int]:
    """Returns the number of a group's devices in each node (process)."""
    return collections.Counter(self._devices[i].process_index for i in group)
