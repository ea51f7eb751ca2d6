"""Where metrics go beside metrics.jsonl: for TensorBoard, as CSV, to W&B.

A writer is given what a run that goes on has recorded, then each later step,
whole and once. Of several processes the first has writers.
"""

import csv
import importlib.util
import os
import pathlib
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from antlm_jax.errors import UserError
from antlm_jax.runtime import files
from antlm_jax.training import events

WANDB_ID = "wandb_id"  # a file: which of W&B's runs a folder is
_EVERY = 10.0  # seconds from one writing of the CSV file to the next, at least
_SHARE = 0.01  # of the time that this may take

Row = Mapping[str, float]  # what was recorded after a step, by its names


class Writer:
  """Takes the metrics of a run.

  Args:
    folder: Where to write.
    rows: What was recorded so far, by step.
    name: The run's.
    config: The run's.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    rows: Mapping[int, Row],
    name: str,
    config: ConfigDict,
  ):
    raise NotImplementedError

  def write(self, step: int, row: Row) -> None:
    """Takes what was recorded after a step; steps ascend."""
    raise NotImplementedError

  def close(self) -> None:
    """Called at the end of the run, well or not."""


class TensorBoard(Writer):
  """Event files, in `tensorboard/`."""

  def __init__(self, folder, rows, name, config):
    last = max(rows, default=-1)
    self._board = events.Board(folder / "tensorboard", purge=last + 1)

  def write(self, step, row):
    self._board.write(step, row)

  def close(self):
    self._board.close()


class Csv(Writer):
  """`metrics.csv`: a line for each step, a column for each name.

  Any step may bring a new column, so it is written anew, every few seconds.
  """

  def __init__(self, folder, rows, name, config):
    self._path, self._rows = folder / "metrics.csv", dict(rows)
    self._next = time.monotonic() + _EVERY

  def write(self, step, row):
    self._rows[step] = row
    if time.monotonic() > self._next:
      self.close()

  def close(self):
    begun = time.monotonic()
    names = sorted({name for row in self._rows.values() for name in row})
    with files.replacing(self._path) as aside, aside.open("w", newline="") as f:
      table = csv.DictWriter(f, ["step", *names])
      table.writeheader()
      table.writerows({"step": s, **row} for s, row in self._rows.items())
    end = time.monotonic()
    self._next = end + max(_EVERY, (end - begun) / _SHARE)


class Wandb(Writer):
  """A run at Weights & Biases; with WANDB_MODE=offline a folder in `wandb/`.

  A folder goes on with its own run there. The step is a metric: W&B's counter
  cannot go back to where a killed run goes on.

  Raises:
    UserError: if W&B cannot be reached, or knows nobody.
  """

  def __init__(self, folder, rows, name, config):
    import wandb

    run_id = _id(folder / WANDB_ID)
    before = list(folder.glob(f"wandb/offline-run-*-{run_id}"))
    try:
      self._run = wandb.init(
        id=run_id,
        resume="allow",
        dir=folder,
        project=os.environ.get("WANDB_PROJECT", "antlm_jax"),
        name=os.environ.get("WANDB_NAME", name),
        config=config.to_dict(),
        settings=wandb.Settings(console="off"),
      )
    except wandb.Error as error:
      raise UserError(
        f"log.writers=wandb: {files.reason(error).rstrip('.')}; without a login"
        " or a network set WANDB_MODE=offline"
      ) from error
    self._run.define_metric("step")
    self._run.define_metric("*", step_metric="step")
    # What W&B lacks: of what a killed process has sent the end may be lost,
    # and what is recorded again has been sent. Offline that is all, and what
    # was written before would be there twice.
    self._last = self._run.summary.get("step", -1)
    for step, row in rows.items():
      self.write(step, row)
    for old in before:
      shutil.rmtree(old)

  def write(self, step, row):
    if step > self._last:
      self._run.log({"step": step, **row})

  def close(self):
    self._run.finish()


def _id(file: pathlib.Path) -> str:
  """Returns the id of a folder's run, which is made with the first."""
  if not file.exists():
    files.write_text(file, secrets.token_hex(4))
  return file.read_text().strip()


WRITERS = {"tensorboard": TensorBoard, "csv": Csv, "wandb": Wandb}


def check(names: Sequence[str]) -> None:
  """Checks that what writers need is installed.

  Raises:
    UserError: if it is not.
  """
  if "wandb" in names and importlib.util.find_spec("wandb") is None:
    raise UserError(
      "log.writers=wandb needs wandb, which is missing: pip install"
      " 'antlm_jax[wandb]'"
    )
