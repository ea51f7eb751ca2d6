"""Forecasts the time of a step, in addition to its lower bound.

docs/appendix/forecast.md describes the model and compares its forecasts with
measurements.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from antlm_jax import mesh as mesh_lib
from antlm_jax.attention.tpu import grid as tpu_grid
from antlm_jax.attention.tpu import kernel as tpu_kernel
from antlm_jax.head import tpu as head_tpu
from antlm_jax.models import Model, encoder
from antlm_jax.objectives.batch import Batch
from antlm_jax.planning import bundles, hlo
from antlm_jax.planning.where import (
  KERNELS,
  NETWORK,
  PARTS,
  Time,
  part_of_step,
  total_time,
)
from antlm_jax.runtime import chips

# For GPUs without measurements.
_ASSUMED = "the shares of the peak that an H100 reaches"


@dataclasses.dataclass(frozen=True)
class Forecast:
  """Time of each part of a step; see `PARTS`."""

  parts: Mapping[str, Time]
  assumes: str = ""  # assumption in place of measurements of the chip

  @property
  def seconds(self) -> float:
    """Seconds of the whole step."""
    return total_time(self.parts).seconds


def measured_chip(device: jax.Device) -> chips.Measured | None:
  """Returns the measurements of a device's chip, or None if unknown.

  A GPU without measurements has those of an H100.
  """
  kind = chips.chip_kind(device.device_kind)
  chip = chips.CHIPS.get(kind)
  like_h100 = chip and device.platform == "gpu" and chip.bandwidth
  return (chip and chip.measured) or (chips.HOPPER if like_h100 else None)


# Names of attention's kernels on a TPU. Some run over the blocks of keys.
_KERNELS = "attention_(output|gradients|query_gradient|key_gradients)"
_BY_KEYS = "attention_gradients", "attention_key_gradients"


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """A compiled step and the work whose time is forecast."""

  mesh: jax.sharding.Mesh
  model: Model
  batch: Batch  # a process's part of the batch, in NumPy arrays
  processes: float  # ratio of the batch's size to that of the part
  training: bool  # whether the step trains
  counts: hlo.Counts  # work of a device
  # Bundles of the program's instructions on a TPU, by name.
  listings: Mapping[str, bundles.BundleCounts]
  visited: float  # FLOPs of its kernels in the blocks that they visit
  network: float  # seconds of the collectives
  carried: float  # seconds of those that run during other instructions


def forecast_step_time(step: CompiledStep) -> Forecast | str:
  """Forecasts the time of a step, or returns the reason why it cannot."""
  device = step.mesh.devices.flat[0]
  measured = measured_chip(device)
  chip = chips.chip_of(device)
  if measured is None:
    return f"there are no measurements of {device.device_kind}"
  on_tpu = device.platform == "tpu"
  counts = step.counts
  fused = counts.stated(head_tpu.NAMES)
  has_attention = counts.stated() > fused
  if has_attention and not (on_tpu or measured.attention):
    return f"there are no times of attention on {device.device_kind}"
  parts = instruction_times(counts.work, chip, measured)
  if fused:
    head = _head_time(step, fused, chip, measured)
    parts["head"] = parts.get("head", Time()) + head
  attention = 0.0
  if has_attention and on_tpu:
    attention = _tpu_attention_seconds(step, measured)
  elif has_attention:
    attention = _gpu_attention_seconds(step, chip, measured)
  exposed = _exposed_seconds(step, chip, measured)
  for name, seconds in {KERNELS: attention, NETWORK: exposed}.items():
    parts[name] = parts.get(name, Time()) + Time(seconds)
  ordered = {name: parts[name] for name in PARTS if name in parts}
  return Forecast(ordered, assumes="" if chip.measured else _ASSUMED)


def _head_time(
  step: CompiledStep, fused: float, chip: chips.Chip, measured: chips.Measured
) -> Time:
  """Returns the time of the head's kernels, which state `fused` FLOPs."""
  seconds = _sum_of(
    step.counts.kernels,
    head_tpu.NAMES,
    _head_seconds(
      step.mesh, step.model, step.batch, step.listings, chip, measured
    ),
  )
  products = fused / (chip.flops * measured.product)
  # Like other instructions, it takes at least the time of its products.
  return Time(max(seconds, products), products)


def _tpu_attention_seconds(
  step: CompiledStep, measured: chips.Measured
) -> float:
  """Returns the seconds of attention on a TPU, by its kernels' bundles."""
  kernel_seconds = _attention_seconds(
    step.mesh, step.model, step.batch, step.listings, measured
  )
  seconds = _sum_of(step.counts.kernels, _KERNELS, kernel_seconds)
  # A call computes one microbatch's rows of a data shard.
  shards = step.mesh.size // step.mesh.shape["tensor"]
  return seconds * (step.processes / (len(step.batch.inputs) * shards))


def _gpu_attention_seconds(
  step: CompiledStep, chip: chips.Chip, measured: chips.Measured
) -> float:
  """Returns the seconds of attention on a GPU, by its measured speed."""
  head_dim = step.model.config.head_dim
  widths = (width for width in measured.attention if width <= head_dim)
  # Shares of the peak: forward and backward, for full, then causal masks.
  shares = measured.attention[max(widths)]
  forward, backward = shares[2:] if step.batch.mask.causal else shares[:2]
  # Two products forward, and five backward.
  share = 7 / (2 / forward + 5 / backward) if step.training else forward
  # Before and after its products, the backward pass only moves arrays.
  counts = step.counts
  moved = counts.kernel_bytes / (chip.bandwidth * measured.bandwidth)
  launches = measured.launch * counts.kernels.total()
  return step.visited / (chip.flops * share) + moved + launches


def _exposed_seconds(
  step: CompiledStep, chip: chips.Chip, measured: chips.Measured
) -> float:
  """Returns the seconds of collectives that no other instruction hides."""
  carriers = {
    instruction: times
    for instruction, times in step.counts.work.items()
    if instruction.carries
  }
  hiding = total_time(instruction_times(carriers, chip, measured)).seconds
  return step.network - min(step.carried, hiding)


def instruction_times(
  work: Mapping[hlo.Instruction, int],
  chip: chips.Chip,
  measured: chips.Measured,
) -> dict[str, Time]:
  """Returns the time of `hlo.Counts.work` by part."""
  rate = measured.cores * measured.clock or math.inf
  out = collections.defaultdict(Time)
  for instruction, times in work.items():
    products = instruction.flops / (chip.flops * measured.product)
    moved = instruction.bytes / (chip.bandwidth * measured.bandwidth)
    seconds = max(products, moved, instruction.cycles / rate)
    if instruction.flops or instruction.bytes:
      seconds += measured.launch
    out[part_of_step(instruction)] += Time(times * seconds, times * products)
  return dict(out)


def kernel(
  listing: bundles.BundleCounts,
  masked: float,
  unmasked: float,
  outputs: float,
  measured: chips.Measured,
) -> float:
  """Returns the seconds of a kernel on all cores; see `BundleCounts.cycles`."""
  cycles = listing.cycles(masked, unmasked, outputs)
  return cycles / (measured.clock * measured.cores)


def _sum_of(
  kernels: Mapping, names: str, seconds: Mapping[str, float]
) -> float:
  """Sums the seconds of kernels whose names match a pattern."""
  matches = ((re.search(names, name), n) for (name, _), n in kernels.items())
  return sum(times * seconds[name[0]] for name, times in matches if name)


def _attention_seconds(
  mesh: jax.sharding.Mesh,
  model: Model,
  batch: Batch,
  listings: Mapping[str, bundles.BundleCounts],
  measured: chips.Measured,
) -> dict[str, float]:
  """Returns the seconds of each attention kernel for the batch, by name."""
  c = model.config
  microbatches, microbatch_rows, length = batch.inputs.shape
  rows = microbatches * microbatch_rows
  kv_heads = c.kv_heads // mesh.shape["tensor"]
  group = c.heads // c.kv_heads
  dtype = jnp.dtype(c.dtype)
  mask = jax.tree.map(lambda x: x.reshape(-1, length), batch.mask)
  masks = encoder.layer_masks(c, mask, (rows, length))
  with jax.set_mesh(mesh):
    blocks = tpu_kernel.choose_blocks(length, length, group, c.head_dim, dtype)
    heads_at_once = tpu_kernel.heads_of_a_step(
      kv_heads, group, c.head_dim, blocks, dtype
    )
  # The kernel visits each block once for each group of heads.
  turns = kv_heads // heads_at_once

  def visits(mask):
    orders = tpu_grid.make_grid_schedules(mask, rows, blocks)
    return [_block_visits(order, rows) for order in orders]

  # Numbers of masked, whole and output blocks; means over the layers.
  by_queries, by_keys = (masks.total(visits) / c.layers).tolist()
  out = {}
  for listed, listing in listings.items():
    if not (match := re.search(_KERNELS, listed)):
      continue
    name = match[0]
    visited = by_keys if name in _BY_KEYS else by_queries
    out[name] = kernel(listing, *(n * turns for n in visited), measured)
  return out


def _block_visits(order: tpu_grid.Schedule, rows: int) -> tuple[int, int, int]:
  """Returns the numbers of masked, whole and output blocks."""
  grid = [int(n) for n in order.grid(rows)]
  ids = jnp.indices(grid).reshape(len(grid), -1)

  @jax.vmap
  def at(*ids):
    step = order.at(ids, order.scalars)
    masked = jnp.bool_(step.masked)
    return step.work & masked, step.work & ~masked, step.last

  return tuple(int(jnp.sum(x)) for x in at(*ids))


def _head_seconds(
  mesh,
  model: Model,
  batch: Batch,
  listings: Mapping,
  chip,
  measured: chips.Measured,
) -> dict[str, float]:
  """Returns the seconds of each head kernel for a microbatch, by name.

  The kernel computes while it reads the next blocks, so the longer decides.
  """
  kernel_shape = jax.eval_shape(
    lambda params: model.output_head(params).kernel.T, model.shapes
  ).shape
  split = mesh_lib.spec(mesh, ("vocab", None), kernel_shape, but=("fsdp",))
  tokens, width = kernel_shape
  tokens //= mesh.shape["tensor"] if split[0] else 1
  targets = batch.targets.shape[-1]
  dtype = jnp.dtype(model.config.dtype)
  with jax.set_mesh(mesh):
    blocks = head_tpu.HeadBlocks.of(targets, tokens, width, dtype)
  steps = math.prod(blocks.grid)
  out = {}
  for listed, listing in listings.items():
    if not (match := re.search(head_tpu.NAMES, listed)):
      continue
    by_token = match[0] == "head_kernel_gradient"
    outer = head_tpu.TOKENS if by_token else head_tpu.TARGETS
    seconds = kernel(listing, steps, 0, blocks.grid[outer], measured)
    moved = blocks.moved(outer, width, dtype.itemsize)
    out[match[0]] = max(seconds, moved / chip.bandwidth)
  return out
