"""Peaks of chips, as their makers publish them.

TPUs: the system architecture pages of Google Cloud (docs.cloud.google.com/tpu
/docs/v4, v5e, v5p, v6e, tpu7x). The links of v4 are in arXiv 2304.01433, Table
4. Memory is the limit in libtpu's error for a program that exceeds it.

GPUs: NVIDIA's data sheets, of the SXM modules for H100, H200 and B200. Memory
in bytes is CUDA's (openxla/xla, xla/backends/gpu/target_config/specs). The
network is each GPU's card in NVIDIA's own nodes (user guides of DGX H100, H200
and B200: eight of 400 Gb/s).
"""

import dataclasses
import os

import jax

_GIB = 2**30
# JAX's share of a GPU's memory: docs.jax.dev, "GPU memory allocation".
_TAKEN = 0.75


@dataclasses.dataclass(frozen=True)
class Chip:
  """Peaks of a chip, or of one of several devices of a chip; 0 if unknown."""

  flops: float  # dense bfloat16 operations a second
  memory: int = 0  # bytes of main memory that programs may use
  bandwidth: float = 0.0  # bytes a second to and from main memory
  links: int = 0  # to other chips
  link: float = 0.0  # bytes a second over one of them, each way
  dcn: float = 0.0  # bytes a second over the data centre's network
  # A slice's side closes to a ring if this divides it; 0 if links meet at
  # switches.
  closes: int = 0
  devices: int = 1  # number of devices that JAX shows


# By prefix of jax.Device.device_kind; the longest counts.
CHIPS = {
  # The network between slices of v4 is not published.
  "TPU v4": Chip(275e12, int(30.75 * _GIB), 1200e9, 6, 50e9, 0.0, 4),
  "TPU v5 lite": Chip(197e12, int(15.75 * _GIB), 819e9, 4, 50e9, 25e9 / 8, 16),
  "TPU v5e": Chip(197e12, int(15.75 * _GIB), 819e9, 4, 50e9, 25e9 / 8, 16),
  "TPU v5": Chip(459e12, int(95.74 * _GIB), 2765e9, 6, 100e9, 50e9 / 8, 4),
  "TPU v6": Chip(918e12, int(31.25 * _GIB), 1638e9, 4, 100e9, 100e9 / 8, 16),
  "TPU7x": Chip(
    2307e12, int(189.5 * _GIB), 7380e9, 6, 100e9, 100e9 / 8, 4, devices=2
  ),
  "NVIDIA A100": Chip(312e12),
  "NVIDIA H100": Chip(989e12, 84_942_979_072, 3350e9, 18, 25e9, 50e9),
  "NVIDIA H200": Chip(989e12, 151_397_597_184, 4800e9, 18, 25e9, 50e9),
  "NVIDIA B200": Chip(2250e12, 191_514_411_008, 8000e9, 18, 50e9, 50e9),
  "NVIDIA L4": Chip(121e12),
  "NVIDIA L40": Chip(181e12),
  "NVIDIA L40S": Chip(362e12),
  "Tesla T4": Chip(65e12),
}


def chip_kind(name: str) -> str | None:
  """Returns the key of `CHIPS` for a jax.Device.device_kind, or None."""
  kinds = [kind for kind in CHIPS if name.startswith(kind)]
  return max(kinds, key=len, default=None)


def chip_of(device: jax.Device) -> Chip | None:
  """Returns a device's peaks, or None if they are unknown.

  A GPU's memory is the share that JAX takes.
  """
  known = chip_kind(device.device_kind)
  return None if known is None else usable(known)


def usable(known: str) -> Chip:
  """Returns the usable part of one device of a kind of `CHIPS`."""
  chip = CHIPS[known]
  share = {
    name: getattr(chip, name) / chip.devices
    for name in ("flops", "bandwidth", "link", "dcn")
  }
  memory = chip.memory // chip.devices
  if not known.startswith("TPU"):
    taken = float(os.environ.get("XLA_CLIENT_MEM_FRACTION", _TAKEN))
    memory = int(memory * taken)
  return dataclasses.replace(chip, memory=memory, **share)
