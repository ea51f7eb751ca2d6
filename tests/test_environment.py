"""Variables of the environment and settings of notebooks change no run."""

import contextlib
import functools
import inspect
import io
import logging
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import antlm_jax as ax
from antlm_jax import jax_flags, private
from antlm_jax.data import preparation, text_files
from antlm_jax.data.preparation import Preparation
from antlm_jax.data.shards import Recipe
from antlm_jax.errors import UserError
from antlm_jax.inference.model import load, write_checkpoint
from antlm_jax.runtime import cores, progress
from tests import random_models, runs

# Another value of each flag that `library_flags` holds.
FLAGS = {
  "jax_enable_x64": True,
  "jax_default_prng_impl": "rbg",
  "jax_threefry_partitionable": False,
  "jax_enable_custom_prng": True,
  "jax_random_seed_offset": 7,
  "jax_high_dynamic_range_gumbel": True,
  "jax_accurate_erf_inv": True,
  "jax_default_matmul_precision": "highest",
  "jax_numpy_dtype_promotion": "strict",
  "jax_numpy_rank_promotion": "raise",
  "jax_softmax_custom_jvp": True,
  "jax_use_hlo_logistic_lowering": True,
  "jax_disable_jit": True,
}
TINY = (
  "train.steps=4",
  "curriculum=C:M=1:1",
  "model.layers=1",
  "model.width=32",
  "model.dropout=0.1",
  "checkpoint.every=2",
  "eval.every=0",
)


@pytest.fixture
def flags():
  """Sets every flag in this process, as a notebook does; yields those set."""
  known = {n: x for n, x in FLAGS.items() if hasattr(jax.config, n)}
  before = {name: getattr(jax.config, name) for name in known}
  for name, value in known.items():
    jax.config.update(name, value)
  yield known
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(scope="module")
def run(prepared, shared):
  """A tiny run, trained without any variable."""
  return shared("plain_run", lambda out: runs.train(out, prepared, *TINY))


def test_a_newer_jax_still_has_the_flags():
  """They are set by a name that is not public: `jax.config._value_holders`."""
  assert FLAGS.keys() == jax_flags._VALUES.keys()
  absent = {n for n in FLAGS if not hasattr(jax.config, n)}
  newer = {"jax_accurate_erf_inv", "jax_use_hlo_logistic_lowering"}
  assert absent <= newer  # than JAX for Python 3.11
  for name, value in jax_flags._VALUES.items():
    assert getattr(jax.config, name, value) == value, "not JAX's default"


@pytest.mark.slow
def test_flags_of_a_notebook_change_no_number(run, prepared, tmp_path, flags):
  done = runs.train(tmp_path / "run", prepared, *TINY)
  (line,) = (x for x in done.stdout.splitlines() if "antlm_jax ignores" in x)
  assert all(name.upper() in line for name in flags)
  assert runs.same_params(run, tmp_path / "run")
  sampled = ax.generate(run, "the", tokens=4, temperature=1.0, seed=3)
  scores = ax.score(run, ["the dogs rest ."], mode="causal")
  # The notebook keeps its flags.
  assert {name: getattr(jax.config, name) for name in flags} == flags
  with contextlib.ExitStack() as plain:
    for name, value in jax_flags._VALUES.items():
      if name in flags:
        plain.enter_context(private.jax_flags()[name](value))
    again = ax.generate(run, "the", tokens=4, temperature=1.0, seed=3)
    assert again == sampled
    assert ax.score(run, ["the dogs rest ."], mode="causal") == scores


@pytest.mark.slow
def test_variables_of_a_shell_change_no_run(run, prepared, tmp_path):
  """The whole command: flags of JAX, and an output that is ASCII alone."""
  variables = {name.upper(): str(value) for name, value in FLAGS.items()}
  locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
  words = runs.train_args(tmp_path / "run", prepared, *TINY)
  done = subprocess.run(
    runs.command("antlm_jax", "train", *words),
    env=os.environ | variables | locale | {"PYTHONIOENCODING": "ascii"},
    capture_output=True,
    encoding="ascii",
  )
  assert done.returncode == 0, done.stderr
  assert r"step 4/4 \xb7 " in done.stdout
  assert "antlm_jax ignores JAX_" in done.stdout
  assert runs.same_params(run, tmp_path / "run")


def test_a_checkpoint_of_another_data_type_is_not_called_damaged(tmp_path):
  loaded = load(random_models.save(tmp_path / "run", random_models.tokenizer()))
  with jax.enable_x64(True):
    params = {n: np.asarray(x, np.float64) for n, x in loaded.params.items()}
    path = write_checkpoint(tmp_path / "wide", 1, params, loaded.meta)
  with pytest.raises(UserError, match="is float64, but the model"):
    load(path)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_python_prints_signs_that_an_output_lacks(encoding, monkeypatch):
  printed = io.BytesIO()
  output = io.TextIOWrapper(printed, encoding, newline="\n")
  monkeypatch.setattr(sys, "stdout", output)
  progress.say("C→M, \udcff")
  arrow = "→" if encoding == "utf-8" else r"\u2192"
  assert printed.getvalue().decode(encoding) == f"C{arrow}M, \\udcff\n"


def test_names_that_are_not_utf8_are_refused(prepared):
  """ArrayRecord and orbax would fail with a traceback, after the work."""
  name = os.fsdecode(b"name-\xff")
  why = "='name-\\udcff' is not UTF-8: rename it"
  assert f"workdir{why}" in runs.told(ax.train, "quickstart", name, prepared)
  assert f"output{why}" in runs.told(ax.prepare, "text.txt", name)
  assert f"output{why}" in runs.told(ax.export, "run", name)
  words = "--model=run", f"--workdir={name}"
  assert why in runs.refused("antlm_jax.commands.import_", *words)


@pytest.mark.parametrize(
  ("affinity", "task", "quota", "expected"),
  [
    (8, "", "", 8),
    (1, "", "", 1),
    (8, "3", "", 3),
    (2, "16", "max 100000", 2),
    (8, "", "450000 100000", 4),
    (8, "", "50000 100000", 1),
  ],
)
def test_cores_are_those_of_the_process(
  affinity, task, quota, expected, monkeypatch, tmp_path
):
  """The machine of a Slurm job or of a container has more."""
  (tmp_path / "cpu.max").write_text(f"{quota}\n")
  monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
  monkeypatch.setenv("SLURM_CPUS_PER_TASK", task)
  everything = set(range(affinity))
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: everything)
  assert cores.count_cores() == expected


def test_a_preparation_goes_on_with_other_cores(tmp_path, monkeypatch):
  """The next job of a cluster may have more or fewer."""
  monkeypatch.setattr(preparation, "_SMALL", 0)  # as if the text were large
  text = tmp_path / "text.txt"
  text.write_text("the dogs rest .\n\n" * 100_000)
  corpus = text_files.find_corpus([str(text)])
  defaults = inspect.signature(ax.prepare).parameters
  arguments = {name: x.default for name, x in defaults.items()}
  recipe = Recipe.of(arguments, None)
  tasks = []
  for count in (2, 1):
    monkeypatch.setattr(cores, "count_cores", functools.partial(int, count))
    asked = Preparation(recipe, corpus, tmp_path / "data")
    asked.begin()
    tasks.append(asked.tasks)
  assert tasks == [2, 2]


def test_quiet_calls_show_no_warnings_of_orbax(caplog):
  """Catches a slow save that prints a line, and warnings lost afterwards."""
  log = logging.getLogger("absl")
  with progress.quietly():
    log.warning("Waiting for previous save to complete took 1.15 seconds.")
  with progress.quietly(False):
    log.warning("shown")
  assert [record.message for record in caplog.records] == ["shown"]
