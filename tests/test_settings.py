"""Sections of settings, as a config and as arguments: values and errors."""

import dataclasses
import math

import pytest

from antlm_jax import cli, settings
from antlm_jax.errors import UserError
from antlm_jax.settings import setting
from tests import runs


@dataclasses.dataclass(frozen=True)
class Small:
  """A section with a setting of each kind."""

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
  settings.add_arguments(parser, Small)
  return settings.from_args(Small, parser.parse_args(["--needed=x", *words]))


def test_arguments_have_the_fields_defaults_and_types():
  assert arguments() == Small("x")
  words = "--rows=1e3 --rate=2 --kind=b --fast --lrs=1,2 --seed=3 --files a b,c"
  assert arguments(*words.split()) == Small(
    "x", 1000, 2.0, 0.1, "b", True, (1.0, 2.0), 3, ("a", "b,c")
  )


def test_help_has_every_argument_its_default_and_choices(capsys):
  parser = cli.Parser(prog="small")
  settings.add_arguments(parser, Small)
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
    ("--kind=c", "invalid choice: 'c' (choose from"),
    ("--lrs=1,x", "--lrs=1,x: not float"),
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
    ({"lrs": 1.0}, "small.lrs=1.0 is not a tuple"),
    ({"needed": None}, "small.needed=None is not of type str"),
  ],
)
def test_a_bad_value_is_told_by_its_key(values, told):
  changed = dataclasses.replace(Small("x"), **values)
  line = runs.told(settings.check, changed, "small")
  assert told in line and len(line) < 300 and line.isascii()


def test_a_sections_plain_values_make_it_again():
  section = Small("x", rows=3, lrs=(1.0,))
  values = settings.to_dict(section)
  assert settings.from_dict(Small, values, "small") == section
  assert values.keys() == vars(section).keys() - {"hidden"}
  values["row"] = 3
  words = r"small\.row is unknown; did you mean 'rows'\?"
  with pytest.raises(UserError, match=words):
    settings.from_dict(Small, values, "small")
  assert settings.from_dict(Small, values, "small", old=True) == section
