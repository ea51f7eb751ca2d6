"""Studies from their stored records, compared as `antlm report` does."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from antlm_jax import config as config_lib
from antlm_jax import tables
from antlm_jax.evals.statistics import Interval, Mean, MeanEstimate
from antlm_jax.evals.studies import design
from antlm_jax.evals.studies.reporting import measured, record
from antlm_jax.evals.studies.reporting.claims import Claim, Claims, Contrast
from antlm_jax.evals.studies.reporting.controls import Family
from antlm_jax.evals.studies.reporting.findings import Findings
from antlm_jax.evals.studies.reporting.render import Row
from antlm_jax.evals.studies.reporting.runs import TrainedRun
from antlm_jax.runtime import files
from antlm_jax.training.metrics import HALVES

RESULTS = pathlib.Path(__file__).parents[1] / "results"
WHEN = "end", "lowest"  # of a run's held-out losses
SHORT = {"CLM": "C", "MLM": "M", "diffusion": "D"}  # of titles
_WORDS = {"confirmed": "better", "contradicted": "worse"}
_MODES = {"clm": "causal", "mlm": "masked, 15 %"}


class Difference(NamedTuple):
  """A row minus a control, in held-out nats or in scores of pairs."""

  row: str  # a name of the study's config
  control: str
  kind: str  # logged name of the objective, or title of the scored set
  when: str  # `end` or `lowest`, or the mode in which pairs are scored
  contrast: Contrast


@dataclasses.dataclass(frozen=True)
class StoredStudy:
  """A study that a record holds."""

  findings: Findings
  families: Mapping[str, Family]
  differences: Sequence[Difference]
  confidence: float
  halved: bool  # whether each half of the held-out rows has losses
  about: Mapping[str, Any]  # further entries of its record

  def title(self, name: str) -> str:
    """Returns a row's title, with the objectives' letters."""
    words = "|".join(SHORT)
    title = self.findings.title(name)
    return re.sub(rf"\b({words})\b", lambda found: SHORT[found[0]], title)

  def of(self, row: str, kind: str, when: str) -> dict[str, Contrast]:
    """Returns a row's differences from its controls, by control."""
    wanted = row, kind, when
    return {
      found.control: found.contrast
      for found in self.differences
      if (found.row, found.kind, found.when) == wanted
    }

  def means(self, family: str) -> dict[str, Row]:
    """Returns the means of held-out losses, by row and heading."""
    found = {kind: rows for kind, _, rows in self.families[family].tables()}
    names = self.families[family].variants
    return dict(zip(names, found["held_out"], strict=True))

  def lowest(self) -> str:
    """Returns a sentence that says which rows `end` and `lowest` are of."""
    if self.halved:
      return (
        "Half of the held-out rows choose the lowest step. Both *end* and"
        " *lowest* are of the other half."
      )
    return (
      "Both *end* and *lowest* are of all held-out rows. The losses of each"
      " half were not kept, so the same rows choose the lowest step and measure"
      " it. This makes *lowest* too low by chance. Its verdicts *on all rows*"
      " are not those of the declared measure."
    )

  def where(self, when: str) -> str:
    """Returns a verdict's suffix, if its measure is not as declared."""
    return "" if self.halved or when == "end" else ", on all rows"


@functools.cache
def stored(name: str) -> StoredStudy:
  """Reads a study from its record, a file of results/."""
  path = RESULTS / f"{name}.json"
  about = files.read_json(path, "the record")
  path_of_config = config_lib.find_config(about["config"])
  _, variants = design.read_scale(path_of_config, about["scale"])
  runs = record.read_record(path, variants)
  halved = all(run.halves for of in runs.values() for run in of)
  if not halved:
    runs = {name: [_unhalved(run) for run in of] for name, of in runs.items()}
  table = measured.read_measurements(runs)
  findings = Findings(
    name=about["config"],
    pipeline="",
    variants=variants,
    runs=runs,
    table=table,
    also=table,
    scores=table,
    items=measured.ItemFiles(),
    fixed=getattr(
      config_lib.config_module(about["config"]), "CONFIDENCE", None
    ),
  )
  families = {
    name: Family(findings, name, of) for name, of in findings.families.items()
  }
  claims = {
    (row, control): _with_pairs(claim, row, control, about)
    for of in families.values()
    for ((row, _), (control, _)), claim in zip(
      of.compared, of.claims, strict=True
    )
  }
  differences = [
    Difference(*sides, *_kind_and_when(contrast), contrast)
    for sides, claim in claims.items()
    for contrast in claim.contrasts
  ]
  confidence = Claims([*claims.values()], findings.fixed).confidence
  return StoredStudy(findings, families, differences, confidence, halved, about)


def _unhalved(run: TrainedRun) -> TrainedRun:
  """Returns a run whose held-out rows both choose and measure a step."""
  return dataclasses.replace(run, halves=dict.fromkeys(HALVES, run.losses))


def _with_pairs(
  claim: Claim, row: str, control: str, about: Mapping[str, Any]
) -> Claim:
  """Adds a record's differences in scores of pairs, of a row and a control.

  An interval needs each pair's scores. So a record has the variances instead.
  """
  pairs = (
    Contrast(
      of["on"],
      MeanEstimate(**of["found"]),
      above={side: MeanEstimate(**x) for side, x in of["above"].items()},
    )
    for of in about.get("differences", ())
    if (of["row"], of["control"]) == (row, control)
  )
  return claim._replace(contrasts=(*claim.contrasts, *pairs))


def _kind_and_when(contrast: Contrast) -> tuple[str, ...]:
  found = re.fullmatch(
    r"(?:held-out (\S+) loss|(.+)), (\w+) \(\w+\)", contrast.on
  )
  return tuple(part for part in found.groups() if part)


# ------------------------------------------------------------------- the cells


def verdict(contrast: Contrast, confidence: float) -> str:
  """Says whether a row is better or worse than its control."""
  found = contrast.verdict(confidence)
  return _WORDS.get(found, found)


def interval_text(interval: Interval, digits: int = 3) -> str:
  """Writes a difference with its interval, in bold if that excludes zero."""
  value, low, high = (f"{x:+.{digits}f}" for x in interval)
  value = f"**{value}**" if interval.sign else value
  return f"{value} ({low} to {high})"


def mean_and_deviation(value: Mean, digits: int = 2) -> str:
  """Writes a mean and its standard deviation."""
  return f"{value.mean:.{digits}f} ± {value.std:.{digits}f}"


def measure_name(kind: str, *when: str) -> str:
  """Names a measure as the pages do."""
  return ", ".join((_MODES[kind], *when))


def losses_table(
  study: StoredStudy, kinds: Sequence[str], *families: str
) -> str:
  """Lays out mean losses; brackets are as in the report, the best is bold.

  Args:
    study: The study.
    kinds: Logged names of the objectives.
    *families: The families of rows, each with a line of its own if several.
  """
  heads = [f"{kind}, {when}" for kind in kinds for when in WHEN]
  lines = []
  for family in families:
    found = study.means(family)
    if len(families) > 1:
      lines.append([f"**{family}**", *[""] * len(heads)])
    best = {
      head: min(
        (n for n, row in found.items() if head not in row["_untrained"]),
        key=lambda name, head=head: found[name][head].mean,
      )
      for head in heads
    }
    for name, row in found.items():
      cells = []
      for head in heads:
        mean, deviation = mean_and_deviation(row[head]).split(" ", 1)
        mean = f"**{mean}**" if best[head] == name else mean
        text = f"{mean} {deviation}"
        cells.append(f"({text})" if head in row["_untrained"] else text)
      lines.append([study.title(name), *cells])
  titles = [measure_name(*head.split(", ")) for head in heads]
  return tables.markdown(lines, ["", *titles])


def expectations_table(rows: Iterable[tuple[str, str, str]]) -> str:
  """Lays out expectations and findings."""
  return tables.markdown(rows, ("measure", "expected", "found"))


def gain_text(contrast: Contrast, confidence: float, where: str = "") -> str:
  """Says by how much a row is better or worse, if that is decided."""
  word, value = verdict(contrast, confidence), contrast.found.value
  if word in _WORDS.values():
    return f"{word} by {abs(value):.2f}{where}"
  return f"{word} ({round(value, 2) + 0.0:+.2f})"  # never -0.00
