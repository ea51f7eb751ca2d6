"""Helpers that run real commands on a little generated English."""

import contextlib
import importlib
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from antlm_jax import config
from antlm_jax.commands import COMMANDS
from antlm_jax.errors import UserError
from antlm_jax.inference.model import load
from antlm_jax.training import metrics

ROOT = pathlib.Path(__file__).parent.parent
QUICK = "configs/quickstart.py:shrink"


def command(module: str, *args: str) -> list[str]:
  """Returns the words that run a module, or the command of this module."""
  names = {home: name for name, home in COMMANDS.items()}
  if module in names:
    module, args = "antlm_jax", (names[module], *args)
  return [sys.executable, "-W", "error", "-m", module, *map(str, args)]


def run(
  module: str, *args: str, devices: int = 1
) -> subprocess.CompletedProcess:
  """Runs a command to its end on `devices` CPU devices."""
  return run_words(command(module, *args), devices)


def run_code(code: str, *args: str, devices: int) -> str:
  """Runs Python code on CPU devices; returns the last line it prints."""
  done = run_words([sys.executable, "-W", "error", "-c", code, *args], devices)
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()[-1] if done.stdout else ""


def run_words(
  words: list[str], devices: int = 1
) -> subprocess.CompletedProcess:
  """Runs a program in the checkout to its end on `devices` CPU devices."""
  flags = f"--xla_force_host_platform_device_count={devices}"
  return subprocess.run(
    words,
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    capture_output=True,
    text=True,
    timeout=300,
  )


def main(module: str, *args: str) -> None:
  """Runs a command in this process; its errors are raised."""
  importlib.import_module(module).main([str(arg) for arg in args])


def told(call, *args, **options) -> str:
  """Returns the message of the `UserError` that a call must raise."""
  with pytest.raises(UserError) as caught:
    call(*args, **options)
  line = str(caught.value)
  assert "\n" not in line, line
  return line


def refusal(pattern: str, call, *args, **options) -> str:
  """Returns the `UserError` message of a call, which must match a pattern."""
  line = told(call, *args, **options)
  assert re.search(pattern, line), line
  return line


def refused(module: str, *args: str) -> str:
  """Returns the `UserError` message of a command run in this process."""
  return told(main, module, *args)


def train_args(workdir, data, *overrides: str) -> list[str]:
  """Returns the arguments of a training run that takes seconds."""
  return [
    f"--config={QUICK}",
    f"--workdir={workdir}",
    f"--config.data.path={data}",
    *(f"--config.{override}" for override in overrides),
  ]


def score(run, data, output: pathlib.Path, *options: str, task: str) -> dict:
  """Scores a task of zero-shot evaluation; returns the summary."""
  where = f"--checkpoint={run}", f"--data={data}", f"--output={output}"
  main("antlm_jax.evals.score", f"--task={task}", *where, *options)
  return summary(output)


def refused_training(workdir, data, *overrides: str) -> str:
  """Returns the `UserError` message of a run with bad settings."""
  args = train_args(workdir, data, *overrides)
  return refused("antlm_jax.commands.train", *args)


def settings(data, *overrides: str) -> config.Config:
  """Returns the configuration of the run of `train_args`."""
  return config.load_config(QUICK, train_args("unused", data, *overrides)[2:])


def train(
  workdir, data, *overrides: str, devices: int = 0
) -> subprocess.CompletedProcess:
  """Trains to the end and asserts success.

  Runs in this process, or in a new process with `devices` CPU devices.
  """
  args = train_args(workdir, data, *overrides)
  if not devices:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      main("antlm_jax.commands.train", *args)
    return subprocess.CompletedProcess(args, 0, printed.getvalue())
  done = run("antlm_jax", "train", *args, devices=devices)
  assert done.returncode == 0, done.stderr
  return done


def ended(
  workdir, data, *overrides: str, moment, by=signal.SIGTERM
) -> tuple[int, str]:
  """Trains in a process that gets a signal once `moment()` is true.

  Returns its status and its output.
  """
  process = subprocess.Popen(
    command("antlm_jax", "train", *train_args(workdir, data, *overrides)),
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  while process.poll() is None and not moment():
    time.sleep(0.001)
  process.send_signal(by)
  out, _ = process.communicate(timeout=120)
  return process.returncode, out


def error_of(done: subprocess.CompletedProcess) -> str:
  """Returns a command's only line on stderr, an error of status 2."""
  assert done.returncode == 2, (done.returncode, done.stderr)
  lines = done.stderr.strip().splitlines()
  assert len(lines) == 1, done.stderr
  assert lines[0].startswith("error: ")
  return lines[0]


def summary(workdir: pathlib.Path) -> dict:
  """Returns a run's summary."""
  return json.loads((workdir / "summary.json").read_text())


def write_lines(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
  """Writes objects as lines of JSON; returns the path."""
  path.parent.mkdir(exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def write_run(
  folder, settings: config.Config, losses=None, summary=None, gap=0.0
) -> pathlib.Path:
  """Writes the files of a run, whose training has ended if it has a summary.

  `losses` are in nats by step and kind. Those of the half of held-out rows that
  chooses no step are worse by `gap`.
  """
  about = {"steps": 4, "switches": [], "parameters": 1000}
  about |= {"unigram_entropy": 6.0, "seconds": {"total": 60.0}}
  lines = []
  for step, by_kind in (losses or {}).items():
    lines.append({"step": step})
    for kind, loss in by_kind.items():
      key = f"eval/{kind}/loss"
      lines[-1] |= {key: loss, f"{key}/choose": loss}
      lines[-1][f"{key}/report"] = loss + gap
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(config.to_json(settings))
  if lines:
    write_lines(folder / "metrics.jsonl", lines)
  if summary is not None:
    (folder / "summary.json").write_text(json.dumps(about | summary))
  return folder


def logged(workdir: pathlib.Path, name: str) -> dict[int, float]:
  """Returns a run's recorded values of a name by step."""
  records = metrics.read_records(workdir)
  return {r["step"]: r[name] for r in records if name in r}


def same_params(a, b) -> bool:
  """Returns whether two runs' parameters are equal bit for bit."""
  a, b = load(a).params, load(b).params
  assert a.keys() == b.keys()
  return all(np.array_equal(a[name], b[name]) for name in a)


def largest_file(folder: pathlib.Path) -> pathlib.Path:
  """Returns the largest file in a folder, such as an array's."""
  files = (path for path in folder.rglob("*") if path.is_file())
  return max(files, key=lambda path: path.stat().st_size)
