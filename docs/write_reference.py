"""Writes the generated parts of the reference, and the site's navigation.

    python docs/write_reference.py           # writes the files
    python docs/write_reference.py --check   # names those that are out of date

A page has each part between `<!-- KIND: NAME -->` and `<!-- end -->`: tables of
settings, commands and objectives, or directives for Python functions. A section
of mkdocs.yml whose line ends in `# FOLDER/index.md` gets that page's links.

The files are committed, so the site needs no code of this package to build, and
a change of a setting shows in its diff. A test holds that they are up to date.
"""

import argparse
import ast
import collections
import dataclasses
import html
import importlib
import inspect
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import antlm_jax
from antlm_jax import config, models, optim, settings
from antlm_jax.commands import COMMANDS
from antlm_jax.objectives.objective import KINDS, OBJECTIVES

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent
_TYPING_ERROR = 2**16  # upper bounds from here on only catch typing errors
_SHARED = 3  # commands from which on an option is described once for all
_BOUNDS = {"least": "≥", "over": ">", "most": "≤", "under": "<"}
# Groups of settings with several implementations, by name.
_REGISTRIES = {
  "model": models.ENCODERS,
  "optimizer": optim.OPTIMIZERS,
  "schedule": optim.SCHEDULES,
}


def _code(text: object) -> str:
  """Returns inline code for a cell of a table."""
  return f"`{text}`".replace("|", "\\|")


def _prose(text: str) -> str:
  """Returns plain text as Markdown, with options and code set as code."""
  text = " ".join(text.split())
  parts = re.split(r"(`[^`]+`|</?\w+>|(?<!\w)--\w[\w.]*(?:=[\w./,]*\w)?)", text)
  for i, part in enumerate(parts):
    if i % 2:
      parts[i] = _code(part.strip("`"))
    else:
      escaped = html.escape(part, quote=False)
      parts[i] = re.sub(r"([*_\[\]|])", r"\\\1", escaped)
  return "".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  lines = (head, ["---"] * len(head), *rows)
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -------------------------------------------------------------------- settings


def groups() -> dict[str, dict[str, type]]:
  """Returns the sections of each group of settings, by name if several."""
  found = {"": {"": config.Config}, "objectives": dict(KINDS)}
  for field in dataclasses.fields(config.Config):
    if isinstance(field.default, settings.Section):
      one = {"": type(field.default)}
      found[field.name] = dict(_REGISTRIES.get(field.name, one))
  return found


def settings_of(group: str) -> str:
  """Returns tables of a group's settings: those of all, then each section's."""
  sections = groups()[group]
  prefix = {"": "", "objectives": "objectives.NAME."}.get(group, f"{group}.")
  chosen = getattr(getattr(config.Config, group, None), "name", "")
  first = sections.get(chosen, next(iter(sections.values())))
  others = [section for section in sections.values() if section is not first]
  common = {
    name: field
    for name, field in settings.fields_of(first).items()
    if all(name in settings.fields_of(section) for section in others)
  }
  common.pop("name", None)  # an objective's, by which logs call it
  parts = [_table_of(common.values(), prefix)]
  if not others:
    return parts[0]
  for name, section in sections.items():
    # A section of an encoder that extends another one lists its differences.
    bases = [x for x in section.__mro__[1:] if x in sections.values()]
    known = settings.fields_of(bases[0]) if bases else common
    own = [
      field
      for field in settings.fields_of(section).values()
      if field.name != "name"
      and (
        field.name not in known or field.default != known[field.name].default
      )
    ]
    if name:
      key = "kind" if group == "objectives" else "name"
      parts += [f"### {prefix}{key}={name}", _prose(_summary(section))]
    parts += [_table_of(own, prefix)] if own else []
  # A setting that several sections have gets one anchor, at its first table.
  seen: set[str] = set()

  def once(match: re.Match) -> str:
    first = match[0] not in seen
    seen.add(match[0])
    return match[0] if first else ""

  return re.sub(r'<a id="\S+"></a>', once, "\n\n".join(parts))


def _summary(section: type) -> str:
  return (section.__doc__ or "").partition("\n\n")[0]


def _table_of(fields: Iterable[settings.Field], prefix: str) -> str:
  """Returns a table of some settings."""
  rows = []
  for field in fields:
    key = f"{prefix}{field.name}"
    default = settings.text(field.default)
    shown = key if default == "" else f"{key}={default}"
    name = f'<a id="{key}"></a>{_code(shown)}'
    rows.append((name, _values(field), _prose(field.help)))
  return _table(("setting", "values", "meaning"), rows)


def _values(field: settings.Field) -> str:
  """Returns the values that a setting can have."""
  found = field.value_type.__name__
  if field.choices:
    found = ", ".join(map(_code, field.choices))
  elif field.bounds:
    limits = (
      f"{_BOUNDS[name]}&nbsp;{of:,}"
      for name, of in field.bounds.items()
      if of < _TYPING_ERROR
    )
    found = f"{found} {', '.join(limits)}".rstrip()
  found = f"list of {found}" if isinstance(field, settings.ListField) else found
  return f"{found}, or `None`" if field.optional else found


# -------------------------------------------------------------------- commands


class _Found(Exception):
  """Carries a command's parser out of the command."""


def _parser(words: str) -> argparse.ArgumentParser:
  """Returns the parser of a command, which shows its help."""

  def take(parser, file=None):
    raise _Found(parser)

  module, *first = COMMANDS[words].split()
  with (
    mock.patch.object(argparse.ArgumentParser, "print_help", take),
    mock.patch.object(sys, "argv", [f"antlm {words}"]),
  ):
    try:
      importlib.import_module(module).main([*first, "--help"])
    except _Found as found:
      return found.args[0]
  raise RuntimeError(f"antlm {words} shows no help")


def commands() -> str:
  """Returns a section for each command: its description and its options.

  Options and paragraphs that several commands have in common are shown once.
  """
  parsers = {words: _parser(words) for words in COMMANDS}
  options = {
    words: [_option(action) for action in parser._actions if _is_own(action)]
    for words, parser in parsers.items()
  }
  # The tasks of `eval score` list only the options that they add to it.
  score = f"{COMMANDS['eval score']} "
  tasks = {words for words in COMMANDS if COMMANDS[words].startswith(score)}
  for words in tasks:
    scored = {name for name, _ in options["eval score"]}
    options[words] = [row for row in options[words] if row[0] not in scored]
  counts = collections.Counter(itertools.chain(*options.values()))
  shared = [row for row, count in counts.items() if count >= _SHARED]
  parts = ["## Shared options", _table(("option", "meaning"), shared)]
  place_of: dict[str, str] = {}  # the command that shows a paragraph
  for words, parser in parsers.items():
    paragraphs = re.split(r"\n\s*\n", parser.description.strip("\n"))
    places = [place_of.setdefault(text, words) for text in paragraphs]
    own = [text for text in paragraphs if place_of[text] == words]
    parts += [f"## antlm {words}", _described(own)]
    elsewhere = dict.fromkeys(place for place in places if place != words)
    if elsewhere:
      parts += [f"The rest is as in {_links(elsewhere)}."]
    if words in tasks:
      parts += [f"It also has the options of {_links(['eval score'])}."]
    rows = [row for row in options[words] if row not in shared]
    parts += [_table(("option", "meaning"), rows)] if rows else []
    common = [row[0] for row in options[words] if row in shared]
    if common:
      parts += [f"[Shared options](#shared-options): {', '.join(common)}."]
    if words == "train":
      parts += ["All settings are on [their own page](settings.md)."]
  return "\n\n".join(parts)


def _is_own(action: argparse.Action) -> bool:
  """Tells whether an option is of its command, and not of all commands."""
  return action.dest not in ("help", "plugin")


def _links(commands: Iterable[str]) -> str:
  links = (f"[antlm {w}](#antlm-{w.replace(' ', '-')})" for w in commands)
  return " and ".join(links)


def _described(paragraphs: Sequence[str]) -> str:
  """Returns a description of --help as Markdown: commands and lists as code."""
  parts = []
  for part in paragraphs:
    lines = part.split("\n")
    # A list has names and, in a column, texts that may be several lines long.
    listed = re.split(r"\n  (?=\S)", f"\n{part}")[1:]
    items = [item.split(None, 1) for item in listed]
    if all(re.match(r"\S+ {2,}\S", item) for item in listed) and items:
      parts.append("\n".join(f"- `{n}`: {_prose(text)}" for n, text in items))
    elif lines[0].startswith((" ", "antlm ")):
      shift = min(len(line) - len(line.lstrip()) for line in lines)
      code = "\n".join(line[shift:] for line in lines)
      parts.append(f"```text\n{code}\n```")
    else:
      parts.append(_prose(part))
  return "\n\n".join(parts)


def _option(action: argparse.Action) -> tuple[str, str]:
  """Returns an option with its default, and its meaning."""
  name = action.option_strings[0] if action.option_strings else action.dest
  # A switch such as `--no-tune` has no value.
  has_default = str(action.default) not in ("None", "False", "True", "", "[]")
  if has_default and not action.required:
    name = f"{name}={settings.text(action.default)}"
  name = _code(name) + " (required)" * action.required
  choices = ", ".join(map(_code, action.choices or ()))
  about = _prose((action.help or "").replace("%%", "%"))
  return name, f"{about}: {choices}".strip(": ")


# ---------------------------------------------- objectives and Python's objects


def objective(name: str) -> str:
  """Returns the settings in which an objective differs from the defaults.

  Their meaning is on the page of settings.
  """
  made, rows = OBJECTIVES[name], []
  for field in settings.fields_of(type(made)).values():
    value = getattr(made, field.name)
    if field.name in ("name", "attention", "shift", "predict") or (
      value != field.default
    ):
      key = f"objectives.{name}.{field.name}"
      link = f"settings.md#objectives.NAME.{field.name}"
      shown = _code(key) if field.name == "name" else f"[{_code(key)}]({link})"
      rows.append((shown, _code(value)))
  return _table(("setting", "value"), rows)


def api(name: str) -> str:
  """Returns the directive that documents a public name."""
  made = getattr(antlm_jax, name)
  options = [f'heading: "ax.{name}"']
  if dataclasses.is_dataclass(made) and settings.fields_of(made):
    # The settings have a page of their own.
    options += ["show_signature: false", "separate_signature: false"]
  lines = (f"      {option}" for option in options)
  return "\n".join([f"::: {made.__module__}.{name}", "    options:", *lines])


def sections_of_python() -> str:
  """Returns a table of the public classes of settings, by group."""
  rows = []
  for group, sections in groups().items():
    names = [section.__name__ for section in sections.values()]
    public = [f"`ax.{name}`" for name in names if name in dir(antlm_jax)]
    if group:
      rows.append((f"[`{group}`](settings.md#{group})", ", ".join(public)))
  return _table(("group of settings", "classes"), rows)


_ARGUMENTS = 3  # arguments that the table of functions shows, if not required
_BUCKET = re.compile(r"ModelOrPath|gs://|bucket")  # in an annotation or Args


def functions() -> str:
  """Returns a table of the public functions: arguments, result, buckets."""
  rows = []
  for name in dir(antlm_jax):
    function = getattr(antlm_jax, name)
    if not inspect.isfunction(function):
      continue
    source = inspect.getsource(inspect.unwrap(function))
    node = next(
      node
      for node in ast.walk(ast.parse(source))
      if isinstance(node, ast.FunctionDef)
    )
    args = node.args
    required = len(args.args) - len(args.defaults)
    arguments = {x.arg: ast.unparse(x.annotation or x) for x in args.args}
    described = (ast.get_docstring(node) or "").partition("Args:")[2]
    entries = re.split(r"\n +(?=\*{0,2}\w+: )", described)
    for entry in entries:
      argument, _, meaning = entry.partition(": ")
      if argument in arguments:
        arguments[argument] += meaning
    shown = ", ".join([*arguments][: max(required, _ARGUMENTS)])
    result = re.sub(r"\b\w+\.", "", ast.unparse(node.returns))
    in_bucket = [_code(x) for x in arguments if _BUCKET.search(arguments[x])]
    cells = _code(f"ax.{name}({shown})"), _code(result), ", ".join(in_bucket)
    rows.append(cells)
  return _table(("function", "result", "may be `gs://`"), rows)


_KINDS = {
  "api": api,
  "commands": lambda _: commands(),
  "functions": lambda _: functions(),
  "objective": objective,
  "sections": lambda _: sections_of_python(),
  "settings": settings_of,
}


# --------------------------------------------------------------------- writing


def fill_page(markdown: str) -> str:
  """Returns a page with its generated parts made anew."""

  def fill(match: re.Match) -> str:
    return f"{match[1]}\n\n{_KINDS[match[2]](match[3] or '')}\n\n<!-- end -->"

  kinds = "|".join(_KINDS)
  block = rf"^(<!-- ({kinds})(?:: (\w+))? -->)\n.*?^<!-- end -->$"
  return re.sub(block, fill, markdown, flags=re.MULTILINE | re.DOTALL)


def fill_navigation(text: str) -> str:
  """Returns mkdocs.yml with the pages of each folder that has an index.

  The headings of a folder's index.md are the themes.
  """

  def fill(match: re.Match) -> str:
    folder = match[2]
    index = (DOCS / folder / "index.md").read_text("utf-8")
    lines = [match[1], f"      - {folder}/index.md"]
    for theme in index.split("\n## ")[1:]:
      lines.append(f"      - {theme.partition(chr(10))[0]}:")
      links = re.findall(r"\]\((\w+\.md)", theme)
      lines += [f"          - {folder}/{link}" for link in links]
    return "\n".join(lines) + "\n"

  section = r"^(  - .*: # (\w+)/index\.md)\n(?: {6,}.*\n)*"
  return re.sub(section, fill, text, flags=re.MULTILINE)


def generated() -> dict[pathlib.Path, str]:
  """Returns the text of each file that has generated parts."""
  pages = sorted((DOCS / "reference").glob("*.md"))
  texts = {page: fill_page(page.read_text("utf-8")) for page in pages}
  site = ROOT / "mkdocs.yml"
  return texts | {site: fill_navigation(site.read_text("utf-8"))}


def main(check: bool) -> int:
  """Writes the files that differ, or names them; returns the exit status."""
  differ = False
  for path, text in generated().items():
    if text == path.read_text("utf-8"):
      continue
    differ = True
    if not check:
      path.write_text(text, "utf-8")
    print("out of date:" if check else "wrote", path.relative_to(ROOT))
  return int(check and differ)


if __name__ == "__main__":
  sys.exit(main(check=sys.argv[1:] == ["--check"]))
