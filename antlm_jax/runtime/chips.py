"""Peaks of chips, as their makers publish them.

TPUs: the system architecture pages of Google Cloud (docs.cloud.google.com/tpu
/docs/v4, v5e, v5p, v6e, tpu7x). The links of v4 are in arXiv 2304.01433, Table
4. Memory is the limit in libtpu's error for a program that exceeds it.

GPUs: NVIDIA's data sheets, of the SXM modules unless the name has PCIe. Peaks
are for bfloat16 products without sparsity that add up in float32. For GeForce
cards they are in Appendix A of the white papers of the architectures: "NVIDIA
Ampere GA102" (RTX 3090), "NVIDIA Ada" (RTX 4090) and "NVIDIA RTX Blackwell"
(RTX 5090). The network is each GPU's card in NVIDIA's own nodes, from the
user guides of DGX A100 (200 Gb/s), H100, H200 and B200 (400).

Memory in bytes is CUDA's. For H100, H200 and B200, openxla/xla has it
(xla/backends/gpu/target_config/specs). For the others, it is the "total
capacity" in PyTorch's errors, in GiB.

GPUs without NVLink have one link, PCI Express with 16 lanes: 31.5 GB/s each
way in generation 4, and 63 GB/s in generation 5.

Checked on 26 November 2026. Each peak from A100 to RTX 5090 is cores x clock
(`planning.gpus`) x dense operations of a core in a cycle. These are 2,048 on
A100, 1,024 on A10 and L4, and 512 on GeForce. GeForce adds up in float32 at
half its rate. karpathy/nanochat (nanochat/common.py) has the same peaks, but no
A10. Bandwidth and watts: glennklockwood.com/garden/processors/A100,
thundercompute.com (A100), baseten.co (A10), fpsbench.com (L4), hwcompare.com
(RTX 3090), techsavvyed.co.uk (RTX 4090 and 5090). No source for the watts of
the A10 was within reach.
"""

import dataclasses
import os
import re

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
  # The most power that it draws, in watts: "max thermal design power" in data
  # sheets. Google does not publish it for TPUs; v4 is from arXiv 2304.01433.
  watts: float = 0.0


_NVLINK_A100 = 12, 25e9, 25e9  # links, bytes a second over one, and network
_PCIE_4 = 1, 31.5e9, 0.0
_PCIE_5 = 1, 63e9, 0.0


def _gpu(
  tera: float, memory: float, giga: float, network: tuple, watts: float
) -> Chip:
  """Makes a GPU from TFLOP/s, GiB, GB/s, its network and watts."""
  peaks = tera * 1e12, int(memory * _GIB), giga * 1e9
  return Chip(*peaks, *network, watts=watts)


# By prefix of jax.Device.device_kind; the longest counts.
CHIPS = {
  # The network between slices of v4 is not published.
  "TPU v4": Chip(275e12, int(30.75 * _GIB), 1200e9, 6, 50e9, 0.0, 4, 1, 192),
  "TPU v5 lite": Chip(197e12, int(15.75 * _GIB), 819e9, 4, 50e9, 25e9 / 8, 16),
  "TPU v5e": Chip(197e12, int(15.75 * _GIB), 819e9, 4, 50e9, 25e9 / 8, 16),
  "TPU v5": Chip(459e12, int(95.74 * _GIB), 2765e9, 6, 100e9, 50e9 / 8, 4),
  "TPU v6": Chip(918e12, int(31.25 * _GIB), 1638e9, 4, 100e9, 100e9 / 8, 16),
  "TPU7x": Chip(
    2307e12, int(189.5 * _GIB), 7380e9, 6, 100e9, 100e9 / 8, 4, devices=2
  ),
  "NVIDIA A100": Chip(312e12),
  "NVIDIA A100-SXM4-40GB": _gpu(312, 39.39, 1555, _NVLINK_A100, 400),
  "NVIDIA A100-SXM4-80GB": _gpu(312, 79.15, 2039, _NVLINK_A100, 400),
  "NVIDIA H100": Chip(
    989e12, 84_942_979_072, 3350e9, 18, 25e9, 50e9, watts=700
  ),
  "NVIDIA H100 PCIe": Chip(756e12),
  "NVIDIA H100 NVL": Chip(835e12),
  "NVIDIA H200": Chip(
    989e12, 151_397_597_184, 4800e9, 18, 25e9, 50e9, watts=700
  ),
  "NVIDIA B200": Chip(
    2250e12, 191_514_411_008, 8000e9, 18, 50e9, 50e9, watts=1000
  ),
  "NVIDIA L4": _gpu(121, 22.05, 300, _PCIE_4, 72),
  "NVIDIA A10": _gpu(125, 22.06, 600, _PCIE_4, 150),
  "NVIDIA A10G": Chip(70e12),
  "NVIDIA GeForce RTX 3090": _gpu(71, 23.69, 936, _PCIE_4, 350),
  "NVIDIA GeForce RTX 4090": _gpu(165.2, 23.64, 1008, _PCIE_4, 450),
  "NVIDIA GeForce RTX 5090": _gpu(209.5, 31.36, 1792, _PCIE_5, 575),
  "NVIDIA L40": Chip(181e12),
  "NVIDIA L40S": Chip(362e12),
  "Tesla T4": Chip(65e12),
}


# Words after a name that make another, slower or faster card of it.
_OTHER_CARD = re.compile(r"\s*(Ti|SUPER|D|Laptop)\b", re.IGNORECASE)


def chip_kind(name: str) -> str | None:
  """Returns the key of `CHIPS` for a jax.Device.device_kind, or None."""
  kinds = [kind for kind in CHIPS if name.startswith(kind)]
  kind = max(kinds, key=len, default=None)
  return None if kind and _OTHER_CARD.match(name[len(kind) :]) else kind


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
