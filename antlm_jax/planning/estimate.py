"""Estimates the memory and the speed of a run's steps before they run.

`topology` compiles each step for absent devices. The compiler reports the
memory, and `hlo` counts operations, bytes and collectives. Times follow from a
roofline model with published peaks (`runtime.chips`, `network`).
"""

import dataclasses
import math
import re
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from antlm_jax import hashing, models
from antlm_jax import mesh as mesh_lib
from antlm_jax.attention.gpu import visits
from antlm_jax.attention.tpu import grid, kernel
from antlm_jax.head import tpu as head_tpu
from antlm_jax.models import encoder
from antlm_jax.objectives.batch import Batch
from antlm_jax.objectives.corruption import WordTokens
from antlm_jax.planning import bundles, forecast, gpus, hlo, topology
from antlm_jax.planning.forecast import Forecast
from antlm_jax.planning.network import Network
from antlm_jax.runtime import chips, progress
from antlm_jax.training import flops
from antlm_jax.training.run import BatchKind, Run

_CUTS = 0x9C07  # random stream, distinct from those of objectives
_PREFIXES = " KMGTPE"  # powers of 2^10


@dataclasses.dataclass(frozen=True)
class StandIn:
  """Rows and a tokenizer in place of absent data."""

  vocab_size: int  # number of tokens V
  seq_len: int  # number of tokens per row T
  pieces: int  # number of documents per row, split at random
  size: int  # number of rows per epoch

  mask_id = 0
  pad_id = None
  bos_id = 1
  eos_id = None
  special = property(lambda self: np.arange(self.vocab_size) == self.mask_id)
  word_tokens = property(lambda self: WordTokens(*[~self.special] * 2))
  segmented = property(lambda self: self.pieces > 1)

  def by_blocks(self, size: int, at_once: int) -> "StandIn":
    return self

  def __len__(self) -> int:
    return self.size

  def read(self, indices) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns tokens and starts `[n, T]`, as `data.rows.Rows` does."""
    shape = len(indices), self.seq_len
    tokens = np.arange(math.prod(shape)).reshape(shape) % (self.vocab_size - 1)
    tokens = (1 + tokens).astype(np.int32)
    if not self.segmented:
      return tokens, None
    starts = np.arange(self.seq_len) == np.zeros((shape[0], 1))
    for piece in range(1, self.pieces):
      draw = hashing.uniform(0, _CUTS, piece, np.asarray(indices))
      cut = 1 + (draw * (self.seq_len - 1)).astype(np.int64)
      starts |= np.arange(self.seq_len) == cut[:, None]
    return tokens, starts


@dataclasses.dataclass(frozen=True)
class Memory:
  """Memory of a device, in bytes."""

  limit: int  # memory available to programs
  needed: int  # memory that this program needs
  arguments: int  # part of `needed` for the state and the batch
  temporaries: int  # rest of `needed`

  @property
  def fits(self) -> bool:
    """Whether the program fits."""
    return self.needed <= self.limit


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Memory and speed of a program, per step and, unless noted, per device."""

  name: str  # name of the program
  steps: int  # number of training steps that use it
  batches: float  # number of whole batches of these steps: `BatchKind.batches`
  rows: int  # rows in a batch, over all devices
  seq_len: int  # number of tokens per row
  devices: int  # number of devices
  peak: float  # peak FLOP/s of a device
  attention: str  # implementation of attention
  work: flops.Work  # FLOPs that a step needs, over all devices
  compile_seconds: float  # seconds to compile on this machine
  memory: Memory  # if a TPU has too little, all fields below are unknown
  # FLOPs of the matrix units, including recomputation and padding.
  executed: float = 0.0
  moved: float = 0.0  # bytes read from and written to memory
  # For each kind and axes, a dict with the count, bytes of arrays, bytes that a
  # device sends, and seconds.
  collectives: tuple[dict, ...] = ()
  # Seconds of compute, memory and network, if each runs alone.
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  unknown_loops: int = 0  # loops of unknown length, counted as one pass
  # Forecast, or why there is none; None if it is not wanted.
  forecast: Forecast | str | None = None

  @property
  def bound(self) -> str:
    """Slowest part: compute, memory or network."""
    return max(self.seconds, key=self.seconds.get)

  @property
  def step_seconds(self) -> float:
    """Lower bound of a step's time, in seconds."""
    return self.seconds[self.bound]

  def mfu(self, seconds: float | None = None) -> float:
    """Returns the share of the peak; by default for `step_seconds`."""
    of_peak = self.devices * self.peak * (seconds or self.step_seconds)
    return self.work.total / of_peak

  def to_json(self) -> dict:
    """Returns the estimate as plain values."""
    out = dataclasses.asdict(self)
    out["memory"]["fits"] = self.memory.fits
    if self.seconds:
      out |= {"bound": self.bound, "step_seconds": self.step_seconds}
      out["mfu"] = self.mfu()
    if isinstance(self.forecast, Forecast):
      seconds = self.forecast.seconds
      out["forecast"] |= {"seconds": seconds, "mfu": self.mfu(seconds)}
    return out


def estimate_all(
  run: Run, chosen: Sequence[BatchKind], forecasts: bool = False
) -> Iterator[Estimate]:
  """Yields estimates of programs; compiles equal programs only once."""
  done: dict = {}
  for program in progress.track(chosen, "program", "compiled", 0):
    # Different objectives may have batches of equal shapes.
    shapes = mesh_lib.abstract(run.mesh, program.batch)
    leaves, tree = jax.tree.flatten(shapes)
    key = tree, *leaves, program.steps > 0
    if key not in done:
      done[key] = estimate_program(run, program, forecasts)
    yield dataclasses.replace(
      done[key], name=program.name, steps=program.steps, batches=program.batches
    )


def estimate_program(
  run: Run, program: BatchKind, forecasts: bool = False
) -> Estimate:
  """Compiles a program and estimates its memory and speed.

  Raises a UserError if the config's attention cannot run on the devices.
  """
  batch = program.batch
  mesh = run.mesh
  training = program.steps > 0
  device = mesh.devices.flat[0]
  shapes = mesh_lib.abstract(mesh, batch)
  chip = chips.chip_of(device)
  # The batch is this process's part of a whole batch.
  processes = shapes.inputs.size / batch.inputs.size
  # For each product, the backward pass has two: for inputs and for weights.
  passes = 3 if training else 1
  work = flops.forward_work(run.model, batch) * passes * processes
  attention = run.attention_of(batch)
  figures = {}
  # Estimate the largest batch, if batches grow.
  step = dataclasses.replace(run.step, growing=False)
  begun = time.monotonic()
  lowered = topology.lower(step, mesh, shapes, training)
  options = gpus.COMPILER_OPTIONS if device.platform == "gpu" else None
  try:
    compiled = topology.compile_lowered(lowered, options)
    spent = time.monotonic() - begun
  except jax.errors.JaxRuntimeError as error:
    spent = time.monotonic() - begun
    arguments = topology.program_arguments(step, mesh, shapes, training)
    on_a_device = (
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in jax.tree.leaves(arguments)
    )
    memory = parse_memory_error(str(error), sum(on_a_device))
    if memory is None:
      raise
  else:
    analysis = compiled.memory_analysis()
    # A result that replaces an argument needs no memory.
    temporaries = analysis.temp_size_in_bytes
    temporaries += analysis.generated_code_size_in_bytes
    temporaries += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    arguments = analysis.argument_size_in_bytes
    needed = arguments + temporaries
    memory = Memory(chip.memory, needed, arguments, temporaries)
    listings = bundles.read_bundle_counts() if device.platform == "tpu" else {}
    counts = hlo.count(compiled.as_text(), listings)
    figures = _speed(run, batch, attention, counts)
    if forecasts:
      compiled_step = forecast.CompiledStep(
        mesh=mesh,
        model=run.model,
        batch=batch,
        processes=processes,
        training=training,
        counts=counts,
        listings=listings,
        visited=figures["executed"] - counts.flops,
        network=figures["seconds"]["network"],
        carried=Network(mesh).total(counts.carried),
      )
      figures["forecast"] = forecast.forecast_step_time(compiled_step)
  return Estimate(
    name=program.name,
    steps=program.steps,
    batches=program.batches,
    rows=math.prod(shapes.inputs.shape[:2]),
    seq_len=shapes.inputs.shape[2],
    devices=mesh.size,
    peak=chip.flops,
    attention=", ".join(dict.fromkeys(attention)),
    work=work,
    compile_seconds=spent,
    memory=memory,
    **figures,
  )


def parse_memory_error(message: str, arguments: int) -> Memory | None:
  """Returns the memory that a compiler's error names; None for other errors.

  `arguments` is the size of the arguments on a device, in bytes.
  """
  if "RESOURCE_EXHAUSTED" not in message:
    return None
  size = r"([\d.]+)([KMGTPE]?)"
  # "Used 20.50G of 15.75G hbm" is about all memory.
  whole = re.search(rf"Used {size} of {size} hbm", message)
  # "temporaries (22.00G) exceeds available HBM (15.75G)" omits the arguments.
  partial = re.search(rf"\({size}\) exceeds available HBM \({size}\)", message)
  match = whole or partial
  if not match:
    return None
  used, limit = (
    int(float(number) * 2 ** (10 * _PREFIXES.index(prefix or " ")))
    for number, prefix in (match.group(1, 2), match.group(3, 4))
  )
  needed = used if whole else arguments + used
  return Memory(limit, needed, arguments, needed - arguments)


def _speed(
  run: Run, batch: Batch, attention: Sequence[str], counts: hlo.Counts
) -> dict:
  """Returns the fields of an `Estimate` about speed."""
  chip = chips.chip_of(run.mesh.devices.flat[0])
  fused = counts.stated(head_tpu.NAMES)
  executed = counts.flops + fused
  if attended := counts.stated() - fused:
    share = _computed_share(run.mesh, run.model, batch, attention)
    executed += attended * share
  network = Network(run.mesh)
  collectives = {}
  for collective, times in counts.collectives.items():
    axes = ", ".join(network.axes(collective.group))
    total = collectives.setdefault(
      (collective.kind, axes),
      {"kind": collective.kind, "axes": axes, "devices": len(collective.group)}
      | dict.fromkeys(("times", "bytes", "sent", "seconds"), 0),
    )
    total["times"] += times
    total["bytes"] += times * collective.bytes
    total["sent"] += times * collective.sent
    total["seconds"] += times * network.seconds(collective)
  slowest = tuple(sorted(collectives.values(), key=lambda c: -c["seconds"]))
  return {
    "executed": executed,
    "moved": counts.bytes,
    "collectives": slowest,
    "unknown_loops": counts.unknown_loops,
    "seconds": {
      "compute": executed / chip.flops,
      "memory": counts.bytes / chip.bandwidth,
      "network": network.total(counts.collectives),
    },
  }


def _computed_share(
  mesh: jax.sharding.Mesh,
  model: models.Model,
  batch: Batch,
  kernels: Sequence[str],
) -> float:
  """Returns the share of attention's stated FLOPs that is computed.

  It is the mean over the layers. The TPU kernel states the FLOPs of all pairs
  of tokens, halved if the mask is causal. The stand-in for `mosaic` and
  `tokamax` states all pairs. They compute only blocks that this batch's mask
  does not hide. `kernels` has the kernel of each kind of mask.
  """
  c = model.config
  length = batch.inputs.shape[-1]
  mask = jax.tree.map(lambda x: x.reshape(-1, length), batch.mask)
  rows = math.prod(batch.inputs.shape[:2])
  group = c.heads // c.kv_heads
  with jax.set_mesh(mesh):
    blocks = kernel.choose_blocks(length, length, group, c.head_dim, c.dtype)
  stated_pairs = rows * length**2 / (2 if mask.causal else 1)

  def share(layer_mask, name):
    if name == "cudnn":  # its stand-in states the exact FLOPs
      return 1.0
    if name in ("mosaic", "tokamax"):
      schedule = visits.make_visit_schedule(layer_mask, rows, length, length)
      return schedule.by_query.share
    by_query, _ = grid.make_grid_schedules(layer_mask, rows, blocks)
    steps = math.prod(int(n) for n in by_query.grid(rows))
    return steps * blocks.q_size * blocks.k_size / stated_pairs

  masks = encoder.layer_masks(c, mask, (rows, length))
  shares = map(share, masks.kinds, kernels)
  of_layers = encoder.PerLayer([*shares], masks.indices)
  return float(of_layers.total(float)) / c.layers
