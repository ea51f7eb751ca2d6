"""How long a step may take: a forecast, beside the bound.

One plain model. An instruction takes the longer of its products' time and of
its bytes', and the next one waits for it; so does the network, of which
nothing is hidden. Products reach the share of the peak that one was measured
to reach, bytes the published rate. A TPU's attention kernel takes the cycles
that its bundles say (`bundles`).
"""

import dataclasses
from collections.abc import Mapping

import jax

from antlm_jax.planning import bundles
from antlm_jax.runtime import chips
from antlm_jax.runtime.chips import Chip


@dataclasses.dataclass(frozen=True)
class Measured:
  """What is measured of a chip, and not only published as its peak."""

  # The share of the peak that a product of 4,096 x 4,096 x 4,096 in bfloat16
  # reaches, with the fastest kernel of those tried: the tables of times in
  # the wheel of tokamax 0.0.17, ragged_dot with a single group.
  product: float
  # A TPU device's cores, and their cycles a second: with these, its matrix
  # units (v5: four of 128 x 128 a core, later four of 256 x 256 a core) have
  # the published peak.
  cores: int = 0
  clock: float = 0.0


# By the keys of `runtime.chips.CHIPS`.
MEASURED = {
  "TPU v5 lite": Measured(0.914, 1, 1.50e9),
  "TPU v5e": Measured(0.914, 1, 1.50e9),
  "TPU v5": Measured(0.927, 2, 1.75e9),
  "TPU v6": Measured(0.788, 1, 1.75e9),
  "TPU7x": Measured(0.722, 1, 2.20e9),
  "NVIDIA H100": Measured(0.728),
  "NVIDIA H200": Measured(0.728),
  "NVIDIA B200": Measured(0.581),
}


def of(device: jax.Device) -> Measured | None:
  """Returns what is measured of a device's chip; None where nothing is."""
  return MEASURED.get(chips.kind(device.device_kind))


def instructions(
  work: Mapping[tuple[float, int], int], chip: Chip, measured: Measured
) -> float:
  """Returns the seconds of instructions, by `hlo.Counts.work`."""
  products = chip.flops * measured.product
  return sum(
    times * max(flops / products, moved / chip.bandwidth)
    for (flops, moved), times in work.items()
  )


def kernel(
  listing: bundles.Listing,
  masked: float,
  whole: float,
  outputs: float,
  measured: Measured,
) -> float:
  """Returns a TPU kernel's seconds.

  Args:
    listing: Its bundles.
    masked: How many blocks of scores it visits some of which are hidden.
    whole: How many of which none is.
    outputs: How many output blocks it makes.
    measured: Of the device. The cores share the kernel.
  """
  cycles = listing.cycles(masked, whole, outputs)
  return cycles / (measured.clock * measured.cores)
