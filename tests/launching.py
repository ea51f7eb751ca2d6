"""Helpers that run the launchers."""

import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
# No such config exists, so the launchers are not to check it.
TRAINING = (
  "--unchecked",
  "--",
  "--config=configs/a.py:size=1B,x=2",
  "--workdir=gs://b/a run",
)


def start(*words, env=None, **kwargs) -> subprocess.Popen:
  """Starts a command with both outputs piped, as text."""
  return subprocess.Popen(
    list(map(str, words)),
    env=os.environ | (env or {}),
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    **kwargs,
  )


def run(*words, **kwargs) -> subprocess.CompletedProcess:
  """Runs a command to its end."""
  with start(*words, **kwargs) as process:
    try:
      out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
      process.kill()
      raise
  return subprocess.CompletedProcess(words, process.returncode, out, err)


def launch(script: str, *words, **kwargs) -> subprocess.CompletedProcess:
  """Runs a launcher to its end."""
  return run(LAUNCH / f"{script}.sh", *words, **kwargs)


def ends_with_error(done: subprocess.CompletedProcess, part: str) -> None:
  """Asserts one line on stderr, an empty stdout and status 2."""
  assert (done.returncode, done.stdout) == (2, ""), done.stderr
  assert done.stderr.startswith("error: ") and part in done.stderr
  assert done.stderr.count("\n") == 1, done.stderr


def write_script(path: pathlib.Path, text: str) -> pathlib.Path:
  """Writes an executable bash script."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/usr/bin/env bash\n{text}")
  path.chmod(0o755)
  return path
