"""How time and memory of a train step grow with tokens, vocabulary and layers.

    python -m evals.benchmarks.growth --targets=cpu,v5p:2x2x1,h100:8

One size at a time grows, from a small encoder of the second paper's kind in
packed rows (four layers, width 512, 2,048 tokens, a vocabulary of 32,768).
A device's step always has 65,536 tokens. If a target is not here, its step is
compiled: memory is the compiler's, time the bound of `antlm plan`. On CPU
the step runs, with a width of 128 and 4,096 tokens.

The picture has both axes in logarithms: with the tokens of a step fixed, an
array of T x T would show as a line that rises with T, one of a step's tokens
by V as one that rises with V, from the head's own size upward.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

import jax

from antlm_jax import cli, units
from antlm_jax.evals.benchmarks import common, train_step
from antlm_jax.planning import topology
from antlm_jax.planning.estimate import estimate
from antlm_jax.planning.search import Pod
from antlm_jax.settings import setting
from antlm_jax.training.step import jitted, state_shardings

_CONFIG = "configs/encoders.py:size=210M"
_BASE = {"tokens": 2048, "vocabulary": 32_768, "layers": 4}  # T, V
_GROWS = {
  "tokens": (128, 512, 2048, 8192, 32_768),
  "vocabulary": (8192, 32_768, 131_072, 262_144),
  "layers": (2, 4, 8, 16, 32),
}
# The width, and the tokens of a device's step; on CPU less, so that one takes
# seconds, and no longer rows.
_WIDTH, _STEP = 512, 65_536
_CPU_WIDTH, _CPU_STEP = 128, 4096
_CPU_SECONDS = 3.0  # for each case


def cases(targets) -> Iterator[dict]:
  """Yields the results of the sizes, each unlike the base in one at most."""
  sizes = [_BASE]
  for name, values in _GROWS.items():
    sizes += [_BASE | {name: v} for v in values if v != _BASE[name]]
  for target in targets:
    for size in sizes:
      if target != "cpu" or size["tokens"] <= _CPU_STEP:
        yield {"target": target, **size, **measure(target, **size)}


def measure(target: str, tokens: int, vocabulary: int, layers: int) -> dict:
  """Compiles a step, or runs it on CPU; returns its seconds and bytes."""
  here = target == "cpu"
  devices = jax.devices() if here else topology.devices(target)
  width, total = (_CPU_WIDTH, _CPU_STEP) if here else (_WIDTH, _STEP)
  total *= len(devices)
  run = Pod(_CONFIG, {}, devices, vocabulary, tokens, pieces=4).run(
    (
      f"model.width={width}",
      f"model.mlp_width={3 * width}",
      f"model.heads={width // 64}",
      f"model.kv_heads={width // 64}",
      f"model.layers={layers}",
      f"model.max_seq_len={tokens}",
      f"train.batch_size={max(len(devices), total // tokens)}",
      "curriculum=10000C steps",
      *(("model.dtype=float32",) if here else ()),
    )
  )
  program = run.programs(evaluations=False)[0]
  if not here:
    found = estimate(run, program)
    bound = found.step_seconds if found.memory.fits else None
    return {"seconds": bound, "bytes": found.memory.needed}
  with jax.set_mesh(run.mesh):
    programs = jitted(run.step, state_shardings(run.step, run.mesh))
    row = train_step.measure(
      run.step, programs, run.mesh, program.batch, _CPU_SECONDS
    )
  return {"seconds": row["seconds"], "bytes": row["needed_bytes"]}


def plot(rows: list[dict], path: pathlib.Path) -> None:
  """Draws time and memory against each size."""
  from matplotlib import figure, ticker

  out = figure.Figure(figsize=(11, 6), layout="constrained")
  axes = out.subplots(2, len(_GROWS), sharex="col", sharey="row")
  lines = ("seconds", 1e3, "ms a step"), ("bytes", 2**-30, "GiB")
  for column, (name, sizes) in enumerate(_GROWS.items()):
    others = _BASE.items() - {(name, _BASE[name])}
    for ax, (what, scale, label) in zip(axes[:, column], lines, strict=True):
      for target in dict.fromkeys(row["target"] for row in rows):
        found = sorted(
          (row[name], scale * row[what])
          for row in rows
          if row["target"] == target and row[what] and others <= row.items()
        )
        ax.plot(*zip(*found, strict=True), "o-", label=target)
      ax.set(xscale="log", yscale="log")
      ax.set_xticks(sizes, [units.quantity(n) for n in sizes], minor=False)
      ax.minorticks_off()
      ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
      ax.yaxis.set_major_formatter("{x:g}")
      ax.grid(visible=True, which="major", alpha=0.3)
      if not column:
        ax.set_ylabel(label)
    axes[1, column].set_xlabel(name)
  axes[0, 0].legend()
  out.savefig(path, dpi=110)


@dataclasses.dataclass(frozen=True)
class Growth:
  """The command's arguments."""

  targets: tuple[str, ...] = setting(
    ("cpu", "v5p:2x2x1", "h100:8"), "cpu, or topologies as of antlm plan"
  )
  output: str = common.output()


_COLUMNS = {
  "target": 10,
  "tokens": 8,
  "vocabulary": 10,
  "layers": 6,
  "step": (10, units.milliseconds, "seconds"),
  "memory": (9, units.gib, "bytes"),
}


def main(argv) -> None:
  """Prints a line per case, writes them as JSON, and draws them."""
  asked = common.arguments(__doc__, Growth, argv)
  found = cases(asked.targets)
  rows = common.report(
    found, asked.output, "growth", _COLUMNS, "<>", config=_CONFIG
  )
  plot(rows, pathlib.Path(asked.output, "growth.png"))


if __name__ == "__main__":
  cli.run(main)
