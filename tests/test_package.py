"""The wheel, installed into an environment outside of the checkout."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

import antlm_jax
from tests import runs

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.metadata.version("setuptools") < "70.1",
    reason="this setuptools makes no wheels: pip install -U setuptools",
  ),
]
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(*command, **more) -> str:
  done = subprocess.run(
    [str(word) for word in command],
    **{"capture_output": True, "text": True, "timeout": 300} | more,
  )
  assert done.returncode == 0, (command, done.stdout, done.stderr)
  return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """The wheel of a copy of this checkout without earlier builds."""
  checkout = tmp_path_factory.mktemp("checkout")
  for name in ("antlm_jax", "configs", "evals"):
    shutil.copytree(runs.ROOT / name, checkout / name, symlinks=True)
  for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py"):
    shutil.copy(runs.ROOT / name, checkout)
  out = checkout / "dist"
  options = ("--no-deps", "--no-build-isolation", f"--wheel-dir={out}")
  run(*_PIP, "wheel", *options, checkout)
  (found,) = out.iterdir()
  return found


def test_the_wheel_holds_the_library_alone(wheel):
  assert wheel.name.startswith(f"antlm_jax-{antlm_jax.__version__}-py3-none")
  names = set(zipfile.ZipFile(wheel).namelist())
  tops = {name.split("/")[0] for name in names}
  assert {top.split("-")[0] for top in tops} == {"antlm_jax"}
  assert not [name for name in names if "benchmarks" in name]
  packed = ("antlm_jax", "configs", "evals")
  kinds = (".py", ".csv", ".j2")
  files = {p for top in packed for p in (runs.ROOT / top).rglob("*.*")}
  assert {
    name.removeprefix("antlm_jax/") for name in names if name.endswith(kinds)
  } == {
    str(path.relative_to(runs.ROOT)).removeprefix("antlm_jax/")
    for path in files
    if "benchmarks" not in path.parts and path.suffix in kinds
  }
  assert "antlm_jax/py.typed" in names


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
