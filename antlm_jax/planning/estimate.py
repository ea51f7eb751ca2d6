"""What the steps of a run need, and what bounds their speed, before they run.

A step is compiled for devices that are not there (`topology`); what it takes
of memory the compiler says, and what it does is counted in its text (`hlo`).
Times are a roofline's, from published peaks (`runtime.chips`, `network`).
"""

import dataclasses
import math
import re
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from antlm_jax import hashing, models
from antlm_jax.attention.gpu import visits
from antlm_jax.attention.tpu import grid, kernel
from antlm_jax.models import encoder
from antlm_jax.objectives.batch import Batch
from antlm_jax.planning import forecast, gpus, hlo, topology
from antlm_jax.planning.forecast import Forecast
from antlm_jax.planning.network import Network
from antlm_jax.runtime import chips, progress, sharding
from antlm_jax.training import flops
from antlm_jax.training.experiment import Program, Run

_CUTS = 0x9C07  # keeps the pieces' draws apart from the objectives'
_PREFIXES = " KMGTPE"  # each 2^10 times the one before


# ------------------------------------------ the data, or what stands in for it


@dataclasses.dataclass(frozen=True)
class StandIn:
  """Rows and tokenizer of data that is not there."""

  vocab_size: int  # number of tokens V
  seq_len: int  # tokens in a row T
  pieces: int  # documents in a row, cut at random
  size: int  # number of rows, which make an epoch

  mask_id, pad_id, bos_id, eos_id = 0, None, 1, None
  special = property(lambda self: np.arange(self.vocab_size) == self.mask_id)
  word_start = property(lambda self: ~self.special)
  segmented = property(lambda self: self.pieces > 1)

  def __len__(self) -> int:
    return self.size

  def read(self, indices) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns rows as `data.rows.Rows` does: tokens and starts `[n, T]`."""
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
  """Bytes of a device's memory."""

  limit: int  # what there is for programs
  needed: int  # what this one takes
  arguments: int  # of that, the state and the batch
  temporaries: int  # what it takes beside them

  @property
  def fits(self) -> bool:
    """Whether it is enough."""
    return self.needed <= self.limit


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What is known of a program before it ever ran; of one device, per step."""

  name: str  # the program's
  steps: int  # how many of the run's steps are of it
  rows: int  # of a batch, over all devices
  seq_len: int  # tokens in a row
  devices: int  # how many
  peak: float  # FLOP/s of one
  attention: str  # what computes it
  work: flops.Work  # the operations that a step needs, over all devices
  compile_seconds: float  # what compiling it took here
  memory: Memory  # where a TPU has too little, nothing below is known
  # Operations of the matrix units, with recomputation and padding.
  executed: float = 0.0
  moved: float = 0.0  # bytes through the memory
  # Each kind along the same axes: how often, the arrays' bytes, the bytes that
  # a device sends, and the seconds that it takes.
  collectives: tuple[dict, ...] = ()
  # The time of products, memory and network, if nothing waits.
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  unknown_loops: int = 0  # loops of unknown length, counted as one pass
  # What it may take, or why that is not known; None if it is not asked for.
  forecast: Forecast | str | None = None

  @property
  def bound(self) -> str:
    """What takes longest: compute, memory or network."""
    return max(self.seconds, key=self.seconds.get)

  @property
  def step_seconds(self) -> float:
    """The shortest that a step can take."""
    return self.seconds[self.bound]

  def mfu(self, seconds: float | None = None) -> float:
    """The share of the peak in so many seconds; by default the highest."""
    of_peak = self.devices * self.peak * (seconds or self.step_seconds)
    return self.work.total / of_peak

  def to_json(self) -> dict:
    """Returns all of it as plain values."""
    out = dataclasses.asdict(self)
    out["memory"]["fits"] = self.memory.fits
    if self.seconds:
      out |= {"bound": self.bound, "step_seconds": self.step_seconds}
      out["mfu"] = self.mfu()
    if isinstance(self.forecast, Forecast):
      seconds = self.forecast.seconds
      out["forecast"] |= {"seconds": seconds, "mfu": self.mfu(seconds)}
      out["forecast"]["range"] = self.forecast.range
    return out


def estimate_all(
  run: Run, chosen: Sequence[Program], forecasts: bool = False
) -> Iterator[Estimate]:
  """Yields `estimate` of the programs; equal ones are compiled once."""
  done: dict = {}
  for program in progress.track(chosen, "program", "compiled", 0):
    shapes = sharding.abstract(run.mesh, program.batch)
    # Batches of other objectives may well be the same to the compiler.
    leaves, tree = jax.tree.flatten(shapes)
    key = tree, *leaves, program.steps > 0
    if key not in done:
      done[key] = estimate(run, program, forecasts)
    yield dataclasses.replace(done[key], name=program.name, steps=program.steps)


def estimate(run: Run, program: Program, forecasts: bool = False) -> Estimate:
  """Compiles a program and reads off what it needs.

  With `forecasts`, it also compiles attention by itself, for its time.

  Raises:
    UserError: if the attention that the config asks for cannot be.
  """
  batch, mesh, training = program.batch, run.mesh, program.steps > 0
  shapes = sharding.abstract(mesh, batch)
  chip = chips.of(mesh.devices.flat[0])
  whole = shapes.inputs.size / batch.inputs.size  # of the first process's
  # Backward a product is two: by its input and by its weights.
  work = flops.forward(run.model, batch) * (3 if training else 1) * whole
  attention = run.attention_of(batch)
  begun, found = time.monotonic(), {}
  # A whole batch: a program does not tell how much of a growing one is filled.
  step = dataclasses.replace(run.step, growing=False)
  lowered = topology.lower(step, mesh, shapes, training)
  on_gpu = mesh.devices.flat[0].platform == "gpu"
  options = gpus.COMPILER_OPTIONS if on_gpu else None
  try:
    compiled = topology.compile_lowered(lowered, options)
  except jax.errors.JaxRuntimeError as error:
    arguments = topology.arguments(step, mesh, shapes, training)
    on_a_device = (
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in jax.tree.leaves(arguments)
    )
    memory = exceeded(str(error), sum(on_a_device))
    if memory is None:
      raise
    spent = time.monotonic() - begun
  else:
    spent = time.monotonic() - begun
    memory = _memory(compiled, chip)
    counts = hlo.count(compiled.as_text())
    found = _speed(run, batch, attention, counts)
    if forecasts:
      found["forecast"] = forecast.step(
        *(mesh, run.model, batch, whole, training, counts),
        visited=found["executed"] - counts.flops,
        network=found["seconds"]["network"],
      )
  return Estimate(
    name=program.name,
    steps=program.steps,
    rows=math.prod(shapes.inputs.shape[:2]),
    seq_len=shapes.inputs.shape[2],
    devices=mesh.size,
    peak=chip.flops,
    attention=attention,
    work=work,
    compile_seconds=spent,
    memory=memory,
    **found,
  )


# ---------------------------------------------------------------- its memory


def _memory(compiled, chip: chips.Chip) -> Memory:
  """Reads how much a program needs that the compiler finds to fit."""
  of = compiled.memory_analysis()
  arguments = of.argument_size_in_bytes
  beside = of.temp_size_in_bytes + of.generated_code_size_in_bytes
  # Results that lie where arguments did take no room of their own.
  beside += of.output_size_in_bytes - of.alias_size_in_bytes
  return Memory(chip.memory, arguments + beside, arguments, beside)


def exceeded(message: str, arguments: int) -> Memory | None:
  """Reads from the compiler's error how much memory would be needed.

  `arguments` are the bytes of the program's arguments on a device.
  """
  size = r"([\d.]+)([KMGTPE]?)"
  found, beside = re.search(rf"Used {size} of {size} hbm", message), 0
  if not found:  # temporaries are too much already, without the arguments
    pattern = rf"\({size}\) exceeds available HBM \({size}\)"
    found, beside = re.search(pattern, message), arguments
  if not found or "RESOURCE_EXHAUSTED" not in message:
    return None
  used, limit = (
    int(float(number) * 2 ** (10 * _PREFIXES.index(prefix or " ")))
    for number, prefix in (found.group(1, 2), found.group(3, 4))
  )
  needed = beside + used
  return Memory(limit, needed, arguments, needed - arguments)


# ----------------------------------------------------------------- its speed


def _speed(run: Run, batch: Batch, attention: str, counts: hlo.Counts) -> dict:
  """Returns the part of an `Estimate` that is about speed."""
  chip = chips.of(run.mesh.devices.flat[0])
  executed = counts.flops
  # A kernel's operations, as it says them, are of the whole square or of half
  # of it; its bytes are those of its arrays, and `counts` has them.
  if counts.kernel_flops:
    executed += counts.kernel_flops * _visited(run.model, batch, attention)
  collectives = _collectives(run.mesh, counts)
  return {
    "executed": executed,
    "moved": counts.bytes,
    "collectives": collectives,
    "unknown_loops": counts.unknown_loops,
    "seconds": {
      "compute": executed / chip.flops,
      "memory": counts.bytes / chip.bandwidth,
      "network": sum(c["seconds"] for c in collectives),
    },
  }


def _visited(model: models.Model, batch: Batch, attention: str) -> float:
  """Scores that the kernel computes, of those that it says it does.

  It visits blocks, and of a mask with bounds it cannot know how many: the
  schedules of this batch do.
  """
  if attention == "cudnn":  # its stand-in says what it does
    return 1.0
  c, length = model.config, batch.inputs.shape[-1]
  mask = jax.tree.map(lambda x: x.reshape(-1, length), batch.mask)
  rows = math.prod(batch.inputs.shape[:2])
  group = c.heads // c.kv_heads
  blocks = kernel.cut(length, length, group, c.head_width, c.dtype)
  said = rows * length**2 / (2 if mask.causal else 1)

  def share(mask):
    if attention == "mosaic":
      made = visits.make(mask, rows, length, length)
      return made.by_query.share
    by_query, _ = grid.make(mask, rows, blocks)
    steps = math.prod(int(n) for n in by_query.grid(rows))
    return steps * blocks.q_size * blocks.k_size / said

  masks = encoder.masks(c, mask, (rows, length))
  return float(masks.total(share)) / c.layers


def _collectives(mesh, counts: hlo.Counts) -> tuple[dict, ...]:
  """The collectives by kind and axes, the slowest first."""
  network, out = Network(mesh), {}
  for one, times in counts.collectives.items():
    axes = ", ".join(network.axes(one.group))
    total = out.setdefault(
      (one.kind, axes),
      {"kind": one.kind, "axes": axes, "devices": len(one.group)}
      | dict.fromkeys(("times", "bytes", "sent", "seconds"), 0),
    )
    total["times"] += times
    total["bytes"] += times * one.bytes
    total["sent"] += times * one.sent
    total["seconds"] += times * network.seconds(one)
  return tuple(sorted(out.values(), key=lambda c: -c["seconds"]))
