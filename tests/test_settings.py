"""Sections of settings, as a config and as arguments: values and errors."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import pytest

from antlm_jax import cli, settings
from antlm_jax.arguments import add_arguments, read_section
from antlm_jax.evals import results
from antlm_jax.settings import PythonOnly, Section, argument, setting
from tests import runs

Share = Annotated[float, argument(least=0, under=1)]


@dataclasses.dataclass(frozen=True)
class Small(Section):
  """A section with a setting of each kind."""

  group = "small"

  needed: str = setting(help="No default")
  rows: int = setting(128, "Rows in a step", least=1)
  rate: float = setting(1e-3, "Peak", over=0)
  share: float = setting(0.1, "Share in %", least=0, under=1)
  kind: str = setting("a", "Kind", choices=("a", "b"))
  fast: bool = setting(False, "Run fast")
  lrs: tuple[float, ...] = setting((5e-5, 1e-4), "Learning rates", over=0)
  seed: int | None = setting(None, "Random if unset", least=0)
  files: tuple[str, ...] = setting(("x",), "Paths", nargs="+")
  hidden: int = 7  # a plain field is no setting


def arguments(*words):
  parser = cli.Parser(prog="small")
  add_arguments(parser, Small)
  return read_section(Small, parser.parse_args(["--needed=x", *words]))


def test_arguments_have_the_fields_defaults_and_types():
  assert arguments() == Small("x")
  words = "--rows=1e3 --rate=2 --kind=b --fast --lrs=1,2 --seed=3 --files a b,c"
  assert arguments(*words.split()) == Small(
    "x", 1000, 2.0, 0.1, "b", True, (1.0, 2.0), 3, ("a", "b,c")
  )


def test_a_setting_is_not_declared_again_as_a_plain_field():
  """Catches a default of a subclass that checkpoints would not store."""

  @dataclasses.dataclass(frozen=True)
  class Smaller(Small):
    rows: int = 64

  with pytest.raises(TypeError, match="'rows' is a setting of Small: declare"):
    settings.fields_of(Smaller)


def test_help_has_every_argument_its_default_and_choices(capsys):
  parser = cli.Parser(prog="small")
  add_arguments(parser, Small)
  with pytest.raises(SystemExit):
    parser.parse_args(["--help"])
  shown = " ".join(capsys.readouterr().out.split())
  assert "Rows in a step (default: 128)" in shown
  assert "Share in % (default: 0.1)" in shown
  assert "{a,b}" in shown and "--hidden" not in shown


@pytest.mark.parametrize(
  "word, told",
  [
    ("--rows=0", "--rows=0 is not at least 1"),
    ("--rows=1e400", "--rows=1e400: not int"),
    (f"--rows={10**30}", "is not at least 1 and at most 2147483647"),
    ("--rate=0", "--rate=0 is not over 0"),
    ("--rate=nan", "--rate=nan is not finite"),
    ("--share=1", "--share=1 is not at least 0 and under 1"),
    ("--kind=c", "--kind='c' is not one of a, b"),
    ("--lrs=1,x", "--lrs=x: not float"),
    ("--seed=-1", "--seed=-1 is not at least 0"),
    ("--hidden=1", "unrecognized arguments: --hidden=1"),
  ],
)
def test_a_bad_argument_is_told_in_one_line(word, told):
  line = runs.told(arguments, word)
  assert told in line and len(line) < 200


@pytest.mark.parametrize(
  "values, told",
  [
    ({"rows": True}, "small.rows=True is not of type int"),
    ({"rate": "1"}, "small.rate='1' is not of type float"),
    ({"share": math.nan}, "small.share=nan is not finite"),
    ({"fast": 1}, "small.fast=1 is not of type bool"),
    ({"kind": "c"}, "small.kind='c' is not one of a, b"),
    ({"lrs": None}, "small.lrs=None is not of type float"),
    ({"needed": None}, "small.needed=None is not of type str"),
  ],
)
def test_a_bad_value_is_told_by_its_key(values, told):
  line = runs.told(lambda: dataclasses.replace(Small("x"), **values))
  assert told in line and len(line) < 300 and line.isascii()


def test_a_sections_plain_values_make_it_again():
  section = Small("x", rows=3, lrs=(1.0,))
  values = settings.to_dict(section)
  assert settings.build(Small, values, "small") == section
  assert values.keys() == vars(section).keys() - {"hidden"}
  values["row"] = 3
  words = "row is no setting of small; did you mean 'rows'?"
  assert words in runs.told(settings.build, Small, values, "small")


@settings.checked
def small(
  model: Annotated[
    os.PathLike[str] | str, argument("--checkpoint", help="Path to a model")
  ],
  text: Annotated[str | Iterable[str], argument(may_be_empty=True)],
  *,
  rows: Annotated[int, argument(least=1)] = 128,
  share: Share = 0.1,
  kind: Annotated[str | None, argument("--as", choices=("a", "b"))] = None,
  fast: bool = False,
  shuffle: bool = True,
  exact: bool | None = None,
  lrs: Annotated[tuple[float, ...], argument(over=0)] = (5e-5, 1e-4),
  words: str | Sequence[str] = (),
  output: Annotated[str | None, argument(read=cli.local_path)] = None,
  watch: PythonOnly[Callable[[int], None] | None] = None,
):
  """Returns its arguments.

  Args:
    model: A model, or a path.
    text: Text or texts.
    rows: Rows in a step, of
      `T` tokens.
    share: Share in %.
    kind: Kind; by default any.
    fast: Run fast.
    shuffle: Shuffle the rows. Off for a stream.
    exact: Be exact.
    lrs: Learning rates.
    words: Words.
    output: Path to a file.
    watch: Function that sees each number.

  Raises:
    UserError: Something else: this line is no argument.
  """
  return dict(locals())


def test_a_functions_signature_is_its_command():
  """Catches a parameter that reaches a function unlike its signature says."""
  given = cli.call_with_arguments(small, ["--checkpoint=m", "--text="], "")
  assert given == small("m", "")
  words = (
    "--checkpoint=m --text=t --rows=1e3 --share=0 --as=b --fast --no-shuffle"
    " --exact --lrs=1,2 --words=a,b --output=o"
  )
  given = cli.call_with_arguments(small, words.split(), "")
  own = [1000, 0.0, "b", True, False, True, (1.0, 2.0), ("a", "b"), "o", None]
  assert list(given.values()) == ["m", "t", *own]
  assert type(given["share"]) is float


def test_a_functions_docstring_is_its_help(capsys):
  """Catches help without a default, and a help text of another place."""
  with pytest.raises(SystemExit):
    cli.call_with_arguments(small, ["--help"], "Two\nlines.")
  shown = capsys.readouterr().out
  assert "\n\nTwo\nlines.\n\n" in shown
  shown = " ".join(shown.split())
  for part in (
    "--checkpoint CHECKPOINT Path to a model --text TEXT Text or texts --rows",
    "Rows in a step, of T tokens (default: 128)",
    "Share in % (default: 0.1)",
    "--as {a,b} Kind; by default any --fast Run fast",
    "Off for a stream (default: True)",
    "Learning rates (default: 5e-05,0.0001)",
  ):
    assert part in shown, part
  assert "--watch" not in shown and "no argument" not in shown


@pytest.mark.parametrize(
  "option, name, value, told",
  [
    ("--rows", "rows", 0, "=0 is not at least 1"),
    ("--share", "share", 1.0, "=1.0 is not at least 0 and under 1"),
    ("--lrs", "lrs", (1.0, -1.0), "-1.0"),
    ("--output", "output", "gs://b/o", ": gs://b/o is not on this machine: "),
    ("--as", "kind", "c", "c'"),
    ("--checkpoint", "model", "", ""),
  ],
)
def test_a_command_names_options_and_python_names_arguments(
  option, name, value, told
):
  """Catches a limit that holds on a command line alone, or in Python alone."""
  word = f"{option}={settings.text(value)}"
  words = ["--checkpoint=m", "--text=t", word]
  line = runs.told(cli.call_with_arguments, small, words, "")
  assert told in line and option in line
  if value:
    line = runs.told(
      lambda: small(**{"model": "m", "text": ""} | {name: value})
    )
    assert told in line and "--" not in line
    assert line.startswith((f"{name}=", f"{name}: "))


def test_python_may_give_more_types_and_learns_the_nearest_name():
  """Catches a check that refuses a path or texts, and a silent unknown name."""
  path = pathlib.Path("m")
  given = small(path, ["a"], words="a", lrs=[1], share=0)
  assert given["model"] is path and given["text"] == ["a"]
  assert given["words"] == ("a",) and given["lrs"] == (1,)
  line = runs.told(lambda: small("m", "t", row=3))
  assert line == "small: no argument 'row'; did you mean 'rows'?"
  assert "rows='3' is not of type int" in runs.told(
    lambda: small("m", "t", rows="3")
  )
  line = runs.told(lambda: small("m"))
  assert line == "small: give text: Text or texts"
  line = runs.told(lambda: small("m", "t", 3))
  assert line.startswith("small: too many positional arguments; it has model,")
  line = runs.told(lambda: small("a text .\n" * 99, "t"))
  assert "too long for a path, or has line ends" in line and len(line) < 300


def test_python_may_give_paths_where_text_is_read():
  """Catches a path that a reader never sees, and one in a list of texts."""

  @settings.checked
  def it(
    runs: Sequence[str | os.PathLike[str]],
    output: Annotated[
      str | os.PathLike[str] | None, results.output_argument(".npy")
    ] = None,
  ):
    """Returns its arguments.

    Args:
      runs: Paths to runs.
    """
    return runs, output

  path = pathlib.Path("a.npy")
  assert it([path, "b"], path) == (("a.npy", "b"), "a.npy")
  assert cli.call_with_arguments(it, ["--runs=a,b"], "") == (("a", "b"), None)
  told = "output: a.txt ends in none of .npy"
  assert runs.told(it, ["b"], path.with_suffix(".txt")) == told
  assert runs.told(it, None) == "runs=None is no path"
  assert runs.told(it, ["b", 3]) == "runs=3 is no path"


def test_a_function_declares_all_of_its_arguments():
  """Catches an argument without help, and a text about no argument."""

  def lacks(rows: int = 1):
    """Args:

    Nothing.
    """

  def strange(rows: int = 1):
    """Does it.

    Args:
      rows: Rows.
      row: Rows.
    """

  def unread(rows: Callable = print):
    """Does it.

    Args:
      rows: Rows.
    """

  for function, told in (
    (lacks, "'rows' has no help text"),
    (strange, "no parameter 'row'"),
    (unread, "'rows' has no type that text can give"),
  ):
    with pytest.raises(TypeError, match=told):
      settings.fields_of(function)
