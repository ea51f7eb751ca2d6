"""Forecast of a run on the present devices."""

import os
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence

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
  """Returns the MFU of a run's steps by the forecast of `antlm plan`.

  Its process compiles on the CPU, so that it needs nothing of the devices.
  Raises a UserError if there is no forecast.

  `words` are the arguments of the config and its settings.
  """
  name = topology()
  if not name:
    raise UserError("antlm plan has no forecast for these devices")
  progress.say(f"speed: antlm plan compiles the forecast of {name}")
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "plan.json"
    options = f"--topology={name}", f"--output={file}"
    arguments = *plugins.plugin_arguments(), *words, *options
    done = subprocess.run(
      cli.python_command("antlm_jax", "plan", *arguments),
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
    )
    programs = []
    if file.exists():
      programs = files.read_json(file, "the plan")["programs"]
  seconds = 0.0
  peak_seconds = 0.0  # with an MFU of 1
  for program in programs:
    forecast = program["forecast"]
    if program["steps"] and isinstance(forecast, dict):
      spent = program["batches"] * forecast["seconds"]
      seconds += spent
      peak_seconds += spent * forecast["mfu"]
  if not seconds:
    reason = (done.stderr or done.stdout).splitlines()[-1:]
    raise UserError(f"no forecast of {name}: {''.join(reason)}")
  return peak_seconds / seconds
