"""One transformer, trained with causal and masked language modeling.

  import antlm_jax

  model = antlm_jax.load("runs/first")
  print(antlm_jax.generate(model, "the dogs near", tokens=20))
  print(antlm_jax.fill_mask(model, "the dogs <mask> often rested .")[0])
  print(antlm_jax.score(model, ["Tom sat .", "Tom sit ."], "causal"))

Nothing is imported before it is used.
"""

import importlib
import sys
import types

__version__ = "0.2.0"
_HOMES = {
  "load": "inference.model",
  "attend": "attention",
  "AttentionMask": "masks",
  "Objective": "objectives.objective",
  "generate": "inference.generation",
  "fill_mask": "inference.filling",
  "unmask": "inference.unmasking",
  "score": "inference.scoring",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
  return getattr(home, name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
  def __setattr__(self, name: str, value) -> None:
    # Importing a command sets an attribute of its name, as of any submodule;
    # `generate` and `fill_mask` are the functions all the same.
    if not (name in _HOMES and isinstance(value, types.ModuleType)):
      super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
