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

import ast
import functools
import importlib
import pathlib

__version__ = "0.2.0"


@functools.cache
def _homes() -> dict[str, str]:
  """Returns the module of each public name, from the stub next to this file."""
  stub = pathlib.Path(__file__).with_suffix(".pyi").read_text("utf-8")
  return {
    name.name: node.module
    for node in ast.walk(ast.parse(stub))
    if isinstance(node, ast.ImportFrom)
    for name in node.names
    if name.name == name.asname
  }


def __getattr__(name: str) -> object:
  if name not in _homes():
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(_homes()[name]), name)


def __dir__() -> list[str]:
  return [*_homes(), "__version__"]
