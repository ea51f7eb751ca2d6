"""Tables of mixing objectives with every row regularised.

`choose_rows`, `choose_candidates` and `choose_for_curve` are the rules of
configs/regularised.py that choose cells of the grid. No page has these tables
yet, because the runs have not ended.
"""

import statistics
from collections.abc import Mapping, Sequence

from antlm_jax import config as config_lib
from antlm_jax import tables
from antlm_jax.evals.benchmarks.pages import studies
from antlm_jax.evals.benchmarks.pages.studies import StoredStudy, interval_text
from antlm_jax.evals.studies.reporting.runs import TrainedRun
from antlm_jax.training.metrics import CHOOSE

WHEN = "end", "lowest"
_ROLES = {
  "clm": "CLM",
  "masked": "diffusion",
  "mixed_clm": "mixed, for its causal loss",
  "mixed_masked": "mixed, for its masked loss",
  "both": "mixed, for both",
  "half_clm": "CLM, half the steps",
  "half_masked": "diffusion, half the steps",
}
_LOSSES = {"clm": "causal", "mlm": "masked"}
Key = tuple[str, str]  # a text, and `end` or `lowest`


def _design():
  return config_lib.config_module("regularised")


def _grid() -> StoredStudy:
  return studies.stored("regularised_grid")


def _small() -> StoredStudy:
  return studies.stored("regularised_small")


def _chosen_by(run: TrainedRun, kinds: Sequence[str], when: str) -> float:
  """Returns the mean loss by which a cell is chosen, in nats.

  It is of the half of held-out rows that chooses lowest steps.
  """
  found = [run.held_out(kind, CHOOSE) for kind in kinds]
  pick = {"end": lambda of: of[max(of)], "lowest": lambda of: min(of.values())}
  return statistics.mean(pick[when](of) for of in found)


def choose_rows(
  runs: Mapping[str, Sequence[TrainedRun]],
) -> dict[Key, dict[str, str]]:
  """Chooses the cell of each role, as the design in the config says.

  Args:
    runs: The runs of the grid by row, of one seed each.
  """
  design = _design()
  return {
    (text, when): {
      role: _best_row(runs, text, kinds, measures, when)
      for role, (kinds, measures) in design.ROLES.items()
    }
    for text in design.GRID_TEXTS
    for when in WHEN
  }


def choose_candidates(
  runs: Mapping[str, Sequence[TrainedRun]],
) -> dict[str, tuple[str, ...]]:
  """Chooses the regularisations of the curve's other texts.

  Args:
    runs: As in `choose_rows`.
  """
  design, out = _design(), {}
  for kind in design.CURVE:
    rows = (
      _best_row(runs, text, (kind,), ("clm",), "end")
      for text in design.GRID_TEXTS
    )
    found = (row.partition(f"_{kind}_")[2] for row in rows)
    out[kind] = tuple(dict.fromkeys(found))
  return out


def choose_for_curve(
  runs: Mapping[str, Sequence[TrainedRun]],
) -> dict[str, dict[str, str]]:
  """Chooses the row of each way of training in each text of the curve.

  Args:
    runs: As in `choose_rows`.
  """
  design = _design()
  return {
    text: {
      kind: _best_row(runs, text, (kind,), ("clm",), "end")
      for kind in design.CURVE
    }
    for text in design.TEXTS
  }


def _best_row(runs, text: str, kinds, measures, when: str) -> str:
  """Returns the row of a text and of ways of training with the lowest loss."""
  losses = {
    row: _chosen_by(of[0], measures, when)
    for row, of in runs.items()
    if row.startswith(tuple(f"{text}_{kind}_" for kind in kinds))
  }
  return min(losses, key=losses.get)


def _choice() -> str:
  """The grid's choice for each role, with its loss on the choosing half."""
  grid, design = _grid(), _design()
  runs, lines = grid.findings.runs, []
  for (text, when), rows in choose_rows(runs).items():
    for role, row in rows.items():
      _, kinds = design.ROLES[role]
      of = [x for x in _LOSSES if x in kinds]
      loss = _chosen_by(runs[row][0], kinds, when)
      what = " and ".join(_LOSSES[x] for x in of)
      lines.append(
        (f"`{text}`", when, _ROLES[role], grid.title(row), what, f"{loss:.2f}")
      )
  head = "text", "measure", "role", "chosen", "by the loss", "nats"
  return tables.markdown(lines, head)


def _claims() -> str:
  study, design, lines = _small(), _design(), []
  for (text, when), rows in design.CHOSEN.items():
    for role, control, kind in design.CLAIMS:
      contrast = study.of(rows[role], kind, when)[rows[control]]
      interval = contrast.found.interval(study.confidence)
      names = (study.title(rows[x]) for x in (role, control))
      lines.append(
        (
          f"`{text}`, {when}",
          _LOSSES[kind],
          " below ".join(names),
          interval_text(interval),
          contrast.verdict(study.confidence),
        )
      )
  head = "text, measure", "loss", "claim", "difference", "verdict"
  return f"{tables.markdown(lines, head)}\n\n{study.lowest()}"


def _losses() -> str:
  return studies.losses_table(_small(), ("clm", "mlm"), *_design().GRID_TEXTS)


TABLES = {
  "regularised-choice": _choice,
  "regularised-claims": _claims,
  "regularised-losses": _losses,
}
