"""What all commands do alike with arguments and errors."""

import contextlib
import errno
import os
import subprocess
import sys

import pytest

from antlm_jax import __main__ as antlm
from antlm_jax import cli, errors
from antlm_jax.commands import export, prepare, train
from antlm_jax.errors import UserError
from tests import runs


@pytest.mark.parametrize(
  "main, words, told",
  [
    (train.main, ("--config=c.py", "--workdir="), "--workdir is empty"),
    (export.main, ("--checkpoint=c", "--output="), "--output is empty"),
    (prepare.main, ("--text", "", "--output=o"), "--text is empty"),
  ],
)
def test_an_empty_argument_is_refused(main, words, told, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  line = runs.told(main, words)
  assert told in line and line.isascii()
  assert not list(tmp_path.iterdir())


def test_an_empty_argument_may_be_allowed_and_be_the_default():
  parser = cli.Parser(prog="it", may_be_empty=("prompt",))
  parser.add_argument("--prompt")
  parser.add_argument("--note", default="")
  args = parser.parse_args(["--prompt=", "--note="])
  assert args.prompt == "" == args.note


def test_an_override_is_a_word_or_two():
  parser = cli.Parser(prog="it")
  parser.add_argument("--workdir")
  words = ["--config.seed", "-1", "--workdir", "w", "--config.curriculum=2C"]
  args, found = parser.parse_with_overrides([*words, "--config.a.b", "x=y"])
  assert args.workdir == "w"
  assert found == ["--config.seed=-1", words[-1], "--config.a.b=x=y"]
  with pytest.raises(UserError, match="unknown argument 'more'"):
    parser.parse_with_overrides([*words, "more"])


@pytest.mark.parametrize(
  "words, told",
  [
    (["eval", "blimp", "--help"], "usage: antlm eval blimp "),
    (["train", "-h"], "usage: antlm train "),
    (["eval", "-h"], "antlm eval ewok "),
    (["--version"], "antlm 0."),
  ],
)
def test_antlm_runs_and_tells_commands(words, told, capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["antlm", *words])
  with contextlib.suppress(SystemExit):
    antlm.main(words)
  assert told in capsys.readouterr().out


@pytest.mark.parametrize(
  "words, told",
  [
    ("trian --x=y", "no command 'trian'; did you mean 'train'"),
    ("eval blip", "no command 'eval blip'; did you mean 'eval blimp'"),
    ("--nonsense", "unknown option '--nonsense'"),
    ("eval --nonsense", "unknown option '--nonsense'"),
  ],
)
def test_antlm_knows_what_was_meant(words, told):
  with pytest.raises(UserError, match=told):
    antlm.main(words.split())


@pytest.mark.parametrize(
  "number, name", [(errno.ENAMETOOLONG, "a" * 5), (errno.ENOSPC, None)]
)
def test_what_the_machine_refuses_is_one_line(number, name):
  status, line = errors.explain(OSError(number, os.strerror(number), name))
  assert status == errors.BAD_INPUT and os.strerror(number) in line
  assert line.endswith(f": {name}" if name else os.strerror(number))


@pytest.mark.parametrize("platforms", ["nonsense", "cuda"])
def test_a_platform_that_jax_lacks_is_one_line(platforms):
  code = (
    "import jax; from antlm_jax import cli\ncli.run(lambda _: jax.devices())"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=os.environ | {"JAX_PLATFORMS": platforms},
    capture_output=True,
    text=True,
  )
  assert done.returncode == errors.BAD_INPUT, done.stderr
  assert done.stderr.count("\n") == 1
  assert done.stderr.startswith(f"error: JAX_PLATFORMS={platforms}: ")


def test_an_unforeseen_error_is_not_explained():
  assert errors.explain(RuntimeError("Unable to initialize backend")) is None
  assert errors.explain(AssertionError()) is None
