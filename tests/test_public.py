"""The public API of `import antlm_jax`."""

import ast
import inspect
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import antlm_jax
from antlm_jax import config, settings
from antlm_jax.evals import finetune
from antlm_jax.evals.finetune import PRESETS
from antlm_jax.evals.zero_shot.tasks import TASKS
from antlm_jax.objectives.objective import KINDS
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


BASES = {
  "model": "EncoderConfig",
  "optimizer": "Optimizer",
  "schedule": "Schedule",
}


def unique_settings(groups):
  """Returns the types of the settings whose name is in one group alone."""
  types, groups_of = {}, {}
  for group, sections in groups.items():
    for section in sections:
      for name, field in settings.fields_of(section).items():
        type_name = field.value_type.__name__
        if isinstance(field, settings.ListField):
          type_name += f" | Sequence[{type_name}]"
        types[name] = type_name
        groups_of.setdefault(name, set()).add(group)
  return {name: types[name] for name in types if len(groups_of[name]) == 1}


def run_settings():
  """Returns the types of the settings that `train` takes by a short name."""
  # A run has several objectives, whose settings have no name of their own.
  groups = {"": [config.Config], "C": KINDS.values(), "M": KINDS.values()}
  parts = {"data": None}  # also the name of an argument
  for group, section in config.GROUPS.items():
    if group in config.REGISTRIES:
      groups[group] = section.values()
      parts[group] = f"str | _{BASES[group]}"
    else:
      groups[group] = [section]
      parts.setdefault(group, section.__name__)
  out = unique_settings(groups) | parts
  return {n: out[n] for n in out if n not in ("data", "objectives", "hooks")}


def test_its_stub_knows_the_settings_tasks_and_presets():
  """Catches a setting that type checkers refuse, or know by another type."""
  tree = ast.parse((ROOT / "antlm_jax/__init__.pyi").read_text("utf-8"))
  # Each function's first signature.
  stubs = {getattr(node, "name", ""): node for node in tree.body[::-1]}
  tuning = [finetune.Grid, finetune.Hyperparameters]
  tuning += [section for x in PRESETS.values() for section in x.settings]
  scoring = [task.settings for task in TASKS.values()]
  for function, stub, expected, choices in (
    (antlm_jax.train, "_RunSettings", run_settings(), ()),
    (
      antlm_jax.finetune,
      "_TuningSettings",
      unique_settings({"": tuning}),
      PRESETS,
    ),
    (
      antlm_jax.evaluate,
      "_TaskSettings",
      unique_settings({"": scoring}),
      TASKS,
    ),
  ):
    known = {x.target.id: ast.unparse(x.annotation) for x in stubs[stub].body}
    known = {name: known[name].removesuffix(" | None") for name in known}
    assert known == expected
    arguments = stubs[function.__name__].args
    names = [x.arg for x in (*arguments.args, *arguments.kwonlyargs)]
    assert [*inspect.signature(function).parameters][:-1] == names
    literals = re.findall(r"Literal(\[[^]]*\])", ast.unparse(arguments))
    # The order of a registry is that of the modules' first imports.
    found = [sorted(ast.literal_eval(text)) for text in literals]
    assert not choices or sorted(choices) in found


@pytest.mark.parametrize("name", FUNCTIONS.split())
def test_help_begins_with_types_alone(name):
  """Catches a signature with its fields' limits: help() had 16,000 letters."""
  text = str(inspect.signature(getattr(antlm_jax, name)))
  assert "Annotated" not in text and " object at" not in text
  assert len(text) < 800


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
ax.train("quickstart", "runs/x", data, steps=9, **{"eval.every": 100})
ax.train("quickstart", data=data, optimizer="muon", train=ax.Train(steps=3))
ax.evaluate("x", "of_a_plugin", "y", **{"share": 0.5})
"""
WRONG = """
import antlm_jax as ax

ax.prepare(["a"], vocab_sice=300)
ax.prepare(["a"], seq_len="long")
ax.train("quickstart", "x", hooks=[1])
ax.load("x").steps
ax.fill("x", "a <mask>", step="x")
ax.unknown
ax.train("quickstart", "x", stepz=3)
ax.train("quickstart", "x", steps="three")
ax.evaluate("x", "cola", "y")
ax.finetune("x", "y", preset="classify")
ax.finetune("x", "y", epoch=3)
ax.train(curriculum="C")
ax.Config(curriculum=3)
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
  assert wrong == {str(line) for line in range(4, 17)}
  shown = [x for *_, x in lines if "Revealed" in x]
  assert len(shown) == len(names)
  # NumPy writes an open shape as Any.
  known = ("tuple[Any, ...]", "dtype[Any]")
  for name, said in zip(names, shown, strict=True):
    for each in known:
      said = said.replace(each, "")
    assert "Any" not in said, (name, said)
