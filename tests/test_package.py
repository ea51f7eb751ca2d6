"""The source distribution and its wheel, outside of the checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest

import antlm_jax
from tests import runs

pytestmark = pytest.mark.slow
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(*command, **more) -> str:
  done = subprocess.run(
    [str(word) for word in command],
    **{"capture_output": True, "text": True, "timeout": 300} | more,
  )
  assert done.returncode == 0, (command, done.stdout, done.stderr)
  return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
  """The source distribution of a copy of this checkout."""
  checkout = tmp_path_factory.mktemp("checkout") / "antlm_jax"
  ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs")
  shutil.copytree(runs.ROOT, checkout, symlinks=True, ignore=ignored)
  folder = tmp_path_factory.mktemp("sdist")
  build = ("setup.py", "--quiet", "sdist", f"--dist-dir={folder}")
  run(sys.executable, *build, cwd=checkout)
  (archive,) = folder.iterdir()
  return archive


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
  """The wheel that pip builds from the source distribution."""
  folder = tmp_path_factory.mktemp("wheel")
  options = ("--no-deps", "--no-build-isolation", f"--wheel-dir={folder}")
  run(*_PIP, "wheel", *options, sdist)
  (path,) = folder.iterdir()
  return path


def test_the_source_distribution_holds_what_the_wheel_is_built_from(sdist):
  """Catches tests without their helpers, which cannot run."""
  with tarfile.open(sdist) as archive:
    names = {
      name.split("/", 2)[1] for name in archive.getnames() if "/" in name
    }
  files = ["CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"]
  files += ["pyproject.toml", "setup.cfg", "setup.py"]
  assert names == {"antlm_jax", "antlm_jax.egg-info", *files}


def test_the_wheel_holds_the_library(wheel):
  assert wheel.name.startswith(f"antlm_jax-{antlm_jax.__version__}-py3-none")
  names = set(zipfile.ZipFile(wheel).namelist())
  tops = {name.split("/")[0] for name in names}
  assert {top.split("-")[0] for top in tops} == {"antlm_jax"}
  packed = ("antlm_jax", "configs", "evals")
  kinds = (".py", ".csv", ".j2", ".md")
  files = {p for top in packed for p in (runs.ROOT / top).rglob("*.*")}
  studies = runs.ROOT / "configs/studies"
  assert {
    name.removeprefix("antlm_jax/") for name in names if name.endswith(kinds)
  } == {
    str(path.relative_to(runs.ROOT)).removeprefix("antlm_jax/")
    for path in files
    if path.suffix in kinds and path.parent != studies
  }
  assert "antlm_jax/py.typed" in names


def test_the_metadata_names_author_license_and_pythons(wheel):
  with zipfile.ZipFile(wheel) as archive:
    (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
    lines = archive.read(name).decode().splitlines()
  assert "Author: The antlm_jax authors" in lines
  assert "License-Expression: Apache-2.0" in lines
  for version in ("3.11", "3.12", "3.13"):
    assert f"Classifier: Programming Language :: Python :: {version}" in lines


def test_pages_name_only_modules_that_the_wheel_has(wheel):
  """Catches `python -m` of a module that pip does not install."""
  names = zipfile.ZipFile(wheel).namelist()
  modules = {
    re.sub(r"(/__init__)?\.py$", "", name).replace("/", ".")
    for name in names
    if name.endswith(".py")
  }
  pages = [runs.ROOT / "README.md", *(runs.ROOT / "docs").rglob("*.md")]
  text = "\n".join(page.read_text("utf-8") for page in pages)
  named = set(re.findall(r"python -m (antlm_jax[\w.]*)", text))
  assert named and named <= modules


@pytest.fixture(scope="module")
def antlm(wheel, tmp_path_factory):
  """Runs `antlm` of an environment with the tests' other packages."""
  place = tmp_path_factory.mktemp("environment")
  venv.create(place)
  paths = {"base": str(place), "platbase": str(place)}
  packages = sysconfig.get_path("purelib", vars=paths)
  # Python searches the folder in a .pth file without reading the .pth files in
  # it. So it does not find the checkout that is installed there.
  with open(f"{packages}/others.pth", "w") as file:
    file.write(sysconfig.get_path("purelib"))
  python = place / "bin/python"
  run(*_PIP, f"--python={python}", "install", "--no-deps", "--no-index", wheel)
  folder = tmp_path_factory.mktemp("elsewhere")
  env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  env |= {"JAX_PLATFORMS": "cpu"}

  def call(*words) -> str:
    return run(place / "bin/antlm", *words, cwd=folder, env=env)

  code = "import antlm_jax; print(antlm_jax.__file__)"
  assert run(python, "-c", code, cwd=folder, env=env).startswith(str(place))
  return call


def test_from_text_to_scores_outside_of_the_checkout(antlm, english):
  assert antlm("--version").split() == ["antlm", antlm_jax.__version__]
  antlm(
    *("prepare", f"--text={english / 'text'}", "--output=data"),
    *("--vocab_size=400", "--seq_len=32", "--packing=documents"),
    "--documents=line",
  )
  train = ("train", "--config=quickstart:shrink", "--config.data.path", "data")
  antlm(*train, "--workdir=runs/1", "--config.curriculum", "6C+6M steps")
  told = antlm("export", "--checkpoint=runs/1", "--output=exported")
  assert "exported" in told
  pairs = (f"--data={english / 'pairs'}", "--mode=mlm", "--limit=5")
  assert "written to" in antlm("eval", "blimp", "--checkpoint=runs/1", *pairs)
