"""The shape of the code: its lines, functions and imports.

    python -m antlm_jax.evals.benchmarks.structure

Prints for each area and package its files and lines, and the lines of its
longest file and function. Counts its private functions, and those that one
place in their file calls by name. Then prints the concepts that a reader meets,
next to the limits and goals of `concepts`. It ends with the circles of imports,
and imports that lead upward in `LEVELS`, also those within functions. Exits
with status 1 if there are any.
"""

import ast
import collections
import contextlib
import graphlib
import io
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping

from antlm_jax import cli, tables
from antlm_jax.evals.benchmarks import concepts

ROOT = pathlib.Path(__file__).resolve().parents[2]  # not by the link
# A module may import modules of lower levels and of its own group. A level's
# groups are packages and modules; + joins several to one group.
LEVELS = (
  "errors+cli+plugins+units+hashing+masks+settings+arguments+tables",
  "mesh",
  "objectives",
  "runtime",
  "attention data",
  "models",
  "head optim",
  "config+config_help+sections",
  "training",
  "page",
  "inference planning",
  "hf",
  "",  # antlm_jax itself, which users import
  "commands",
  "__main__",
  "evals",
  "evals.score evals.finetune",
  "evals.babylm evals.studies",
  "evals.benchmarks",
)
_GROUPS = {
  f"antlm_jax.{name}".removesuffix("."): (level, group)
  for level, groups in enumerate(LEVELS)
  for group in groups.split(" ")
  for name in group.split("+")
}
# Lower levels that a group never imports, and the only ones that it does.
NEVER = {"models": ("objectives",)}
ONLY = {"attention": ("antlm_jax.masks", "antlm_jax.hashing", "antlm_jax.mesh")}

# The areas, by the beginning of their files' names; the first that fits counts.
_SATELLITES = (
  r"antlm_jax/(planning/|hf/|commands/plan|.*/toy_english[.]|.*/chips[.])"
)
AREAS = {
  _SATELLITES: "satellites",
  "antlm_jax/": "core",
  "evals/benchmarks/": "benchmarks",
  "evals/": "evals",
  "tests/": "tests",
}


def module_group(module: str) -> tuple[int, str]:
  """Returns a module's level, counted from the ground, and its group.

  Raises:
    KeyError: if `LEVELS` does not have it.
  """
  root = module
  # The package itself is one module, not all that has no other level.
  while root and (root not in _GROUPS or root == "antlm_jax" != module):
    root = root.rpartition(".")[0]
  if not root:
    raise KeyError(f"{module} has no level in evals.benchmarks.structure")
  return _GROUPS[root]


def modules(root: pathlib.Path = ROOT) -> dict[str, pathlib.Path]:
  """Returns the library's modules and their files, without copied code.

  `hf/remote` goes into exported models, and imports transformers alone. A link
  makes evals/ a part of the library: antlm_jax.evals.
  """
  out = {}
  for package in ("antlm_jax", "evals"):
    for path in sorted((root / package).rglob("*.py")):
      name = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
      name = re.sub("^evals", "antlm_jax.evals", name)
      if ".remote." not in name:
        out[name.removesuffix(".__init__")] = path
  return out


def imports(files: Mapping[str, pathlib.Path]) -> dict[str, set[str]]:
  """Returns which of the modules each one imports, at the top or within."""
  return {
    name: {
      found
      for node in ast.walk(ast.parse(path.read_text("utf-8")))
      for found in _imported(node, files)
      if found != name
    }
    for name, path in files.items()
  }


def _imported(node: ast.AST, known: Iterable[str]) -> Iterator[str]:
  if isinstance(node, ast.Import):
    yield from (n.name for n in node.names if n.name in known)
  elif isinstance(node, ast.ImportFrom) and node.module in known:
    for n in node.names:  # a module, or a name in a module
      inner = f"{node.module}.{n.name}"
      yield inner if inner in known else node.module


def upward(arrows: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
  """Returns the imports that `LEVELS`, `NEVER` and `ONLY` do not allow."""
  return sorted(
    (a, b) for a, targets in arrows.items() for b in targets if not _may(a, b)
  )


def _may(a: str, b: str) -> bool:
  (from_level, source), (to_level, target) = module_group(a), module_group(b)
  if source == target:
    return True
  if target in NEVER.get(source, ()) or b not in ONLY.get(source, (b,)):
    return False
  return to_level < from_level


def circles(arrows: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
  """Returns modules that import each other, around corners too: one circle."""
  try:
    graphlib.TopologicalSorter(arrows).prepare()
  except graphlib.CycleError as error:
    return [tuple(sorted(set(error.args[1])))]
  return []


def _file_sizes(path: pathlib.Path) -> list[int]:
  """A file's lines, its longest function's, private functions, called once."""
  text = path.read_text("utf-8")
  nodes = list(ast.walk(ast.parse(text)))
  functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
  private = [f.name for f in functions if re.match("_[^_]", f.name)]
  uses = collections.Counter(
    n.id if isinstance(n, ast.Name) else n.attr
    for n in nodes
    if isinstance(n, ast.Name | ast.Attribute)
  )
  longest = max((f.end_lineno - f.lineno + 1 for f in functions), default=0)
  once = sum(uses[name] <= 1 for name in private)
  return [text.count("\n"), longest, len(private), once]


def areas() -> dict[str, list[pathlib.Path]]:
  """Returns the files of each area, and of the packages within."""
  out = collections.defaultdict(list)
  for top in ("antlm_jax", "evals", "tests"):
    for path in sorted((ROOT / top).rglob("*.py")):
      name = path.relative_to(ROOT).as_posix()
      area = next(a for start, a in AREAS.items() if re.match(start, name))
      out[area].append(path)
      first, *inner = name.split("/")[1:]
      if area in ("core", "satellites", "evals"):
        out[f"{area}: {first if inner else 'commands and ground'}"] += [path]
  return out


def product_files() -> dict[str, list[pathlib.Path]]:
  """Returns the files of the core, and of all that is no test."""
  found = areas()
  all_of = [p for area in dict.fromkeys(AREAS.values()) for p in found[area]]
  tests = {*found["tests"]}
  rest = [path for path in all_of if path not in tests]
  return {"core": found["core"], "product": rest}


def main(argv) -> None:
  """Prints all of it."""
  cli.Parser(description=__doc__).parse_args(argv)
  rows = []
  for name, paths in sorted(areas().items()):
    lines, longest, private, once = zip(*map(_file_sizes, paths), strict=True)
    row = [name, len(paths), f"{sum(lines):,}", max(lines), max(longest)]
    rows.append([*row, sum(private), sum(once)])
  head = ("", "files", "lines", "longest file", "function")
  print(tables.text_table(rows, (*head, "private", "called once"), "<>"))
  with contextlib.redirect_stdout(io.StringIO()):
    found = concepts.measure_concepts(**product_files(), walk=True)
  rows = [(n, found[n], *limits) for n, limits in concepts.LIMITS.items()]
  print(f"\n{tables.text_table(rows, ('concepts', 'now', 'limit', 'goal'))}")
  arrows = imports(modules())
  wrong, rings = upward(arrows), circles(arrows)
  count = sum(map(len, arrows.values()))
  print(
    f"\n{len(arrows)} modules, {count} imports of each other:"
    f" {len(rings)} circles, {len(wrong)} upward"
  )
  for ring in rings:
    print(f"  circle: {', '.join(ring)}")
  for source, target in wrong:
    print(f"  upward: {source} imports {target}")
  if rings or wrong:
    sys.exit(1)


if __name__ == "__main__":
  cli.run_command(main)
