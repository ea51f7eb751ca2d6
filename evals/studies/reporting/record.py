"""Record of a study: its long table in one JSON file.

`antlm report` writes it, and reads it in place of the runs' folders. Held-out
losses are columns by run and step. Other scores are one object each. The scores
of single items are too many, so the record has the differences over them.
"""

import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from antlm_jax.evals.statistics import MeanEstimate
from antlm_jax.evals.studies.reporting import runs as runs_lib
from antlm_jax.evals.studies.reporting.findings import EstimateKey, Findings
from antlm_jax.evals.studies.reporting.runs import TrainedRun
from antlm_jax.evals.studies.reporting.scores import Score, Scores
from antlm_jax.runtime import files

FILE = "study.json"
_DIGITS = 4  # of a loss in nats
_SUMMARY = "steps", "parameters", "unigram_entropy", "switches"
_OBJECTIVE = "name", "attention", "mask_ratio"
_ITEMS = (("", ""),)  # placeholder for files of items, which a record omits
_DEFAULTS = Score._field_defaults


def write_record(path: pathlib.Path, study: Findings, **header: Any) -> None:
  """Writes the record of a study as JSON.

  Args:
    path: Path to the file.
    study: Findings to write.
    **header: Values to write before them, such as `config`.

  Raises:
    UserError: The file cannot be written.
  """
  rows = {
    name: {
      "config": _reported_settings(runs[0]),
      "runs": {run.seed: _packed_run(run) for run in runs},
    }
    for name, runs in study.runs.items()
  }
  # A mean over several items cannot be computed again from the record.
  differences = [
    {
      "measure": measure,
      "sides": sorted([*side, weight] for side, weight in weights),
      "estimate": estimate._asdict(),
    }
    for (measure, weights), estimate in study.estimates.items()
    if estimate and estimate.items > 1
  ]
  record = header | {
    "rows": rows,
    "scores": [_packed_score(score) for score in study.table],
    "differences": differences,
    "notes": study.notes,
  }
  files.write_text(path, json.dumps(record, separators=(",", ":")) + "\n")


def _reported_settings(run: TrainedRun) -> dict[str, Any]:
  """Returns the settings that a report reads."""
  config = run.config
  return {
    "curriculum": config["curriculum"],
    "objectives": {
      name: {key: settings[key] for key in _OBJECTIVE if key in settings}
      for name, settings in run.known_objectives.items()
    },
    "train": {"batch_size": config["train"]["batch_size"]},
    "eval": {"patience": config["eval"].get("patience")},
  }


def _packed_score(score: Score) -> dict[str, Any]:
  """Returns the fields of a score that differ from their defaults."""
  score = score._replace(items=_ITEMS if score.items else ())
  fields = score._asdict().items()
  return {name: x for name, x in fields if x != _DEFAULTS.get(name)}


def _packed_run(run: TrainedRun) -> dict[str, Any]:
  """Returns a run's losses, warm start and summary, for `_unpacked_runs`.

  The losses are columns with a value for each step, null if not measured.
  """
  all_losses = itertools.chain.from_iterable(
    losses_by_name.values() for losses_by_name in run.losses.values()
  )
  steps = sorted(set().union(*all_losses))
  columns = {
    half: {
      loss_name: [_rounded(losses.get(step)) for step in steps]
      for loss_name, losses in losses_by_name.items()
    }
    for half, losses_by_name in run.losses.items()
  }
  packed = {"steps": steps, "losses": columns}
  init = run.config.get("init") or {}
  if init.get("checkpoint"):
    # The last parts of the path do not depend on the machine.
    checkpoint = "/".join(pathlib.Path(init["checkpoint"]).parts[-4:])
    packed["init"] = {"checkpoint": checkpoint, "step": init["step"]}
  if run.summary:
    packed["summary"] = {name: run.summary[name] for name in _SUMMARY}
  return packed


def _rounded(loss: float | None) -> float | str | None:
  """Returns a loss as JSON has it: null if unknown, "nan" if not finite."""
  if loss is None:
    return None
  return round(loss, _DIGITS) if math.isfinite(loss) else "nan"


def read_record(path: pathlib.Path) -> dict[str, Any]:
  """Reads the record of a study, and restores the types of its fields.

  Returns:
    The fields of `header`, as they were written, and those of `Findings`:
      rows: Runs of each row, by its name.
      scores: Lines of the long table.
      differences: Estimates by `EstimateKey`.
      notes: Notes, as they were written.

  Raises:
    UserError: The file cannot be read, is not a record, or has differences that
      an older version wrote.
  """
  with runs_lib.reading_file(path) as record:
    rows = {
      name: list(_unpacked_runs(path, name, row))
      for name, row in record["rows"].items()
    }
    scores = Scores(
      Score(**score | {"items": _ITEMS if score.get("items") else ()})
      for score in record.get("scores", ())
    )
    return {
      "notes": [],  # an older record has no notes
      **record,
      "rows": rows,
      "scores": scores,
      "differences": _unpacked_differences(record.get("differences", ())),
    }


def _unpacked_differences(
  differences: Sequence[Mapping[str, Any]],
) -> dict[EstimateKey, MeanEstimate]:
  """Returns the estimates of a record's differences.

  Raises a ValueError if an older version wrote them.
  """
  for difference in differences:
    if "part" in difference or difference.get("subset"):
      raise ValueError("an older version wrote its differences")
  estimates = {}
  for difference in differences:
    sides = difference["sides"]
    weights = frozenset(((row, mode), weight) for row, mode, weight in sides)
    estimate = MeanEstimate(**difference["estimate"])
    estimates[difference["measure"], weights] = estimate
  return estimates


def _unpacked_runs(
  path: pathlib.Path, name: str, row: Mapping[str, Any]
) -> Iterator[TrainedRun]:
  """Yields the runs of a row from their form of `_packed_run`."""
  for seed, packed in row["runs"].items():
    losses = {
      half: {
        loss_name: {
          step: float(loss)
          for step, loss in zip(packed["steps"], column, strict=True)
          if loss is not None
        }
        for loss_name, column in columns.items()
      }
      for half, columns in packed["losses"].items()
    }
    run = TrainedRun(
      name,
      seed,
      folder=path / name / seed,
      config=row["config"] | {"init": packed.get("init") or {}},
      known_objectives=row["config"]["objectives"],
      losses=losses,
    )
    if "summary" in packed:
      run = runs_lib.with_summary(run, packed["summary"])
    yield run
