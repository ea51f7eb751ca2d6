"""Prose follows a few rules: short sentences, plain words, named things.

    python tests/test_english.py [FILE ...]

prints every sentence that breaks a rule, and the number of each rule. Prose is
Markdown, docstrings, comments, help texts and errors.
"""

import ast
import collections
import json
import pathlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
WORDS = 25  # the longest sentence
# An error names a place, a problem and advice. A help text lists choices.
_WORDS, _COLONS = {"error": 40, "help": 35}, {"error": 3}
_BEFORE = ("least", "most", "exactly", "than", "only", "just", "by", "or", "to")
_NOT_NUMBER = "".join(rf"(?<!\b{word} )" for word in _BEFORE)
_RULES = {
  # A relative clause is no noun: name the thing.
  "what": r"\b(what|whatever|whoever|that which)\b(?=[^?]*$)",
  # A pronoun leaves the reader to search: repeat the noun.
  "one": (
    rf"{_NOT_NUMBER}\b(ones\b|one(?=[,;:]? (is|was|has|had|does|can|may|must"
    r"|that|which|who|whose)\b|[.;)]|$))"
  ),
  "beside": r"\b(beside|alike|all the same|besides|thereby|whereof)\b",
  "stands": r"\b(stands?|stood|goes on|go on|going on|brings?|brought|comes?"
  r"|came)\b",
}
# Parts of the reference, whose texts are checked where the code has them.
_GENERATED = (
  r"<!-- (?:api|commands|functions|objective|sections|settings)\b"
  r".*?<!-- end -->"
)
_HELP = re.compile(r"(of|that|whose|how|what|which|whether)\b", re.IGNORECASE)
# Names of the field, quotations and the like, in which a rule has no say.
_ALLOWED = re.compile(
  r"what's new|come from|comes from|stands for|stand-in|one by one|one another"
  r"|one to one|one at a time|outcomes?|zero or one|\bone\b(?= (of|or|and) )",
  re.IGNORECASE,
)


def _files() -> list[pathlib.Path]:
  listed = subprocess.run(
    ("git", "ls-files", "*.md", "*.py", "*.ipynb"),
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  ).stdout.split()
  return [ROOT / name for name in listed if (ROOT / name).is_file()]


# ----------------------------------------------------------------- where it is


def _markdown(text: str) -> Iterator[tuple[int, str]]:
  """Yields (line, paragraph), each cell and item of a list by itself."""
  text = re.sub(
    rf"^( *)```.*?^\1```|{_GENERATED}|<!--.*?-->",
    lambda found: "\n" * found[0].count("\n"),
    text,
    flags=re.DOTALL | re.MULTILINE,
  )
  begin, lines = 1, []
  for number, line in enumerate((*text.split("\n"), ""), 1):
    new = re.match(r"\s*([-*+>#|!]|\d+\.|$|:::|\?\?\?)", line)
    if new and lines:
      yield begin, " ".join(lines)
      lines = []
    pre = line.startswith(("    ", "![")) or re.search(r"\S {2,}\S", line)
    if not line.strip() or pre:
      continue
    if line.lstrip().startswith("|"):
      yield from ((number, cell) for cell in re.split(r"(?<!\\)\|", line))
      continue
    begin = begin if lines else number
    lines.append(re.sub(r"^\s*([-*+>#]+|\d+\.)\s", "", line).strip())


def _docstring(text: str) -> str:
  """Makes Markdown of a docstring: its entries become items of a list."""
  text = re.sub(r"^(\s*)(\*?\w+): (?=\S)", r"\n- ", text, flags=re.MULTILINE)
  return re.sub(r"^\s*[A-Z][a-z]+:$", "", text, flags=re.MULTILINE)


def _python(path: pathlib.Path) -> Iterator[tuple[int, str, str]]:
  """Yields (line, kind, paragraph) of a module."""
  tree = ast.parse(path.read_text())
  for node in ast.walk(tree):
    if isinstance(
      node, ast.Module | ast.ClassDef | ast.FunctionDef
    ) and ast.get_docstring(node):
      line, text = node.body[0].lineno, ast.get_docstring(node)
      for at, part in _markdown(_docstring(text)):
        yield line + at - 1, "docstring", part
    if isinstance(node, ast.Call):
      name = getattr(node.func, "id", getattr(node.func, "attr", ""))
      if name in ("setting", "amount_setting") and len(node.args) > 1:
        yield node.lineno, "help", _string(node.args[1])
      if name == "UserError" and node.args:
        yield node.lineno, "error", _string(node.args[0])
  comments, last = [], None
  with path.open("rb") as file:
    for token in tokenize.tokenize(file.readline):
      if token.type != tokenize.COMMENT:
        continue
      line, text = token.start[0], token.string.lstrip("#").strip()
      if re.match(r"(noqa|type:|fmt:|!|-{5})", text) or not text:
        continue
      inline = token.line[: token.start[1]].strip()
      if last is not None and (line > last + 1 or inline):
        yield last, "comment", " ".join(comments)
        comments = []
      comments.append(text)
      last = line - 1 if inline else line
  if comments:
    yield last, "comment", " ".join(comments)


def _string(node: ast.expr) -> str:
  """Returns an expression's text, with a name in place of each value."""
  if isinstance(node, ast.Constant):
    return str(node.value)
  if isinstance(node, ast.JoinedStr):
    return "".join(
      _string(part) if isinstance(part, ast.Constant) else "X"
      for part in node.values
    )
  if isinstance(node, ast.BinOp):
    return _string(node.left) + _string(node.right)
  return ""


def prose(path: pathlib.Path) -> Iterator[tuple[int, str, str]]:
  """Yields (line, kind, paragraph) of a file's prose."""
  if path.suffix == ".py":
    yield from _python(path)
    return
  text = path.read_text()
  if path.suffix == ".ipynb":
    cells = json.loads(text)["cells"]
    text = "\n\n".join(
      "".join(cell["source"])
      for cell in cells
      if cell["cell_type"] == "markdown"
    )
  yield from ((line, "text", part) for line, part in _markdown(text))


# -------------------------------------------------------------------- the rules


def broken(kind: str, paragraph: str) -> Iterator[tuple[str, str]]:
  """Yields (rule, sentence) for each rule that a paragraph breaks."""
  text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
  text = re.sub(r"`[^`]*`", "X", text)
  text = re.sub(r'"[^"]*"|\$[^$]*\$', "X", text)
  text = re.sub(r"https?://\S+|\b[A-Za-z_]+\.py\b", "X", text)
  if kind == "help" and text and (_HELP.match(text) or not text[:1].isupper()):
    yield "help", text
  for sentence in re.split(r"(?<=[.!?])[)\"*]*\s+", text):
    plain = _ALLOWED.sub("", sentence)
    if len(re.findall(r"[A-Za-z]+", sentence)) > _WORDS.get(kind, WORDS):
      yield "long", sentence
    if len(re.findall(r"[:;](?= )", sentence)) > _COLONS.get(kind, 1):
      yield "colons", sentence
    for rule, pattern in _RULES.items():
      if re.search(pattern, plain, re.IGNORECASE):
        yield rule, sentence


def check(paths: list[pathlib.Path]) -> list[tuple[str, str]]:
  """Returns (rule, place and sentence) for all that breaks a rule."""
  return [
    (rule, f"{path}:{line}: {kind}: {sentence.strip()[:300]}")
    for path in paths
    for line, kind, part in prose(path)
    for rule, sentence in broken(kind, part)
  ]


def test_rules():
  """Catches a rule that no longer finds anything, or finds too much."""
  bad = {
    "what": "It prints what was measured.",
    "one": "The last one is saved.",
    "beside": "The file lies beside the run.",
    "stands": "The figure stands in the table.",
    "long": "word " * 26,
    "colons": "First: then; last.",
  }
  for rule, sentence in bad.items():
    assert [name for name, _ in broken("text", sentence)] == [rule], sentence
  assert [rule for rule, _ in broken("help", "whose losses")] == ["help"]
  good = (
    "What does it cost?",
    "Use one of the two files, one by one.",
    "At least one is needed.",
    "This comes from the paper.",
    "`what` is a name. So is [this](one.md).",
  )
  assert not [found for text in good for found in broken("text", text)]


def test_no_prose_breaks_a_rule():
  """Catches a hard sentence in the docs, the code, a help text or an error."""
  assert check(_files()) == []


if __name__ == "__main__":
  chosen = [pathlib.Path(name) for name in sys.argv[1:]] or _files()
  found = check(chosen)
  for rule, text in sorted(found):
    print(f"{rule}: {text}")
  print(dict(collections.Counter(rule for rule, _ in found)))
