"""The public API of `import antlm_jax`."""

import os
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import antlm_jax
from tests import runs

ROOT = pathlib.Path(__file__).parent.parent
FUNCTIONS = (
  "prepare train load score perplexity generate fill embed finetune predict"
  " evaluate export import_model compare sweep plan"
)


def test_it_offers_what_its_stub_names():
  names = {*dir(antlm_jax)}
  assert {*FUNCTIONS.split(), "Config", "Muon", "Hook", "attend"} <= names
  for name in names:
    assert getattr(antlm_jax, name) is not None
  with pytest.raises(AttributeError, match="no attribute 'unknown'"):
    _ = antlm_jax.unknown


def test_no_module_hides_a_function():
  """Catches a module whose import would replace a public function."""
  found = {name for _, name, _ in pkgutil.iter_modules(antlm_jax.__path__)}
  assert "masks" in found and not found & {*dir(antlm_jax)}


def test_nothing_is_imported_before_it_is_used():
  code = """
import sys, antlm_jax
print({name.split(".")[0] for name in sys.modules} & {"jax", "numpy", "flax"})
from antlm_jax import AttentionMask
assert "antlm_jax.models" not in sys.modules
"""
  assert runs.run_code(code, devices=1) == "set()"


USAGE = """
from typing import assert_type

import numpy as np
import numpy.typing as npt

import antlm_jax as ax

data = ax.prepare(["a b c"], vocab_size=300)
model = ax.load("runs/x")
assert_type(ax.score(model, ["a"]), npt.NDArray[np.float64])
assert_type(ax.generate("runs/x", ["a"], count=2), list[str])
(filled,) = ax.fill(model, "a <mask>", steps=1)
assert_type(filled.masks[0].candidates, list[tuple[str, float]])
config: ax.Config = ax.Config(optimizer=ax.Muon(), schedule=ax.WSD())
run = ax.train(config, "runs/x", data, curriculum="4C+4M", seed=1)
assert_type(run.losses, dict[str, float])
assert_type(ax.perplexity(model, ["a"], mode="clm").bits_per_byte, float)
assert_type(ax.evaluate("x", "blimp", "y", mode="mlm", limit=9).score, float)
tuned = ax.finetune(model, [("a", "x")], preset="classification", lrs=(1e-4,))
assert_type(tuned["own"].score, float)
assert_type(ax.predict("model", ["a"])[0].label, str | None)
assert_type(ax.embed(model, ["a"]), npt.NDArray[np.float32])
assert_type(ax.compare(["runs/x"]).best.label, str)
swept = ax.sweep("quickstart", {"seed": [1, 2]}, "runs/s", data=data)
assert_type(swept.failed, tuple[str, ...])
assert_type(ax.plan("quickstart", "v5e:2x2").fits, bool)
"""
WRONG = """
import antlm_jax as ax

ax.prepare(["a"], vocab_sice=300)
ax.prepare(["a"], seq_len="long")
ax.train("quickstart", "x", hooks=[1])
ax.load("x").steps
ax.fill("x", "a <mask>", step="x")
ax.unknown
"""
# Large packages that no public type comes from.
SKIPPED = """
[mypy-torch.*,transformers.*,wandb.*,onnx.*,onnxscript.*,IPython.*,matplotlib.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_public_surface(tmp_path):
  """Right calls pass, wrong calls are found, and no public name is untyped.

  This is a single test because the checker reads all modules each time.
  """
  names = [n for n in dir(antlm_jax) if n.islower() and n[0] != "_"]
  shown = "".join(f"reveal_type(ax.{name})\n" for name in names)
  codes = {
    "right.py": USAGE,
    "wrong.py": WRONG,
    "shown.py": f"import antlm_jax as ax\n{shown}",
  }
  for name, code in {**codes, "mypy.ini": f"[mypy]{SKIPPED}"}.items():
    (tmp_path / name).write_text(code)
  words = ["--follow-imports=silent", "--explicit-package-bases", "--strict"]
  done = subprocess.run(
    [sys.executable, "-m", "mypy", *words, *codes],
    cwd=tmp_path,
    env=os.environ | {"MYPYPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert not done.stderr, done.stderr
  lines = [line.split(":", 2) for line in done.stdout.splitlines()[:-1]]
  assert not [line for line in lines if line[0] == "right.py"]
  wrong = {n for file, n, x in lines if file == "wrong.py" and "error" in x}
  assert wrong == {*"456789"}
  shown = [x for *_, x in lines if "Revealed" in x]
  assert len(shown) == len(names)
  # NumPy writes an open shape as Any.
  known = ("tuple[Any, ...]", "dtype[Any]")
  for name, said in zip(names, shown, strict=True):
    for each in known:
      said = said.replace(each, "")
    assert "Any" not in said, (name, said)
