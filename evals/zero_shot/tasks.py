"""All zero-shot tasks: each module here that implements one registers it."""

import importlib
import pkgutil

from antlm_jax.evals import zero_shot
from antlm_jax.evals.zero_shot.task import TASKS

__all__ = ["TASKS"]

for module in pkgutil.iter_modules(zero_shot.__path__):
  importlib.import_module(f"{zero_shot.__name__}.{module.name}")
