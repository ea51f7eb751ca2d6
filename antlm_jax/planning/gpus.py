"""Descriptions of absent GPUs, and a stand-in for cuDNN's attention."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies
from jax.sharding import PartitionSpec
from jaxlib import xla_client

from antlm_jax.attention.backends import BACKENDS
from antlm_jax.attention.blocks import SAVED
from antlm_jax.errors import UserError
from antlm_jax.mesh import on_shards
from antlm_jax.planning import compilers
from antlm_jax.runtime import chips

# By default, XLA rejects unregistered custom calls such as the stand-in.
COMPILER_OPTIONS = {"xla_gpu_mock_custom_calls": True}
_STAND_IN = "antlm_cudnn_attention"
_MOST_NODES = 1024
_MOST_IN_NODE = 8  # GPUs that NVLink connects in the nodes of `runtime.chips`


@dataclasses.dataclass(frozen=True)
class Gpu:
  """Description of a GPU for XLA, in addition to `runtime.chips`."""

  kind: str  # device_kind of its jax.Device
  capability: int  # major version of the compute capability
  cores: int  # number of streaming multiprocessors
  clock: float  # highest clock, GHz
  cache: int  # bytes of the second-level cache


# Source: openxla/xla, xla/backends/gpu/target_config/specs (h100_sxm, h200,
# b200).
GPUS = {
  "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 52_428_800),
  "h200": Gpu("NVIDIA H200", 9, 132, 1.98, 52_428_800),
  "b200": Gpu("NVIDIA B200", 10, 148, 1.965, 132_644_864),
}
# A GpuTargetConfig (openxla/xla, xla/stream_executor/device_description.proto).
# Compute capabilities 9.0 and 10.0 have the same limits (CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability").
_DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{
    major: {capability} feature_extension: ACCELERATED_FEATURES
  }}
  core_count: {cores}
  clock_rate_ghz: {clock}
  l2_cache_size: {cache}
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth:.0f}
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
device_description_str: "{kind}"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 12 }}
"""


def description(gpu: Gpu) -> str:
  """Returns XLA's description of a GPU, a GpuTargetConfig as text."""
  chip = chips.CHIPS[chips.chip_kind(gpu.kind)]
  known = dataclasses.asdict(gpu) | dataclasses.asdict(chip)
  return _DESCRIPTION.format(**known)


def gpu_devices(topology: str) -> Sequence[jax.Device]:
  """Returns GPUs that programs can be compiled for but not run on.

  A topology is a kind and a number, h100:8 for a node of eight or h100:4x8 for
  four such nodes. Each node is a process. Raises a UserError for impossible
  nodes or if the compiler is not installed.
  """
  name, _, shape = topology.partition(":")
  found = re.fullmatch(r"(?:(\d+)x)?(\d+)", shape)
  nodes, each = (int(n or 1) for n in found.groups()) if found else (0, 0)
  if not (0 < nodes <= _MOST_NODES and 0 < each <= _MOST_IN_NODE):
    raise UserError(
      f"unknown topology {topology!r}: write {name}:8 (one node of at most"
      f" {_MOST_IN_NODE}) or {name}:4x8 (at most {_MOST_NODES:,} nodes)"
    )
  path = compilers.cuda()
  if path is None:
    raise compilers.missing_compiler("GPUs", "plan-gpu", "cuda-compiler")
  _register_compiler(path)
  return topologies.get_topology_desc(
    platform="cuda",
    topology_name=name,
    target_config=description(GPUS[name]),
    topology=f"1x{nodes}x{each}",  # groups of nodes x nodes x GPUs per node
  ).devices


@functools.cache
def _register_compiler(path: pathlib.Path) -> None:
  """Registers the compiler with JAX."""
  # Let JAX find its devices first, or it would search for a GPU.
  jax.devices()
  # Show only errors, because XLA prints long warnings about memory.
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
  if not xla_client.pjrt_plugin_loaded("cuda"):
    xla_bridge.register_plugin("cuda", library_path=str(path))


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
  """Traces programs with a stand-in for cuDNN's attention.

  The stand-in has the arguments, results and FLOPs of cuDNN's attention. It has
  no scratch memory, because only cuDNN knows its size.
  """

  def attend(q, k, v, prepared, scale, dropout, relative, rope):
    split = prepared.split
    spec = PartitionSpec(split.rows, None, split.heads, None)
    run = functools.partial(_local_attention, prepared.mask.causal)
    return on_shards(run, (spec,) * 3, spec)(q, k, v)

  BACKENDS["cudnn"].run = attend
  try:
    yield
  finally:
    del BACKENDS["cudnn"].run  # restores the method of the class


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local_attention(causal: bool, q, k, v):
  return _stand_in_forward(causal, q, k, v)[0]


def _stand_in_forward(causal: bool, q, k, v):
  rows, length, heads, _ = q.shape
  sums = jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)
  made = _call_stand_in(causal, 2, (q, k, v), (q, sums))
  out, sums = (checkpoint_name(x, SAVED) for x in made)
  return out, (q, k, v, out, sums)


def _stand_in_backward(causal: bool, kept, g):
  q, k, v, *_ = kept
  return tuple(_call_stand_in(causal, 5, (*kept, g), (q, k, v)))


_local_attention.defvjp(_stand_in_forward, _stand_in_backward)


def _call_stand_in(causal: bool, products: int, arguments, results):
  """Calls the stand-in for `products` products of queries and keys."""
  q, k = arguments[:2]
  pairs = q.shape[1] * k.shape[1] / (2 if causal else 1)
  operations = 2 * products * pairs * q.size / q.shape[1]
  kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
  call = jax.ffi.ffi_call(_STAND_IN, kinds)
  return call(*arguments, flops=np.int64(operations))
