"""Record of a study: every held-out loss of its runs, in one JSON file.

`antlm report` writes it, and reads it in place of the runs' folders. All that a
report says about losses follows from it.
"""

import json
import math
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from antlm_jax.errors import UserError
from antlm_jax.evals.studies.reporting import runs as runs_lib
from antlm_jax.evals.studies.reporting.runs import TrainedRun
from antlm_jax.runtime import files
from antlm_jax.training.metrics import HALVES

FILE = "losses.json"
_DIGITS = 4  # of a loss in nats
_SUMMARY = ("steps", "parameters", "unigram_entropy", "switches")
_OBJECTIVE = "name", "attention", "mask_ratio"
_ALL = "all"  # held-out rows, next to `HALVES`


def write_record(
  path: pathlib.Path, runs: Mapping[str, Sequence[TrainedRun]], **about: Any
) -> None:
  """Writes the record of runs, by variant, and `about` before it.

  Raises:
    UserError: If it cannot be written.
  """
  rows = {
    variant: {
      "config": _reported_settings(of[0]),
      "runs": {run.seed: _packed(run) for run in of},
    }
    for variant, of in runs.items()
  }
  text = json.dumps(about | {"rows": rows}, separators=(",", ":"))
  files.write_text(path, text + "\n")


def _reported_settings(run: TrainedRun) -> dict[str, Any]:
  """Returns the settings that a report reads."""
  objectives = {
    name: {key: about[key] for key in _OBJECTIVE if key in about}
    for name, about in run.known.items()
  }
  config = run.config
  return {
    "curriculum": config["curriculum"],
    "objectives": objectives,
    "train": {"batch_size": config["train"]["batch_size"]},
    "eval": {"patience": config["eval"].get("patience")},
  }


def _packed(run: TrainedRun) -> dict[str, Any]:
  losses = {_ALL: run.losses, **run.halves}
  steps = sorted({s for of in losses.values() for x in of.values() for s in x})
  columns = {
    half: {kind: [_rounded(x.get(s)) for s in steps] for kind, x in of.items()}
    for half, of in losses.items()
  }
  found = {"steps": steps, "losses": columns}
  init = run.config.get("init") or {}
  if init.get("checkpoint"):
    # Of the path only the run and its step are the same everywhere.
    place = "/".join(pathlib.Path(init["checkpoint"]).parts[-4:])
    found["init"] = {"checkpoint": place, "step": init["step"]}
  if run.summary:
    found["summary"] = {name: run.summary[name] for name in _SUMMARY}
  return found


def _rounded(loss: float | None) -> float | str | None:
  """Returns a loss as JSON has it: null if unknown, "nan" if not finite."""
  if loss is None:
    return None
  return round(loss, _DIGITS) if math.isfinite(loss) else "nan"


def read_record(
  path: pathlib.Path, variants: Collection[str]
) -> dict[str, list[TrainedRun]]:
  """Reads the runs of a record; variants without runs are left out.

  Raises:
    UserError: If it cannot be read, is no record, or has none of the variants.
  """
  with runs_lib.reading_file(path) as record:
    rows = record["rows"]
    found = {
      variant: list(_unpacked(path, variant, rows[variant]))
      for variant in variants
      if variant in rows
    }
  if not found:
    raise UserError(f"{path} has no run of {', '.join(variants)}")
  return runs_lib.all_with_shared_steps(found)


def _unpacked(
  path: pathlib.Path, variant: str, row: Mapping[str, Any]
) -> Iterator[TrainedRun]:
  for seed, about in row["runs"].items():
    losses = {
      half: {
        kind: {
          step: float(loss)
          for step, loss in zip(about["steps"], column, strict=True)
          if loss is not None
        }
        for kind, column in of.items()
      }
      for half, of in about["losses"].items()
    }
    config = row["config"] | {"init": about.get("init") or {}}
    halves = {half: losses[half] for half in HALVES if half in losses}
    known, place = config["objectives"], path / variant / seed
    run = TrainedRun(
      *(variant, seed, place, config, known, losses[_ALL], halves)
    )
    yield runs_lib.with_summary(run, about.get("summary"))
