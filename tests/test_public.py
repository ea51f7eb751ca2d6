"""What `import antlm_jax` offers."""

import importlib
import sys

import pytest

import antlm_jax
from antlm_jax.attention import attend
from antlm_jax.inference import filling, generation, scoring, unmasking
from antlm_jax.inference.model import load
from antlm_jax.masks import AttentionMask
from antlm_jax.objectives.objective import Objective
from tests import runs


def test_it_offers_what_stands_elsewhere():
  assert {name: getattr(antlm_jax, name) for name in antlm_jax.__all__} == {
    "load": load,
    "attend": attend,
    "AttentionMask": AttentionMask,
    "Objective": Objective,
    "generate": generation.generate,
    "fill_mask": filling.fill_mask,
    "unmask": unmasking.unmask,
    "score": scoring.score,
  }
  assert set(antlm_jax.__all__) <= set(dir(antlm_jax))
  with pytest.raises(AttributeError, match="no attribute 'unknown'"):
    _ = antlm_jax.unknown


@pytest.mark.parametrize("name", ["generate", "fill_mask"])
def test_a_function_is_not_its_command(name):
  """Importing a submodule sets its package's attribute, as a rule."""
  command = importlib.import_module(f"antlm_jax.{name}")
  assert callable(command.main)
  assert callable(getattr(antlm_jax, name))
  scope = {}
  exec(f"from antlm_jax import {name} as found", scope)
  assert scope["found"] is getattr(antlm_jax, name) is not command
  # Other submodules are attributes as ever.
  assert antlm_jax.masks is sys.modules["antlm_jax.masks"]


def test_nothing_is_imported_before_it_is_used():
  code = """
import sys, antlm_jax
print({name.split(".")[0] for name in sys.modules} & {"jax", "numpy", "flax"})
from antlm_jax import AttentionMask
assert "antlm_jax.models" not in sys.modules
"""
  assert runs.run_code(code, devices=1) == "set()"
