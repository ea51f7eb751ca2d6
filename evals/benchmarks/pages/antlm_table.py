"""Tables of AntLM against CLM and MLM, at `small` and `8m`."""

import functools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from antlm_jax import tables
from antlm_jax.evals.benchmarks.pages import studies
from antlm_jax.evals.benchmarks.pages.studies import (
  StoredStudy,
  gain_text,
  interval_text,
)
from antlm_jax.evals.statistics import mean_of_seeds

SCALES = "small", "8m"
_ROW, _FAMILY = "babyllama_antlm", "BabyLlama"
_CONTROLS = {"clm": "babyllama_c", "mlm": "babyllama_m"}
_LOSSES = {"clm": "causal loss", "mlm": "masked loss"}
_BLIMP, _SUPPLEMENT = "BLiMP", "BLiMP supplement"
_ODDS = f"{_BLIMP} (log-odds)"
_SCORES = {
  _ODDS: "BLiMP, log-odds (nats)",
  _BLIMP: "BLiMP (points)",
  _SUPPLEMENT: "supplement (points)",
}
_MODES = {"causal": "causal", "mlm": "masked"}
_WITHIN = 0.05  # nats, expected at the lowest: see configs/antlm_table.py


def _antlm_table_study(scale: str) -> StoredStudy:
  return studies.stored(f"antlm_{scale}")


def _antlm_table_contrast(
  study: StoredStudy, kind: str, when: str, against: str
):
  return study.of(_ROW, kind, when)[_CONTROLS[against]]


def _antlm_table_differences(scale: str) -> str:
  study, lines = _antlm_table_study(scale), []
  for of in study.differences:
    interval = of.contrast.found.interval(study.confidence)
    word = studies.verdict(of.contrast, study.confidence)
    if of.kind in _LOSSES:
      name = f"{_LOSSES[of.kind]}, {of.when}"
      word += study.where(of.when) if interval.sign else ""
    else:
      name = f"{_MODES[of.when]} {_SCORES[of.kind]}"
    name = f"{study.findings.title(of.control)}, {name}"
    lines.append((name, interval_text(interval, of.contrast.digits), word))
  percent = f"{100 * study.confidence:.4g} %"
  head = "AntLM against", f"difference ({percent} interval)", "verdict"
  return f"{tables.markdown(lines, head)}\n\n{study.lowest()}"


def _antlm_table_losses(scale: str) -> str:
  return studies.losses_table(
    _antlm_table_study(scale), ("clm", "mlm"), _FAMILY
  )


def _antlm_table_expectations(scale: str) -> str:
  study = _antlm_table_study(scale)
  found = {
    (kind, when): gain_text(
      _antlm_table_contrast(study, kind, when, kind),
      study.confidence,
      study.where(when),
    )
    for kind in _LOSSES
    for when in studies.WHEN
  }
  lowest = _antlm_table_contrast(study, "clm", "lowest", "clm")
  interval = lowest.found.interval(study.confidence)
  if max(-interval.low, interval.high) <= _WITHIN:
    found["clm", "lowest"] = (
      f"as expected: all of the interval is within {_WITHIN}"
    )
  rows = [
    ("causal, end", "better than CLM by 0.5 to 2", found["clm", "end"]),
    ("causal, lowest", f"within {_WITHIN} of CLM", found["clm", "lowest"]),
    ("masked, end", "worse than MLM by 1 to 2", found["mlm", "end"]),
    (
      "masked, lowest",
      "better than MLM by 0.05 to 0.1",
      found["mlm", "lowest"],
    ),
  ]
  if _scores_of_runs(study):
    blimp = _antlm_table_contrast(study, _BLIMP, "causal", "clm")
    text = gain_text(blimp, study.confidence)
    rows.append(("BLiMP, causal", "better than CLM by 0 to 1.5 points", text))
  return studies.expectations_table(rows)


# ----------------------------------------------------------- scores of pairs


def _scores_of_runs(study: StoredStudy) -> list[dict]:
  """Returns the scores of each run: by row, seed, mode and task."""
  return study.about.get("scores", [])


def _score_by_seed(
  study: StoredStudy, row: str, mode: str, task: str, key: str
):
  """Returns a score's mean over seeds, or None if no seed has it."""
  wanted = row, mode, task
  return mean_of_seeds(
    {
      one["seed"]: one[key]
      for one in _scores_of_runs(study)
      if (one["row"], one["mode"], one["task"]) == wanted
    }
  )


def _antlm_table_scores(scale: str) -> str:
  study, lines = _antlm_table_study(scale), []
  columns = {
    "BLiMP, % right": (_BLIMP, "accuracy", 100, 1),
    "BLiMP, log-odds": (_BLIMP, "log_odds", 1, 2),
    "their spread": (_BLIMP, "spread", 1, 1),
    "supplement, % right": (_SUPPLEMENT, "accuracy", 100, 1),
  }
  for row, runs in study.findings.runs.items():
    settings = runs[0].config["objectives"]
    trained = {
      study.findings.variants[row].mode(settings[name]["attention"])
      for name in runs[0].objectives
    }
    for mode, title in _MODES.items():
      cells = []
      for task, key, unit, digits in columns.values():
        found = _score_by_seed(study, row, mode, task, key)
        cells.append(_scaled_cell(found, unit, digits) if found else "")
      seeds = len(_score_by_seed(study, row, mode, _BLIMP, "accuracy").values)
      if mode not in trained:
        cells = [f"({x})" if x else x for x in cells]
      lines.append((study.title(row), title, seeds, *cells))
  return tables.markdown(lines, ("", "mode", "seeds", *columns))


def _scaled_cell(found, unit: int, digits: int) -> str:
  scaled = {seed: unit * x for seed, x in found.values.items()}
  return studies.mean_and_deviation(mean_of_seeds(scaled), digits)


def antlm_table_figures() -> Iterator[float]:
  """Yields figures of `8m` that the text quotes."""
  study = _antlm_table_study("8m")
  for task in (_BLIMP, _ODDS):
    # At 95 %, not corrected for ten differences.
    yield from _antlm_table_contrast(
      study, task, "causal", "clm"
    ).found.interval()
  spreads, shares = zip(
    *(
      (
        _score_by_seed(study, row, "causal", _BLIMP, "spread").mean,
        _score_by_seed(study, row, "causal", _BLIMP, "log_odds").mean,
      )
      for row in (_CONTROLS["clm"], _ROW)
    ),
    strict=True,
  )
  yield spreads[0] / spreads[1]
  yield from np.divide(shares, spreads)
  (size,) = study.findings.sizes([_ROW])
  yield size[0] / 1e6


_MAKERS = {
  "differences": _antlm_table_differences,
  "losses": _antlm_table_losses,
  "expected": _antlm_table_expectations,
}
_OF_8M = {"scores": _antlm_table_scores}


def _tables_by_name() -> Iterable[tuple[str, Callable[[], str]]]:
  for scale in SCALES:
    for name, make in (_MAKERS | (_OF_8M if scale == "8m" else {})).items():
      yield f"antlm-{scale}-{name}", functools.partial(make, scale)


TABLES = dict(_tables_by_name())
