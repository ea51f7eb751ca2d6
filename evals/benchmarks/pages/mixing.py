"""Tables of mixing objectives against a regularised CLM."""

from collections.abc import Iterator, Mapping

from antlm_jax import tables
from antlm_jax.evals.benchmarks.pages import studies
from antlm_jax.evals.benchmarks.pages.studies import (
  StoredStudy,
  gain_text,
  interval_text,
)
from antlm_jax.evals.studies.reporting.claims import OPEN, Contrast

# A claim about several controls is contradicted at this confidence, and
# confirmed at the study's: see configs/mixing.py.
_CONTRADICTED = 1 - 0.05 / 54
# The rows and measures of the claims, in order.
_CLAIMS = (
  ("repeated_cd", "clm"),
  ("repeated_cm", "clm"),
  ("repeated_cd", "mlm"),
  ("repeated_cm", "mlm"),
  ("repeated_cd_muon", "clm"),
  ("fresh_cd", "clm"),
  ("fresh_cm", "clm"),
)
_REGULARISED = "repeated_c_dropout_10 repeated_c_dropout_20 repeated_c_decay_5"
_REGULARISED = [*_REGULARISED.split(), "repeated_c_decay_15"]


def _mixing_study() -> StoredStudy:
  return studies.stored("mixing")


def _decide(
  found: Mapping[str, Contrast], confidence: float
) -> tuple[str, float, str]:
  """Decides a claim; returns the control and confidence to show, too."""
  against = max(found, key=lambda name: found[name].found.value)
  wide = confidence if len(found) == 1 else _CONTRADICTED
  words = {n: studies.verdict(c, confidence) for n, c in found.items()}
  if set(words.values()) == {"better"}:
    return against, confidence, "**confirmed**"
  worse = [n for n, c in found.items() if studies.verdict(c, wide) == "worse"]
  if worse:
    against = max(worse, key=lambda name: found[name].found.value)
    return against, wide, "**contradicted**"
  better = list(words.values()).count("better")
  text = f"{OPEN}; better than {better} of {len(found)}" if better else OPEN
  return against, confidence, text


def _mixing_claims() -> str:
  study, lines = _mixing_study(), []
  for row, kind in _CLAIMS:
    for when in studies.WHEN:
      found = study.of(row, kind, when)
      control, confidence, verdict = _decide(found, study.confidence)
      verdict += study.where(when) if "**" in verdict else ""
      names = [study.title(name) for name in found]
      below = " and ".join(names) if len(names) < 3 else "the best CLM"
      family = row.partition("_")[0]
      claim = f"`{family}`: {study.title(row)} below {below}"
      interval = interval_text(found[control].found.interval(confidence))
      of = f" against {study.title(control)}" if len(names) > 1 else ""
      percent = f"{100 * confidence:.4g} %"
      measure = studies.measure_name(kind, when)
      lines.append((claim, measure, interval + of, percent, verdict))
  head = "claim", "measure", "against the best control", "interval", "verdict"
  return f"{tables.markdown(lines, head)}\n\n{study.lowest()}"


def _mixing_losses() -> str:
  return studies.losses_table(
    _mixing_study(), ("clm", "mlm"), "repeated", "fresh"
  )


def _gained(row: str, when: str) -> float:
  """By how much a row of `repeated` is below plain CLM, in causal nats."""
  found = _mixing_study().means("repeated")
  plain = found["repeated_c"][f"clm, {when}"].mean
  return plain - found[row][f"clm, {when}"].mean


def _against(row: str, kind: str, when: str) -> str:
  study = _mixing_study()
  found = study.of(row, kind, when)
  control, confidence, _ = _decide(found, study.confidence)
  return gain_text(found[control], confidence, study.where(when))


def _regularisers(when: str) -> str:
  study = _mixing_study()
  two = sorted(_REGULARISED, key=lambda row: -_gained(row, when))[:2]
  return ", then ".join(
    f"{study.title(row).removeprefix('C, ')} by {_gained(row, when):.2f}"
    for row in two
  )


def _mixing_expectations() -> str:
  def both(kind: str, when: str) -> str:
    rows = {"C:D": "repeated_cd", "C:M": "repeated_cm"}
    found = (f"{n} {_against(row, kind, when)}" for n, row in rows.items())
    return ", ".join(found)

  def twice(row: str, kind: str) -> str:
    return ", ".join(
      f"{when} {_against(row, kind, when)}" for when in studies.WHEN
    )

  best = "C:D and C:M against the best CLM"
  return studies.expectations_table(
    [
      (f"{best}, end", "better by over 0.3", both("clm", "end")),
      (f"{best}, lowest", "within 0.1", both("clm", "lowest")),
      (
        "C:D against M and D, masked",
        "better by 0.1 to 0.4",
        twice("repeated_cd", "mlm"),
      ),
      (
        "C:M against M and D, masked",
        "better by 0 to 0.3",
        twice("repeated_cm", "mlm"),
      ),
      (
        "best regularisers, lowest",
        "dropout, by 0.05 to 0.15",
        _regularisers("lowest"),
      ),
      ("best regularisers, end", "weight decay 1.5", _regularisers("end")),
      (
        "C:D against C, both with Muon",
        "as without Muon",
        twice("repeated_cd_muon", "clm"),
      ),
      (
        "`fresh`: C:D against C, lowest",
        "worse by 0.3 to 0.5",
        _against("fresh_cd", "clm", "lowest"),
      ),
      (
        "`fresh`: C:M against C, lowest",
        "worse by 0.2 to 0.5",
        _against("fresh_cm", "clm", "lowest"),
      ),
    ]
  )


def _mixing_entropies() -> str:
  study = _mixing_study()
  each = (
    f"{of.entropy.mean:.2f} nats in `{name}`"
    for name, of in study.families.items()
  )
  return f"Token frequencies alone give {' and '.join(each)}."


def mixing_figures() -> Iterator[float]:
  """Yields further figures that the text quotes."""
  study = _mixing_study()
  for when in studies.WHEN:
    found = study.of("repeated_cd", "clm", when)["repeated_c"]
    yield from found.found.interval(study.confidence)


def readme_table() -> str:
  """The table of the README."""
  study, found = _mixing_study(), _mixing_study().means("repeated")
  more = {"cd": "CLM and diffusion in every batch", "antlm": "AntLM's blocks"}
  rows = {f"repeated_{name}": title for name, title in more.items()}
  plain = "repeated_c", "repeated_c_dropout_20", "repeated_c_decay_15"
  rows = {row: study.findings.title(row) for row in plain} | rows
  return tables.markdown(
    (
      (title, *(f"{x.mean:.2f}" for x in shown))
      for row, title in rows.items()
      for shown in [[found[row][f"clm, {when}"] for when in studies.WHEN]]
    ),
    ("training", *studies.WHEN),
  )


TABLES = {
  "mixing-claims": _mixing_claims,
  "mixing-losses": _mixing_losses,
  "mixing-entropies": _mixing_entropies,
  "mixing-expected": _mixing_expectations,
}
