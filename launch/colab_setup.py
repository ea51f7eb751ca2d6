"""Installs antlm_jax into a notebook's Python, beside the jax that is there.

    python launch/colab_setup.py

A runtime such as Colab's comes with jax, jaxlib and the plugin for its device.
Where setup.py allows those versions they are kept as they are; otherwise all
of them are changed together. Needs nothing but Python and its pip.
"""

import ast
import importlib.metadata
import operator
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What an accelerator needs beside jax and jaxlib, by the extra of jax.
PLUGINS = {
  "cuda12": "jax-cuda12-plugin",
  "cuda13": "jax-cuda13-plugin",
  "tpu": "libtpu",
}
# Which packages must be of one version.
_JAX = re.compile(r"jax|jaxlib|jax-cuda.*")
_CUDA13_DRIVER = 580  # the oldest driver that runs CUDA 13
_COMPARE = {">=": operator.ge, "<": operator.lt}
# Packages whose old version may still be in a session that has imported it.
_IMPORTED = ("jax", "jaxlib", "flax", "numpy", "scipy", "ml_dtypes")

Version = tuple[int, ...]


class Plan(NamedTuple):
  """What to do.

  Attributes:
    arguments: Of pip.
    why: What they keep or change, in one line.
  """

  arguments: list[str]
  why: str


def plan(
  python: Version, installed: Mapping[str, str], device: str, root=ROOT
) -> Plan:
  """Decides what pip installs.

  What is kept is asked for as the version that it is, so that pip cannot
  change it for another package's sake.

  Args:
    python: Its version, such as `(3, 12)`.
    installed: Versions by the packages' names.
    device: `cpu`, or an extra of jax: `cuda12`, `cuda13` or `tpu`.
    root: The checkout.
  """
  allowed = ranges((root / "setup.py").read_text("utf-8"), python)
  parts = {n: v for n, v in sorted(installed.items()) if _JAX.fullmatch(n)}
  keep = {"jax", "jaxlib"} <= parts.keys() and all(
    fits(version, allowed["jax"]) for version in parts.values()
  )
  present = [extra for extra, name in PLUGINS.items() if name in installed]
  # A plugin for another CUDA is one for the same device.
  there = device == "cpu" or device[:4] in [extra[:4] for extra in present]
  extras = [*([] if keep else present), *([] if there else [device])]
  jax = f"jax[{','.join(extras)}]" if extras else "jax"
  wanted = [jax]
  if keep:
    wanted = [f"{name}=={version}" for name, version in parts.items()]
    wanted += [f"{jax}=={parts['jax']}"] if extras else []
  base = ["install", "--editable", str(root)]
  return Plan([*base, *wanted], _why(python, installed, allowed, keep, extras))


def _why(python, installed, allowed, keep: bool, extras) -> str:
  along = [PLUGINS[extra] for extra in extras]
  before = installed.get("jax", "")
  if keep:
    what = f"keeping jax {before}" + (f", adding {along[0]}" if along else "")
  else:
    what = f"changing jax {before}" if before else "installing jax"
    what += f" together with {' and '.join(['jaxlib', *along])}"
  line = (
    f"{what}; setup.py allows jax {allowed['jax']} on Python"
    f" {python[0]}.{python[1]}, and with it flax {allowed['flax']}"
  )
  flax = installed.get("flax")
  if flax and not fits(flax, allowed["flax"]):
    line += f" (here is {flax}, which is changed)"
  return line


def ranges(setup: str, python: Version) -> dict[str, str]:
  """Reads the list PAIRED of setup.py.

  Args:
    setup: Its text.
    python: Which Python's versions are asked for.

  Returns:
    By package the versions that go together, such as `>=0.11.2,<0.13`.

  Raises:
    ValueError: if there is no such list, or an entry is not of its form.
  """
  for node in ast.parse(setup).body:
    if isinstance(node, ast.Assign) and node.targets[0].id == "PAIRED":
      break
  else:
    raise ValueError("setup.py has no list PAIRED")
  out = {}
  for entry in ast.literal_eval(node.value):
    found = re.fullmatch(
      r"(\w+)([\d.,<>=]+); python_version (<|>=) '([\d.]+)'", entry
    )
    if not found:
      raise ValueError(f"PAIRED of setup.py: cannot read {entry!r}")
    name, versions, compare, edge = found.groups()
    if _COMPARE[compare](python[:2], _version(edge)):
      out[name] = versions
  return out


def fits(version: str, versions: str) -> bool:
  """Whether a version is in a range such as `>=0.11.2,<0.13`."""
  for part in versions.split(","):
    compare, edge = re.fullmatch(r"(>=|<)([\d.]+)", part).groups()
    if not _COMPARE[compare](_version(version), _version(edge)):
      return False
  return True


def _version(text: str) -> Version:
  """The numbers that a version begins with, such as (0, 12, 0)."""
  numbers = re.match(r"\d+(\.\d+)*", text).group()
  return tuple(int(number) for number in numbers.split("."))


def installed_versions() -> dict[str, str]:
  """Returns the versions of all installed packages, by their names."""
  return {
    re.sub(r"[-_.]+", "-", d.name).lower(): d.version
    for d in importlib.metadata.distributions()
    if d.name
  }


def device() -> str:
  """Returns what this machine computes on, as `plan` names it."""
  try:
    asked = "--query-gpu=driver_version", "--format=csv,noheader"
    done = subprocess.run(
      ["nvidia-smi", *asked], capture_output=True, text=True, check=True
    )
    driver = _version(done.stdout)[0]
  except (OSError, subprocess.CalledProcessError, AttributeError):
    devices = pathlib.Path("/dev")
    tpus = [*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*")]
    return "tpu" if tpus else "cpu"
  return "cuda13" if driver >= _CUDA13_DRIVER else "cuda12"


def check(modules: Mapping[str, ModuleType], root=ROOT) -> None:
  """Checks that a session can go on with what is installed now.

  Args:
    modules: Its `sys.modules`.
    root: The checkout.

  Raises:
    RuntimeError: if it must be restarted, or something is not installed.
  """
  importlib.invalidate_caches()
  now = installed_versions()
  allowed = ranges((root / "setup.py").read_text("utf-8"), sys.version_info[:2])
  for name in ("antlm-jax", *allowed):
    if name not in now or not fits(now[name], allowed.get(name, ">=0")):
      raise RuntimeError(
        f"{name} {now.get(name, 'is not')} installed, which will not do: see"
        " what pip says above"
      )
  for name in _IMPORTED:
    before = getattr(modules.get(name), "__version__", None)
    if before and before != now.get(name.replace("_", "-")):
      raise RuntimeError(
        f"this session has imported {name} {before}, which was changed since:"
        " restart it (Runtime > Restart session) and run all cells again"
      )


def main() -> int:
  """Installs, and returns pip's status."""
  found = device()
  todo = plan(sys.version_info[:2], installed_versions(), found)
  print(f"device: {found}; {todo.why}", flush=True)
  pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
  return subprocess.run([*pip, *todo.arguments]).returncode


if __name__ == "__main__":
  sys.exit(main())
