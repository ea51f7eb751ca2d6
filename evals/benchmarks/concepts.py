"""Concepts that a reader meets: walks through the code, names, and tokens.

A walk is traced while a command runs, after a first call that imports and
compiles. It counts the project's own functions, their files, and the classes
of these files. `python -m antlm_jax.evals.benchmarks.structure` prints it.
"""

import ast
import collections
import functools
import io
import os
import pathlib
import re
import sys
import tempfile
import threading
import tokenize
from collections.abc import Iterable, Mapping, Sequence

import antlm_jax
from antlm_jax import config as config_lib
from antlm_jax.commands import prepare, train
from antlm_jax.data import toy_english

ROOT = pathlib.Path(__file__).resolve().parents[2]  # not by the link
CONFIG = "quickstart:shrink"
_HERE = pathlib.Path(__file__).name  # the walk's own functions do not count
# The most that a test allows, and the goal of the design. A change that makes a
# number smaller makes its limit smaller, too.
LIMITS = {
  "train: functions": (466, 390),
  "train: files": (54, 46),
  "train: classes": (99, 90),
  "override: functions": (36, 20),
  "override: files": (8, 4),
  "override: configs made": (1, 1),
  "arguments declared again": (3, 0),
  "class names with several meanings": (0, 8),
  "functions that share their name, %": (5, 25),
  "tokens a code line of the core": (9.3, 9.6),
}
_SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
_LAYOUT = (tokenize.INDENT, tokenize.DEDENT)


@functools.cache
def _own_file(name: str) -> str:
  """Returns the path of a file of the project from its root; "" for others."""
  path = pathlib.Path(os.path.realpath(name))
  own = path.is_relative_to(ROOT) and not {".venv", _HERE} & {*path.parts}
  return (
    path.relative_to(ROOT).as_posix() if own and path.suffix == ".py" else ""
  )


class Walk:
  """Counts the project's functions that run in its block.

  Attributes:
    functions: File and qualified name of each function.
    configs: Number of `Config` objects that were made.
  """

  def __init__(self):
    self.functions: set[tuple[str, str]] = set()
    self.configs = 0

  def __enter__(self) -> "Walk":
    sys.setprofile(self._called)
    threading.setprofile(self._called)
    return self

  def __exit__(self, *_) -> None:
    sys.setprofile(None)
    threading.setprofile(None)

  def _called(self, frame, event: str, _) -> None:
    if event != "call":
      return
    code = frame.f_code
    if code.co_name == "__init__":  # a dataclass's belongs to no file
      self.configs += type(frame.f_locals.get("self")) is config_lib.Config
    name = _own_file(code.co_filename)
    # Comprehensions and modules have names such as <listcomp>.
    if name and code.co_qualname[-1] != ">":
      self.functions.add((name, code.co_qualname))

  def counts(self) -> dict[str, int]:
    """Returns the numbers of functions, of files and of their classes."""
    files = {file for file, _ in self.functions}
    bodies = (
      ast.parse((ROOT / file).read_text("utf-8")).body for file in files
    )
    classes = [isinstance(n, ast.ClassDef) for body in bodies for n in body]
    found = len(self.functions), len(files), sum(classes)
    return dict(zip(("functions", "files", "classes"), found, strict=True))


def override() -> Walk:
  """Walks from one `--config.KEY=VALUE` to the `Config`."""
  config_lib.load_config(CONFIG)
  with Walk() as walk:
    config_lib.load_config(CONFIG, ["--config.schedule.peak_lr=1e-4"])
  return walk


def walk_training() -> Walk:
  """Walks through `antlm train`, on generated English."""
  with tempfile.TemporaryDirectory() as folder:
    toy_english.main([f"--output={folder}/toy", "--sentences=3000"])
    words = "--vocab_size=400", "--seq_len=32"
    where = f"--text={folder}/toy/text", f"--output={folder}/data"
    prepare.main([*where, *words])
    asked = f"--config={CONFIG}", f"--config.data.path={folder}/data"
    train.main([*asked, f"--workdir={folder}/first"])
    with Walk() as walk:
      train.main([*asked, f"--workdir={folder}/run"])
  return walk


def shared_names(files: Iterable[pathlib.Path]) -> tuple[dict[str, set], float]:
  """Returns the classes that share a name, and the share of such functions.

  Methods do not count, and a leading underscore makes no other name.
  """
  meanings, functions = collections.defaultdict(set), collections.Counter()
  for file in files:
    for node in ast.parse(file.read_text("utf-8")).body:
      if isinstance(node, ast.ClassDef):
        meanings[node.name.lstrip("_")].add(file.as_posix())
      elif isinstance(node, ast.FunctionDef):
        functions[node.name.lstrip("_")] += 1
  several = {name: of for name, of in meanings.items() if len(of) > 1}
  shared = sum(count for count in functions.values() if count > 1)
  return several, shared / max(1, functions.total())


def declared_again(files: Iterable[pathlib.Path]) -> list[str]:
  """Returns the arguments of public functions that their file declares again.

  Public functions are those of `antlm_jax` and those that are `checked`. Other
  declarations are a section's setting, a parser's option, and a default that a
  parameter takes from a section.
  """
  out, homes = [], {(of, name) for name, of in antlm_jax._homes().items()}
  for file in files:
    path = file.relative_to(ROOT).with_suffix("").as_posix()
    module = re.sub("^evals", "antlm_jax/evals", path).replace("/", ".")
    tree = ast.parse(file.read_text("utf-8"))
    parameters, others = set(), set()
    for node in ast.walk(tree):
      if node in tree.body and isinstance(node, ast.FunctionDef):
        own, names = node.args, {ast.unparse(d) for d in node.decorator_list}
        if (module, node.name) in homes or names & {
          "checked",
          "settings.checked",
          "settings_lib.checked",
        }:
          parameters |= {a.arg for a in (*own.args, *own.kwonlyargs)}
          defaults = (*own.defaults, *own.kw_defaults)
          others |= {d.attr for d in defaults if isinstance(d, ast.Attribute)}
      elif isinstance(node, ast.AnnAssign) and _calls(node.value, "setting"):
        others.add(node.target.id)
      elif _calls(node, "add_argument", "add") and node.args:
        others.add(str(getattr(node.args[0], "value", "")).lstrip("-"))
    found = sorted(parameters & others)
    out += [f"{file.relative_to(ROOT)}: {name}" for name in found]
  return out


def _calls(node: ast.AST | None, *names: str) -> bool:
  """Returns whether a node calls a function or method with one of the names."""
  if not isinstance(node, ast.Call):
    return False
  of = node.func
  return getattr(of, "id", getattr(of, "attr", "")) in names


def count_tokens(files: Iterable[pathlib.Path]) -> tuple[int, int]:
  """Returns the numbers of tokens and of code lines.

  Docstrings, comments and blank lines are not code.
  """
  count, lines = 0, 0
  for file in files:
    text = file.read_text("utf-8")
    prose = {
      line
      for node in ast.walk(ast.parse(text))
      if isinstance(node, ast.Expr)
      and isinstance(node.value, ast.Constant)
      and isinstance(node.value.value, str)
      for line in range(node.lineno, node.end_lineno + 1)
    }
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    code = [
      token
      for token in found
      if token.type not in (*_SKIPPED, *_LAYOUT) and token.start[0] not in prose
    ]
    count += len(code)
    lines += len(
      {line for t in code for line in range(t.start[0], t.end[0] + 1)}
    )
  return count, lines


def measure_concepts(
  core: Sequence[pathlib.Path], product: Sequence[pathlib.Path], walk: bool
) -> Mapping[str, float]:
  """Returns each number of `LIMITS`; those of training only with `walk`."""
  out = {}
  if walk:
    of_train = walk_training().counts()
    out |= {f"train: {name}": of for name, of in of_train.items()}
  one = override()
  found = one.counts()
  out |= {f"override: {name}": found[name] for name in ("functions", "files")}
  out["override: configs made"] = one.configs
  remote = re.compile("/remote/")
  out["arguments declared again"] = len(declared_again(product))
  several, share = shared_names(
    f for f in product if not remote.search(f.as_posix())
  )
  out["class names with several meanings"] = len(several)
  out["functions that share their name, %"] = round(100 * share)
  count, lines = count_tokens(core)
  out["tokens a code line of the core"] = round(count / lines, 1)
  return out
