"""Tables of AntLM against CLM and MLM, at `small`."""

from antlm_jax import tables
from antlm_jax.evals.benchmarks.pages import studies
from antlm_jax.evals.benchmarks.pages.studies import StoredStudy, apart, gain

_ROW, _FAMILY = "babyllama_antlm", "BabyLlama"
_CONTROLS = {"clm": "babyllama_c", "mlm": "babyllama_m"}
_NAMES = {"clm": "CLM, causal loss", "mlm": "MLM, masked loss"}
_WITHIN = 0.05  # nats, expected at the lowest: see configs/antlm_table.py


def _study() -> StoredStudy:
  return studies.stored("antlm_small")


def _contrast(kind: str, when: str):
  return _study().of(_ROW, kind, when)[_CONTROLS[kind]]


def _differences() -> str:
  study, lines = _study(), []
  for kind, name in _NAMES.items():
    for when in ("end", "lowest"):
      contrast = _contrast(kind, when)
      interval = contrast.found.interval(study.confidence)
      word = studies.verdict(contrast, study.confidence)
      word += study.where(when) if interval.sign else ""
      lines.append((f"{name}, {when}", apart(interval), word))
  percent = f"{100 * study.confidence:.4g} %"
  head = "AntLM against", f"difference ({percent} interval)", "verdict"
  return f"{tables.markdown(lines, head)}\n\n{study.lowest()}"


def _losses() -> str:
  return studies.losses(_study(), ("clm", "mlm"), _FAMILY)


def _expected() -> str:
  study = _study()
  found = {
    (kind, when): gain(
      _contrast(kind, when), study.confidence, study.where(when)
    )
    for kind in _NAMES
    for when in ("end", "lowest")
  }
  interval = _contrast("clm", "lowest").found.interval(study.confidence)
  if max(-interval.low, interval.high) <= _WITHIN:
    found["clm", "lowest"] = (
      f"as expected: all of the interval is within {_WITHIN}"
    )
  return studies.expected(
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
  "antlm-differences": _differences,
  "antlm-losses": _losses,
  "antlm-expected": _expected,
}
