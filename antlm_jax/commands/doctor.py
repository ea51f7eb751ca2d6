"""Checks an installation: versions, devices and optional packages.

If a required package is missing or of an untested version, or JAX cannot
compute, the exit status is 1.
"""

import importlib.metadata
import pathlib
import platform
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from packaging.requirements import Requirement

import antlm_jax
from antlm_jax import cli, tables
from antlm_jax.errors import explain
from antlm_jax.planning import compilers
from antlm_jax.runtime import compilation

# Use of the optional packages, by the extra that installs them.
_EXTRAS = {
  "evals": "antlm report",
  "hf": "opening exported models, GGUF",
  "datasets": "text of the Hub, hf://NAME",
  "gcs": "runs and data in buckets, gs://",
  "wandb": "log.writers=wandb",
  "notebook": "the notebook, outside Colab",
  "plan-tpu": "antlm plan for TPUs",
  "plan-gpu": "antlm plan for GPUs",
  "datatrove": "filters for web text, in a checkout",
  "mteb": "benchmarks of embedders",
  "docs": "the documentation's site",
}
_COMPILERS = {"plan-tpu": compilers.libtpu, "plan-gpu": compilers.cuda}


def _packages() -> Iterator[tuple[str, Requirement, str]]:
  """Yields an extra ("" for none), a package, and its version ("" if absent).

  They are the requirements that apply to this Python. Raises a
  PackageNotFoundError if antlm_jax runs from a folder without being installed.
  """
  for line in importlib.metadata.requires("antlm_jax") or ():
    requirement = Requirement(line)
    marker = requirement.marker
    is_optional = marker is not None and "extra" in str(marker)
    for extra in ("", *_EXTRAS):
      if bool(extra) != is_optional:
        continue
      if marker and not marker.evaluate({"extra": extra}):
        continue
      try:
        version = importlib.metadata.version(requirement.name)
      except importlib.metadata.PackageNotFoundError:
        version = ""
      yield extra, requirement, version


def doctor() -> None:
  """Prints the state of this installation, and exits with 1 if it is faulty."""
  print(
    f"antlm {antlm_jax.__version__}, Python {platform.python_version()},"
    f" {platform.platform()}"
  )
  problems = []
  try:
    packages = list(_packages())
  except importlib.metadata.PackageNotFoundError:
    packages = []
    root = pathlib.Path(antlm_jax.__file__).parents[1]
    problems.append(
      f"{root} is on Python's path but not installed, so the required versions"
      f" of packages are unknown: pip install -e {root}"
    )
  rows = []
  lacking: dict[str, list[str]] = {}
  for extra, requirement, version in packages:
    name = requirement.name
    versions = requirement.specifier
    tested = version and versions.contains(version, prereleases=True)
    if extra:
      lacking.setdefault(extra, []).extend([] if tested else [name])
      continue
    rows.append((name, version or "missing", str(versions)))
    if not tested:
      state = version or "is missing"
      problems.append(f"{name} {state}: pip install '{name}{versions}'")
  if rows:
    print(tables.text_table(rows, ("package", "version", "tested")))
    print()
  rows = []
  for extra, names in lacking.items():
    if extra in _COMPILERS:  # an extra of jax, which is always there
      names = [] if _COMPILERS[extra]() else ["its compiler"]
    if len(names) > 4:
      names = [*names[:3], f"{len(names) - 3} more"]
    state = f"needs {', '.join(names)}" if names else "yes"
    rows.append((f"antlm_jax[{extra}]", state, _EXTRAS[extra]))
  if rows:
    print(tables.text_table(rows, ("optional", "installed", "for")))
    print()
  problems += _device_problems()
  for problem in problems:
    print(f"problem: {problem}")
  if problems:
    sys.exit(1)
  print("everything that antlm_jax needs is here")


def _device_problems() -> Iterator[str]:
  """Prints the state of devices and compiler; yields their problems."""
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as error:
    if explained := explain(error):
      yield explained[1].removeprefix("error: ")
      return
    raise
  start = time.monotonic()
  ones = jnp.ones((512, 512))
  if float(jax.jit(lambda x: jnp.sum(x @ x))(ones)) != 512**3:
    yield "a matrix product of this device is wrong"
  print(
    f"{jax.device_count()} x {jax.devices()[0].device_kind}: a matrix product"
    f" compiled and ran in {time.monotonic() - start:.1f} s"
  )
  compilation.keep_programs()
  if folder := compilation.program_cache():
    print(f"compiled programs are kept in {folder}")
  else:
    print(
      "compiled programs are not kept: to keep them, set"
      " JAX_COMPILATION_CACHE_DIR to a folder"
    )


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  cli.call_with_arguments(doctor, argv, __doc__)
