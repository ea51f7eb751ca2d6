"""The README's commands and code run as written."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import runs

TEXT = (runs.ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
  """The README's fenced blocks of a language."""
  return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder to run them in, with what they name of the checkout."""
  folder = tmp_path_factory.mktemp("readme")
  for name in ("configs", "launch"):
    (folder / name).symlink_to(runs.ROOT / name)
  return folder


def in_shell(script: str, folder: pathlib.Path) -> str:
  """Runs a script with this Python first on the path."""
  path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
  done = subprocess.run(
    ["bash", "-euo", "pipefail", "-c", script],
    cwd=folder, env=os.environ | {"PATH": path},
    capture_output=True, text=True, timeout=600,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def test_the_commands_by_hand_and_the_code_after_them(folder):
  (commands,) = blocks("bash")
  printed = in_shell(commands, folder)
  assert "the dogs near" in printed and "mean over UIDs" in printed
  for code in blocks("python"):
    (folder / "code.py").write_text(code)
    assert in_shell("python code.py", folder).strip()


def test_every_file_and_command_that_it_names_exists():
  for name in re.findall(r"`((?:configs|antlm_jax|launch)/[\w/.]+)", TEXT):
    assert (runs.ROOT / name).exists(), name
  for link in re.findall(r"\]\((?!http)([^)]+)\)", TEXT):
    assert (runs.ROOT / link).exists(), link
  for module in set(re.findall(r"python -m ([\w.]+)", TEXT)):
    done = runs.run(module, "--help")
    assert done.returncode == 0 and "--" in done.stdout, module


def test_every_curriculum_that_it_names_parses():
  from antlm_jax.objectives import curriculum, objective

  table = TEXT.split("## What trains when")[1].split("| letter |")[0]
  strings = re.findall(r"`([^`]*[A-Z][^`]*)`", table.split("|---|---|")[1])
  assert len(strings) >= 10
  for text in strings:
    assert curriculum.parse(text, objective.OBJECTIVES, 100, 5000).steps > 0
