"""Package layout: the direction and the cost of imports, and its size."""

import ast
import graphlib
import io
import re
import subprocess
import sys
import tokenize

import pytest

from antlm_jax.commands import COMMANDS
from tests.runs import ROOT

HEAVY = {"torch", "tensorboardX", "matplotlib", "tensorflow", "transformers"}
HEAVY |= {"jinja2", "pandas"}
# A module may import modules of lower levels and of its own group. A level's
# groups are packages and modules; + joins several to one group.
LEVELS = (
  "errors+cli+private+jax_flags+plugins+terminal+units+hashing+masks+settings"
  "+arguments+tables",
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
GROUPS = {
  f"antlm_jax.{name}".removesuffix("."): (level, group)
  for level, groups in enumerate(LEVELS)
  for group in groups.split(" ")
  for name in group.split("+")
}
# A group, and another that it never imports although it is lower.
NEVER = "models", "objectives"
# Tokens of a room, at most.
BUDGETS = {
  "antlm_jax": 19_060,
  "antlm_jax/attention": 21_170,
  "antlm_jax/commands": 10_500,
  "antlm_jax/data": 42_430,
  "antlm_jax/head": 4_674,
  "antlm_jax/hf": 22_090,
  "antlm_jax/inference": 11_240,
  "antlm_jax/models": 14_850,
  "antlm_jax/objectives": 7_605,
  "antlm_jax/page": 4_960,
  "antlm_jax/planning": 15_940,
  "antlm_jax/runtime": 10_440,
  "antlm_jax/training": 20_490,
  "configs": 2_810,
  "configs/studies": 5_080,
  "evals": 8_850,
  "evals/benchmarks": 12_594,
  "evals/finetuning": 43_580,
  "evals/studies": 28_400,
  "evals/zero_shot": 10_770,
  "tests": 297_100,
}
LAYOUT = {
  *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
  *(tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
}


def modules():
  """Returns the library's modules and their files, without copied code.

  `hf/remote` goes into exported models, and imports transformers alone.
  """
  out = {}
  for package in ("antlm_jax", "evals"):
    for path in sorted((ROOT / package).rglob("*.py")):
      name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
      name = re.sub("^evals", "antlm_jax.evals", name)
      if ".remote." not in name:
        out[name.removesuffix(".__init__")] = path
  return out


def imports(files):
  """Returns the modules that each module imports, also within functions."""
  arrows = {name: set() for name in files}
  for name, path in files.items():
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
      if isinstance(node, ast.Import):
        arrows[name] |= {x.name for x in node.names} & files.keys()
      elif isinstance(node, ast.ImportFrom) and node.module in files:
        inner = (f"{node.module}.{x.name}" for x in node.names)
        arrows[name] |= {x if x in files else node.module for x in inner}
    arrows[name].discard(name)
  return arrows


def group_of(module):
  """Returns a module's level, counted from the ground, and its group."""
  root = module
  # The package itself is one module, not all that has no other level.
  while root not in GROUPS or root == "antlm_jax" != module:
    root, _, last = root.rpartition(".")
    assert last, f"{module} has no level in LEVELS"
  return GROUPS[root]


def test_no_module_imports_what_is_above_it_or_imports_it():
  """Catches an upward import and a circle, also within functions."""
  arrows = imports(modules())
  assert "antlm_jax.errors" in arrows["antlm_jax.models.llama"]
  wrong = []
  for source, targets in arrows.items():
    level, group = group_of(source)
    for target in targets:
      lower, other = group_of(target)
      if other != group and (lower >= level or (group, other) == NEVER):
        wrong.append((source, target))
  assert not wrong
  graphlib.TopologicalSorter(arrows).prepare()  # raises at a circle


def docstring_lines(tree):
  """Returns the lines of all docstrings."""
  lines = set()
  functions = ast.FunctionDef | ast.AsyncFunctionDef
  for node in ast.walk(tree):
    if isinstance(node, ast.Module | ast.ClassDef | functions) and (
      ast.get_docstring(node)
    ):
      lines |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
  return lines


def count_tokens(text):
  """Counts tokens without comments, docstrings and layout.

  An f-string is one token, so all Pythons agree.
  """
  prose = docstring_lines(ast.parse(text))
  depth, count = 0, 0
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    kind = tokenize.tok_name[token.type]
    if token.type not in LAYOUT and token.start[0] not in prose:
      count += depth == 0 and kind != "FSTRING_END"
      depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
  return count


def room_of(path):
  """Returns a file's room: its package's folder in it, or the package."""
  package, *folders = path.relative_to(ROOT).parts[:-1]
  return "/".join([package, *folders[:1]]) if package != "tests" else package


def test_each_room_keeps_its_budget_of_tokens():
  """Catches code that is added to a room, and nothing removed for it."""
  sizes = dict.fromkeys(BUDGETS, 0)
  for package in ("antlm_jax", "evals", "configs", "tests"):
    for path in (ROOT / package).rglob("*.py"):
      parts = path.relative_to(ROOT).parts
      if "remote" not in parts and parts[:2] != ("antlm_jax", "evals"):
        sizes[room_of(path)] += count_tokens(path.read_text("utf-8"))
  assert not {n: x for n, x in sizes.items() if x > BUDGETS[n]}


@pytest.mark.parametrize(
  ("text", "count"),
  [
    ('x = f"{a + 1} {b}"', 3),
    ('x = f"{f(\'y\')!r:>{w}}" f"z"', 4),
    ('"""Prose."""\n\ndef f():\n  """Prose."""\n  return "a"  # why\n', 7),
    ("async def f(x):\n  await g(x)\n", 12),
  ],
)
def test_tokens_are_counted_alike_by_all_pythons(text, count):
  """Catches an f-string whose parts count since Python 3.12."""
  assert count_tokens(text) == count


def output(code: str) -> str:
  """Runs code in a fresh process; returns its output."""
  command, options = [sys.executable, "-c", code], {"cwd": ROOT}
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
    **{"capture_output": True, "text": True, "cwd": ROOT},
  )
  assert done.returncode == 1
  assert done.stderr.splitlines()[-1] == (
    "ImportError: import antlm_jax.evals instead of evals:"
    " it is a part of antlm_jax"
  )


@pytest.fixture(scope="module")
def commands():
  texts = {n: p.read_text("utf-8") for n, p in modules().items()}
  ways = "cli.run_command(main)", "\ndef main(argv: Sequence[str])"
  return {n for n, text in texts.items() if any(way in text for way in ways)}


def test_no_command_loads_what_only_some_need(commands):
  assert not loaded(*commands) & HEAVY


def test_antlm_knows_every_command(commands):
  known = {entry.split()[0] for entry in COMMANDS.values()}
  known |= {"antlm_jax.__main__"}
  # Studies and sweeps start these.
  known |= {f"antlm_jax.evals.studies.{x}" for x in ("jobs", "together")}
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


@pytest.mark.slow
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


def test_attention_and_the_gpus_check_load_few_others():
  """launch/gpu_check.sh names the packages that its process needs."""
  code = """
import sys, antlm_jax.attention
print(*sys.modules)
import tests.test_gpu, antlm_jax.evals.benchmarks.attention
print(*sys.modules)
"""
  attention, check = (set(line.split()) for line in output(code).splitlines())
  names = {n for n in attention if n.startswith("antlm_jax")}
  of_attention = {n for n in names if n.startswith("antlm_jax.attention")}
  assert names - of_attention == {
    "antlm_jax",
    "antlm_jax.errors",
    "antlm_jax.hashing",
    "antlm_jax.jax_flags",
    "antlm_jax.masks",
    "antlm_jax.mesh",
    "antlm_jax.private",
    "antlm_jax.settings",
  }
  others = "array_record grain ml_collections safetensors tensorflow_datasets"
  assert not check & ({*others.split(), "tokenizers", "tqdm"} | HEAVY)
