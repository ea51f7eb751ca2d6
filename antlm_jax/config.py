"""The configuration of a run: typed settings, config files, overrides.

A config file is Python: `get_config(arg)` returns `default()`, a ConfigDict,
with changes. `--config=FILE.py:ARG` loads it, and `--config.key=value` changes
one setting. The files of configs/ also load by name: `--config=quickstart`. The
argument `shrink` makes every config run in seconds:
`--config=quickstart:shrink`.

`typed` turns the ConfigDict into a `Config`, a tree of frozen dataclasses that
build the parts of the run. It checks every setting. The library itself takes
only Configs.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from flax import traverse_util
from ml_collections import ConfigDict

from antlm_jax import models, plugins, settings
from antlm_jax.data import order
from antlm_jax.errors import UserError
from antlm_jax.models import llama
from antlm_jax.objectives import batch, curriculum, objective
from antlm_jax.objectives.curriculum import amount_setting
from antlm_jax.objectives.objective import OBJECTIVES, Objective, with_ratio
from antlm_jax.runtime.sharding import Mesh
from antlm_jax.settings import Section, nearest, setting
from antlm_jax.training import optim

CONFIGS = pathlib.Path(__file__).parent / "configs"
# Settings that may differ when a run resumes. They change no parameter, except
# by rounding (and which neurons a dropout drops, with other microbatches).
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
  "train.loss_chunk",
  "train.max_epochs",
  "train.microbatches",
)


@dataclasses.dataclass(frozen=True)
class Data(Section):
  """Rows and their order."""

  group = "data"

  path: str = setting(
    "", "Path to a prepared folder, or NAME=FOLDER,NAME=FOLDER"
  )
  mix: str = setting("", "Curriculum of data by name, e.g. 90%a+10%a:b=1:3")
  rounding: str = setting(
    "carry",
    "Batch at an epoch's end: continue with the next epoch (carry), repeat rows"
    " (up) or drop rows (down)",
    choices=order.ROUNDING,
  )
  shuffle: bool = setting(True, "Shuffle the rows in every epoch")
  short: float = setting(
    0.0, "Share of the rows to cut at random lengths", least=0, most=1
  )
  random_offset: bool = setting(False, "Cut a stream anew in each epoch")
  framed: bool = setting(False, "Put boundary tokens around a stream's rows")
  threads: int = setting(
    2, "Number of threads that build batches", least=1, most=1024
  )


@dataclasses.dataclass(frozen=True)
class Train(Section):
  """Batches and the run's length."""

  group = "train"

  batch_size: int = setting(
    128,
    "Number of rows in a step, over all devices",
    least=1,
    most=batch.MOST_ROWS,
  )
  # ("64x128@0.5", "32x512@0.9"): 64 rows of 128 tokens from half of the run on,
  # then 32 rows of 512. "32x512@0.9:base=40000" also changes RoPE's base.
  batch_schedule: tuple[str, ...] = setting(
    (),
    "Later batches, ROWSxTOKENS@SHARE[:base=BASE]: shape, part of the run after"
    " which it begins, and RoPE base",
  )
  batch_start: float = setting(
    1.0, "Filled share of the first batch; grows linearly to 1", over=0, most=1
  )
  microbatches: int = setting(
    1, "Number of parts of a batch, computed in turn to save memory", least=1
  )
  # A curriculum without a length of its own needs one of the two.
  epochs: float = setting(0.0, "Number of epochs of the run", least=0, most=1e6)
  steps: int = setting(0, "Number of steps of the run", least=0)
  max_epochs: float = setting(
    0.0, "Largest number of epochs, e.g. 10 for BabyLM; 0 for any", least=0
  )
  loss_average: str = setting(
    "targets",
    "Average the loss over all targets, or first within each objective",
    choices=("targets", "objectives"),
  )
  z_loss: float = setting(
    0.0, "Weight of the z-loss, the squared log-partition", least=0
  )
  loss_chunk: int = setting(
    0,
    "Number of targets whose logits are in memory at once; 0 chooses by the"
    " device (a fused kernel on TPU, 256 on CPU, up to 2 GiB on GPU)",
    least=0,
  )


@dataclasses.dataclass(frozen=True)
class Eval(Section):
  """Measures during training."""

  group = "eval"

  every: float = amount_setting(0.05, "Time between two evaluations")
  rows: int = setting(
    512, "Largest number of held-out rows of each set", least=0
  )
  data: str = setting("", "Further held-out sets, NAME=FOLDER,...")
  objectives: tuple[str, ...] = setting(
    ("C", "M"), "Objectives whose held-out loss is measured"
  )
  pairs: str = setting("", "Path to a folder of minimal pairs to score")
  watch: tuple[str, ...] = setting(
    (),
    "Held-out losses, e.g. clm,mlm, whose lowest sum chooses the step to keep"
    " (on half of the held-out rows)",
  )
  patience: int = setting(
    0,
    "Number of evaluations without a lower sum of eval.watch that end the run;"
    " 0 for never",
    least=0,
  )


@dataclasses.dataclass(frozen=True)
class Checkpoint(Section):
  """Steps that are saved and kept."""

  group = "checkpoint"

  every: float = amount_setting(0.1, "Time between two saves")
  keep_last: int = setting(2, "Number of newest checkpoints kept", least=1)
  keep_every: int = setting(
    0, "Keep multiples of this step; 0 for none", least=0
  )
  at: tuple[int, ...] = setting((), "Further steps to save and keep", least=1)
  words: tuple[str, ...] = setting(
    (), "Save and keep after this many words, e.g. 1M,10M, or babylm"
  )


@dataclasses.dataclass(frozen=True)
class Log(Section):
  """Logging."""

  group = "log"

  every: int = setting(20, "Number of steps between two log lines", least=1)
  # A run checks the names of both: its model loads without their plugins.
  writers: tuple[str, ...] = setting(
    ("tensorboard", "csv"),
    "Formats of copies of metrics.jsonl: tensorboard, csv, wandb or a plugin's",
  )
  hooks: tuple[str, ...] = setting((), "Names of registered hooks to add")
  trace: str = setting("", "Profile steps FIRST:LAST into WORKDIR/trace")


@dataclasses.dataclass(frozen=True)
class Init(Section):
  """Start of a run."""

  group = "init"

  checkpoint: str = setting("", "Run, checkpoint or model to start from")
  optimizer: str = setting(
    "keep", "Optimizer state of init.checkpoint", choices=("keep", "reset")
  )
  step: str = setting(
    "keep", "Step number of init.checkpoint", choices=("keep", "reset")
  )


@dataclasses.dataclass(frozen=True)
class Config:
  """The configuration of a run; `objectives` are by name in the curriculum.

  Making one raises a UserError if its settings do not fit together.
  """

  seed: int = setting(0, "Random seed", most=2**32 - 1)
  curriculum: str = setting(
    "4C+16M+4C",
    "Objectives in order, with lengths in epochs or steps; see"
    " docs/reference/curriculum.md",
  )
  objectives: Mapping[str, Objective] = dataclasses.field(
    default_factory=OBJECTIVES.copy
  )
  model: models.EncoderConfig = llama.LlamaConfig()
  data: Data = Data()
  train: Train = Train()
  optimizer: optim.Optimizer = optim.AdamW()
  schedule: optim.Schedule = optim.WSD()
  mesh: Mesh = Mesh()
  eval: Eval = Eval()
  checkpoint: Checkpoint = Checkpoint()
  log: Log = Log()
  init: Init = Init()

  def __post_init__(self):
    settings.check(self)
    for name in _GROUPS:
      section = getattr(self, name)
      if getattr(section, "group", None) != name:
        raise UserError(f"{name}={section!r:.80} is no section of that name")
    if self.train.epochs and self.train.steps:
      raise UserError(
        "train.epochs and train.steps are both set: choose between them"
      )
    known = self.known_objectives
    for name in known:
      same = [other for other in known if known[other].name == known[name].name]
      if len(same) > 1:
        raise UserError(
          f"config.objectives {' and '.join(same)} are both named"
          f" {known[name].name!r}: logs would mix them up"
        )

  @functools.cached_property
  def known_objectives(self) -> dict[str, Objective]:
    """`objectives`, and those of a letter and a percentage, such as M30."""
    out = dict(self.objectives)
    used = " ".join([self.curriculum, *self.eval.objectives])
    for name in re.findall(curriculum.NAME, used):
      if name not in out and (made := with_ratio(name, out)):
        out[name] = made
    return out

  @property
  def trained(self) -> list[Objective]:
    """The objectives of the curriculum, in order."""
    names = curriculum.names(self.curriculum, self.known_objectives)
    return [self.known_objectives[name] for name in names]

  def to_dict(self) -> dict[str, Any]:
    """Returns all settings as plain values, in groups."""
    out = {name: getattr(self, name) for name in _NAMES}
    each = self.objectives.items()
    out["objectives"] = {name: settings.to_dict(of) for name, of in each}
    return out | {name: settings.to_dict(out[name]) for name in _GROUPS}


_NAMES = tuple(field.name for field in dataclasses.fields(Config))
# Groups with several implementations, then groups with a single section.
_KINDS = {
  "model": models.ENCODERS,
  "optimizer": optim.OPTIMIZERS,
  "schedule": optim.SCHEDULES,
}
# Other libraries' names of settings whose own name is not similar.
_USUAL = dict.fromkeys(("learning_rate", "lr"), "schedule.peak_lr")
_NAMED = re.compile(rf"--config\.({'|'.join(_KINDS)})\.name=")
# A curriculum with counts of epochs or steps, which give its length.
_COUNTS = re.compile(r"(^|[+(])\s*[\d.]+\s*[A-Za-z]")
_SECTIONS = Data, Train, Mesh, Eval, Checkpoint, Log, Init
_GROUPS = {**_KINDS, **{section.group: section for section in _SECTIONS}}


def default(encoder: str | models.EncoderConfig = "llama") -> ConfigDict:
  """Returns every setting with its default, for an encoder or its name.

  An encoder has its own defaults: a config file chooses it here, not by a later
  change of `model.name`.
  """
  if isinstance(encoder, str):
    encoder = models.ENCODERS[encoder]()
  return ConfigDict(Config(model=encoder).to_dict())


def typed(
  config: Config | ConfigDict | Mapping[str, Any], old: bool = False
) -> Config:
  """Makes a Config from a ConfigDict or plain values; returns a Config as is.

  Missing settings have their defaults. Raises a UserError for the first setting
  that is unknown or has a bad value. `old` ignores unknown settings, which an
  older version may have written.
  """
  if isinstance(config, Config):
    return config
  made = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
  for name in sorted(made.keys() - {*_NAMES}):
    if not old:
      raise UserError(f"config.{name} is unknown; {nearest(name, _NAMES)}")
    del made[name]
  for name in made.keys() & _GROUPS.keys():
    if name in _KINDS:
      made[name] = _KINDS[name].make(made[name], old=old)
    else:
      made[name] = settings.from_dict(_GROUPS[name], made[name], name, old)
  if "objectives" in made:
    made["objectives"] = {
      name: objective.make(of, f"config.objectives.{name}", old)
      for name, of in made["objectives"].items()
    }
  return Config(**made)


def described(config: Config | None = None) -> str:
  """Returns a line for each setting: key, value or default, and help text."""
  values = leaves(config) if config else {}
  sections = [("", Config)]
  for group, found in _GROUPS.items():
    each = found.values() if group in _KINDS else [found]
    sections += [(group, section) for section in each]
  lines = {}
  sections += [("objectives.NAME", kind) for kind in objective.KINDS.values()]
  for group, section in sections:
    for field in settings.fields(section):
      key = ".".join(filter(None, (group, field.name)))
      choices = field.metadata["choices"]
      one_of = f" ({', '.join(map(str, choices))})" if choices else ""
      value = values.get(key, field.default)
      pair = f"{key}={settings.written(value)}"
      line = f"  {pair:33} {field.metadata['help']}{one_of}"
      lines.setdefault(key, line)  # several sections may share it
  del lines["objectives.NAME.name"]
  return "\n".join(lines.values())


def load(spec: str, overrides: Iterable[str] = ()) -> Config:
  """Loads `FILE.py` or `FILE.py:ARG`.

  `get_config` receives ARG without the word `shrink`, which this function
  applies after the overrides (each `--config.key.key=value`). Raises a
  UserError if the file is no config, a key is unknown, or a value has a wrong
  type or is out of bounds. The error suggests the nearest known key.
  """
  path, _, arg = spec.partition(":")
  words = arg.split(",")
  get_config = module(path).get_config
  with plugins.reported(path, f"--config={path}"):
    config = get_config(",".join(word for word in words if word != "shrink"))
  if not isinstance(config, ConfigDict):
    raise UserError(
      f"--config={path}: get_config(arg) returns {type(config).__name__}, not a"
      " ConfigDict: return default() with changes"
    )
  try:
    config = ConfigDict(typed(config).to_dict())
  except UserError as error:  # before the overrides: it is the file's
    raise UserError(f"--config={path}: {error}") from error
  changed = _change(config, overrides)
  if "shrink" in words:
    shrink(config, changed)
  return typed(config)


def given(
  config: str | os.PathLike[str] | Config,
  changes: Mapping[str, settings.Setting],
) -> Config:
  """Returns a config, or loads it by name or path, with changed settings.

  Errors are those of `load` and `typed`.
  """
  pairs = ((key, settings.written(value)) for key, value in changes.items())
  words = [f"--config.{key}={value}" for key, value in pairs]
  if isinstance(config, str | os.PathLike):
    return load(os.fspath(config), words)
  made = typed(config)
  if not words:
    return made
  changed = ConfigDict(made.to_dict())
  _change(changed, words)
  return typed(changed)


def find(path: str) -> str:
  """Returns a config file's path, of our own by its name; UserError if none."""
  own = {file.stem: file for file in sorted(CONFIGS.glob("*.py"))}
  if path in own:
    return str(own[path])
  if not pathlib.Path(path).is_file():
    name, comma, arg = path.partition(",")
    if comma and name in own:
      raise UserError(f"--config={path}: write --config={name}:{arg}")
    near = nearest(pathlib.Path(path).stem, own, f"known: {', '.join(own)}")
    raise UserError(f"--config={path}: no such file, nor such a name; {near}")
  return path


def module(path: str) -> types.ModuleType:
  """Runs a config file, and returns it as a module with `get_config`."""
  path = find(path)
  out = plugins.run_file(path, f"--config={path}")
  if not hasattr(out, "get_config"):
    raise UserError(f"--config={path}: it defines no get_config(arg)")
  return out


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
      near = nearest(name, known, f"known: {', '.join(known)}")
      raise UserError(f"config argument {name!r} is unknown; {near}")
    _set(parsed, name, value if equals else "True", f"config argument {part}")
    if parsed[name] not in choices.get(name, (parsed[name],)):
      known = ", ".join(choices[name])
      raise UserError(f"config argument {name}={value!r} is not one of {known}")
  return parsed


def pairs(words: Iterable[str]) -> dict[str, str]:
  """Returns `KEY=VALUE` or `--config.KEY=VALUE` words as settings by key."""
  parts = (word.removeprefix("--config.").partition("=") for word in words)
  return {key: value for key, _, value in parts}


def _change(config: ConfigDict, overrides: Iterable[str]) -> set[str]:
  """Applies each `--config.key=value`, and returns the keys."""
  # First those that choose an implementation, whose settings others change.
  ordered = sorted(overrides, key=lambda word: not _NAMED.match(word))
  changed = {_override(config, override) for override in ordered}
  lengths = {"train.epochs", "train.steps"}
  own = "curriculum" in changed and _COUNTS.search(config.curriculum)
  if own or lengths & changed:  # a new length replaces that of the config
    config.update_from_flattened_dict(dict.fromkeys(lengths - changed, 0))
  return changed


def _override(config: ConfigDict, override: str) -> str:
  """Applies `--config.key=value` to a config, and returns the key."""
  key, equals, value = override.partition("=")
  key = key.removeprefix("--config.")
  if not equals:
    raise UserError(f"--config.{key}: give a value, --config.{key}=VALUE")
  group, _, name = key.rpartition(".")
  if group in _KINDS and name == "name":
    before, made = (
      settings.to_dict(_KINDS[group][each]())
      for each in (config[group].name, value)
    )
    # Of the settings that both have, those that the config changed stay.
    for field, found in config[group].items():
      if field in made and field != "name" and found != before[field]:
        made[field] = found
    config[group] = ConfigDict(made)
    return key
  node = config
  for part in key.split("."):
    if not isinstance(node, ConfigDict) or part not in node:
      ours = _USUAL.get(key.rpartition(".")[2], key)
      hint = nearest(ours, leaves(config))
      raise UserError(f"unknown config key {key!r}; {hint}")
    owner, node = node, node[part]
  # A ConfigDict has no types of a tuple's parts, or of values that may be None.
  section = _GROUPS.get(group)
  if group in _KINDS:
    section = section[owner.name]
  elif group.startswith("objectives."):
    section = objective.KINDS[owner.get("kind", "")]
  declared = settings.kinds(section) if section else {}
  kind = declared.get(name, owner.get_type(name))
  _set(owner, name, value, f"--config.{key}={value:.100}", kind)
  return key


def _set(node: ConfigDict, name: str, text: str, what: str, kind=None) -> None:
  """Sets `node.name` from text, read as a type, by default that it has."""
  kind = kind or node.get_type(name)
  if kind in (ConfigDict, dict):
    names = ", ".join(node[name])
    raise UserError(f"{what}: not a group of settings ({names})")
  node[name] = settings.parse(text, kind, what)


def leaves(config: ConfigDict | Config) -> dict[str, Any]:
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

  The phases of the curriculum keep their proportions. The run has the
  `train.steps` that the user asked for, and keeps only as many phases. By
  default it has 12 steps, or one for each phase if there are more.

  `changed` has the keys that the user set, which stay. A curriculum that the
  user wrote in steps, such as `8C+8M steps`, keeps its length.
  """
  model = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2}
  model |= {"mlp_width": 64, "dtype": "float32"}
  if config.init.checkpoint and "init.checkpoint" not in changed:
    model = {}  # the config file starts from a model
  small = {f"model.{name}": value for name, value in model.items()} | _SHRUNK
  there = leaves(config).keys() - changed
  config.update_from_flattened_dict(
    {key: value for key, value in small.items() if key in there}
  )
  in_steps = "curriculum" in changed and config.curriculum.endswith("steps")
  if not in_steps and "train.epochs" not in changed:
    asked = config.train.steps if "train.steps" in changed else 0
    known = typed(config).known_objectives
    text = config.curriculum
    phases = curriculum.parse(text, known, 1000, 1000).phases
    steps = asked or max(12, len(phases))
    config.curriculum = curriculum.scaled(text, known, steps)
    config.train.update(steps=0, epochs=0.0)


def to_json(config: Config) -> str:
  """Returns the resolved config as JSON, which `from_json` reads."""
  return json.dumps(config.to_dict(), indent=2)


def from_json(text: str) -> Config:
  """Reads the text of `to_json`; UserError if it is not that of a config.

  Missing settings have their defaults, and unknown settings are ignored.
  """
  try:
    stored = json.loads(text)
    if "model" not in stored:
      raise ValueError("it has no model")
    for name, of in [*stored.get("objectives", {}).items()]:
      # The run had loaded its plugin, but does not need it.
      unknown = of.get("kind", "") not in objective.KINDS
      if unknown and name not in stored["curriculum"]:
        del stored["objectives"][name]
    return typed(stored, old=True)
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    raise UserError(f"not the JSON of a config: {error!r:.200}") from error


def differences(old: Config, new: Config) -> list[str]:
  """Lists the settings that differ and must not when a run resumes."""
  before, after = leaves(old), leaves(new)
  # Objectives that the curriculum does not use only matter to evaluations. It
  # uses M for M30, too. A version may add or remove objectives.
  words = re.findall(curriculum.NAME, f"{old.curriculum} {new.curriculum}")
  unused = set(old.objectives) ^ set(new.objectives)
  unused |= {
    name
    for name in new.objectives
    if not any(word.startswith(name) for word in words)
  }
  free_keys = (*FREE, *(f"objectives.{name}" for name in unused))
  out = []
  for key in sorted(before.keys() | after.keys()):
    if any(key == free or key.startswith(free + ".") for free in free_keys):
      continue
    # A setting that only one of them has is a difference, too.
    if before.get(key) != after.get(key):
      out.append(f"{key} was {before.get(key)!r}, is {after.get(key)!r}")
  return out
