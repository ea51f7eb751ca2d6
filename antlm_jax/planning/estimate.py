"""What the steps of a run need, and what bounds their speed, before they run.

A step is compiled for devices that are not there (`topology`); what it takes
of memory the compiler says, and what it does is counted in its text (`hlo`).
Times are a roofline's, from published peaks (`runtime.chips`, `network`):
products, memory and network are each thought to go on all the time, beside
each other.
"""

import dataclasses
import math
import re
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from antlm_jax import hashing, models
from antlm_jax.attention.tpu import kernel, schedule
from antlm_jax.objectives.batch import Batch
from antlm_jax.planning import hlo, topology
from antlm_jax.planning.network import Network
from antlm_jax.runtime import chips, progress, sharding
from antlm_jax.training import flops
from antlm_jax.training import run as run_lib
from antlm_jax.training.run import Run

_CUTS = 0x9C07  # keeps the pieces' draws apart from the objectives'
_PREFIXES = " KMGTPE"  # each 2^10 times the one before


# ------------------------------------------ the data, or what stands in for it


@dataclasses.dataclass(frozen=True)
class StandIn:
  """Rows and tokenizer of data that is not there.

  Attributes:
    vocab_size: Number of tokens V.
    seq_len: Tokens in a row T.
    pieces: Documents in a row, cut at random.
    size: Number of rows, which make an epoch.
  """

  vocab_size: int
  seq_len: int
  pieces: int
  size: int

  mask_id, pad_id = 0, None

  @property
  def special(self) -> np.ndarray:
    """Which tokens are special, bool `[V]`."""
    return np.arange(self.vocab_size) == self.mask_id

  @property
  def word_start(self) -> np.ndarray:
    """Which tokens begin a word, bool `[V]`."""
    return ~self.special

  @property
  def segmented(self) -> bool:
    """Whether rows hold several documents."""
    return self.pieces > 1

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


def assemble(
  config: ConfigDict, devices: Sequence[jax.Device], stand_in: StandIn
) -> Run:
  """Builds a run as `run.build` does, but on devices that need not be there.

  Args:
    config: Its config. The data of `data.path` is read, if it is set.
    devices: The devices.
    stand_in: What stands in for the data otherwise.

  Raises:
    UserError: for settings and devices that do not fit together.
  """
  data = dict.fromkeys(("train_rows", "dev_rows", "tokenizer"), stand_in)
  data["manifest"] = None
  if config.data.path:
    data = run_lib.read_data(config)
  return run_lib.assemble(config, devices, **data)


# ----------------------------------------------------------- what is compiled


@dataclasses.dataclass(frozen=True)
class Program:
  """A step that a run compiles, for one kind of batch.

  Attributes:
    name: The objectives of the batch.
    steps: How many of the run's steps are of it; 0 for an evaluation.
    batch: A batch, as the first process makes its part of it.
  """

  name: str
  steps: int
  batch: Batch


def programs(run: Run, evaluations: bool = True) -> list[Program]:
  """Returns the steps that a run compiles, each with a batch of its kind."""
  source, out = run.source(), {}
  # The kind of batch changes where the curriculum or the rows' layout does.
  starts = {phase.start for phase in run.curriculum.phases}
  starts = sorted(starts | {*run.order.starts})
  ends = [*starts[1:], run.curriculum.steps]
  for start, end in zip(starts, ends, strict=True):
    name = str(run.curriculum.at(start))
    joined = run.order.at(start).joined
    if joined > 1:
      name += f" of {joined * run.train_rows.seq_len}"
    # Objectives that come again are one program, which trains more steps.
    known = out.get(name) or Program(name, 0, source[start])
    out[name] = dataclasses.replace(known, steps=known.steps + end - start)
  if evaluations:
    for name, of in run.eval_sources().items():
      out[f"eval {name}"] = Program(f"eval {name}", 0, of[0])
  return list(out.values())


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of a device's memory.

  Attributes:
    limit: What there is for programs.
    needed: What this one takes.
    arguments: Of that, the state and the batch.
    temporaries: What it takes beside them.
  """

  limit: int
  needed: int
  arguments: int | None = None
  temporaries: int | None = None

  @property
  def fits(self) -> bool:
    """Whether it is enough."""
    return self.needed <= self.limit


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What is known of a program before it ever ran; of one device, per step.

  Attributes:
    name: The program's.
    steps: How many of the run's steps are of it.
    rows: Rows of a batch, over all devices.
    seq_len: Tokens in a row.
    devices: How many.
    peak: FLOP/s of one.
    attention: What computes attention.
    work: The operations that a step needs, over all devices.
    compile_seconds: What compiling it took here.
    memory: What it needs. Where that is too much, nothing below is known.
    executed: Operations of the matrix units, with recomputation and padding.
    moved: Bytes through the memory.
    collectives: Each kind along the same axes: how often, the arrays' bytes,
      the bytes that a device sends, and the seconds that it takes.
    seconds: The time of products, memory and network, if nothing waits.
    unknown_loops: Loops of unknown length, counted as one pass.
  """

  name: str
  steps: int
  rows: int
  seq_len: int
  devices: int
  peak: float
  attention: str
  work: flops.Work
  compile_seconds: float
  memory: Memory
  executed: float = 0.0
  moved: float = 0.0
  collectives: tuple[dict, ...] = ()
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  unknown_loops: int = 0

  @property
  def bound(self) -> str:
    """What takes longest: compute, memory or network."""
    return max(self.seconds, key=self.seconds.get)

  @property
  def step_seconds(self) -> float:
    """The shortest that a step can take."""
    return self.seconds[self.bound]

  @property
  def mfu(self) -> float:
    """The highest share of the peak that what is needed can reach."""
    return self.work.total / (self.devices * self.peak * self.step_seconds)

  def to_json(self) -> dict:
    """Returns all of it as plain values."""
    out = dataclasses.asdict(self)
    out["memory"]["fits"] = self.memory.fits
    if self.seconds:
      names = ("bound", "step_seconds", "mfu")
      out |= {name: getattr(self, name) for name in names}
    return out


def estimate_all(run: Run, chosen: Sequence[Program]) -> Iterator[Estimate]:
  """Yields the programs' estimates; equal ones are compiled once."""
  done: dict = {}
  for program in progress.track(chosen, "program", "compiled", 0):
    shapes = sharding.abstract(run.mesh, program.batch)
    # Batches of other objectives may well be the same to the compiler.
    leaves, tree = jax.tree.flatten(shapes)
    key = tree, *leaves, program.steps > 0
    if key not in done:
      done[key] = estimate(run, program)
    yield dataclasses.replace(done[key], name=program.name, steps=program.steps)


def estimate(run: Run, program: Program) -> Estimate:
  """Compiles a program and reads off what it needs.

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
  lowered = topology.lower(run.step, mesh, shapes, training)
  try:
    compiled = topology.compile_lowered(lowered)
  except jax.errors.JaxRuntimeError as error:
    arguments = topology.arguments(run.step, mesh, shapes, training)
    memory = exceeded(str(error), _bytes(arguments))
    if memory is None:
      raise
    spent = time.monotonic() - begun
  else:
    spent = time.monotonic() - begun
    memory = _memory(compiled, chip)
    found = _speed(run, batch, hlo.count(compiled.as_text()))
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

  Args:
    message: The error's text.
    arguments: Bytes of the program's arguments on a device.
  """
  size = r"([\d.]+)([KMGTPE]?)"
  found, beside = re.search(rf"Used {size} of {size} hbm", message), 0
  if not found:  # temporaries are too much already, without the arguments
    pattern = rf"\({size}\) exceeds available HBM \({size}\)"
    found, beside = re.search(pattern, message), arguments
  if not found or "RESOURCE_EXHAUSTED" not in message:
    return None
  used, used_prefix, limit, limit_prefix = found.groups()
  needed = beside + _of_prefix(used, used_prefix)
  limit = _of_prefix(limit, limit_prefix)
  return Memory(limit, needed, arguments, needed - arguments)


def _of_prefix(number: str, prefix: str) -> int:
  return int(float(number) * 2 ** (10 * _PREFIXES.index(prefix or " ")))


def _bytes(shapes) -> int:
  """Bytes of arrays' parts on a device."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(shapes)
  )


# ----------------------------------------------------------------- its speed


def _speed(run: Run, batch: Batch, counts: hlo.Counts) -> dict:
  """Returns the part of an `Estimate` that is about speed."""
  chip = chips.of(run.mesh.devices.flat[0])
  executed = counts.flops
  if counts.kernel_flops:  # said of the whole square, or of half of it
    executed += counts.kernel_flops * _visited(run.model, batch)
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


def _visited(model: models.Model, batch: Batch) -> float:
  """Scores that the kernel computes, of those that it says it does.

  It visits blocks, and of a mask with bounds it cannot know how many.
  """
  c, length = model.config, batch.inputs.shape[-1]
  group = c.heads // c.kv_heads
  blocks = kernel.cut(length, length, group, c.head_width, c.dtype)
  mask = jax.tree.map(lambda x: x.reshape(-1, length), batch.mask)
  rows = math.prod(batch.inputs.shape[:2])
  by_query, _ = schedule.make(mask, rows, blocks)
  steps = math.prod(int(n) for n in by_query.grid(rows))
  said = rows * length**2 / (2 if mask.causal else 1)
  return steps * blocks.q_size * blocks.k_size / said


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
