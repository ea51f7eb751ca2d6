"""Descriptions of absent GPUs, and a stand-in for their attention kernels."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies
from jax.sharding import PartitionSpec
from jaxlib import xla_client

from antlm_jax import mesh as mesh_lib
from antlm_jax import private
from antlm_jax.attention.backends import BACKENDS
from antlm_jax.attention.blocks import SAVED
from antlm_jax.errors import UserError
from antlm_jax.planning import compilers
from antlm_jax.planning.places import Topology
from antlm_jax.runtime import chips

COMPILER_OPTIONS = {
  # By default, XLA rejects unregistered custom calls such as the stand-in.
  "xla_gpu_mock_custom_calls": True,
  # The pass makes Triton kernels of norms and softmax. XLA then tries the
  # tilings of each operation that can join them, 50 of 62 s for a layer of
  # LTG-BERT. Its norms meet GELU and dropout. Without the pass, that layer
  # moves 13 % more bytes, and a layer of the 210M 0.3 %.
  "xla_disable_hlo_passes": "triton-softmax-rewriter",
  # The machine code never runs, and the estimates do not depend on it.
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}
_STAND_IN = "antlm_gpu_attention"
# Names in `attention.backends.BACKENDS`.
_STOOD_IN_FOR = ("cudnn", "mosaic", "tokamax")


# GPUs that can be described, by their names in topologies.
GPUS = {chip.name: chip for chip in chips.CHIPS.values() if chip.kind}


class _Limits(NamedTuple):
  """Limits of a streaming multiprocessor."""

  fpus: int  # float32 units
  threads: int  # number of threads
  shared: int  # bytes of shared memory
  # Bytes of shared memory for a block that asks for more than 48 KiB.
  block: int


# By compute capability: CUDA C++ Programming Guide, "Technical Specifications
# per Compute Capability".
_HOPPER = _Limits(128, 2048, 228 * 1024, 227 * 1024)
_GAMING = _Limits(128, 1536, 100 * 1024, 99 * 1024)
_LIMITS = {
  7.5: _Limits(64, 1024, 64 * 1024, 64 * 1024),
  8.0: _Limits(64, 2048, 164 * 1024, 163 * 1024),
  8.6: _GAMING,
  8.9: _GAMING,
  9.0: _HOPPER,
  10.0: _HOPPER,
  12.0: _GAMING,
}
# A GpuTargetConfig (openxla/xla, xla/stream_executor/device_description.proto).
_DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  core_count: {cores}
  clock_rate_ghz: {clock}
  l2_cache_size: {cache}
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth:.0f}
  fpus_per_core: {fpus}
  threads_per_warp: 32
  threads_per_core_limit: {threads}
  threads_per_block_limit: 1024
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_core: {shared}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
device_description_str: "{kind}"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 12 }}
"""


def description(gpu: chips.Chip) -> str:
  """Returns XLA's description of a GPU, a GpuTargetConfig as text."""
  version = mesh_lib.capability(gpu.kind)
  major, minor = divmod(round(10 * version), 10)
  # Instructions of one generation alone, such as Hopper's wgmma.
  features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
  fields = dataclasses.asdict(gpu) | _LIMITS[version]._asdict()
  return _DESCRIPTION.format(
    **fields, major=major, minor=minor, features=features
  )


def gpu_devices(place: Topology) -> Sequence[jax.Device]:
  """Returns GPUs that programs can be compiled for but not run on.

  Each node is a process. Raises a UserError if the network between nodes is
  unknown, or the compiler is not installed.
  """
  name = place.kind
  nodes, node_gpus = place.nodes
  if nodes > 1 and not GPUS[name].dcn:
    raise UserError(
      f"the network between nodes of {name} is not published: plan one node"
    )
  path = compilers.cuda()
  if path is None:
    raise compilers.missing_compiler("GPUs", "plan-gpu", "cuda-compiler")
  _register_compiler(path)
  return topologies.get_topology_desc(
    platform="cuda",
    topology_name=name,
    target_config=description(GPUS[name]),
    # Groups of nodes x nodes x GPUs per node.
    topology=f"1x{nodes}x{node_gpus}",
  ).devices


@functools.cache
def _register_compiler(path: pathlib.Path) -> None:
  """Registers the compiler with JAX."""
  # Let JAX find its devices first, or it would search for a GPU.
  jax.devices()
  # Show only errors, because XLA prints long warnings about memory.
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
  if not xla_client.pjrt_plugin_loaded("cuda"):
    private.register_compiler("cuda", path)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
  """Traces programs with a stand-in for the GPUs' attention kernels.

  The stand-in has the arguments and results of their attention. Its FLOPs are
  those of cuDNN's pairs of tokens, and of all pairs for the others. It has no
  scratch memory, because only the kernels know its size. It counts five
  products backward, although our kernel computes seven: it is as fast.
  """

  def attend(q, k, v, prepared, scale, dropout, relative, rope):
    split = prepared.split
    spec = PartitionSpec(split.rows, None, split.heads, None)
    # The others are counted by the blocks that they visit.
    half = prepared.mask.causal and prepared.implementation == "cudnn"
    run = functools.partial(_local_attention, half)
    return mesh_lib.on_shards(run, (spec,) * 3, spec)(q, k, v)

  for name in _STOOD_IN_FOR:
    BACKENDS[name].run = attend
  try:
    yield
  finally:
    for name in _STOOD_IN_FOR:
      del BACKENDS[name].run  # restores the method of the class


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local_attention(causal: bool, q, k, v):
  return _stand_in_forward(causal, q, k, v)[0]


def _stand_in_forward(causal: bool, q, k, v):
  rows, length, heads, _ = q.shape
  sums = jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)
  arrays = _call_stand_in(causal, 2, (q, k, v), (q, sums))
  out, sums = (checkpoint_name(x, SAVED) for x in arrays)
  return out, (q, k, v, out, sums)


def _stand_in_backward(causal: bool, residuals, g):
  q, k, v, *_ = residuals
  return tuple(_call_stand_in(causal, 5, (*residuals, g), (q, k, v)))


_local_attention.defvjp(_stand_in_forward, _stand_in_backward)


def _call_stand_in(causal: bool, products: int, arguments, results):
  """Calls the stand-in for `products` products of queries and keys."""
  q, k = arguments[:2]
  pairs = q.shape[1] * k.shape[1] / (2 if causal else 1)
  operations = 2 * products * pairs * q.size / q.shape[1]
  kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
  call = jax.ffi.ffi_call(_STAND_IN, kinds)
  return call(*arguments, flops=np.int64(operations))
