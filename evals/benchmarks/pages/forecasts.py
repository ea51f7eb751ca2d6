"""Tables of forecasts next to published times, and of plans."""

import functools
from collections.abc import Mapping
from typing import Any

from antlm_jax import tables
from antlm_jax.evals.benchmarks import costs, encoder_costs
from antlm_jax.evals.benchmarks.pages.studies import RESULTS
from antlm_jax.planning import where
from antlm_jax.runtime import files

_TOKENS = 1e11  # of a whole training
_COST_TOKENS = 1e10  # of the page about costs
_KERNELS = {  # kinds of kernels, and their chips, by title
  "splash attention, forward, v5p": ("forward", "v5p"),
  "splash attention, forward, v6e": ("forward", "v6e"),
  "splash attention, forward, TPU7x": ("forward", "tpu7x"),
  "splash attention, backward, TPU7x": ("backward", "tpu7x"),
  "gated linear units 384 wide: v5p, v6e, TPU7x": (
    *("product", "v5p", "v6e", "tpu7x"),
  ),
}
_LENGTHS = "1024", "2048"  # tokens in a row
_VERSIONS = {  # the plans with the code before and after
  "610M, v5e:16x16, fsdp=64": "610M-v5e",
  "610M, v6e:16x16": "610M-v6e",
  "210M, v5p:4x4x4": "210M-v5p",
  "1B, v5p:4x4x8": "1B-v5p",
  "210M, h100:8, 16 microbatches": "210M-h100",
  "610M, h100:8, 16 microbatches": "610M-h100",
  "the public shape, v6e:2x2, C": "public-v6e",
}
_ON_GPUS = {
  "210M, packed": (
    *("210M-h100-8", "210M-h100-8-mosaic", "210M-h100-8-tokamax"),
  ),
  "210M, one document": ("210M-h100-8-one-document",),
  "610M, packed": ("610M-h100-8", "610M-h100-8-mosaic"),
  "610M, one document": ("610M-h100-8-one-document",),
}


def _read_stored_results(name: str) -> dict[str, Any]:
  return files.read_json(RESULTS / f"{name}.json", "the figures")


def _trained(name: str) -> list[dict[str, Any]]:
  """Returns the training steps of a plan, or none if it is not there."""
  if not (RESULTS / f"{name}.json").is_file():
    return []
  return [
    step for step in _read_stored_results(name)["programs"] if step["steps"]
  ]


def _public() -> str:
  lines = []
  for row in _read_stored_results("public-step")["rows"]:
    cells = [f"{row['measured_ms']:.0f} ms"]
    for kind in ("bundles", "estimates"):
      time, error = row[f"{kind}_ms"], row[f"{kind}_error"]
      cells.append(f"{time:,.0f} ms ({100 * error:+.0f} %)")
    lines.append((row["chip"].partition(":")[0], *cells))
  head = "164M, 64 rows of 2,048 in 16 microbatches, one chip", "measured"
  return tables.markdown(
    lines, (*head, "forecast", "with XLA's estimated cycles")
  )


def _speeds(table: str) -> str:
  """The comparison of `benchmarks.costs`."""
  rows = list(costs.compare_speeds(table))
  return tables.markdown(costs.comparison_cells(rows), costs.COMPARISON)


def _kernels() -> str:
  found, lines = _read_stored_results("forecast-errors")["rows"], []
  for title, (what, *chips) in _KERNELS.items():
    ratios = [
      row["measured_ms"] / row["forecast_ms"]
      for row in found
      if row["what"] == what
      and row["chip"] in chips
      and (what == "product" or row["shape"].split("x")[1] in _LENGTHS)
    ]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    lines.append((title, len(ratios), spread))
  return tables.markdown(lines, ("kernel", "cases", "measured / forecast"))


def _step_parts() -> str:
  """The parts of a step, as `antlm plan --where --before` shows them."""
  before, after = (
    where.read_step_parts(RESULTS / f"step-610M-v5e-{when}.json")
    for when in ("before", "after")
  )
  columns = {}
  for name, parts in before.items():
    columns |= {name: parts, name.split()[0]: after[name]}
  return f"```\n{where.step_parts_table(columns)}\n```"


def _versions() -> str:
  lines = []
  for title, name in _VERSIONS.items():
    times, ratios = [], []
    for when in ("before", "after"):
      steps = _trained(f"step-{name}-{when}")
      ms = (f"{1e3 * step['forecast']['seconds']:,.0f}" for step in steps)
      times.append(f"{', '.join(ms)} ms" if steps else None)
      found = ", ".join(f"{_time_over_products(step):.2f}" for step in steps)
      ratios.append(found or None)
    lines.append((title, *times, *ratios))
  head = "C, M", "forecast before", "forecast now"
  ratio = "instructions / products"
  return tables.markdown(lines, (*head, f"{ratio}, before", f"{ratio}, now"))


def _time_over_products(step: Mapping[str, Any]) -> float:
  """Returns the time of XLA's instructions over that of their products."""
  parts = step["forecast"]["parts"]
  own = [v for k, v in parts.items() if k not in (where.NETWORK, where.KERNELS)]
  seconds, products = (sum(x[k] for x in own) for k in ("seconds", "products"))
  return seconds / products


def _scaling_table() -> str:
  lines = []
  for row in _read_stored_results("weak-scaling-v5p")["rows"]:
    axes = (f"{axis}={n}" for axis, n in row["mesh"].items() if n > 1)
    lines.append(
      (
        f"{row['chips']:,}",
        ", ".join(axes),
        f"{row['memory']['needed'] / 2**30:.1f} GiB",
        f"{row['sent_bytes'] / 1e9:.1f} GB",
        f"{100 * row['mfu']:.0f} %",
      )
    )
  return tables.markdown(
    lines, ("v5p chips", "mesh", "memory", "sent", "best MFU")
  )


def _on_gpus() -> str:
  lines = []
  for title, names in _ON_GPUS.items():
    for name in names:
      steps = _trained(f"plan-{name}")

      def each(write, steps=steps) -> str:
        return ", ".join(map(write, steps))

      memory = max(step["memory"]["needed"] for step in steps)
      cells = (
        steps[0]["attention"],
        f"{memory / 2**30:.1f} GiB",
        each(lambda step: f"{step['moved'] / 1e12:.1f}") + " TB",
        each(lambda step: f"{step['executed'] / step['peak']:.2f}") + " s",
        each(lambda step: f"{step['seconds']['memory']:.2f}") + " s",
        each(lambda step: f"{100 * step['mfu']:.1f}") + " %",
      )
      lines.append((title, *cells))
  head = "", "attention by", "memory", "through memory", "products"
  return tables.markdown(lines, (*head, "bound by memory", "best MFU"))


def _hours_table() -> str:
  lines = []
  for name in _VERSIONS.values():
    plan = _read_stored_results(f"step-{name}-after")
    steps = _trained(f"step-{name}-after")
    if len(steps) > 1:
      hours = [_training_hours(step) for step in steps]
      chips = plan["devices"]
      cells = (f"{h:.{int(h < 10)}f} ({h * chips:,.0f})" for h in hours)
      lines.append((name.partition("-")[0], plan["topology"], *cells))
  return tables.markdown(lines, ("", "chips", "CLM", "MLM"))


def _training_hours(step: Mapping[str, Any]) -> float:
  """Returns the hours of a training with one kind of step."""
  seconds = step["forecast"]["seconds"]
  return _TOKENS / (step["rows"] * step["seq_len"]) * seconds / 3600


def _cost_table() -> str:
  """The table of `benchmarks.encoder_costs` without prices."""
  price = encoder_costs.HEAD.index("price")
  found = list(encoder_costs.encoder_costs(_COST_TOKENS, rates={}))
  head, *rows = (
    (*row[:price], *row[price + 1 :])
    for row in (encoder_costs.HEAD, *encoder_costs.cost_rows(found))
  )
  return tables.markdown(rows, head)


COSTS = {"encoder-costs": _cost_table}
TABLES = {
  "forecast-speeds": functools.partial(_speeds, "public_speeds"),
  "forecast-own": functools.partial(_speeds, "own_speeds"),
  "forecast-public": _public,
  "forecast-kernels": _kernels,
  "forecast-parts": _step_parts,
  "forecast-versions": _versions,
  "forecast-scaling": _scaling_table,
  "forecast-gpus": _on_gpus,
  "forecast-hours": _hours_table,
}
