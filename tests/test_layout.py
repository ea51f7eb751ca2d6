"""Package layout: the direction and the cost of imports."""

import subprocess
import sys

import pytest

from antlm_jax.commands import COMMANDS
from antlm_jax.evals.benchmarks import concepts, structure

HEAVY = {"torch", "tensorboardX", "matplotlib", "tensorflow", "transformers"}


def test_no_module_imports_what_is_above_it_or_imports_it():
  arrows = structure.imports(structure.modules())
  assert "antlm_jax.errors" in arrows["antlm_jax.models.llama"]
  assert not structure.upward(arrows)
  assert not structure.circles(arrows)


def output(code: str) -> str:
  """Runs code in a fresh process; returns its output."""
  command, options = [sys.executable, "-c", code], {"cwd": structure.ROOT}
  return subprocess.check_output(command, text=True, **options)


def loaded(*modules: str) -> set[str]:
  """Returns all modules of a fresh process that imports `modules`."""
  code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
  return set(output(code).split())


def test_evals_has_one_name():
  """A second name would give each registry twice, without a word."""
  code = "import runpy; runpy.run_module('evals.score')"
  done = subprocess.run(
    [sys.executable, "-c", code],
    **{"capture_output": True, "text": True, "cwd": structure.ROOT},
  )
  assert done.returncode == 1
  assert done.stderr.splitlines()[-1] == (
    "ImportError: import antlm_jax.evals instead of evals:"
    " it is a part of antlm_jax"
  )


@pytest.fixture(scope="module")
def commands():
  texts = {n: p.read_text("utf-8") for n, p in structure.modules().items()}
  ways = "cli.run_command(main)", "\ndef main(argv: Sequence[str])"
  return {n for n, text in texts.items() if any(way in text for way in ways)}


def test_no_command_loads_what_only_some_need(commands):
  assert not loaded(*commands) & HEAVY


def test_antlm_knows_every_command(commands):
  known = {entry.split()[0] for entry in COMMANDS.values()}
  known |= {"antlm_jax.__main__"}
  # Modules that a study and launch/antlm_on_gpu.sh start.
  known |= {"antlm_jax.evals.studies.jobs", "antlm_jax.evals.studies.one_gpu"}
  assert {n for n in commands if ".benchmarks." not in n} == known


def test_antlm_tells_them_without_loading_them():
  code = """
import sys
from antlm_jax.__main__ import main
main([])
print(*{name.split(".")[0] for name in sys.modules} & {"jax", "numpy"})
"""
  told = output(code).splitlines()
  assert [line.split("  ")[0] for line in told[1:-3]] == [
    f"antlm {name}" for name in COMMANDS
  ]
  assert told[-1] == ""


def test_the_gpus_check_needs_few_packages():
  """launch/gpu_check.sh names the packages."""
  modules = ("tests.test_gpu", "antlm_jax.evals.benchmarks.attention")
  others = "array_record grain ml_collections safetensors tensorflow_datasets"
  others = {*others.split(), "tokenizers", "tqdm"}
  assert not loaded(*modules) & (others | HEAVY)


def test_the_help_of_training_loads_only_what_it_shows():
  """Catches an import of orbax or grain, each of which takes a second."""
  code = """
import sys
from antlm_jax.commands import train
try:
  train.main(["--help"])
except SystemExit:
  print(*sys.modules)
"""
  names = {name.partition(".")[0] for name in output(code).split()}
  assert "jax" in names and not names & {"orbax", "grain", "tensorstore"}


def test_attention_loads_few_others():
  names = {
    n for n in loaded("antlm_jax.attention") if n.startswith("antlm_jax")
  }
  of_attention = {n for n in names if n.startswith("antlm_jax.attention")}
  assert names - of_attention == {
    "antlm_jax",
    "antlm_jax.errors",
    "antlm_jax.hashing",
    "antlm_jax.masks",
    "antlm_jax.mesh",
    "antlm_jax.settings",
  }


def held(found):
  """Asserts that no number of concepts is over its limit."""
  over = {n: x for n, x in found.items() if x > concepts.LIMITS[n][0]}
  assert found and not over


def test_names_and_the_way_of_a_setting_keep_their_limits():
  """Catches a class name with a second meaning, and a Config made twice."""
  held(concepts.measure_concepts(**structure.product_files(), walk=False))


@pytest.mark.slow
def test_the_way_of_a_training_keeps_its_limits(capsys):
  """Catches a further class or file on the way of `antlm train`."""
  held({f"train: {n}": x for n, x in concepts.walk_training().counts().items()})
