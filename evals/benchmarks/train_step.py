"""Time, throughput and memory of a config's train steps.

    python -m antlm_jax.evals.benchmarks.train_step --config=babylm_small \\
      --vocab_size=8192 --seq_len=128

It times one step for each kind of batch in the config's curriculum, over all
devices at hand. The rows are those of `antlm plan`. --config.KEY=VALUE changes
any setting. `benchmarks.peers` compares steps with transformers.

A step's time is the median from the end of one step to that of the next. The
next one already waits: no step waits for Python, as in training. MFU is of the
FLOPs that `antlm_jax.training.flops` counts: attention's visible pairs, and no
recomputation. Memory is of one device: the compiled step's need, and the
process's peak (on a CPU, its peak resident memory).
"""

import dataclasses
import resource
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from antlm_jax import cli, models, units
from antlm_jax import mesh as mesh_lib
from antlm_jax.arguments import add_arguments, read_section
from antlm_jax.evals.benchmarks import common
from antlm_jax.models.llama import LlamaConfig
from antlm_jax.objectives import corruption
from antlm_jax.objectives.batch import Batch, BatchLayout, assemble_batch
from antlm_jax.objectives.objective import OBJECTIVES
from antlm_jax.optim import AdamW
from antlm_jax.runtime import chips
from antlm_jax.settings import Section, setting
from antlm_jax.training import flops
from antlm_jax.training.step import TrainStep, jitted, state_shardings

BATCHES = {  # the objectives of rows, in turn, and whether rows are packed
  "clm": ("C", False),
  "mlm": ("M", False),
  "packed": ("C", True),
  "mixed": ("CM", False),
}
_DOCUMENTS = 5  # in a packed row, about
_SPECIAL = 4  # ids under this are special, and the last of them is the mask
_WARMUP = 3  # most steps that are not timed
_MOST = 100  # most steps that are timed
_NO_MEMORY = "out of memory"


def make_example(
  batch: str, layout: BatchLayout, seq_len: int, vocab_size: int
) -> Batch:
  """Makes one of `BATCHES`, by its name, of random tokens."""
  names, packed = BATCHES[batch]
  chosen = [OBJECTIVES[name] for name in names]
  rows = layout.slots
  draw = np.random.default_rng(0)
  shape = len(rows), seq_len
  # Zipf's law: token k is as likely as 1 / k.
  tokens = _SPECIAL * (vocab_size / _SPECIAL) ** draw.random(shape)
  tokens = tokens.astype(np.int32)
  segments = corruption.Segments.whole(*shape)
  if packed:
    starts = draw.random(shape) < _DOCUMENTS / seq_len
    starts[:, 0] = True
    segments = corruption.Segments.of(starts)
  ids = np.arange(vocab_size)
  words = corruption.WordTokens(ids >= _SPECIAL)
  vocabulary = corruption.Vocabulary(
    _SPECIAL - 1, None, None, ids < _SPECIAL, lambda: words
  )
  counters = corruption.Draw(0, 0, rows[:, None])
  # Every objective corrupts all rows, and each row is taken from its own.
  text = tokens, segments, counters, vocabulary
  corrupted = [objective.corrupt(*text) for objective in chosen]
  kinds = rows % len(chosen)
  index = kinds, np.arange(len(rows))
  merged = (np.stack(arrays)[index] for arrays in zip(*corrupted, strict=True))
  shares = {k: 1 / len(chosen) for k in range(len(chosen))}
  merged = corruption.Corrupted(*merged)
  return assemble_batch(merged, kinds, chosen, layout, shares, packed)


def make_step(config: LlamaConfig) -> TrainStep:
  """Makes a train step with AdamW at a constant rate, for all `BATCHES`."""
  model = models.from_config(config)
  return TrainStep(
    model=model,
    optimizer=AdamW().build(model.axes),
    schedule=lambda step: jnp.float32(1e-3),
    num_objectives=2,
  )


def step_times(
  step, init, example: Batch, seconds: float, fewest: int
) -> np.ndarray:
  """Returns the seconds from each step's end to the next one's."""
  ends: list[float] = []
  warmup = min(_WARMUP, fewest)
  state, running = step(init(), example)
  while len(ends) <= warmup + fewest or (
    len(ends) <= warmup + _MOST and ends[-1] - ends[warmup] < seconds
  ):
    state, following = step(state, example)
    jax.block_until_ready(running)
    ends.append(time.perf_counter())
    running = following
  jax.block_until_ready(state)
  return np.diff(ends[warmup:])


def time_train_step(
  train_step, programs, mesh, example: Batch, args: "StepTimings"
) -> dict:
  """Times one case, under `jax.set_mesh`; returns its part of the results.

  `programs` are those of `jitted`. `error` says why a case has no time.
  """
  out = {}
  device = mesh.devices.flat[0]
  model = train_step.model
  try:
    names = model.attention_of(example.inputs, example.mask)
    out["attention"] = ", ".join(dict.fromkeys(names))
    placed = mesh_lib.place_batch(mesh, example)
    begun = time.perf_counter()
    state = jax.eval_shape(programs.init)
    compiled = programs.update.lower(state, placed).compile()
    out["compile_seconds"] = time.perf_counter() - begun
    if size := compiled.memory_analysis():
      out["needed_bytes"] = (
        size.argument_size_in_bytes
        + size.output_size_in_bytes
        + size.temp_size_in_bytes
        - size.alias_size_in_bytes
      )
    times = step_times(
      compiled, programs.init, placed, args.seconds, args.steps
    )
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    full = "RESOURCE_EXHAUSTED" in str(error)
    out["error"] = _NO_MEMORY if full else str(error).splitlines()[0]
  else:
    out["seconds"] = float(np.median(times))
    out["steps"] = len(times)
    out["tokens_per_second"] = example.inputs.size / out["seconds"]
    if chip := chips.chip_of(device):
      done = flops.train_step(model, example) / out["seconds"]
      out["mfu"] = float(done / (chip.flops * mesh.size))
  peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
  if device.platform == "cpu":
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return out | {"peak_bytes": peak}


def measure_config(
  args: "StepTimings", overrides: Sequence[str]
) -> Iterator[dict]:
  """Yields the results of each kind of batch of a config's run."""
  from antlm_jax import config as config_lib  # it needs ml_collections
  from antlm_jax.planning.search import Pod

  changes = config_lib.parse_overrides(overrides)
  text = args.vocab_size, args.seq_len, args.pieces
  run = Pod(args.config, changes, jax.devices(), *text).build_run()
  programs = jitted(run.step, state_shardings(run.step, run.mesh))
  for kind in run.batch_kinds(evaluations=False):
    micro, rows, length = kind.batch.inputs.shape
    with jax.set_mesh(run.mesh):
      results = time_train_step(run.step, programs, run.mesh, kind.batch, args)
    yield {
      "size": args.config,
      "batch": kind.name,
      "rows": micro * rows,
      "microbatches": micro,
      "seq_len": length,
      "vocab_size": run.model.config.vocab_size,
      "parameters": run.model.size,
      "remat": run.model.config.remat,
      "overrides": list(overrides),
      **results,
    }


_COLUMNS = {
  "size": 5,
  "batch": 6,
  "rows x tokens": (13, "{} x {}".format, "rows", "seq_len"),
  "attention": 10,
  "step": (9, units.milliseconds, "seconds"),
  "tokens/s": (10, "{:,.0f}".format, "tokens_per_second"),
  "MFU": (6, "{:.1%}".format, "mfu"),
  "needs": (9, units.gib, "needed_bytes"),
  "peak": (9, units.gib, "peak_bytes"),
  "error": 0,
}


@dataclasses.dataclass(frozen=True)
class StepTimings(Section):
  """The command's arguments."""

  config: str = setting(help="Name or path of a config")
  seconds: float = setting(3.0, "Seconds of timing for each case", over=0)
  steps: int = setting(5, "Smallest number of timed steps", least=1, most=_MOST)
  vocab_size: int = setting(
    128_256, "Vocabulary size of the rows", least=2, most=2**24
  )
  seq_len: int | None = setting(
    None, "Tokens in a row (default: model.max_seq_len)", least=1, most=2**24
  )
  pieces: int = setting(1, "Documents in a row", least=1)
  output: str = common.output()


def main(argv) -> None:
  """Prints a line per kind of batch, and writes them all as JSON."""
  parser = cli.Parser(description=__doc__)
  add_arguments(parser, StepTimings)
  args, overrides = parser.parse_with_overrides(argv)
  args = read_section(StepTimings, args)
  device = jax.devices()[0].device_kind
  count = jax.device_count()
  facts = {"jaxlib": jaxlib.__version__, "device": device, "devices": count}
  rows = measure_config(args, overrides)
  place = args.output, f"step {device} {args.config}"
  rows = common.report_rows(rows, *place, _COLUMNS, "<<<<>", **facts)
  if any(row.get("error", _NO_MEMORY) != _NO_MEMORY for row in rows):
    sys.exit(1)


if __name__ == "__main__":
  cli.run_command(main)
