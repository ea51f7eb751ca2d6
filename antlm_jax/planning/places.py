"""Topologies by name: their chips, names in each cloud, and launch commands.

It needs no compiler. `settings_for` chooses rows, mesh and microbatches by
arithmetic; `antlm plan` compiles them, and `plan --fit` corrects them.
"""

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping, Sequence

from antlm_jax.errors import UserError
from antlm_jax.runtime import chips

# Example topology of each TPU generation, by libtpu's names.
TPUS = {x.name: x.example for x in chips.CHIPS.values() if x.example}
_SHAPE = re.compile(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,2}")
_MOST_CHIPS = 1 << 14  # of a slice; the largest slices have 9,216
_MOST_NODES = 1024
_MOST_IN_NODE = 8  # GPUs that NVLink connects in the nodes of `runtime.chips`
_SMALLEST = "v5e"  # the chip with the least memory, for a bare number of chips
# Rows of 2,048 tokens of a device in one microbatch. They fill its matrix
# units, and the stored plans have as many.
_MOST_TOKENS = 9 * 2048
_SPARE = 0.85  # share of the memory that the arithmetic below may fill
_WORKSPACE = 2 * 2**30  # the head's scores, and the compiler's own buffers


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices of one topology, such as v5p:4x4x8 or h100:4x8."""

  kind: str  # key of `chips.NAMES`
  shape: str  # 4x4x8; empty for a bare number of chips
  chips: int  # number of chips

  @property
  def chip(self) -> chips.Chip:
    """Peaks of a device, with the memory that programs can use."""
    return chips.usable(chips.NAMES[self.kind])

  @property
  def is_tpu(self) -> bool:
    """Whether its devices are TPUs."""
    return self.kind in TPUS

  @property
  def nodes(self) -> tuple[int, int]:
    """Number of nodes, and of GPUs in each."""
    node_gpus = int(self.shape.rpartition("x")[2])
    return self.chips // node_gpus, node_gpus

  @property
  def devices(self) -> int:
    """Number of devices that JAX shows."""
    return self.chips * self.chip.devices

  def type(self, cloud: str) -> str:
    """Returns its type in `gcloud` or `gke`; empty if it has none there."""
    pattern = getattr(self.chip, cloud)
    cores = 2 * self.chips
    return pattern.format(chips=self.chips, cores=cores, shape=self.shape)


def parse_topology(
  topology: str, slices: int = 1, any_gpus: bool = False
) -> Topology:
  """Parses v5e:16x16, h100:8, h100:4x8, or a number of chips, such as 256.

  With `any_gpus`, GPUs of an unknown kind, gpu:4x8, are taken for h100. Raises
  a UserError for an unknown or impossible topology, or for several slices of
  GPUs.
  """
  # A kind alone lacks a shape.
  text = f"{topology}:" if topology in chips.NAMES else topology
  kind, colon, shape = text.rpartition(":")
  known = kind if colon else _SMALLEST
  if any_gpus and kind == "gpu":
    known = "h100"
  sizes = list(map(int, shape.split("x"))) if _SHAPE.fullmatch(shape) else []
  if known not in chips.NAMES or not (colon or sizes):
    raise unknown_topology(topology)
  place = Topology(known, shape if colon else "", math.prod(sizes))
  if place.is_tpu:
    example = TPUS[known]
    dimensions = len(example.partition(":")[2].split("x"))
    is_possible = len(sizes) in (1, dimensions)
    is_possible &= place.chips <= _MOST_CHIPS
    remedy = f"a shape of at most {_MOST_CHIPS:,} chips, such as {example}"
  else:
    node_gpus = sizes[-1] if 0 < len(sizes) <= 2 else 0
    # Other kinds may have more in a node.
    is_possible = node_gpus > 0 and (
      kind == "gpu" or node_gpus <= _MOST_IN_NODE
    )
    is_possible = is_possible and place.chips <= _MOST_NODES * node_gpus
    remedy = (
      f"{kind}:8 (one node of at most {_MOST_IN_NODE}) or {kind}:4x8 (at most"
      f" {_MOST_NODES:,} nodes)"
    )
  if not is_possible:
    raise UserError(f"unknown topology {topology!r:.60}: write {remedy}")
  if slices > 1 and not place.is_tpu:
    raise UserError(
      f"slices={slices} is for TPUs: {topology} includes its nodes"
    )
  return place


def unknown_topology(topology: str) -> UserError:
  """Returns the error for a topology of no known chip."""
  tpus = ", ".join(TPUS.values())
  gpus = ", ".join(f"{name}:8" for name in chips.NAMES if name not in TPUS)
  return UserError(
    f"unknown topology {topology!r:.60}: write TPUs ({tpus}) or GPUs of one"
    f" node ({gpus}) or several (h100:4x8)"
  )


def nearest_rows(rows: int, parts: int) -> int:
  """Returns the multiple of `parts` nearest to `rows`; the larger of two."""
  return max(1, (2 * rows + parts) // (2 * parts)) * parts


def settings_for(
  topology: str,
  shape: Mapping[str, int],
  vocab_size: int,
  rows: int,
  length: int,
  slices: int = 1,
) -> dict[str, int]:
  """Returns the settings with which an encoder fits into a topology's memory.

  Memory holds parameters, gradients and AdamW's moments: 16 bytes
  a parameter, or 20 if gradients add up over microbatches. It also holds the
  activations that the policy `dots` saves in each layer, in bfloat16. A GPU
  holds one layer's attention scores and weights, 6 bytes each: XLA's attention
  writes them if a row has several documents.

  It prefers whole parameters on each device, then the fewest microbatches.
  The mesh has no open size, so that a run refuses another number of devices.

  Args:
    topology: Devices; see `parse_topology`.
    shape: Layers, width, mlp_width, heads and kv_heads of the encoder.
    vocab_size: Number of tokens V; embedding and head are untied.
    rows: Preferred number of rows of a batch.
    length: Number of tokens in a row.
    slices: Number of slices, each of this topology.

  Raises:
    UserError: The topology is unknown, or the encoder does not fit.
  """
  place = parse_topology(topology, slices)
  devices = place.devices
  limit = _SPARE * place.chip.memory
  width = shape["width"]
  mlp = shape["mlp_width"]
  layers = shape["layers"]
  kv = 2 * width * shape["kv_heads"] // shape["heads"]
  body = layers * (width * (2 * width + kv) + 3 * width * mlp)
  parameters = body + 2 * vocab_size * width
  rows = nearest_rows(rows, devices * slices)
  device_rows = rows // (devices * slices)
  row = 2 * layers * length * (4 * width + kv + 2 * mlp)
  row += 0 if place.is_tpu else 6 * shape["heads"] * length**2
  counts = [n for n in range(1, device_rows + 1) if device_rows % n == 0]
  most = max(1, _MOST_TOKENS // length)  # rows of a microbatch
  counts = [n for n in counts if device_rows // n <= most]
  first = counts[0]
  widest = math.gcd(math.gcd(devices, width), 64)
  for fsdp, count in [(1, first), *((widest, n) for n in counts)]:
    state = parameters * (16 if count == 1 else 20) // fsdp
    if _WORKSPACE + row * device_rows // count + state <= limit:
      return {
        "train.batch_size": rows,
        "train.microbatches": count,
        "mesh.data": devices * slices // fsdp,
        "mesh.fsdp": fsdp,
      }
  raise UserError(
    f"topology={topology}: {parameters / 1e6:,.0f}M parameters do not fit:"
    " take more chips, or chips with more memory"
  )


def launch(topology: str, slices: int, words: Sequence[str]) -> str:
  """Returns the command that launches a training on a topology.

  Google's TPUs run in TPU VMs if gcloud has the type, or else in GKE, and GPUs
  under Slurm. `words` are arguments of `antlm train`. A workdir and a data path
  that they lack are added in capitals, for the user to replace.
  """
  place = parse_topology(topology)
  slices_option = [f"--slices={slices}"] if slices > 1 else []
  placeholders = {
    "--workdir": "gs://BUCKET/NAME",
    "--config.data.path": "gs://BUCKET/DATA",
  }
  if place.type("gcloud"):
    launcher = ["./launch/tpu_vm.sh", "run", "NAME", "--zone=ZONE"]
    launcher += [f"--type={place.type('gcloud')}", *slices_option]
  elif place.type("gke"):
    launcher = ["./launch/gke.sh", "run", "NAME", f"--type={place.type('gke')}"]
    launcher += slices_option
  else:
    nodes, node_gpus = place.nodes
    launcher = ["./launch/slurm.sh", "run", "NAME"]
    launcher += [f"--nodes={nodes}", f"--gpus={node_gpus}"]
    placeholders = {"--workdir": "runs/NAME", "--config.data.path": "DATA"}
  options = {word.partition("=")[0] for word in words}
  missing = [f"{k}={v}" for k, v in placeholders.items() if k not in options]
  parts = [*launcher, "--"], words, missing
  lines = [shlex.join(part) for part in parts if part]
  return " \\\n  ".join(lines)
