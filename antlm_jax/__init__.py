"""One transformer, trained with causal and masked language modeling.

  import antlm_jax as ax

  data = ax.prepare("texts/*.txt", vocab_size=8192)
  run = ax.train("babylm_small", "runs/first", data, curriculum="4C+16M+4C")
  model = ax.load("runs/first")
  print(ax.generate(model, "the dogs near", tokens=20)[0])
  print(ax.fill(model, "the dogs <mask> often rested ."))
  print(ax.score(model, ["Tom sat .", "Tom sit ."], mode="causal"))

Nothing is imported before it is used.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from antlm_jax.api import *

__version__ = "0.2.0"
__all__ = [
  "AttentionMask",
  "Config",
  "Evaluator",
  "Hook",
  "Objective",
  "attend",
  "export",
  "generate",
  "import_model",
  "load",
  "merge",
  "plan",
  "prepare",
  "score",
  "train",
]


def __getattr__(name: str) -> object:
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.api"), name)


def __dir__() -> list[str]:
  return [*__all__, "__version__"]


class _Package(types.ModuleType):
  def __setattr__(self, name: str, value: object) -> None:
    # Importing the module `train` would set an attribute of its name;
    # `antlm_jax.train` is the function all the same.
    if not (name in __all__ and isinstance(value, types.ModuleType)):
      super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
