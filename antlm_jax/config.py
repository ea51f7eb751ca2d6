"""The configuration of a run: settings, defaults, config files, overrides.

A config file is Python: `get_config(arg)` returns `default()` with changes.
`--config=FILE.py:ARG` loads it, and `--config.key=value` changes one setting.
The files of configs/ also load by name: `--config=quickstart`. The argument
`shrink` makes every config run in seconds: `--config=quickstart:shrink`.
"""

import contextlib
import dataclasses
import difflib
import importlib.util
import json
import os
import pathlib
import re
import traceback
from collections.abc import Collection, Iterable, Iterator

from flax import traverse_util
from ml_collections import ConfigDict

from antlm_jax import models, settings
from antlm_jax.data import order
from antlm_jax.errors import UserError
from antlm_jax.objectives import batch, curriculum
from antlm_jax.objectives.objective import OBJECTIVES, Objective, with_ratio
from antlm_jax.settings import setting

CONFIGS = pathlib.Path(__file__).parent / "configs"
# Settings that may differ when a run resumes, since they change no parameter.
FREE = (
  "checkpoint",
  "data.path",
  "data.threads",
  "eval",
  "log",
  "mesh",
  "model.attention",
  "model.remat",
  "model.scan_layers",
  "train.max_epochs",
)


def _amount(default: float):
  """Returns a setting of steps or a share; see `curriculum.amount`."""
  text = "Number of steps, or under 1 a share of the run"
  return setting(default, text, least=0, most=settings.LARGEST)


@dataclasses.dataclass(frozen=True)
class Run:
  """Settings without a group."""

  seed: int = setting(0, "Random seed", most=2**32 - 1)
  curriculum: str = setting(
    "4C+16M+4C", "Objectives by epochs or steps; see docs/curricula.md"
  )


@dataclasses.dataclass(frozen=True)
class Data:
  """Rows and their order."""

  path: str = setting("", "Prepared folder, or NAME=FOLDER,NAME=FOLDER")
  mix: str = setting("", "Curriculum of folders, such as 90%a+10%a:b=1:3")
  rounding: str = setting(
    "carry", "Rounding of an epoch to whole batches", choices=order.ROUNDING
  )
  shuffle: bool = setting(True, "Shuffle the rows in every epoch")
  short: float = setting(0.0, "Share of the rows cut short", least=0, most=1)
  random_offset: bool = setting(False, "Cut a stream anew in each epoch")
  framed: bool = setting(False, "Put boundaries around a stream's rows")
  threads: int = setting(2, "Threads that build batches", least=1, most=1024)


@dataclasses.dataclass(frozen=True)
class Train:
  """Batches and the run's length."""

  batch_size: int = setting(
    128, "Rows in a step, over all devices", least=1, most=batch.MOST_ROWS
  )
  # ("64x128@0.5", "32x512@0.9"): 64 rows of 128 tokens from half of the run on,
  # then 32 rows of 512.
  batch_schedule: tuple[str, ...] = setting(
    (), "Later batches, each ROWSxTOKENS@SHARE of the run"
  )
  batch_start: float = setting(
    1.0, "Filled share of the first batch; grows to 1", over=0, most=1
  )
  microbatches: int = setting(1, "Parts of a batch, in sequence", least=1)
  # A curriculum without a length of its own needs one of the two.
  epochs: float = setting(0.0, "Epochs of the run", least=0, most=1e6)
  steps: int = setting(0, "Steps of the run", least=0)
  max_epochs: float = setting(
    0.0, "Refuse longer runs, e.g. 10 by BabyLM's rules; 0: any", least=0
  )
  loss_average: str = setting(
    "targets",
    "Average the loss over all targets, or first within each objective",
    choices=("targets", "objectives"),
  )
  z_loss: float = setting(0.0, "Weight of the z-loss", least=0)
  loss_chunk: int = setting(
    0, "Targets whose logits are in memory at once; 0: 2048, CPU 256", least=0
  )


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """Optimizer, weight decay and averaging."""

  name: str = setting("adamw", "Optimizer", choices=("adamw", "lamb"))
  b1: float = setting(0.9, "Decay of the first moment", least=0, under=1)
  b2: float = setting(0.95, "Decay of the second moment", least=0, under=1)
  # Not 0: the moments of a token that never occurred would be 0 / 0.
  eps: float = setting(1e-8, "Added to the second moment's root", over=0)
  weight_decay: float = setting(
    0.1, "Weight decay per step, times the learning rate", least=0
  )
  # matrices: neither norms nor biases; hidden: nor embeddings.
  decay_scope: str = setting(
    "matrices", "Parameters that decay", choices=("all", "matrices", "hidden")
  )
  clip: float = setting(1.0, "Largest gradient norm; 0: no clipping", least=0)
  ema: float = setting(
    0.0, "Decay of the parameters' moving average; 0: none", least=0, under=1
  )
  reset_at_switch: bool = setting(False, "Reset the state at each new phase")


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Learning rate."""

  name: str = setting("wsd", "Schedule", choices=("wsd", "cosine"))
  peak_lr: float = setting(1e-3, "Highest learning rate", least=0)
  warmup_steps: float = _amount(0.02)
  decay_steps: float = _amount(0.1)
  decay: str = setting(
    "linear", "Shape of wsd's decay", choices=("linear", "cosine", "1-sqrt")
  )
  min_lr_ratio: float = setting(0.0, "Last / highest rate", least=0, most=1)
  cooldown_steps: float = _amount(0.0)  # at the end, from the floor to zero
  restart_at_switch: bool = setting(False, "Restart the schedule in each phase")


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Devices; one size may be -1, for the remaining devices."""

  data: int = setting(-1, "Parts of the batch", least=-1)
  fsdp: int = setting(1, "Parts of the batch and the parameters", least=-1)
  tensor: int = setting(1, "Parts of heads and widths", least=-1)


@dataclasses.dataclass(frozen=True)
class Eval:
  """Measures during training."""

  every: float = _amount(0.05)
  rows: int = setting(512, "Most held-out rows of each set", least=0)
  data: str = setting("", "Further prepared folders, NAME=FOLDER,...")
  objectives: tuple[str, ...] = setting(
    ("C", "M"), "Objectives whose held-out loss is measured"
  )
  pairs: str = setting("", "Path to minimal pairs to score; none if empty")
  watch: tuple[str, ...] = setting(
    (), "Held-out losses, e.g. clm,mlm; the step with the lowest sum is kept"
  )
  patience: int = setting(
    0, "Evaluations without a lower sum before the run ends; 0: off", least=0
  )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """Steps that are saved and kept."""

  every: float = _amount(0.1)
  keep_last: int = setting(2, "Number of newest checkpoints kept", least=1)
  keep_every: int = setting(0, "Keep multiples of this step; 0: off", least=0)
  at: tuple[int, ...] = setting((), "Further steps to save and keep", least=1)
  words: tuple[str, ...] = setting(
    (), "Save and keep after this many words, e.g. 1M,10M, or babylm"
  )


@dataclasses.dataclass(frozen=True)
class Log:
  """Logging."""

  every: int = setting(20, "Steps between two log lines", least=1)
  writers: tuple[str, ...] = setting(
    ("tensorboard", "csv"),
    "Copies of metrics.jsonl in other formats",
    choices=("tensorboard", "csv", "wandb"),
  )
  trace: str = setting("", "Profile steps FIRST:LAST into WORKDIR/trace")


@dataclasses.dataclass(frozen=True)
class Init:
  """Start of a run."""

  checkpoint: str = setting("", "Run, checkpoint or model to start from")
  optimizer: str = setting("keep", "Its state", choices=("keep", "reset"))
  step: str = setting("keep", "First step", choices=("keep", "reset"))


# Sections by group, but for `model`, which is the encoder's own section, and
# `objectives`, which may have any number of members.
_SECTIONS = Data, Train, Optimizer, Schedule, Mesh, Eval, Checkpoint, Log, Init
GROUPS = {section.__name__.lower(): section for section in _SECTIONS}


def default(encoder: str = "llama") -> ConfigDict:
  """Returns every setting with its default, for a key of `models.ENCODERS`."""
  out = settings.to_config_dict(Run())
  out.objectives = ConfigDict(
    {name: settings.to_config_dict(o) for name, o in OBJECTIVES.items()}
  )
  out.model = ConfigDict({"name": encoder, **models.defaults(encoder)})
  for name, section in GROUPS.items():
    out[name] = settings.to_config_dict(section())
  return out


def described() -> str:
  """Returns a line for each setting: key, default and help text."""
  others = [("model", models.config_type(name)) for name in models.ENCODERS]
  others.append(("objectives.NAME", Objective))
  lines = {}
  for group, section in [("", Run), *GROUPS.items(), *others]:
    for field in dataclasses.fields(section):
      key = ".".join(filter(None, (group, field.name)))
      choices = field.metadata["choices"]
      one_of = f" ({', '.join(map(str, choices))})" if choices else ""
      pair = f"{key}={settings.written(field.default)}"
      line = f"  {pair:33} {field.metadata['help']}{one_of}"
      lines.setdefault(key, line)  # the first encoder's, of what all have
  del lines["model.vocab_size"], lines["objectives.NAME.name"]
  return "\n".join(lines.values())


def load(spec: str, overrides: Iterable[str] = ()) -> ConfigDict:
  """Loads `FILE.py` or `FILE.py:ARG`, and locks the config.

  `get_config` receives ARG without the word `shrink`, which this function
  applies after the overrides (each `--config.key.key=value`). Raises a
  UserError for a file that is not a config, an unknown key (with the nearest
  right one) or a value of another type or out of its bounds.
  """
  path, _, arg = spec.partition(":")
  words = arg.split(",")
  get_config = module(path).get_config
  with _reported(path):
    config = get_config(",".join(word for word in words if word != "shrink"))
  # Before the overrides: an unknown key here is the file's fault.
  _check_keys(path, config)
  changed = {_override(config, override) for override in overrides}
  if "shrink" in words:
    shrink(config, changed)
  check(config)
  return config.lock()


def check(config: ConfigDict) -> None:
  """Checks all settings, alone and together; UserError for the first error."""
  settings.check_values(Run, config)
  for name, section in GROUPS.items():
    settings.check_values(section, config[name], name)
  encoder_config = models.config_type(config.model.name)
  settings.check_values(encoder_config, config.model, "model")
  objectives(config)
  if config.train.epochs and config.train.steps:
    raise UserError("train.epochs and train.steps are both set: choose one")


def find(path: str) -> str:
  """Returns a config file's path, of our own by its name; UserError if none."""
  own = {file.stem: file for file in sorted(CONFIGS.glob("*.py"))}
  if path in own:
    return str(own[path])
  if not pathlib.Path(path).is_file():
    near = _nearest(pathlib.Path(path).stem, own, f"known: {', '.join(own)}")
    raise UserError(f"--config={path}: no such file, nor such a name; {near}")
  return path


def module(path: str):
  """Runs a config file, and returns it as a module with `get_config`."""
  path = find(path)
  found = importlib.util.spec_from_file_location("config_file", path)
  if found is None:
    raise UserError(f"--config={path}: not a Python file")
  out = importlib.util.module_from_spec(found)
  with _reported(path):
    found.loader.exec_module(out)
  if not hasattr(out, "get_config"):
    raise UserError(f"--config={path}: it defines no get_config(arg)")
  return out


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
  """Reports any error of a config file, which is a user's code, as input."""
  try:
    yield
    return
  except UserError:
    raise
  except SyntaxError as error:
    lines, told = [error.lineno], error.msg
  except (Exception, SystemExit) as error:
    # The last line of this file that ran, not of the library that it called.
    frames = traceback.extract_tb(error.__traceback__)
    own = os.path.abspath(path)
    lines = [f.lineno for f in frames if os.path.abspath(f.filename) == own]
    told = f"{type(error).__name__}: {error}"
  where = ", line ".join([path, *map(str, lines[-1:])])
  raise UserError(f"--config={where}: {' '.join(told.split())}")


def _check_keys(path: str, config) -> None:
  """Checks that a config has exactly the known keys."""
  what = f"--config={path}: get_config(arg)"
  if not isinstance(config, ConfigDict):
    raise UserError(
      f"{what} returns {type(config).__name__}, not a ConfigDict: return"
      " default() with changes"
    )
  if "objectives" not in config:
    raise UserError(f"{what} returns no objectives: begin with default()")
  # A ConfigDict takes any new key, so a slip would train with the default.
  found = leaves(config)
  known = leaves(default(found.get("model.name", "llama")))
  for key in sorted(found.keys() ^ known.keys()):
    if key.startswith("objectives."):  # may be added; `objectives` checks them
      continue
    if key in known:
      raise UserError(f"{what} returns no {key}: begin with default()")
    near = _nearest(key, known)
    raise UserError(f"{what} sets {key}, which is unknown; {near}")


def parse_arg(arg: str, **defaults) -> ConfigDict:
  """Parses the argument of a config file, such as `size=xs,curriculum=24M`.

  Raises a UserError for an unknown name or a value of another type.

  Args:
    arg: Comma-separated parts, `name=value` or `name` for `name=True`.
    **defaults: Allowed names with their defaults, or tuples of all allowed
      values, the default first.
  """
  choices = {k: v for k, v in defaults.items() if isinstance(v, tuple)}
  parsed = ConfigDict(defaults | {k: v[0] for k, v in choices.items()})
  for part in filter(None, arg.split(",")):
    name, equals, value = part.partition("=")
    if name not in defaults:
      known = [*defaults, "shrink"]
      near = _nearest(name, known, f"known: {', '.join(known)}")
      raise UserError(f"config argument {name!r} is unknown; {near}")
    _set(parsed, name, value if equals else "True", f"config argument {part}")
    if parsed[name] not in choices.get(name, (parsed[name],)):
      known = ", ".join(choices[name])
      raise UserError(f"config argument {name}={value!r} is not one of {known}")
  return parsed


def _override(config: ConfigDict, override: str) -> str:
  """Applies `--config.key=value` to a config, and returns the key."""
  key, equals, value = override.partition("=")
  key = key.removeprefix("--config.")
  if not equals:
    raise UserError(f"--config.{key}: give a value, --config.{key}=VALUE")
  group, _, name = key.rpartition(".")
  node = config
  for part in key.split("."):
    if not isinstance(node, ConfigDict) or part not in node:
      near = _nearest(key, leaves(config))
      raise UserError(f"unknown config key {key!r}; {near}")
    owner, node = node, node[part]
  # A tuple in a ConfigDict does not say what its parts are.
  section = GROUPS.get(group)
  if group == "model":
    section = models.config_type(config.model.name)
  declared = settings.kinds(section) if section else {}
  kind = declared.get(name, owner.get_type(name))
  _set(owner, name, value, f"--config.{key}={value:.100}", kind)
  return key


def _nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
  near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
  otherwise = otherwise or "antlm train --help lists them"
  return f"did you mean {near[0]!r}?" if near else otherwise


def _set(node: ConfigDict, name: str, text: str, what: str, kind=None) -> None:
  """Sets `node.name` from text, read as a type, by default that it has."""
  kind = kind or node.get_type(name)  # also a placeholder, which has no value
  if kind in (ConfigDict, dict):
    names = ", ".join(node[name])
    raise UserError(f"{what}: not a group of settings ({names})")
  node[name] = settings.parse(text, kind, what)


def leaves(config: ConfigDict) -> dict:
  """Returns all settings as `{"group.key": value}`."""
  return traverse_util.flatten_dict(config.to_dict(), sep=".")


_SHRUNK = {
  "train.batch_size": 4,
  "train.batch_schedule": (),
  "train.batch_start": 1.0,
  "train.microbatches": 1,
  "schedule.warmup_steps": 0.1,
  "schedule.decay_steps": 0.2,
  "schedule.cooldown_steps": 0.0,
  "eval.every": 0.5,
  "eval.rows": 8,
  "checkpoint.every": 0.5,
  "checkpoint.keep_every": 0,
  "log.every": 1,
}


def shrink(config: ConfigDict, changed: Collection[str] = ()) -> None:
  """Makes any config run in seconds, on the same kind of data.

  The phases of the curriculum keep their proportions, over 12 steps or the
  `train.steps` that the user asked for.

  `changed` has the keys that the user set, which stay. A curriculum that the
  user wrote in steps, such as `8C+8M steps`, keeps its length.
  """
  model = {"layers": 2, "width": 32, "heads": 4, "mlp_width": 64}
  if "kv_heads" in config.model:
    model["kv_heads"] = 2
  model["dtype"] = "float32"
  if config.init.checkpoint and "init.checkpoint" not in changed:
    model = {}  # the config file starts from a model
  small = {f"model.{name}": value for name, value in model.items()} | _SHRUNK
  config.update_from_flattened_dict(
    {key: value for key, value in small.items() if key not in changed}
  )
  in_steps = "curriculum" in changed and config.curriculum.endswith("steps")
  if not in_steps and "train.epochs" not in changed:
    asked = config.train.steps if "train.steps" in changed else 0
    config.curriculum = _scaled(config, asked or 12)
    config.train.steps = 0
  # The length that the config file gives is that of its whole curriculum.
  if "train.epochs" not in changed:
    config.train.epochs = 0.0
  if "train.steps" not in changed:
    config.train.steps = 0


def _scaled(config: ConfigDict, steps: int) -> str:
  """Returns the curriculum over `steps` steps, at least one in each phase."""
  # A thousand, so that each phase has at least a step before it is scaled.
  names = list(objectives(config))
  parsed = curriculum.parse(config.curriculum, names, 1000, 1000)
  end, phases = 0, []
  for phase in parsed.phases:
    start, end = end, max(end + 1, round(phase.stop / parsed.steps * steps))
    shares = ":".join(f"{share:.6f}" for share in phase.shares.values())
    mixed = f"={shares}" if len(phase.shares) > 1 else ""
    phases.append(f"{end - start}{':'.join(phase.shares)}{mixed}")
  return f"{'+'.join(phases)} steps"


def to_json(config: ConfigDict) -> str:
  """Returns the resolved config as JSON, which `from_json` reads."""
  return json.dumps(config.to_dict(), indent=2)


def from_json(text: str) -> ConfigDict:
  """Reads the text of `to_json`; UserError if it is not that of a config."""
  try:
    stored = json.loads(text)
    # Settings that came later have their defaults.
    config = default(stored["model"]["name"])
    config.update(stored)
  except Exception as error:  # foreign JSON makes ConfigDict raise many kinds
    raise UserError(f"not the JSON of a config: {error!r:.200}") from error
  return config.lock()


def differences(old: ConfigDict, new: ConfigDict) -> list[str]:
  """Lists the settings that differ and must not when a run resumes."""
  before, after = leaves(old), leaves(new)
  # The curriculum uses none of the objectives that only one of them has, such
  # as those that a version adds or removes: it is the same, and both can run.
  unused = set(old.objectives) ^ set(new.objectives)
  free_keys = (*FREE, *(f"objectives.{name}" for name in unused))
  out = []
  for key in sorted(before.keys() | after.keys()):
    if any(key == free or key.startswith(free + ".") for free in free_keys):
      continue
    # A setting that only one of them has is a difference, too.
    if before.get(key) != after.get(key):
      out.append(f"{key} was {before.get(key)!r}, is {after.get(key)!r}")
  return out


def objectives(config: ConfigDict) -> dict[str, Objective]:
  """Builds a config's objectives, by their names in the curriculum.

  These are `config.objectives` and those that a letter and a percentage name,
  such as M30. Raises a UserError for an impossible objective, and for two with
  the same name.
  """
  known = {field.name for field in dataclasses.fields(Objective)}
  out = {}
  for name, group in config.objectives.items():
    if not isinstance(group, ConfigDict):
      raise UserError(f"config.objectives.{name}={group!r} is not a group")
    for key in set(group) - known:
      near = _nearest(key, known)
      raise UserError(f"config.objectives.{name}.{key} is unknown; {near}")
    out[name] = Objective(**group)
  used = " ".join([config.curriculum, *config.eval.objectives])
  for name in re.findall(curriculum.NAME, used):
    if name not in out and (made := with_ratio(name, out)):
      out[name] = made
  for name in out:
    same = [other for other in out if out[other].name == out[name].name]
    if len(same) > 1:
      raise UserError(
        f"config.objectives {' and '.join(same)} are both named"
        f" {out[name].name!r}: logs would mix them up"
      )
  return out
