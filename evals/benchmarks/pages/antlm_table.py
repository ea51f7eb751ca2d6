"""Tables of AntLM against CLM and MLM, at `small`."""

from antlm_jax import tables
from antlm_jax.evals.benchmarks.pages import studies
from antlm_jax.evals.benchmarks.pages.studies import (
  StoredStudy,
  gain_text,
  interval_text,
)

_ROW, _FAMILY = "babyllama_antlm", "BabyLlama"
_CONTROLS = {"clm": "babyllama_c", "mlm": "babyllama_m"}
_NAMES = {"clm": "CLM, causal loss", "mlm": "MLM, masked loss"}
_WITHIN = 0.05  # nats, expected at the lowest: see configs/antlm_table.py


def _antlm_table_study() -> StoredStudy:
  return studies.stored("antlm_small")


def _antlm_table_contrast(kind: str, when: str):
  return _antlm_table_study().of(_ROW, kind, when)[_CONTROLS[kind]]


def _antlm_table_differences() -> str:
  study, lines = _antlm_table_study(), []
  for kind, name in _NAMES.items():
    for when in ("end", "lowest"):
      contrast = _antlm_table_contrast(kind, when)
      interval = contrast.found.interval(study.confidence)
      word = studies.verdict(contrast, study.confidence)
      word += study.where(when) if interval.sign else ""
      lines.append((f"{name}, {when}", interval_text(interval), word))
  percent = f"{100 * study.confidence:.4g} %"
  head = "AntLM against", f"difference ({percent} interval)", "verdict"
  return f"{tables.markdown(lines, head)}\n\n{study.lowest()}"


def _antlm_table_losses() -> str:
  return studies.losses_table(_antlm_table_study(), ("clm", "mlm"), _FAMILY)


def _antlm_table_expectations() -> str:
  study = _antlm_table_study()
  found = {
    (kind, when): gain_text(
      _antlm_table_contrast(kind, when), study.confidence, study.where(when)
    )
    for kind in _NAMES
    for when in ("end", "lowest")
  }
  interval = _antlm_table_contrast("clm", "lowest").found.interval(
    study.confidence
  )
  if max(-interval.low, interval.high) <= _WITHIN:
    found["clm", "lowest"] = (
      f"as expected: all of the interval is within {_WITHIN}"
    )
  return studies.expectations_table(
    [
      ("causal, end", "better than CLM by 0.5 to 2", found["clm", "end"]),
      ("causal, lowest", f"within {_WITHIN} of CLM", found["clm", "lowest"]),
      ("masked, end", "worse than MLM by 1 to 2", found["mlm", "end"]),
      (
        "masked, lowest",
        "better than MLM by 0.05 to 0.1",
        found["mlm", "lowest"],
      ),
    ]
  )


TABLES = {
  "antlm-differences": _antlm_table_differences,
  "antlm-losses": _antlm_table_losses,
  "antlm-expected": _antlm_table_expectations,
}
