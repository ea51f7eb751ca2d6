"""Tables of mixing objectives with every row regularised.

`choose_rows`, `choose_candidates` and `choose_for_curve` are the rules of
configs/regularised.py that choose cells of the grid.
"""

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from antlm_jax import config as config_lib
from antlm_jax import tables
from antlm_jax.evals.benchmarks.pages import studies
from antlm_jax.evals.benchmarks.pages.studies import (
  WHEN,
  StoredStudy,
  gain_text,
  interval_text,
  measure_name,
)
from antlm_jax.evals.studies.reporting.claims import Contrast
from antlm_jax.evals.studies.reporting.runs import TrainedRun
from antlm_jax.training.metrics import CHOOSE

ROLES = {
  "clm": "CLM",
  "masked": "diffusion",
  "mixed_clm": "mixed, for its causal loss",
  "mixed_masked": "mixed, for its masked loss",
  "both": "mixed, for both",
  "half_clm": "CLM, half the steps",
  "half_masked": "diffusion, half the steps",
}
WAYS = {
  "c": "CLM",
  "cd": "CLM:diffusion",
  "cm": "CLM:MLM",
  "antlm": "AntLM's blocks",
}
_ADVISED = {
  "repeated": "35,400 words, 31 times",
  "fresh": "142,000 words, 7 times",
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


def contrast_of(
  study: StoredStudy, key: Key, role: str, control: str, kind: str
) -> Contrast:
  """Returns the difference of two roles' chosen rows in a loss."""
  rows, (_, when) = config().CHOSEN[key], key
  return study.of(rows[role], kind, when)[rows[control]]


def _claims() -> str:
  """The claims, with their intervals and verdicts."""
  study, lines = studies.stored("regularised_small"), {}
  for (text, when), rows in config().CHOSEN.items():
    for role, control, kind in config().CLAIMS:
      found = contrast_of(study, (text, when), role, control, kind)
      names = (study.title(rows[x]) for x in (role, control))
      measure = f"`{text}`", measure_name(kind, when), " below ".join(names)
      interval = interval_text(found.found.interval(study.confidence))
      lines[measure] = (interval, found.verdict(study.confidence))
  head = "text", "measure", "claim", "difference", "verdict"
  table = tables.markdown(((*k, *v) for k, v in lines.items()), head)
  return f"{table}\n\n{study.lowest()}"


# Expectations of configs/regularised.py for each claim, by text.
_EXPECTED = {
  "repeated": (
    "end within 0.1, lowest worse by 0.05 to 0.2",
    "better by 0.1 to 0.4",
    "within 0.1",
    "better by 0.3 to 0.6",
  ),
  "fresh": (
    "worse by 0.05 to 0.15",
    "better by 0.1 to 0.3",
    "better by 0 to 0.2",
    "better by 0.3 to 0.6",
  ),
}


def _expected() -> str:
  """The claims' differences as expected and found, and the best CLM."""
  study = studies.stored("regularised_small")
  rows = config().CHOSEN["repeated", "end"]
  best = study.means("repeated")[rows["clm"]]["clm, end"].mean
  lines = [
    (
      "`repeated`: the best CLM, causal, end",
      "about 5.40, dropout 0.2, decay 0.5 or 1.5",
      f"{best:.2f}, {study.title(rows['clm']).removeprefix('C, ')}",
    )
  ]
  for text, each in _EXPECTED.items():
    for (role, control, kind), expected in zip(
      config().CLAIMS, each, strict=True
    ):
      found = []
      for when in WHEN:
        of = contrast_of(study, (text, when), role, control, kind)
        found.append(f"{when} {gain_text(of, study.confidence)}")
      sides = f"{ROLES[role]}, against {ROLES[control]}"
      name = f"`{text}`: {sides} ({measure_name(kind)})"
      lines.append((name, expected, ", ".join(found)))
  return studies.expectations_table(lines)


def _means() -> str:
  """The mean losses of each role's row at the end."""
  study, lines = studies.stored("regularised_small"), []
  for text in config().GRID_TEXTS:
    means, roles = study.means(text), {}
    for role, row in config().CHOSEN[text, "end"].items():
      roles.setdefault(row, []).append(ROLES[role])
    for row, names in roles.items():
      found, losses = means[row], ("clm, end", "mlm, end")
      cells = [
        f"({of})" if head in found["_untrained"] else of
        for head in losses
        for of in [studies.mean_and_deviation(found[head])]
      ]
      chosen = "; ".join(names)
      lines.append((f"`{text}`", chosen, study.title(row), *cells))
  head = "text", "chosen as", "training", *map(measure_name, ("clm", "mlm"))
  return tables.markdown(lines, head)


def claim_figures() -> Iterator[float]:
  """Yields the claims' differences and their intervals."""
  study = studies.stored("regularised_small")
  for key in config().CHOSEN:
    for claim in config().CLAIMS:
      found = contrast_of(study, key, *claim).found
      yield from found.interval(study.confidence)


def _advice() -> str:
  """Costs of a second mode, and of two models of half the compute."""
  study, lines = studies.stored("regularised_small"), []
  for text, title in _ADVISED.items():
    rows, means = config().CHOSEN[text, "end"], study.means(text)

    def against(control, kind, key=(text, "end")):
      found = contrast_of(study, key, "both", control, kind).found
      return interval_text(found.interval(study.confidence), 2)

    masked = (means[rows[x]]["mlm, end"].mean for x in ("both", "masked"))
    lines.append(
      (
        title,
        study.title(rows["clm"]),
        study.title(rows["both"]),
        against("clm", "clm"),
        *(f"{x:.2f}" for x in masked),
        against("half_clm", "clm"),
        against("half_masked", "mlm"),
      )
    )
  percent = f"{100 * study.confidence:.4g} %"
  head = (
    *("text", "best CLM", "best in both modes", f"causal cost ({percent})"),
    *("masked loss", "of diffusion alone"),
    *("against half CLM, causal", "against half diffusion, masked"),
  )
  return tables.markdown(lines, head)


def _larger_contrasts(
  when: str,
) -> Iterator[tuple[str, str, str, list[Contrast]]]:
  """Yields text, row, CLM's row and their differences in causal loss.

  The differences are `small`'s and `larger`'s.
  """
  clm, *mixed = config().LARGER
  sizes = [studies.stored(f"regularised_{x}") for x in ("small", "larger")]
  for text in config().GRID_TEXTS:
    rows = config().CHOSEN[text, "end"]
    for row in dict.fromkeys(rows[role] for role in mixed):
      both = [study.of(row, "clm", when)[rows[clm]] for study in sizes]
      yield text, row, rows[clm], both


def _larger() -> str:
  """Differences from CLM in causal loss, next to those of `small`."""
  study, lines = studies.stored("regularised_larger"), {}
  for when in WHEN:
    for text, row, clm, both in _larger_contrasts(when):
      names = " against ".join(map(study.title, (row, clm)))
      cells = (interval_text(x.found.interval(study.confidence)) for x in both)
      lines.setdefault((f"`{text}`", names), []).extend(cells)
  sizes = [
    f"{studies.stored(f'regularised_{name}').findings.sizes([clm])[0][0]:,}"
    for name in ("small", "larger")
  ]
  heads = (f"{when}, {size} parameters" for when in WHEN for size in sizes)
  rows = ((*names, *cells) for names, cells in lines.items())
  return tables.markdown(rows, ("text", "rows", *heads))


def _larger_expected() -> str:
  """The differences at the end as expected and found."""
  study, lines = studies.stored("regularised_larger"), []
  for text, row, clm, both in _larger_contrasts("end"):
    small, larger = (x.found.value for x in both)
    sign = "same sign" if small * larger > 0 else "other sign"
    found = f"{sign}, {larger - small:+.2f} from `small`'s"
    names = " against ".join(map(study.title, (row, clm)))
    expected = "the sign of `small`'s difference, within 0.05 of it"
    lines.append((f"`{text}`: {names}", expected, found))
  return studies.expectations_table(lines)


def larger_figures() -> Iterator[float]:
  """Yields CLM's losses on little text, and differences from CLM."""
  study = studies.stored("regularised_larger")
  clm = config().CHOSEN["repeated", "end"]["clm"]
  for when in WHEN:
    yield study.means("repeated")[clm][f"clm, {when}"].mean
    for _, _, _, (_, of) in _larger_contrasts(when):
      yield from of.found.interval(study.confidence)


def _losses(scale: str) -> str:
  study = studies.stored(f"regularised_{scale}")
  return studies.losses_table(study, ("clm", "mlm"), *config().GRID_TEXTS)


def curve_of(way: str, when: str = "end") -> dict[str, Contrast]:
  """Returns a mixed way's differences from CLM in causal loss, by text."""
  study = studies.stored("regularised_curve")
  return {
    text: study.of(rows[way], "clm", when)[rows["c"]]
    for text, rows in config().CHOSEN_FOR_CURVE.items()
  }


def _curve() -> str:
  """The differences from CLM by text, at the end and at the lowest."""
  study, lines = studies.stored("regularised_curve"), []
  for text, rows in config().CHOSEN_FOR_CURVE.items():
    words, readings = (study.about[x][text] for x in ("words", "readings"))
    for way in config().CURVE[1:]:
      found = (curve_of(way, when)[text].found for when in WHEN)
      cells = (interval_text(x.interval(study.confidence)) for x in found)
      names = (study.title(rows[x]) for x in (way, "c"))
      lines.append((f"{words:,}", f"{readings:.2g}", *names, *cells))
  head = "words", "readings", "mixed", "CLM", *WHEN
  return tables.markdown(lines, head)


# Expectations of configs/regularised.py for each way, at the fewest readings.
_EXPECTED_AT_ONE = {
  "cd": "worse by 0.1 to 0.3",
  "cm": "worse by 0.1 to 0.3",
  "antlm": "worse by 0.3 to 0.6",
}


def _curve_expected() -> str:
  """The curve's differences as expected and found."""
  study = studies.stored("regularised_curve")
  most, *_, fewest = config().CHOSEN_FOR_CURVE
  readings = study.about["readings"]

  def found(way, text):
    return gain_text(curve_of(way)[text], study.confidence)

  best = min(
    config().CURVE[1:], key=lambda way: curve_of(way)[most].found.value
  )
  lines = [
    (
      f"{readings[most]:.2g} readings: the best mixture, {WAYS[best]}",
      "within 0.1",
      found(best, most),
    )
  ]
  for way, expected in _EXPECTED_AT_ONE.items():
    title = f"{readings[fewest]:.2g} readings: {WAYS[way]}"
    lines.append((title, expected, found(way, fewest)))
  return studies.expectations_table(lines)


def curve_figures() -> Iterator[float]:
  """Yields the curve's differences and their intervals."""
  study = studies.stored("regularised_curve")
  for way in config().CURVE[1:]:
    for when in WHEN:
      for of in curve_of(way, when).values():
        yield from of.found.interval(study.confidence)


ADVICE = {"curriculum-advice": _advice}
REPORT = {"regularised-means": _means}
TABLES = {
  "regularised-choice": _choice,
  "regularised-claims": _claims,
  "regularised-losses": functools.partial(_losses, "small"),
  "regularised-expected": _expected,
  "regularised-larger": _larger,
  "regularised-larger-losses": functools.partial(_losses, "larger"),
  "regularised-larger-expected": _larger_expected,
  "regularised-curve": _curve,
  "regularised-curve-expected": _curve_expected,
}
