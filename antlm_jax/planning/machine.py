"""Forecast of a run on the present devices."""

import os
import pathlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from antlm_jax import cli, plugins
from antlm_jax.errors import UserError
from antlm_jax.runtime import chips, files, progress


def topology() -> str:
  """Names these devices as `antlm plan` does; "" if it does not know them."""
  devices = jax.devices()
  chip = chips.chip_of(devices[0])
  if chip is None or not chip.name:
    return ""
  if chip.kind:  # a GPU
    sides = [jax.local_device_count()]
    if jax.process_count() > 1:
      sides = [jax.process_count(), *sides]
  else:
    corners = zip(*(device.coords for device in devices), strict=True)
    sides = [max(corner) + 1 for corner in corners]
    sides = sides[: chip.example.count("x") + 1]
  return f"{chip.name}:{'x'.join(map(str, sides))}"


def forecast_mfu(words: Sequence[str]) -> float:
  """Returns the MFU that `antlm plan` forecasts for a run on these devices.

  A subprocess compiles the run's programs on the CPU, so it does not occupy
  the devices.

  Args:
    words: Command-line arguments that choose the config and its settings.

  Raises:
    UserError: `antlm plan` does not know these devices, or it failed.
  """
  name = topology()
  if not name:
    raise UserError("antlm plan has no forecast for these devices")
  progress.say(f"speed: antlm plan compiles the forecast of {name}")
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "plan.json"
    options = f"--topology={name}", f"--output={file}"
    arguments = *plugins.plugin_arguments(), *words, *options
    process = subprocess.run(
      cli.python_command("antlm_jax", "plan", *arguments),
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
    )
    programs = []
    if file.exists():
      programs = files.read_json(file, "the plan")["programs"]
  mfu = _mean_mfu(programs)
  if mfu is None:
    reason = (process.stderr or process.stdout).splitlines()[-1:]
    raise UserError(f"no forecast of {name}: {''.join(reason)}")
  return mfu


def _mean_mfu(programs: Sequence[Mapping[str, Any]]) -> float | None:
  """Returns the mean MFU of training steps, weighted by their time, if any."""
  seconds = 0.0
  peak_seconds = 0.0  # time of the same steps with an MFU of 1
  for program in programs:
    forecast = program["forecast"]
    if program["steps"] and isinstance(forecast, dict):
      program_seconds = program["batches"] * forecast["seconds"]
      seconds += program_seconds
      peak_seconds += program_seconds * forecast["mfu"]
  return peak_seconds / seconds if seconds else None
