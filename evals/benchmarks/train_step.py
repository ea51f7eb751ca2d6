"""Time, throughput and memory of train steps, by size and kind of batch.

    python -m evals.benchmarks.train_step --sizes=97M,610M --batches=clm,mlm

Whole steps in bfloat16 with AdamW, over all devices at hand, on random tokens
that are as unevenly frequent as words. The batches:
- clm: causal rows of one document each;
- mlm: bidirectional rows of one document each, 15 % of the tokens targets;
- packed: as clm, but about five documents of random lengths in a row;
- mixed: as clm and mlm, row by row in turn. Not packed, so that beside those
  two it shows what mixing alone costs.

A step's time is the median from the end of one step to that of the next, with
the next one already waiting: no step waits for Python, as in training. MFU is
of what `antlm_jax.training.flops` counts: attention's visible pairs, and no
recomputation. Memory is of one device: what the compiled step needs, and the
process's peak so far.

It needs of antlm_jax's dependencies only jax, flax, optax and orbax.
"""

import dataclasses
import sys
import time
import types

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from antlm_jax import cli, models, units
from antlm_jax.evals.benchmarks.common import RESULTS, Report, arguments
from antlm_jax.models.llama import SHAPES, LlamaConfig
from antlm_jax.objectives.batch import Batch, Layout, assemble
from antlm_jax.objectives.corruption import (
  Corrupted,
  Draw,
  Segments,
  Vocabulary,
  corrupt,
)
from antlm_jax.objectives.objective import OBJECTIVES
from antlm_jax.runtime import chips, sharding
from antlm_jax.settings import setting
from antlm_jax.training import flops, optim
from antlm_jax.training.step import TrainStep, jitted, state_shardings

BATCHES = {  # the objectives of rows, in turn, and whether rows are packed
  "clm": ("C", False),
  "mlm": ("M", False),
  "packed": ("C", True),
  "mixed": ("CM", False),
}
_DOCUMENTS = 5  # in a packed row, about
_SPECIAL = 4  # ids under this are special, and the last of them is the mask
_WARMUP, _FEWEST, _MOST = 3, 5, 100  # steps: not timed, and timed
_NO_MEMORY = "out of memory"
_MEASURED = (
  *("attention", "seconds", "steps", "tokens_per_second", "mfu"),
  *("needed_bytes", "peak_bytes", "compile_seconds", "error"),
)


@dataclasses.dataclass(frozen=True)
class Size:
  """How a size is timed; so many rows a device fit into 80 GB."""

  shape: dict[str, int]  # the encoder's, as in `SHAPES`
  seq_len: int  # tokens in a row T
  rows: int  # on a device
  vocab_size: int  # number of tokens V
  tied: bool  # whether the head is the transposed embedding
  remat: str  # what the backward pass recomputes


SIZES = {
  "97M": Size(SHAPES["97M"], 128, 256, 16_000, True, "none"),
  "210M": Size(SHAPES["210M"], 2048, 32, 128_256, False, "dots"),
  "610M": Size(SHAPES["610M"], 2048, 16, 128_256, False, "dots"),
}
_SHRUNK = {
  "shape": dict(layers=2, width=32, mlp_width=64, heads=4, kv_heads=2),
  "seq_len": 64,
  "rows": 4,
  "vocab_size": 512,
}


def make_example(
  batch: str, layout: Layout, seq_len: int, vocab_size: int
) -> Batch:
  """Makes one of `BATCHES`, by its name, of random tokens."""
  names, packed = BATCHES[batch]
  chosen = [OBJECTIVES[name] for name in names]
  rows, draw = layout.rows, np.random.default_rng(0)
  shape = len(rows), seq_len
  # Zipf's law: token k is as likely as 1 / k.
  tokens = _SPECIAL * (vocab_size / _SPECIAL) ** draw.random(shape)
  tokens = tokens.astype(np.int32)
  segments = Segments.whole(*shape)
  if packed:
    starts = draw.random(shape) < _DOCUMENTS / seq_len
    segments = Segments.of(starts | (np.arange(seq_len) == 0))
  ids = np.arange(vocab_size)
  vocabulary = Vocabulary(
    _SPECIAL - 1, *(None,) * 2, ids < _SPECIAL, ids >= _SPECIAL
  )
  counters = Draw(0, 0, rows[:, None])
  # Every objective shows all rows, and each row is taken as its own shows it.
  shown = [corrupt(o, tokens, segments, counters, vocabulary) for o in chosen]
  kinds = rows % len(chosen)
  each = kinds, np.arange(len(rows))
  merged = (np.stack(arrays)[each] for arrays in zip(*shown, strict=True))
  shares = {k: 1 / len(chosen) for k in range(len(chosen))}
  return assemble(Corrupted(*merged), kinds, chosen, layout, shares, packed)


def make_step(config: LlamaConfig) -> TrainStep:
  """Makes a train step with AdamW at a constant rate, for all `BATCHES`."""
  model = models.from_config(config)
  adamw = types.SimpleNamespace(
    name="adamw",
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    decay_scope="matrices",
    clip=1.0,
  )
  return TrainStep(
    model=model,
    optimizer=optim.make(adamw, model.axes),
    schedule=lambda step: jnp.float32(1e-3),
    num_objectives=2,
  )


def step_times(step, state, example: Batch, seconds: float) -> np.ndarray:
  """Returns the seconds from each step's end to the next one's."""
  ends: list[float] = []

  def enough() -> bool:
    timed = len(ends) - _WARMUP - 1
    return timed >= _FEWEST and (
      timed >= _MOST or ends[-1] - ends[_WARMUP] >= seconds
    )

  state, running = step(state, example)
  while not enough():
    state, following = step(state, example)
    jax.block_until_ready(running)
    ends.append(time.perf_counter())
    running = following
  jax.block_until_ready(state)
  return np.diff(ends[_WARMUP:])


def measure_size(size: Size, batches, attention: str, mesh, seconds: float):
  """Yields the results of each batch, under `jax.set_mesh`."""
  config = LlamaConfig(
    **size.shape,
    vocab_size=size.vocab_size,
    max_seq_len=size.seq_len,
    tied=size.tied,
    attention=attention,
    dtype="bfloat16",
    remat=size.remat,
  )
  train_step, shards = make_step(config), sharding.data_shards(mesh)
  layout = Layout(size.rows * shards, 1, shards)
  init, step = jitted(train_step, state_shardings(train_step, mesh))
  for batch in batches:
    example = make_example(batch, layout, size.seq_len, size.vocab_size)
    yield {
      "batch": batch,
      "rows": layout.batch_size,
      "seq_len": size.seq_len,
      "parameters": train_step.model.size,
      "remat": size.remat,
    } | measure(train_step, init, step, mesh, example, seconds)


def measure(train_step, init, step, mesh, example: Batch, seconds: float):
  """Times one case; returns its part of the results.

  What is not known is None; `error` says why a case has no time.
  """
  _, rows, length = example.inputs.shape
  out = dict.fromkeys(_MEASURED)
  try:
    model = train_step.model
    out["attention"] = model.attention_of(example.inputs, example.mask)
    placed, state = sharding.place(mesh, example), init()
    begun = time.perf_counter()
    compiled = step.lower(state, placed).compile()
    out["compile_seconds"] = time.perf_counter() - begun
    if size := compiled.memory_analysis():
      out["needed_bytes"] = (
        size.argument_size_in_bytes
        + size.output_size_in_bytes
        + size.temp_size_in_bytes
        - size.alias_size_in_bytes
      )
    times = step_times(compiled, state, placed, seconds)
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    full = "RESOURCE_EXHAUSTED" in str(error)
    out["error"] = _NO_MEMORY if full else str(error).splitlines()[0]
  else:
    out["seconds"], out["steps"] = float(np.median(times)), len(times)
    out["tokens_per_second"] = rows * length / out["seconds"]
    if chip := chips.of(mesh.devices.flat[0]):
      done = flops.train_step(train_step.model, example) / out["seconds"]
      out["mfu"] = float(done / (chip.flops * mesh.size))
  stats = mesh.devices.flat[0].memory_stats() or {}
  out["peak_bytes"] = stats.get("peak_bytes_in_use")
  return out


def _if_known(name: str, form):
  return lambda row: None if row[name] is None else form(row[name])


_COLUMNS = {
  "size": 5,
  "batch": 6,
  "rows x tokens": (13, lambda row: f"{row['rows']} x {row['seq_len']}"),
  "attention": 10,
  "step": (9, _if_known("seconds", units.milliseconds)),
  "tokens/s": (10, _if_known("tokens_per_second", "{:,.0f}".format)),
  "MFU": (6, _if_known("mfu", "{:.1%}".format)),
  "needs": (9, _if_known("needed_bytes", units.gib)),
  "peak": (9, _if_known("peak_bytes", units.gib)),
  "": (0, lambda row: row["error"] or ""),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  sizes: tuple[str, ...] = setting(
    tuple(SIZES), f"of {', '.join(SIZES)}", choices=SIZES
  )
  batches: tuple[str, ...] = setting(
    tuple(BATCHES), "kinds of batches", choices=BATCHES
  )
  seq_len: int | None = setting(
    None, "tokens in a row (default: 128 or 2048)", least=1
  )
  rows: int | None = setting(
    None, "rows on a device (default: 256, 32 or 16)", least=1
  )
  attention: str = setting("auto", "as model.attention of a config")
  seconds: float = setting(3.0, "per case", over=0)
  output: str = setting(str(RESULTS), "a folder", read=cli.here)
  shrink: bool = setting(False, "the first size, but tiny, to try the command")


def main(argv) -> None:
  """Prints a line per size and batch, and writes them all as JSON."""
  args = arguments(__doc__, Settings, argv)
  changes = {"seq_len": args.seq_len, "rows": args.rows}
  changes = {name: n for name, n in changes.items() if n is not None}
  changes = (_SHRUNK if args.shrink else {}) | changes
  mesh = sharding.make_mesh({"data": -1, "fsdp": 1, "tensor": 1})
  device = mesh.devices.flat[0].device_kind
  report = Report(
    args.output,
    f"step {device}{' shrunk' if args.shrink else ''}",
    _COLUMNS,
    "<<<<>",
    jaxlib=jaxlib.__version__,
    device=device,
    devices=mesh.size,
  )
  for name in args.sizes[: 1 if args.shrink else None]:
    size = dataclasses.replace(SIZES[name], **changes)
    with jax.set_mesh(mesh):
      for row in measure_size(
        size, args.batches, args.attention, mesh, args.seconds
      ):
        report.add({"size": name} | row)
  report.close()
  if any(row["error"] not in (None, _NO_MEMORY) for row in report.rows):
    sys.exit(1)


if __name__ == "__main__":
  cli.run(main)
