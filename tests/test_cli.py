"""Arguments and errors, which all commands treat in the same way."""

import contextlib
import errno
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax import __main__ as antlm
from antlm_jax import cli, config, errors, plugins
from antlm_jax.commands import COMMANDS, configs, doctor
from tests import runs


def test_an_empty_argument_may_be_allowed_and_be_the_default():
  parser = cli.Parser(prog="it")
  parser.add_argument("--prompt").may_be_empty = True
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
  assert "unknown argument 'more'" in runs.told(
    parser.parse_with_overrides, [*words, "more"]
  )


@pytest.fixture
def plugin(tmp_path, monkeypatch):
  """Returns a function that writes a plugin; the environment names none."""
  monkeypatch.setenv(plugins.VARIABLE, "")
  monkeypatch.chdir(tmp_path)

  def write(text, name="own.py"):
    (tmp_path / name).write_text(text)
    return tmp_path / name

  return write


def test_a_plugin_is_imported_once_here_and_in_children(plugin, capsys):
  first = plugin("print('first')", "first.py")
  second = plugin("from __future__ import annotations\nprint('second')")
  argv = ["--plugin=first.py", "train", "--plugin", "own.py", "--x=y"]
  assert plugins.load_plugins([*argv, f"--plugin={first}"]) == [
    "train",
    "--x=y",
  ]
  assert capsys.readouterr().out == "first\nsecond\n"
  assert plugins.plugin_arguments() == [
    f"--plugin={first}",
    f"--plugin={second}",
  ]
  code = "from antlm_jax import plugins; plugins.load_plugins([])"
  child = [sys.executable, "-c", code]
  done = subprocess.run(child, cwd=runs.ROOT, capture_output=True, text=True)
  assert done.stdout == "first\nsecond\n", done.stderr


@pytest.mark.parametrize(
  "text, word, told",
  [
    (
      "x = 1\nboom()",
      "own.py",
      "own.py, line 2: NameError: name 'boom' is not",
    ),
    ("x = ", "own.py", "own.py, line 1: invalid syntax"),
    ("raise SystemExit(0)", "own.py", "own.py, line 1: SystemExit: 0"),
    ("", "none.py", "none.py: no such file"),
    ("", "words.txt", "words.txt: not a Python file"),
  ],
)
def test_a_bad_plugin_is_told_with_its_line(
  plugin, text, word, told, monkeypatch
):
  plugin(text)
  plugin("", "words.txt")
  assert f"--plugin={told}" in runs.told(
    plugins.load_plugins, [f"--plugin={word}"]
  )
  monkeypatch.setenv(plugins.VARIABLE, os.path.abspath(word))
  assert told in runs.told(plugins.load_plugins, [])


def test_a_plugin_needs_a_file(plugin):
  line = runs.told(plugins.load_plugins, ["--plugin"])
  assert line.startswith("--plugin is empty: give a file")


@pytest.mark.parametrize(
  "words, told",
  [
    (["eval", "blimp", "--help"], "usage: antlm eval blimp "),
    (["eval", "score", "--task=blimp", "-h"], "usage: antlm eval score "),
    (["train", "-h"], "usage: antlm train "),
    # A config's own arguments, which its file alone knows.
    (["train", "--config=own_text", "-h"], "- `memory`: 24 (default)"),
    (["eval", "-h"], "antlm eval ewok "),
    (["--version"], "antlm 0."),
  ],
)
def test_antlm_runs_and_tells_commands(words, told, capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["antlm", *words])
  with contextlib.suppress(SystemExit):
    antlm.main(words)
  out = capsys.readouterr().out
  assert told in out and ("  --task {" in out) == ("--task=blimp" in words)


# A configured run that is never begun.
RUN = "train --config=quickstart --workdir=x"
REFUSED = [  # arguments of antlm, and a part of its error
  ("trian --x=y", "no command 'trian'; did you mean 'train'"),
  ("eval blip", "no command 'eval blip'; did you mean 'eval blimp'"),
  ("--nonsense", "unknown option '--nonsense'"),
  ("eval --nonsense", "unknown option '--nonsense'"),
  ("train --config=c.py --workdir=", "--workdir is empty"),
  ("export --checkpoint=c --output=", "--output is empty"),
  ("prepare --text '' --output=o", "--text is empty"),
  ("prepare --vocab_sise=3", "--vocab_sise=3; did you mean '--vocab_size'"),
  ("export --checkpoint=x --out=y", "--out=y; did you mean '--output'"),
  ("train --confg=x --config.seed=2", "--confg=x; did you mean '--config'"),
  (f"{RUN} --lr=1", "did you mean --config.schedule.peak_lr?"),
  # With its dashes, --steps would be as similar to --help.
  (f"{RUN} --steps=1", "did you mean --config.train.steps?"),
  ("train --config=continued,shrink --workdir=x", "=continued:shrink"),
  # A setting without its group, also next to a missing or a known config.
  *(
    (f"{run} --{word}", f"--{word}; did you mean --config.{key}?")
    for run in ("train", RUN)
    for word, key in (
      ("peak_lr=1", "schedule.peak_lr"),
      ("optimizer=lamb", "optimizer"),
      ("data=x", "data.path"),
      ("num_hidden_layers=2", "model.layers"),
      ("mask_ratio=0.3", "objectives.M.mask_ratio"),
    )
  ),
]


@pytest.mark.parametrize("words, told", REFUSED)
def test_a_bad_argument_is_told_with_its_remedy(
  words, told, tmp_path, monkeypatch
):
  """Catches an error about another argument, and files that are left."""
  monkeypatch.chdir(tmp_path)
  line = runs.told(antlm.main, shlex.split(words))
  assert told in line and line.isascii()
  assert not list(tmp_path.iterdir())


@pytest.fixture
def shown_help(capsys):
  """Returns the help of a command as one line: `shown_help("train")`."""

  def shown(words: str) -> str:
    with pytest.raises(SystemExit):
      antlm.main([*words.split(), "--help"])
    return " ".join(capsys.readouterr().out.split())

  return shown


RATE = "by commas (default: {})"
MUON = "with optimizer.name=muon also: optimizer.momentum=0.95"


@pytest.mark.parametrize(
  "words, parts",
  [
    (
      "train",
      [
        " schedule.peak_lr=0.001 ",
        "optimizer.name=adamw Implementation (adamw, lamb, muon",
        "schedule.name=wsd Implementation (wsd, cosine",
        "model.name=llama Implementation (bert, llama, gemma",
        MUON,
      ],
    ),
    ("train --config=quickstart", [" schedule.peak_lr=0.003 "]),
    ("train --config=antlm_ltg_bert", [" optimizer.name=lamb "]),
    ("eval finetune", [RATE.format("5e-05")]),
    ("eval finetune --preset=simcse", [RATE.format("3e-05")]),
    ("eval finetune --preset=2026", [RATE.format("3e-05")]),
  ],
)
def test_help_has_the_values_of_a_config_or_preset(words, parts, shown_help):
  """Catches help with the same defaults for all, and hidden settings."""
  shown = shown_help(words)
  assert all(part in shown for part in parts), shown
  assert "(default: )" not in shown
  assert ("momentum" in shown) == (MUON in parts)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_no_empty_default_and_no_file_that_a_wheel_lacks(
  command, shown_help
):
  """Catches `(default: )`, Python's own names, and paths of a checkout."""
  shown = shown_help(command)
  assert "(default: )" not in shown and "object at 0x" not in shown
  options = re.split(r" (?=--\w+ )", shown)
  # Two defaults, one in words, contradict each other.
  assert not [o for o in options if "by default" in o and "(default: " in o]
  path = r"(?:^|[ (`\"])((?:\./)?[\w./]+/[\w.]+\.(?:py|sh|md))"
  assert not re.findall(path, shown)


@pytest.mark.parametrize(
  "number, name", [(errno.ENAMETOOLONG, "a" * 5), (errno.ENOSPC, None)]
)
def test_what_the_machine_refuses_is_one_line(number, name):
  status, line = errors.explain(OSError(number, os.strerror(number), name))
  assert status == errors.BAD_INPUT and os.strerror(number) in line
  assert line.endswith(f": {name}" if name else os.strerror(number))


def test_a_platform_that_jax_lacks_is_one_line():
  code = (
    "import jax; from antlm_jax import cli\n"
    "cli.run_command(lambda _: jax.devices())"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=os.environ | {"JAX_PLATFORMS": "nonsense"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == errors.BAD_INPUT, done.stderr
  assert done.stderr.count("\n") == 1
  assert done.stderr.startswith("error: JAX_PLATFORMS=nonsense: ")


@pytest.mark.parametrize("make", [jnp.zeros, np.zeros])
def test_a_lack_of_memory_is_one_line(make):
  """Catches a traceback, and a launcher that tries again."""
  with pytest.raises((jax.errors.JaxRuntimeError, MemoryError)) as caught:
    make(1 << 50)
  status, line = errors.explain(caught.value)
  assert status == errors.BAD_INPUT and "\n" not in line
  assert "llocat" in line and "train.microbatches=4" in line


def test_an_unforeseen_error_is_not_explained():
  assert errors.explain(RuntimeError("Unable to initialize backend")) is None
  assert errors.explain(AssertionError()) is None


def test_configs_lists_each_with_its_size_and_length(capsys):
  configs.main(["--vocab_size=1000"])
  head, *lines = capsys.readouterr().out.splitlines()
  assert head.split()[2:4] == ["parameters", "vocabulary"]
  rows = {line.split()[0]: line for line in lines}
  stems = {path.stem for path in config.CONFIGS.glob("*.py")}
  assert {name.partition(":")[0] for name in rows} == stems
  for name, words in {
    "antlm_babyllama": ("llama", "24 epochs"),
    "gpt_bert": ("ltg_bert", "7,812 steps"),
    "encoders:size=1B": ("970M", " 1k ", "42,000 steps"),
    "continued": ("Continues a model",),  # its size depends on that model
  }.items():
    assert all(word in rows[name] for word in words), rows[name]


def test_doctor_says_that_devices_are_missing():
  """Catches a traceback in place of the problem that it is asked about."""
  env = os.environ | {"JAX_PLATFORMS": "cuda"}
  command = [sys.executable, "-m", "antlm_jax", "doctor"]
  ended = subprocess.run(command, env=env, capture_output=True, text=True)
  assert ended.returncode == 1 and "Traceback" not in ended.stderr
  assert "problem: JAX_PLATFORMS=cuda: " in ended.stdout


@pytest.fixture
def failed_doctor(capsys):
  """Returns the report of `antlm doctor`, which finds a problem."""

  def printed() -> str:
    with pytest.raises(SystemExit) as ended:
      doctor.main([])
    assert ended.value.code == 1
    return capsys.readouterr().out

  return printed


def test_doctor_checks_a_source_tree_that_is_not_installed(
  failed_doctor, monkeypatch
):
  """Catches a traceback where only PYTHONPATH leads to the package."""

  def requires(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "requires", requires)
  printed = failed_doctor()
  assert "a matrix product compiled and ran" in printed
  assert re.search(r"\nproblem: .* not installed.*: pip install -e /", printed)


def test_doctor_names_what_is_missing(failed_doctor, capsys, monkeypatch):
  doctor.main([])
  printed = capsys.readouterr().out
  assert "a matrix product compiled and ran" in printed
  assert printed.endswith("everything that antlm_jax needs is here\n")
  installed_version = importlib.metadata.version

  def version(name):
    if name in ("optax", "jinja2"):
      raise importlib.metadata.PackageNotFoundError(name)
    return "0.1" if name == "grain" else installed_version(name)

  monkeypatch.setattr(importlib.metadata, "version", version)
  printed = failed_doctor()
  assert "problem: optax is missing: pip install 'optax>=" in printed
  assert "problem: grain 0.1: pip install 'grain>=" in printed
  evals = re.search(r"^antlm_jax\[evals\].*$", printed, re.M)
  assert "needs jinja2" in evals[0]  # a missing extra is not a problem
  monkeypatch.setattr(doctor, "_COMPILERS", {"plan-tpu": lambda: None})
  assert re.search(r"\[plan-tpu\] +needs its compiler", failed_doctor())
