"""The commands and code of README and docs/ run as written."""

import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest

from antlm_jax import config
from antlm_jax.commands import COMMANDS
from antlm_jax.objectives import curriculum
from tests import runs

README = runs.ROOT / "README.md"
PAGES = sorted((runs.ROOT / "docs").glob("*.md"))


def blocks(page: pathlib.Path, *languages: str) -> list[tuple[str, str]]:
  """A page's fenced blocks of these languages, with their language."""
  found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S)
  return [block for block in found if block[0] in languages]


@pytest.fixture(scope="module")
def readme(tmp_path_factory):
  """A folder with what the README's commands leave, and what they print."""
  folder = tmp_path_factory.mktemp("docs")
  for name in ("configs", "docs", "launch", ".venv"):
    (folder / name).symlink_to(runs.ROOT / name)
  return folder, in_folder(README, folder)


def in_folder(page: pathlib.Path, folder: pathlib.Path) -> str:
  """Runs a page's blocks in turn; returns all that they print."""
  path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
  printed = []
  # Python blocks that follow each other are one program.
  groups = itertools.groupby(blocks(page, "bash", "python"), lambda b: b[0])
  parts = []
  for language, found in groups:
    texts = [text for _, text in found]
    joined = ["\n".join(texts)] if language == "python" else texts
    parts += [(language, text) for text in joined]
  for language, text in parts:
    code = folder / "snippet.py"
    code.write_text(text)
    script = text if language == "bash" else f"python {code}"
    done = subprocess.run(
      ["bash", "-euo", "pipefail", "-c", script],
      cwd=folder,
      env=os.environ | {"PATH": path, "PYTHONPATH": str(runs.ROOT)},
      capture_output=True,
      text=True,
      timeout=600,
    )
    assert done.returncode == 0, (page.name, text, done.stdout, done.stderr)
    printed.append(done.stdout)
  return "".join(printed)


@pytest.mark.slow
def test_the_readmes_commands_by_hand_and_its_code(readme):
  _, printed = readme
  assert "the dogs near" in printed and "mean over UIDs" in printed


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_and_code_of_a_page(page, readme):
  folder, _ = readme
  assert in_folder(page, folder) or not blocks(page, "bash", "python")


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_every_file_and_command_that_a_page_names_exists(page):
  text = page.read_text()
  ours = "configs|antlm_jax|launch|tests"
  for name in re.findall(rf"`((?:{ours})/[\w/.]+)", text):
    assert (runs.ROOT / name).exists(), name
  for link in re.findall(r"\]\((?!http)([^)#]+)", text):
    assert (page.parent / link).exists(), link
  for module in re.findall(r"python -m ([\w.]+)", text):
    path = runs.ROOT / module.replace(".", "/")
    known = path.with_suffix(".py"), path / "__main__.py"
    assert any(file.exists() for file in known), module
  for name, second in re.findall(r"(?:`|^)antlm (\w+)(?: (\w+))?", text, re.M):
    assert {name, f"{name} {second}"} & COMMANDS.keys(), (name, second)


def test_the_readme_lists_every_config_once():
  listed = re.findall(r"^\| `configs/(\w+)\.py`", README.read_text(), re.M)
  assert sorted(listed) == sorted(p.stem for p in config.CONFIGS.glob("*.py"))


def test_every_page_is_in_the_readme():
  for page in PAGES:
    assert f"(docs/{page.name})" in README.read_text()


@pytest.mark.parametrize(
  ("page", "least"), [(README, 8), (runs.ROOT / "docs/curricula.md", 10)]
)
def test_every_curriculum_that_a_page_names_parses(page, least):
  table = page.read_text().split("| curriculum |")[1].split("\n\n")[0]
  strings = re.findall(r"`([^`]*[A-Z][^`]*)`", table.split("|---|---|")[1])
  assert len(strings) >= least
  for text in strings:
    known = config.Config(curriculum=text).known_objectives
    assert curriculum.parse(text, known, 100, 5000).steps > 0
