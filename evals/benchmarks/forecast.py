"""How far forecasts are from published times of kernels and products.

    python -m antlm_jax.evals.benchmarks.forecast --tables=T --kernels=K

tokamax ships measured times: of splash attention with its fastest blocks, and
of gated linear units, which are XLA's. Each is compiled here for the same chip,
shape and blocks. The forecast of `planning.forecast` is compared with the
measured time (docs/appendix/forecast.md).

T and K are folders of unpacked wheels, of which nothing is installed:

    pip download --no-deps --python-version 3.12 --only-binary=:all: \\
      tokamax==0.0.17  # the tables
    pip download --no-deps --python-version 3.11 --only-binary=:all: \\
      tokamax==0.0.12  # the kernels, as the last for Python 3.11 has them
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import re
import sys
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import cli, tables
from antlm_jax.evals.benchmarks import common
from antlm_jax.planning import bundles, forecast, hlo, topology, where
from antlm_jax.runtime import chips
from antlm_jax.settings import setting

# A generation's folder of tables, and a small topology.
GENERATIONS = {
  "v5p": ("tpu_v5", "v5p:2x2x1"),
  "v6e": ("tpu_v6_lite", "v6e:2x2"),
  "tpu7x": ("tpu7x", "tpu7x:2x2x1"),
}
_FLASH = "pallas_mosaic_tpu_flash_attention"
_TABLES = {
  "forward": _FLASH,
  "backward": f"{_FLASH}_vjp",
  "product": "gated_linear_unit",
}
_CAUSAL = {"offset": 0, "window_size": None}
_LONGEST = 2048  # tokens in a row, and in a block


@dataclasses.dataclass(frozen=True)
class PublishedCase:
  """Something whose time is published."""

  generation: str
  what: str  # of `_TABLES`
  shapes: dict[str, tuple[int, ...]]  # of the arrays
  config: dict  # the kernel's, as the table has it
  seconds: float
  causal: bool = False

  @property
  def blocks(self) -> list[int]:
    """The sizes of the kernel's blocks; there may be zeros."""
    return [n for k, n in self.config.items() if k.startswith("block_") and n]


def published_cases(
  folder: str, generation: str, what: str
) -> Iterator[PublishedCase]:
  """Yields a table's cases in bfloat16 without further options."""
  name = f"{GENERATIONS[generation][0]}/{_TABLES[what]}.json"
  path = pathlib.Path(folder) / "tokamax/data/autotuning" / name
  found = json.loads(path.read_text()) if path.exists() else {}
  for text, measured in found.items():
    key = json.loads(text)
    names = ("x", "weights") if what == "product" else ("q", "k", "v")
    kinds = [str(key.get(n)) for n in names]
    plain = all(kind.startswith("bf16[") for kind in kinds)
    if not (plain and measured) or key.get("return_residuals"):
      continue
    mask = {k: v for k, v in (key.get("mask") or {}).items() if v}
    causal = mask.pop("causal_mask", None)
    if mask or key.get("bias") or causal not in (None, _CAUSAL):
      continue
    sizes = [tuple(map(int, re.findall(r"\d+", k[4:]))) for k in kinds]
    config, times = next(iter(measured.items()))
    seconds = float(np.median(times["evaluation_times_ms"])) / 1e3
    shapes = dict(zip(names, sizes, strict=True))
    config = json.loads(config)
    yield PublishedCase(
      generation, what, shapes, config, seconds, causal is not None
    )


def wanted_case(case: PublishedCase) -> bool:
  """Whether a case is like training runs here, and compiles quickly."""
  if case.what == "product":  # there are many, and most are narrower
    *rows, width = case.shapes["x"]
    return width > 256 and math.prod(rows) % 5120 == 0
  _, length, _, width = case.shapes["q"]
  return width in (64, 128) and max(length, *case.blocks) <= _LONGEST


def case_program(case: PublishedCase, kernels: str):
  """Returns a function, and the shapes of its arguments."""
  like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
  shapes = [like(s) for s in case.shapes.values()]
  if case.what == "product":
    return _unit, shapes
  splash, masks = _splash_kernels(kernels)
  config = {
    name: splash.QKVLayout(value) if name.endswith("_layout") else value
    for name, value in case.config.items()
  }
  q, k, _ = shapes
  mask = masks.CausalMask if case.causal else masks.FullMask
  with jax.ensure_compile_time_eval():
    made = splash.make_splash_mha(
      mask((q.shape[1], k.shape[1])),
      config=dataclasses.replace(splash.SplashConfig.get_default(), **config),
      save_residuals=case.what == "backward",
      q_seq_shards=1,
    )
  if case.what == "forward":
    return functools.partial(_splash_forward, made), shapes
  sums = like((q.shape[0], q.shape[2], q.shape[1]), dtype=jnp.float32)
  run = functools.partial(_splash_backward, splash, made)
  return run, [*shapes, q, q, sums]


def _unit(x, weights):
  # Both products at once, as tokamax writes it.
  gate, up = jnp.moveaxis(jnp.einsum("...k,kjn->...jn", x, weights), -2, 0)
  wide = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
  return wide.astype(x.dtype)


def _splash_forward(kernel, q, k, v):
  q, k, v = _by_heads(q * q.shape[-1] ** -0.5, k, v)
  return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)


def _splash_backward(splash, kernel, q, k, v, out, grad, sums):
  scale = q.shape[-1] ** -0.5
  names = ("mask_value", "is_mqa", "config", "mask_function")
  names += ("fwd_mask_sparsity", "dkv_mask_sparsity")
  static = [kernel.kwargs[name] for name in names]

  def run(q, k, v, out, grad, sums):
    kept = q, k, v, None, None, out, sums, kernel.dkv_mask_info
    made = splash._splash_attention_bwd(True, *static, kept, (grad, None))
    return made[2:5]

  arrays = _by_heads(q * scale, k, v, out, grad)
  dq, dk, dv = _by_heads(*jax.vmap(run)(*arrays, sums * math.log2(math.e)))
  return dq * scale, dk, dv


def _by_heads(*arrays):
  return [x.swapaxes(1, 2) for x in arrays]


@functools.cache
def _splash_kernels(folder: str):
  # tokamax would import packages that are not installed; its kernel does not.
  package = types.ModuleType("tokamax")
  package.__path__ = [f"{folder}/tokamax"]
  sys.modules["tokamax"] = package
  from tokamax._src.ops.experimental.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
  )

  return splash_attention_kernel, splash_attention_mask


def visit_counts(case: PublishedCase) -> tuple[int, int, int]:
  """Returns the numbers of masked, whole and output blocks."""
  rows, length, heads, _ = case.shapes["q"]
  end = "_dkv" if case.what == "backward" else ""
  q_size, k_size = case.config[f"block_q{end}"], case.config[f"block_kv{end}"]
  queries, keys = length // q_size, case.shapes["k"][1] // k_size
  masked, whole = 0, queries * keys
  if case.causal:
    i, j = np.indices((queries, keys))
    seen = j * k_size < (i + 1) * q_size
    all_seen = (j + 1) * k_size <= i * q_size + 1
    whole = int(all_seen.sum())
    masked = int(seen.sum()) - whole
  outputs = keys if end else queries
  return tuple(rows * heads * n for n in (masked, whole, outputs))


def measure_forecast(case: PublishedCase, kernels: str) -> dict:
  """Compiles a case; returns its forecast next to the published time."""
  device = topology.topology_devices(GENERATIONS[case.generation][1])[0]
  chip, measured = chips.chip_of(device), forecast.measured_chip(device)
  run, shapes = case_program(case, kernels)
  text = common.compile_for(device, run, *shapes).as_text()
  found = bundles.read_bundle_counts()
  counts = hlo.count(text, found)
  times = forecast.instruction_times(counts.work, chip, measured)
  parts = {"xla": where.total_time(times).seconds}
  seconds = parts["xla"]
  if case.what != "product":
    (listing,) = (x for name, x in found.items() if "splash_" in name)
    parts["kernel"] = forecast.kernel(listing, *visit_counts(case), measured)
    seconds += parts["kernel"]
    parts |= dataclasses.asdict(listing)
  sizes = ("x".join(map(str, s)) for s in case.shapes.values())
  return {
    "chip": case.generation,
    "what": case.what,
    "shape": " ".join(dict.fromkeys(sizes)),
    "causal": case.causal,
    "blocks": "x".join(map(str, case.blocks)),
    "forecast_ms": round(seconds * 1e3, 4),
    "measured_ms": round(case.seconds * 1e3, 4),
    "error": round(seconds / case.seconds - 1, 3),
    "parts": parts,
  }


@dataclasses.dataclass(frozen=True)
class Forecasts:
  """The command's arguments."""

  tables: str = setting(help="a folder with tokamax 0.0.17", read=cli.here)
  kernels: str = setting(help="a folder with tokamax 0.0.12", read=cli.here)
  output: str = common.output()


def main(argv) -> None:
  """Prints a line per case, and writes them to a file."""
  args = common.benchmark_arguments(__doc__, Forecasts, argv)
  found = [
    case
    for what, generation in itertools.product(_TABLES, GENERATIONS)
    for case in published_cases(args.tables, generation, what)
    if wanted_case(case)
  ]
  found.sort(key=lambda case: math.prod(case.shapes.get("q", (1,))[1:2]))
  columns = {"chip": 5, "what": 8, "shape": 34, "causal": 6, "blocks": 16}
  columns |= {"forecast_ms": 11, "measured_ms": 11, "error": 6}
  rows = (measure_forecast(case, args.kernels) for case in found)
  name = "forecast errors"
  rows = common.report_rows(rows, args.output, name, columns, "<<<<<>")
  errors = collections.defaultdict(list)
  for row in rows:
    errors[f"{row['what']}, {row['chip']}"].append(row["error"])
  summary = [
    (name, len(x), f"{np.median(x):+.0%}", f"{max(x, key=abs):+.0%}")
    for name, x in errors.items()
  ]
  print(tables.text_table(summary, ("", "cases", "median", "worst")))


if __name__ == "__main__":
  cli.run_command(main)
