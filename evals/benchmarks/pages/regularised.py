"""Tables of mixing objectives with every row regularised.

`choose_rows`, `choose_candidates` and `choose_for_curve` are the rules of
configs/regularised.py that choose cells of the grid. No page has these tables
yet, because the runs have not ended.
"""

import statistics
from collections.abc import Mapping, Sequence
from types import ModuleType

from antlm_jax import config as config_lib
from antlm_jax import tables
from antlm_jax.evals.benchmarks.pages import studies
from antlm_jax.evals.benchmarks.pages.studies import (
  StoredStudy,
  interval_text,
  measure_name,
)
from antlm_jax.evals.studies.reporting.runs import TrainedRun
from antlm_jax.training.metrics import CHOOSE

WHEN = "end", "lowest"
ROLES = {
  "clm": "CLM",
  "masked": "diffusion",
  "mixed_clm": "mixed, for its causal loss",
  "mixed_masked": "mixed, for its masked loss",
  "both": "mixed, for both",
  "half_clm": "CLM, half the steps",
  "half_masked": "diffusion, half the steps",
}
Runs = Mapping[str, Sequence[TrainedRun]]  # of the grid: one seed for each row
Key = tuple[str, str]  # a text, and `end` or `lowest`


def config() -> ModuleType:
  """Returns the study's config."""
  return config_lib.config_module("regularised")


def _chosen_by(run: TrainedRun, kinds: Sequence[str], when: str) -> float:
  """Returns the mean loss by which a cell is chosen, in nats.

  It is of the half of held-out rows that chooses lowest steps.
  """
  found = [run.held_out(kind, CHOOSE) for kind in kinds]
  pick = {"end": lambda of: of[max(of)], "lowest": lambda of: min(of.values())}
  return statistics.mean(pick[when](of) for of in found)


def best_row(
  runs: Runs,
  text: str,
  ways: Sequence[str],
  kinds: Sequence[str] = ("clm",),
  when: str = "end",
) -> str:
  """Returns the cell of some ways of training that has the lowest loss."""
  begin = tuple(f"{text}_{way}_" for way in ways)
  losses = {
    row: _chosen_by(of[0], kinds, when)
    for row, of in runs.items()
    if row.startswith(begin)
  }
  return min(losses, key=losses.get)


def choose_rows(runs: Runs) -> dict[Key, dict[str, str]]:
  """Chooses the cell of each role, as the design says."""
  return {
    (text, when): {
      role: best_row(runs, text, *by, when)
      for role, by in config().ROLES.items()
    }
    for text in config().GRID_TEXTS
    for when in WHEN
  }


def choose_candidates(runs: Runs) -> dict[str, tuple[str, ...]]:
  """Chooses the regularisations of each way in the curve's other texts."""
  out = {}
  for way in config().CURVE:
    rows = (best_row(runs, text, (way,)) for text in config().GRID_TEXTS)
    found = (row.partition(f"_{way}_")[2] for row in rows)
    out[way] = tuple(dict.fromkeys(found))
  return out


def choose_for_curve(runs: Runs) -> dict[str, dict[str, str]]:
  """Chooses the cell of each way of training in each text of the curve."""
  return {
    text: {way: best_row(runs, text, (way,)) for way in config().CURVE}
    for text in config().TEXTS
  }


# ------------------------------------------------------------------- the tables


def _choice() -> str:
  """The grid's choice for each role, with its loss on the choosing half."""
  grid = studies.stored("regularised_grid")
  runs, lines = grid.findings.runs, []
  for (text, when), rows in choose_rows(runs).items():
    for role, row in rows.items():
      _, kinds = config().ROLES[role]
      loss = _chosen_by(runs[row][0], kinds, when)
      what = " and ".join(measure_name(kind, when) for kind in kinds)
      title = grid.title(row)
      lines.append((f"`{text}`", ROLES[role], title, what, f"{loss:.2f}"))
  head = "text", "role", "chosen", "by its loss", "nats"
  return tables.markdown(lines, head)


def _claims_of(
  study: StoredStudy, claims: Sequence[tuple[str, str, str]], whens=WHEN
) -> str:
  """Lays out claims, as in `CLAIMS`, with their intervals and verdicts."""
  lines = {}
  for (text, when), rows in config().CHOSEN.items():
    for role, control, kind in claims if when in whens else ():
      found = study.of(rows[role], kind, when)[rows[control]]
      names = (study.title(rows[x]) for x in (role, control))
      measure = f"`{text}`", measure_name(kind, when), " below ".join(names)
      interval = interval_text(found.found.interval(study.confidence))
      lines[measure] = (interval, found.verdict(study.confidence))
  head = "text", "measure", "claim", "difference", "verdict"
  return tables.markdown(((*k, *v) for k, v in lines.items()), head)


def _claims() -> str:
  study = studies.stored("regularised_small")
  return f"{_claims_of(study, config().CLAIMS)}\n\n{study.lowest()}"


def _larger() -> str:
  clm, *mixed = config().LARGER
  claims = [(role, clm, "clm") for role in mixed]
  return _claims_of(studies.stored("regularised_larger"), claims, ("end",))


def _losses() -> str:
  study = studies.stored("regularised_small")
  return studies.losses_table(study, ("clm", "mlm"), *config().GRID_TEXTS)


def _curve() -> str:
  """The differences from CLM by text, at the end and at the lowest."""
  study, lines = studies.stored("regularised_curve"), []
  for text, rows in config().CHOSEN_FOR_CURVE.items():
    words, readings = (study.about[x][text] for x in ("words", "readings"))
    for way in config().CURVE[1:]:
      found = (
        study.of(rows[way], "clm", when)[rows["c"]].found for when in WHEN
      )
      cells = (interval_text(x.interval(study.confidence)) for x in found)
      names = (study.title(rows[x]) for x in (way, "c"))
      lines.append((f"{words:,}", f"{readings:.2g}", *names, *cells))
  head = "words", "readings", "mixed", "CLM", *WHEN
  return tables.markdown(lines, head)


TABLES = {
  "regularised-choice": _choice,
  "regularised-claims": _claims,
  "regularised-losses": _losses,
  "regularised-larger": _larger,
  "regularised-curve": _curve,
}
