"""One table of chips: published peaks, names, and measurements.

TPUs: the system architecture pages of Google Cloud (docs.cloud.google.com/tpu
/docs/v4, v5e, v5p, v6e, tpu7x). The links of v4 are in arXiv 2304.01433, Table
4. Memory is the limit in libtpu's error for a program that exceeds it.

GPUs: NVIDIA's data sheets, of the SXM modules unless the name has PCIe. Peaks
are for bfloat16 products without sparsity that add up in float32. For GeForce
cards they are in Appendix A of the white papers of the architectures: "NVIDIA
Ampere GA102" (RTX 3090), "NVIDIA Ada" (RTX 4090) and "NVIDIA RTX Blackwell"
(RTX 5090). That of an RTX 4060 follows from its cores and clock. The network is
each GPU's card in NVIDIA's own nodes, from the user guides of DGX A100
(200 Gb/s), H100, H200 and B200 (400).

Memory in bytes is CUDA's. For H100, H200 and B200, openxla/xla has it
(xla/backends/gpu/target_config/specs). For the others, it is the "total
capacity" in PyTorch's errors, in GiB.

GPUs without NVLink have one link, PCI Express with 16 lanes: 31.5 GB/s each
way in generation 4, and 63 GB/s in generation 5. An RTX 4060 (8 lanes) and a T4
(generation 3) have 15.75 GB/s.

Checked on 26 November 2026. Each peak from A100 to RTX 5090 is cores x clock
x dense operations of a core in a cycle. These are 2,048 on
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
from collections.abc import Mapping

import jax

_GIB = 2**30
# Variables with the share of a GPU's memory that JAX takes, by the present and
# the older name. JAX refuses both together.
_MEMORY_VARIABLES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
# The share for a training. JAX's own default is 0.75: docs.jax.dev, "GPU memory
# allocation".
_TAKEN = 0.92


@dataclasses.dataclass(frozen=True)
class Measured:
  """Measurements of a chip, in addition to its published peaks."""

  # Share of the peak that the fastest kernel reaches for a bfloat16 product of
  # 4,096 x 4,096 x 4,096. Source: tables of times in the wheel of tokamax
  # 0.0.17, ragged_dot with a single group.
  product: float
  # Cores of a TPU device, and clock in cycles per second. They give the
  # published peak with four matrix units per core: 128 x 128 on v5, and
  # 256 x 256 on later generations.
  cores: int = 0
  clock: float = 0.0
  # Share of the published bandwidth that an instruction reaches.
  bandwidth: float = 1.0
  # Seconds that a kernel of a GPU takes in addition to its work.
  launch: float = 0.0
  # Shares of the peak that fused attention on a GPU reaches, by smallest head
  # width. They are forward and backward, then both with a causal mask. Source:
  # the same tables, pallas_mosaic_gpu_flash_attention, 2,048 tokens.
  attention: Mapping[int, tuple[float, float, float, float]] = (
    dataclasses.field(default_factory=dict)
  )


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
  name: str = ""  # in topologies, such as h100; empty if plan does not know it
  # Types of N chips in gcloud and in GKE; `{cores}` counts two for each chip.
  gcloud: str = ""
  gke: str = ""
  example: str = ""  # topology of a TPU
  # Description of a GPU for XLA: its whole device_kind, number of streaming
  # multiprocessors, highest clock in GHz, and bytes of the second-level cache.
  # H100, H200 and B200: openxla/xla, xla/backends/gpu/target_config/specs. The
  # others: NVIDIA's data sheets and the white papers above.
  kind: str = ""
  cores: int = 0
  clock: float = 0.0
  cache: int = 0
  measured: Measured | None = None  # for the forecast


_NVLINK_A100 = 12, 25e9, 25e9  # links, bytes a second over one, and network
_NVLINK_H100 = 18, 25e9, 50e9
_PCIE_3 = 1, 15.75e9, 0.0  # also 8 lanes of generation 4
_PCIE_4 = 1, 31.5e9, 0.0
_PCIE_5 = 1, 63e9, 0.0
_SHARES = {128: (0.615, 0.459, 0.498, 0.365), 0: (0.489, 0.342, 0.352, 0.257)}
# On an H200, x + 1 of 2 GiB moves 3.24 TB/s. The launch is fitted to five steps
# of benchmarks/own_speeds.csv. An H100 is assumed to be as good at both.
_H200 = Measured(0.728, bandwidth=0.675, launch=2.3e-6, attention=_SHARES)
HOPPER = dataclasses.replace(_H200, bandwidth=0.9)


def _tpu(
  name: str,
  example: str,
  peaks: tuple,
  network: tuple,
  gcloud: str,
  gke: str,
  **fields,
) -> Chip:
  """Makes a TPU's entry from the units of its data sheet.

  Args:
    name: Name in topologies, such as v5e.
    example: Shape of a topology, such as 4x4x8.
    peaks: TFLOP/s, GiB of memory, and GB/s to and from it.
    network: Values of `links`, `link`, `dcn` and `closes`, as in `Chip`.
    gcloud: Type in gcloud.
    gke: Type in GKE.
    **fields: Other fields of `Chip`.
  """
  teraflops, memory, gigabytes = peaks
  links, link, dcn, closes = network
  return Chip(
    flops=teraflops * 1e12,
    memory=int(memory * _GIB),
    bandwidth=gigabytes * 1e9,
    links=links,
    link=link,
    dcn=dcn,
    closes=closes,
    name=name,
    example=f"{name}:{example}",
    gcloud=gcloud,
    gke=gke,
    **fields,
  )


def _gpu(
  name: str,
  kind: str,
  peaks: tuple,
  network: tuple,
  watts: float,
  processors: tuple,
  measured: Measured | None = None,
) -> Chip:
  """Makes a GPU's entry from the units of its data sheet.

  Args:
    name: Name in topologies, such as h100.
    kind: Whole device_kind.
    peaks: TFLOP/s, GiB of memory, and GB/s to and from it.
    network: Values of `links`, `link` and `dcn`, as in `Chip`.
    watts: The most power that it draws.
    processors: Number of streaming multiprocessors, clock in GHz, and cache in
      MiB.
    measured: Measurements for the forecast.
  """
  teraflops, memory, gigabytes = peaks
  links, link, dcn = network
  cores, clock, cache = processors
  return Chip(
    flops=teraflops * 1e12,
    memory=int(memory * _GIB),
    bandwidth=gigabytes * 1e9,
    links=links,
    link=link,
    dcn=dcn,
    watts=watts,
    name=name,
    kind=kind,
    cores=cores,
    clock=clock,
    cache=int(cache * 2**20),
    measured=measured,
  )


_V5E = _tpu(
  *("v5e", "16x16", (197, 15.75, 819), (4, 50e9, 25e9 / 8, 16)),
  *("v5litepod-{chips}", "v5litepod-{chips}"),
  measured=Measured(0.914, 1, 1.50e9),
)
# By prefix of jax.Device.device_kind; the longest counts.
CHIPS = {
  # The network between slices of v4 is not published.
  "TPU v4": _tpu(
    *("v4", "4x4x4", (275, 30.75, 1200), (6, 50e9, 0.0, 4)),
    *("v4-{cores}", "v4-{chips}"),
    watts=192,
  ),
  "TPU v5 lite": _V5E,
  "TPU v5e": _V5E,
  "TPU v5": _tpu(
    *("v5p", "4x4x8", (459, 95.74, 2765), (6, 100e9, 50e9 / 8, 4)),
    *("v5p-{cores}", "v5p-{chips}"),
    measured=Measured(0.927, 2, 1.75e9),
  ),
  "TPU v6": _tpu(
    *("v6e", "16x16", (918, 31.25, 1638), (4, 100e9, 100e9 / 8, 16)),
    *("v6e-{chips}", "v6e-{chips}"),
    measured=Measured(0.788, 1, 1.75e9),
  ),
  "TPU7x": _tpu(
    *("tpu7x", "4x4x4", (2307, 189.5, 7380), (6, 100e9, 100e9 / 8, 4)),
    *("", "tpu7x-{shape}"),
    devices=2,
    measured=Measured(0.722, 1, 2.20e9),
  ),
  "NVIDIA A100": Chip(312e12),
  "NVIDIA A100-SXM4-40GB": _gpu(
    *("a100-40", "NVIDIA A100-SXM4-40GB", (312, 39.39, 1555)),
    *(_NVLINK_A100, 400, (108, 1.41, 40)),
  ),
  "NVIDIA A100-SXM4-80GB": _gpu(
    *("a100-80", "NVIDIA A100-SXM4-80GB", (312, 79.15, 2039)),
    *(_NVLINK_A100, 400, (108, 1.41, 40)),
  ),
  "NVIDIA H100": _gpu(
    *("h100", "NVIDIA H100 80GB HBM3", (989, 84_942_979_072 / _GIB, 3350)),
    *(_NVLINK_H100, 700, (132, 1.98, 50), HOPPER),
  ),
  "NVIDIA H100 PCIe": Chip(756e12),
  "NVIDIA H100 NVL": Chip(835e12),
  "NVIDIA H200": _gpu(
    *("h200", "NVIDIA H200", (989, 151_397_597_184 / _GIB, 4800)),
    *(_NVLINK_H100, 700, (132, 1.98, 50), _H200),
  ),
  "NVIDIA B200": _gpu(
    *("b200", "NVIDIA B200", (2250, 191_514_411_008 / _GIB, 8000)),
    *((18, 50e9, 50e9), 1000, (148, 1.965, 126.5), Measured(0.581)),
  ),
  "NVIDIA L4": _gpu(
    *("l4", "NVIDIA L4", (121, 22.05, 300), _PCIE_4, 72, (58, 2.04, 48))
  ),
  "NVIDIA A10": _gpu(
    *("a10", "NVIDIA A10", (125, 22.06, 600), _PCIE_4, 150, (72, 1.695, 6))
  ),
  "NVIDIA A10G": Chip(70e12),
  "NVIDIA GeForce RTX 3090": _gpu(
    *("rtx3090", "NVIDIA GeForce RTX 3090", (71, 23.69, 936)),
    *(_PCIE_4, 350, (82, 1.695, 6)),
  ),
  "NVIDIA GeForce RTX 4060": _gpu(
    *("rtx4060", "NVIDIA GeForce RTX 4060", (30.2, 7.63, 272)),
    *(_PCIE_3, 115, (24, 2.46, 24)),
  ),
  "NVIDIA GeForce RTX 4090": _gpu(
    *("rtx4090", "NVIDIA GeForce RTX 4090", (165.2, 23.64, 1008)),
    *(_PCIE_4, 450, (128, 2.52, 72)),
  ),
  "NVIDIA GeForce RTX 5090": _gpu(
    *("rtx5090", "NVIDIA GeForce RTX 5090", (209.5, 31.36, 1792)),
    *(_PCIE_5, 575, (170, 2.407, 96)),
  ),
  "NVIDIA L40": Chip(181e12),
  "NVIDIA L40S": Chip(362e12),
  # The peak of float32: it has no bfloat16, and float16 is not supported here.
  "Tesla T4": _gpu(
    *("t4", "Tesla T4", (8.1, 14.56, 320)), *(_PCIE_3, 70, (40, 1.59, 4))
  ),
}
# Keys of `CHIPS` by the name in topologies.
NAMES = {chip.name: kind for kind, chip in CHIPS.items() if chip.name}


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
  kind = chip_kind(device.device_kind)
  return None if kind is None else usable(kind)


def take_memory() -> None:
  """Lets JAX take most of a GPU's memory, unless the user says how much.

  It has an effect before JAX first uses the GPU.
  """
  if not any(map(os.environ.get, _MEMORY_VARIABLES)):
    os.environ[_MEMORY_VARIABLES[0]] = str(_TAKEN)


def usable(kind: str) -> Chip:
  """Returns the usable part of one device of a kind of `CHIPS`."""
  chip = CHIPS[kind]
  share = {
    name: getattr(chip, name) / chip.devices
    for name in ("flops", "bandwidth", "link", "dcn")
  }
  memory = chip.memory // chip.devices
  if not kind.startswith("TPU"):
    shares = filter(None, map(os.environ.get, _MEMORY_VARIABLES))
    memory = int(memory * float(next(shares, _TAKEN)))
  return dataclasses.replace(chip, memory=memory, **share)
