"""Tables of AntLM against CLM and MLM, on BabyLlama and on LTG-BERT."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from scipy import stats

from antlm_jax import tables
from antlm_jax.evals.benchmarks.pages import studies
from antlm_jax.evals.benchmarks.pages.studies import (
  StoredStudy,
  gain_text,
  interval_text,
)
from antlm_jax.evals.statistics import mean_of_seeds, student

# Names of records, without `antlm_`, and of tables, without `antlm-`.
_LTG_BERT, _PILOTS = "ltg_bert", "ltg_bert_pilots"
STUDIES = "small", _LTG_BERT, "8m"
_ROWS = {"BabyLlama": "babyllama", "LTG-BERT": "ltg_bert"}  # how names begin
_CONTROLS = {"clm": "c", "mlm": "m"}  # how names of a mode's controls end
_LOSSES = {"clm": "causal loss", "mlm": "masked loss"}
_BLIMP, _SUPPLEMENT = "BLiMP", "BLiMP supplement"
_ODDS = f"{_BLIMP} (log-odds)"
_SCORES = {
  _ODDS: "BLiMP, log-odds (nats)",
  _BLIMP: "BLiMP (points)",
  _SUPPLEMENT: "supplement (points)",
}
_MODES = {"causal": "causal", "mlm": "masked"}


class _Expected(NamedTuple):
  """An expectation of configs/antlm_table.py for a loss."""

  text: str
  within: float = 0.0  # nats, if no difference is expected


_EXPECTED = {
  "BabyLlama": {
    ("clm", "end"): _Expected("better than CLM by 0.5 to 2"),
    ("clm", "lowest"): _Expected("within 0.05 of CLM", 0.05),
    ("mlm", "end"): _Expected("worse than MLM by 1 to 2"),
    ("mlm", "lowest"): _Expected("better than MLM by 0.05 to 0.1"),
  },
  "LTG-BERT": {
    ("clm", "end"): _Expected("better than CLM by 0.5 to 2"),
    ("clm", "lowest"): _Expected("within 0.1 of CLM", 0.1),
    ("mlm", "end"): _Expected("worse than MLM by 0.3 to 2"),
    ("mlm", "lowest"): _Expected("within 0.1 of MLM", 0.1),
  },
}
# Nats that LTG-BERT's runs are to find at the lowest.
_EFFECTS = {"clm": 0.05, "mlm": 0.1}
_POWER = 0.8
_SEEDS = range(5, 14)  # at least, and at most


def _antlm_study(name: str) -> StoredStudy:
  return studies.stored(f"antlm_{name}")


def _family(study: StoredStudy) -> str:
  """Returns the encoder of a study's rows, a key of `_ROWS`."""
  (family,) = study.families
  return family


def _row(study: StoredStudy, end: str) -> str:
  """Returns a row's name in the study's config."""
  return f"{_ROWS[_family(study)]}_{end}"


def _antlm_contrast(study: StoredStudy, kind: str, when: str, against: str):
  found = study.of(_row(study, "antlm"), kind, when)
  return found[_row(study, _CONTROLS[against])]


def _antlm_table_differences(name: str) -> str:
  study, lines = _antlm_study(name), []
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


def _antlm_table_losses(name: str) -> str:
  study = _antlm_study(name)
  return studies.losses_table(study, ("clm", "mlm"), _family(study))


def _antlm_table_expectations(name: str) -> str:
  study, rows = _antlm_study(name), []
  for (kind, when), expected in _EXPECTED[_family(study)].items():
    contrast = _antlm_contrast(study, kind, when, kind)
    found = gain_text(contrast, study.confidence, study.where(when))
    interval = contrast.found.interval(study.confidence)
    if max(-interval.low, interval.high) <= expected.within:
      found = f"as expected: all of the interval is within {expected.within}"
    mode = _LOSSES[kind].removesuffix(" loss")
    rows.append((f"{mode}, {when}", expected.text, found))
  if _scores_of_runs(study):
    blimp = _antlm_contrast(study, _BLIMP, "causal", "clm")
    text = gain_text(blimp, study.confidence)
    rows.append(("BLiMP, causal", "better than CLM by 0 to 1.5 points", text))
  return studies.expectations_table(rows)


# ---------------------------------------------------- the size, from its pilots


def chance_to_find(
  effect: float, deviation: float, seeds: int, confidence: float
) -> float:
  """Returns how often an interval of paired seeds excludes zero.

  Args:
    effect: The true difference.
    deviation: Standard deviation of a difference over seeds.
    seeds: Number of seeds.
    confidence: Of the interval, by Student's t.
  """
  if not deviation:
    return 1.0
  edge, shift = student(seeds - 1, confidence), effect * seeds**0.5 / deviation
  of = stats.nct(seeds - 1, shift)
  return float(of.sf(edge) + of.cdf(-edge))


def seeds_to_find(effect: float, deviation: float, confidence: float) -> int:
  """Returns the fewest seeds of `_SEEDS` that find it often enough, or most."""
  for seeds in _SEEDS:
    if chance_to_find(effect, deviation, seeds, confidence) >= _POWER:
      return seeds
  return _SEEDS[-1]


def _antlm_table_pilots() -> str:
  """Deviations over the pilots' seeds, and the number of seeds they ask for."""
  study, lines = _antlm_study(_PILOTS), []
  for kind, effect in _EFFECTS.items():
    found = _antlm_contrast(study, kind, "lowest", kind).found
    deviation = (found.by_seeds * found.seeds) ** 0.5
    seeds = seeds_to_find(effect, deviation, study.confidence)
    chance = chance_to_find(effect, deviation, seeds, study.confidence)
    measure = f"{_LOSSES[kind]}, lowest"
    lines.append((measure, f"{deviation:.3f}", effect, seeds, f"{chance:.0%}"))
  head = "measure", "deviation", "effect to find", "seeds", "found"
  return tables.markdown(lines, head)


# -------------------------------------------------------- both halves of AntLM

# Points of the macro-average over either objective alone, at equal epochs
# (arXiv 2412.03275, abstract).
_PUBLISHED = {"BabyLlama": 1.0, "LTG-BERT": 2.2}


def _antlm_table_halves() -> str:
  """Both encoders at `small`, next to the paper's claims."""
  rows: dict[str, list[str]] = {}
  for name in ("small", _LTG_BERT):
    study = _antlm_study(name)
    (size,) = study.findings.sizes([_row(study, "antlm")])
    cells = {
      "published: macro-average over either objective alone (points)": (
        f"{_PUBLISHED[_family(study)]:+}"
      ),
      "parameters": f"{size[0] / 1e6:.2f}M",
      "words": f"{study.about['words']:,}",
      "epochs": study.about["epochs"],
    }
    for kind, loss in _LOSSES.items():
      for when in studies.WHEN:
        found = _antlm_contrast(study, kind, when, kind).found
        against = study.findings.title(_row(study, _CONTROLS[kind]))
        title = f"AntLM against {against}, {loss}, {when}"
        cells[title] = interval_text(found.interval(study.confidence))
    for title, cell in cells.items():
      rows.setdefault(title, []).append(cell)
  lines = [(title, *cells) for title, cells in rows.items()]
  return tables.markdown(lines, ("", *_PUBLISHED))


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


def _antlm_table_scores(name: str) -> str:
  study, lines = _antlm_study(name), []
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
  """Yields figures of `8m` and of LTG-BERT's pilots that the text quotes."""
  pilots = _antlm_study("ltg_bert_first_pilots")
  yield _antlm_contrast(pilots, "clm", "end", "clm").found.value
  means = pilots.means(_family(pilots))
  yield means[_row(pilots, "m")]["mlm, lowest"].mean
  (size,) = pilots.findings.sizes([_row(pilots, "antlm")])
  yield size[0] / 1e6
  study = _antlm_study("8m")
  for task in (_BLIMP, _ODDS):
    # At 95 %, not corrected for ten differences.
    yield from _antlm_contrast(study, task, "causal", "clm").found.interval()
  spreads, shares = zip(
    *(
      (
        _score_by_seed(study, row, "causal", _BLIMP, "spread").mean,
        _score_by_seed(study, row, "causal", _BLIMP, "log_odds").mean,
      )
      for row in (_row(study, _CONTROLS["clm"]), _row(study, "antlm"))
    ),
    strict=True,
  )
  yield spreads[0] / spreads[1]
  yield from np.divide(shares, spreads)
  (size,) = study.findings.sizes([_row(study, "antlm")])
  yield size[0] / 1e6


_MAKERS = {
  "differences": _antlm_table_differences,
  "losses": _antlm_table_losses,
  "expected": _antlm_table_expectations,
}
_OF_8M = {"scores": _antlm_table_scores}


def _tables_by_name() -> Iterable[tuple[str, Callable[[], str]]]:
  for study in STUDIES:
    for name, make in (_MAKERS | (_OF_8M if study == "8m" else {})).items():
      title = study.replace("_", "-")
      yield f"antlm-{title}-{name}", functools.partial(make, study)


TABLES = dict(_tables_by_name())
TABLES["antlm-ltg-bert-pilots"] = _antlm_table_pilots
TABLES["antlm-halves"] = _antlm_table_halves
