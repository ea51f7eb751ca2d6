"""Tables of AdamW, LAMB and Muon compared."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from antlm_jax import tables
from antlm_jax.evals import statistics
from antlm_jax.evals.benchmarks.pages import studies
from antlm_jax.evals.benchmarks.pages.studies import (
  StoredStudy,
  interval_text,
  mean_and_deviation,
)
from antlm_jax.evals.statistics import Interval
from antlm_jax.evals.studies.reporting import plots
from antlm_jax.evals.studies.reporting.claims import Contrast

_MEASURES = {  # family and logged name of the objective
  "CLM": ("clm", "clm"),
  "MLM, 30 %": ("mlm", "mlm"),
  "mixture, causal": ("mixed", "clm"),
  "mixture, MNTP": ("mixed", "mntp"),
}
_TITLES = {
  "adamw": "AdamW",
  "lamb": "LAMB",
  "muon": "Muon",
  "adamw_long": "AdamW, 960 steps",
}
_PAIRS = (
  ("muon", "adamw"),
  ("muon", "lamb"),
  ("lamb", "adamw"),
  ("muon", "adamw_long"),
)
_LONGER = 2  # times AdamW's steps: those of `adamw_long`
_OBJECTIVES = {"clm": "CLM", "mlm": "MLM", "mixed": "mixture"}
_OPTIMIZERS = "adamw", "lamb", "muon"


def _optimizer_study() -> StoredStudy:
  return studies.stored("optimizers")


def _end_losses(row: str, kind: str) -> dict[str, float]:
  return {
    run.seed: run.end(kind) for run in _optimizer_study().findings.runs[row]
  }


def _optimizer_losses() -> str:
  study, lines = _optimizer_study(), []
  found = {family: study.means(family) for family in study.families}
  best = {
    name: min(
      _OPTIMIZERS,
      key=lambda x, f=f, k=k: found[f][f"{f}_{x}"][f"{k}, end"].mean,
    )
    for name, (f, k) in _MEASURES.items()
  }
  for optimizer, title in _TITLES.items():
    cells = []
    for name, (family, kind) in _MEASURES.items():
      text = mean_and_deviation(
        found[family][f"{family}_{optimizer}"][f"{kind}, end"], 3
      )
      mean, rest = text.split(" ", 1)
      bold = best[name] == optimizer
      cells.append(f"**{mean}** {rest}" if bold else text)
    lines.append([title, *cells])
  return tables.markdown(lines, ["", *_MEASURES])


def _optimizer_contrast(
  one: str, other: str, family: str, kind: str
) -> Contrast:
  found = _optimizer_study().of(f"{family}_{one}", kind, "end")
  return found[f"{family}_{other}"]


def _optimizer_differences() -> str:
  confidence, lines = _optimizer_study().confidence, []
  for one, other in _PAIRS:
    cells = [
      interval_text(
        _optimizer_contrast(one, other, *of).found.interval(confidence), 2
      )
      for of in _MEASURES.values()
    ]
    lines.append([f"{_TITLES[one]} - {_TITLES[other]}", *cells])
  cells = [_ratio_text(_speed_up(*of)) for of in _MEASURES.values()]
  lines.append(["Muon's speed-up in steps", *cells])
  return tables.markdown(lines, ["", *_MEASURES])


def _speed_up(
  family: str, kind: str, adamw: Mapping[str, float] | None = None
) -> Interval:
  """The factor of steps that AdamW needs for Muon's loss, with its interval."""
  adamw = adamw or _end_losses(f"{family}_adamw", kind)
  muon, longer = (
    _end_losses(f"{family}_{x}", kind) for x in ("muon", "adamw_long")
  )
  # Steps whose logarithm is linear in AdamW's loss.
  logs = {
    (seed, ""): math.log(_LONGER) * (a - muon[seed]) / (a - longer[seed])
    for seed, a in adamw.items()
  }
  interval = statistics.estimate_over_seeds(logs).interval()
  return Interval(*(math.exp(x) for x in interval))


def _ratio_text(found: Interval) -> str:
  return f"{found.estimate:.2f} ({found.low:.2f} to {found.high:.2f})"


def _rates_table() -> str:
  found, lines = _optimizer_study().about["rates"], []
  for family, title in _OBJECTIVES.items():
    losses = {
      (optimizer, rate): float(np.mean([*by_kind.values()]))
      for optimizer in _OPTIMIZERS
      for rate, by_kind in found[family][optimizer].items()
    }
    rates = dict.fromkeys(rate for _, rate in losses)
    best = {x: _best_variant(losses, x)[1] for x in _OPTIMIZERS}
    cells = []
    for rate in rates:
      texts = [f"{losses[x, rate]:.2f}" for x in _OPTIMIZERS]
      texts = [
        f"**{text}**" if best[x] == rate else text
        for x, text in zip(_OPTIMIZERS, texts, strict=True)
      ]
      cells.append(", ".join(texts))
    lines.append([f"{title}: AdamW, LAMB, Muon", *cells])
  return tables.markdown(lines, ["peak rate", *rates])


def _best_variant(losses: Mapping[tuple[str, str], float], optimizer: str):
  return min((x for x in losses if x[0] == optimizer), key=losses.get)


# AdamW's and Muon's schedules and averages, as the record names them.
_AVERAGES = {
  "AdamW, cosine to zero, `average=tail`": "cosine, average=tail",
  "AdamW, cosine to zero, `ema=0.99`": "cosine, ema=0.99",
  "AdamW, constant at 1e-2, none": "constant rate, ema=0.0",
  "AdamW, constant at 1e-2, `average=tail`": "constant rate, average=tail",
  "AdamW, constant at 1e-2, `ema=0.99`": "constant rate, ema=0.99",
}
_MUON_TAIL = "muon, constant rate, average=tail"


def _averages() -> str:
  found, adamw = (
    _optimizer_study().about["average"],
    _end_losses("clm_adamw", "clm"),
  )
  lines = [
    (title, interval_text(_minus(found[name], adamw)))
    for title, name in _AVERAGES.items()
  ]
  muon = _end_losses("clm_muon", "clm")
  best = found["constant rate, average=tail"]
  tail = found[_MUON_TAIL]
  lines += [
    (
      "Muon, constant at 2e-2, `average=tail`",
      interval_text(_minus(tail, adamw)),
    ),
    ("the same, compared with Muon, cosine", interval_text(_minus(tail, muon))),
    (
      "the same, compared with AdamW's row of it",
      interval_text(_minus(tail, best)),
    ),
    (
      "Muon, cosine to zero, none (same seeds)",
      interval_text(_minus(muon, adamw, tail)),
    ),
  ]
  head = "optimizer, schedule, average", "compared with AdamW, cosine, none"
  return tables.markdown(lines, head)


def _minus(
  a: Mapping[str, float],
  b: Mapping[str, float],
  seeds: Mapping[str, float] | None = None,
) -> Interval:
  """Returns a minus b, paired by seed, at 95 %."""
  wanted = a if seeds is None else seeds
  pairs = {(seed, ""): a[seed] - b[seed] for seed in wanted}
  return statistics.estimate_over_seeds(pairs).interval()


def _tuned_at_half_rate() -> str:
  """AdamW on MLM at half of its rate, with the seeds of the experiment."""
  study = _optimizer_study()
  half, ends = study.about["mlm_adamw_5e_3"], _end_losses("mlm_adamw", "mlm")
  muon = _end_losses("mlm_muon", "mlm")
  pairs = {(seed, ""): muon[seed] - half[seed] for seed in half}
  wide = statistics.estimate_over_seeds(pairs).interval(study.confidence)
  rows = [
    (
      "AdamW at 5e-3, loss",
      mean_and_deviation(statistics.mean_of_seeds(half), 2),
    ),
    (
      "AdamW at 5e-3 - AdamW at 1e-2 (95 %)",
      interval_text(_minus(half, ends), 2),
    ),
    (
      f"Muon - AdamW at 5e-3 ({100 * study.confidence:.4g} %)",
      interval_text(wide, 2),
    ),
    (
      "Muon's speed-up over AdamW at 5e-3",
      _ratio_text(_speed_up("mlm", "mlm", half)),
    ),
  ]
  return tables.markdown(rows, ("MLM", "seven seeds"))


def _reached() -> str:
  """Steps at which Muon's mean curve reaches AdamW's last loss."""
  rows = []
  for family, title in _OBJECTIVES.items():
    kinds = [kind for name, kind in _MEASURES.values() if name == family]
    curve = _curve(f"{family}_muon", kinds)
    last = _curve(f"{family}_adamw", kinds)[-1]
    step = _crossing(curve, last[1])
    rows.append((title, f"{step:.0f}", f"{last[0] / step:.1f}"))
  head = ("", "step of Muon, of 480", "times faster")
  return tables.markdown(rows, head)


def _curve(row: str, kinds: Sequence[str]) -> list[tuple[int, float]]:
  """Returns the mean over seeds and objectives, by step."""
  runs = _optimizer_study().findings.runs[row]
  lines = [plots.mean_line([run.held_out(k) for run in runs]) for k in kinds]
  return [
    (points[0][0], float(np.mean([mean.mean for _, mean in points])))
    for points in zip(*lines, strict=True)
  ]


def _crossing(curve: Sequence[tuple[int, float]], loss: float) -> float:
  for (before, high), (after, low) in itertools.pairwise(curve):
    if low <= loss:
      return before + (after - before) * (high - loss) / (high - low)
  raise ValueError("the curve does not reach the loss")


def optimizer_figures() -> Iterator[float]:
  """Yields further figures that the text quotes."""
  losses = _optimizer_study().about["rates"]
  for optimizer, family in itertools.product(_OPTIMIZERS, _OBJECTIVES):
    means = {
      float(rate): float(np.mean([*by_kind.values()]))
      for rate, by_kind in losses[family][optimizer].items()
    }
    best = min(means, key=means.get)
    yield means[2 * best] - means[best]
    yield means[best / 2] - means[best]


TABLES = {
  "optimizers-losses": _optimizer_losses,
  "optimizers-differences": _optimizer_differences,
  "optimizers-reached": _reached,
  "optimizers-rates": _rates_table,
  "optimizers-tuned": _tuned_at_half_rate,
  "optimizers-averages": _averages,
}
