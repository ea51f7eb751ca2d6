"""The configuration of a run: typed settings, config files, overrides.

A config file is Python: `get_config(arg)` returns a sparse ConfigDict, which
has only the settings that it changes. `--config=FILE.py:ARG` loads it, and
`--config.key=value` changes one setting. The files of configs/ and its folder
studies/ also load by name: `--config=quickstart`. The argument `shrink` makes
every config run in seconds: `--config=quickstart:shrink`.

`load_config` sets the overrides on these changes, and makes one `Config` of
them: a tree of frozen dataclasses that build the parts of the run. They check
every setting. The library itself takes only Configs.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import string
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any

from flax import traverse_util
from ml_collections import ConfigDict

from antlm_jax import models, optim, plugins, settings
from antlm_jax.errors import UserError, similar_names, suggestion
from antlm_jax.mesh import Mesh
from antlm_jax.models import llama
from antlm_jax.objectives import curriculum, objective
from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.objectives.objective import OBJECTIVES, Objective, with_ratios
from antlm_jax.sections import Data, Eval, Init, Log, Saving, Train
from antlm_jax.settings import Section, setting

CONFIGS = pathlib.Path(__file__).parent / "configs"
STUDIES = CONFIGS / "studies"  # in a clone; the wheel has none
OPTION = "--config"  # names a config on a command line
_LISTED = 3  # most keys that a hint lists before the last
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
  "model.fused_layers",
  "model.remat",
  "model.scan_layers",
  "train.loss_chunk",
  "train.max_epochs",
  "train.microbatches",
)


@dataclasses.dataclass(frozen=True)
class Config(Section):
  """The configuration of a run; `objectives` are by name in the curriculum.

  Making one raises a UserError if its settings do not fit together.
  """

  seed: int = setting(0, "Random seed", least=0, most=2**32 - 1)
  curriculum: str = setting(
    "4C+16M+4C", "Objectives in order, with lengths in epochs or steps"
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
  checkpoint: Saving = Saving()
  log: Log = Log()
  init: Init = Init()

  def __post_init__(self):
    super().__post_init__()
    for name in GROUPS:
      section = getattr(self, name)
      if not isinstance(section, Section) or section.group != name:
        raise _no_section(name, section)
    for group in REGISTRIES:
      _check_registered(group, getattr(self, group), "name")
    for name, value in self.objectives.items():
      _check_registered(f"objectives.{name}", value, "kind")
    if self.train.epochs and self.train.steps:
      raise UserError(
        "train.epochs and train.steps are both set: choose between them"
      )
    names = {}  # in the curriculum, by the name in logs
    for name, value in self.known_objectives.items():
      if value.name in names:
        raise UserError(
          f"config.objectives {names[value.name]} and {name} are both named"
          f" {value.name!r}: logs would mix them up"
        )
      names[value.name] = name

  @functools.cached_property
  def known_objectives(self) -> dict[str, Objective]:
    """`objectives`, and those of a letter and a percentage, such as M30."""
    names = " ".join([self.curriculum, *self.eval.objectives])
    return with_ratios(self.objectives, names)

  def curriculum_for(self, steps_per_epoch: float) -> Curriculum:
    """Returns the objectives of each step, for epochs of so many steps.

    Raises a UserError if the curriculum does not fit the run's length.
    """
    length = curriculum.run_length(
      self.train.steps, self.train.epochs, steps_per_epoch
    )
    return curriculum.parse_curriculum(
      self.curriculum, list(self.known_objectives), steps_per_epoch, length
    )

  @property
  def trained(self) -> list[Objective]:
    """The objectives of the curriculum, in order."""
    names = curriculum.objective_names(self.curriculum, self.known_objectives)
    return [self.known_objectives[name] for name in names]

  def to_dict(self) -> dict[str, Any]:
    """Returns all settings as plain values, in groups."""
    values = {name: getattr(self, name) for name in _NAMES}
    values["objectives"] = _plain_objectives(self.objectives)
    return values | {name: settings.to_dict(values[name]) for name in GROUPS}


def _check_registered(label: str, part: object, key: str) -> None:
  """Raises a UserError if a part's class has no name for a checkpoint."""
  # A class that is not registered inherits the name of its base, which would
  # be restored in its place.
  if key not in vars(type(part)):
    raise UserError(
      f"{label}: no checkpoint could name the class {type(part).__name__}:"
      ' register it, such as with @ENCODERS.register("NAME") or'
      ' @KINDS.register("NAME") above it'
    )


def _plain_objectives(
  objectives: Mapping[str, Objective],
) -> dict[str, dict[str, Any]]:
  """Returns the settings of objectives as plain values."""
  return {name: settings.to_dict(value) for name, value in objectives.items()}


def _no_section(name: str, value: object) -> UserError:
  return UserError(
    f"{name}={value!r:.80} is no section of that name: give an object, such as"
    " Muon() for optimizer"
  )


# A function's config: a value, or where to find it.
ConfigOrName = Annotated[
  str | os.PathLike[str] | Config,
  settings.argument(help="Name or path of a config, FILE.py or FILE.py:ARG"),
]
_NAMES = tuple(field.name for field in dataclasses.fields(Config))
# Groups with several implementations.
REGISTRIES = {
  "model": models.ENCODERS,
  "optimizer": optim.OPTIMIZERS,
  "schedule": optim.SCHEDULES,
}
# Keys that name an implementation.
_IMPLEMENTATION = re.compile(
  rf"({'|'.join(REGISTRIES)})\.name|objectives\.\w+\.kind"
)
# Other libraries' names of settings whose own name is not similar.
USUAL_NAMES = {
  "amp": "model.dtype",
  "batch": "train.batch_size",
  "beta1": "optimizer.b1",
  "beta2": "optimizer.b2",
  "bf16": "model.dtype",
  "data": "data.path",
  "ema_decay": "optimizer.ema",
  "eval_interval": "eval.every",
  "eval_steps": "eval.every",
  "fp16": "model.dtype",
  "gradient_accumulation_steps": "train.microbatches",
  "gradient_checkpointing": "model.remat",
  "gradient_clip": "optimizer.clip",
  "hidden_dim": "model.width",
  "hidden_size": "model.width",
  "intermediate_size": "model.mlp_width",
  "learning_rate": "schedule.peak_lr",
  "log_interval": "log.every",
  "logging_steps": "log.every",
  "lr": "schedule.peak_lr",
  "mask_ratio": "objectives.M.mask_ratio",
  "max_grad_norm": "optimizer.clip",
  "max_position_embeddings": "model.max_seq_len",
  "max_steps": "train.steps",
  "mixed_precision": "model.dtype",
  "mlm_probability": "objectives.M.mask_ratio",
  "n_layer": "model.layers",
  "num_attention_heads": "model.heads",
  "num_epochs": "train.epochs",
  "num_hidden_layers": "model.layers",
  "num_key_value_heads": "model.kv_heads",
  "num_train_epochs": "train.epochs",
  "num_train_steps": "train.steps",
  "num_workers": "data.threads",
  "objective": "curriculum",
  "per_device_train_batch_size": "train.batch_size",
  "precision": "model.dtype",
  "report_to": "log.writers",
  "save_steps": "checkpoint.every",
  "tie_word_embeddings": "model.tied",
  "torch_dtype": "model.dtype",
  "wandb": "log.writers",
  "warmup": "schedule.warmup_steps",
  "warmup_ratio": "schedule.warmup_steps",
}
# Hints at other libraries' words that are no setting here.
USUAL_WORDS = {
  "block_size": "prepare the data with seq_len",
  "model_name_or_path": "give a model to a config, config=continued:model=NAME",
  "out_dir": "give the run's folder as workdir",
  "output_dir": "give the run's folder as workdir",
  "push_to_hub": "export the run, with --repo=USER/NAME to push it",
  "resume": "the same command resumes a run",
  "resume_from_checkpoint": "the same command resumes a run",
  "torch_compile": "JAX compiles every run",
  "train_file": "prepare it, and give the folder as data.path",
  "vocab_size": "prepare the data with vocab_size",
}
# A curriculum with counts of epochs or steps, which give its length.
_COUNTS = re.compile(r"(^|[+(])\s*[\d.]+\s*[A-Za-z]")
_SECTIONS = Data, Train, Mesh, Eval, Saving, Log, Init
GROUPS = {**REGISTRIES, **{section.group: section for section in _SECTIONS}}
_NAME_FIELD = settings.Field()  # a text without limits
Values = dict[str, Any]  # values of settings by key, such as train.steps


# -------------------------------------------------------------- config files


def changes(encoder: str | models.EncoderConfig = "llama") -> ConfigDict:
  """Returns a ConfigDict for a config file's changes, with empty groups.

  The file may then choose an optimizer or schedule by its `name`. All settings
  that it leaves out keep their defaults.

  Args:
    encoder: An encoder's name, or its configuration.
  """
  model = {"name": encoder}
  if not isinstance(encoder, str):
    model = settings.changed_settings(encoder)
  tree: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
  tree["model"] = model
  tree["objectives"] = {name: {} for name in OBJECTIVES}
  # A Config checks the types.
  return ConfigDict(tree, type_safe=False)


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
      names = [*defaults, "shrink"]
      hint = suggestion(name, names, f"known: {', '.join(names)}")
      raise UserError(f"config argument {name!r} is unknown; {hint}")
    field = settings.Field(
      value_type=parsed.get_type(name), choices=choices.get(name)
    )
    label = f"config argument {name}"
    text = value if equals else "True"
    parsed[name] = field.accept(field.parse(text, label), label)
  return parsed


def named_configs() -> dict[str, pathlib.Path]:
  """Returns the configs that load by name, with those of studies in a clone."""
  paths = [*CONFIGS.glob("*.py"), *STUDIES.glob("*.py")]
  return {path.stem: path for path in sorted(paths)}


def find_config(path: str) -> str:
  """Returns a config file's path, of our own by its name; UserError if none."""
  configs = named_configs()
  if path in configs:
    return str(configs[path])
  if not os.path.isfile(path):  # Path raises for very long names
    name, comma, arg = path.partition(",")
    if comma and name in configs:
      raise UserError(f"config={path}: write config={name}:{arg}")
    names = f"known: {', '.join(configs)}"
    hint = suggestion(pathlib.Path(path).stem, configs, names)
    if not STUDIES.is_dir():
      hint += "; studies of papers are in configs/studies of a clone"
    raise UserError(f"config={path:.60}: no such file, nor such a name; {hint}")
  return path


def config_module(path: str) -> types.ModuleType:
  """Runs a config file, and returns it as a module with `get_config`."""
  path = find_config(path)
  module = plugins.run_file(path, f"config={path}")
  if not hasattr(module, "get_config"):
    raise UserError(f"config={path}: it defines no get_config(arg)")
  return module


# ------------------------------------------------- from settings to a Config


def parse_overrides(words: Iterable[str]) -> dict[str, str]:
  """Returns `KEY=VALUE` or `--config.KEY=VALUE` words as settings by key."""
  overrides = {}
  for word in words:
    key, equals, value = word.removeprefix(f"{OPTION}.").partition("=")
    if not equals:
      raise UserError(f"{OPTION}.{key}: give a value, {OPTION}.{key}=VALUE")
    overrides[key] = value
  return overrides


def load_config(
  config: ConfigOrName | ConfigDict | Mapping[str, Any],
  changes: Iterable[str] | Mapping[str, settings.Setting | Section] = (),
) -> Config:
  """Makes a Config of a config file or of settings in groups, with changes.

  Args:
    config: Name of a config, path of a config file (`FILE.py` or
      `FILE.py:ARG`), settings in groups, or a Config. `get_config` receives ARG
      without the word `shrink`, which this function applies after the changes.
    changes: Words `--config.key=value`, or values by key. A key may be a
      setting's last name, such as `steps`, if no other setting of the config
      has it. A value may be a section, such as `optimizer=Muon()`, which
      replaces the config's. `optimizer=muon` means `optimizer.name=muon`, and
      keeps the settings that both implementations have.

  Raises:
    UserError: The file is no config, a key is unknown, or a value has a wrong
      type or is out of bounds. The error suggests the nearest known key.
  """
  if not isinstance(changes, Mapping):
    changes = parse_overrides(changes)
  if isinstance(config, str | os.PathLike):
    return _load_file(os.fspath(config), changes)
  if isinstance(config, Config):
    if not changes:
      return config
    changed = {x: settings.changed_settings(getattr(config, x)) for x in GROUPS}
    config = config.to_dict() | changed
  elif isinstance(config, ConfigDict):
    config = config.to_dict()
  elif not isinstance(config, Mapping):
    raise UserError(
      f"config={config!r:.60} is no config: give a name, a path or a Config"
    )
  return _overridden(config, changes)


def _load_file(
  spec: str, overrides: Mapping[str, settings.Setting | Section]
) -> Config:
  """Makes a Config of `FILE.py:ARG` and a user's overrides."""
  path, _, arg = spec.partition(":")
  label = f"config={path}"
  words = arg.split(",")
  shrink = "shrink" in words
  get_config = config_module(path).get_config
  with plugins.reported(path, label):
    file_config = get_config(",".join(w for w in words if w != "shrink"))
  if not isinstance(file_config, ConfigDict):
    raise UserError(
      f"{label}: get_config(arg) returns {type(file_config).__name__}, not a"
      " ConfigDict: return changes() with your settings"
    )
  groups = file_config.to_dict()
  try:
    return _overridden(groups, overrides, shrink)
  except UserError as error:
    # The file is at fault if it fails in the same way without the overrides.
    try:
      _overridden(groups, {}, shrink)
    except UserError as file_error:
      if str(file_error) == str(error):
        raise UserError(f"{label}: {error}") from error
    raise


def _overridden(
  groups: Mapping[str, Any],
  overrides: Mapping[str, settings.Setting | Section],
  shrink: bool = False,
) -> Config:
  """Makes a Config of settings in groups and a user's overrides.

  Implementations are first, because they decide which settings exist. Then each
  override is read and set once, by its key.
  """
  sections = {}
  texts = {}
  for name, value in overrides.items():
    key = f"{name}.name" if name in REGISTRIES else name
    if not isinstance(value, Section):
      if key in texts:
        raise _set_twice(key)
      texts[key] = value
    elif value.group == name:
      sections[name] = settings.to_dict(value)
    else:
      raise _no_section(name, value)
  kept_groups = {x: groups[x] for x in groups if x not in sections}
  values = traverse_util.flatten_dict(kept_groups, sep=".")
  user_values = traverse_util.flatten_dict(sections, sep=".")
  implementations = {x: texts[x] for x in texts if _IMPLEMENTATION.fullmatch(x)}
  fields = _fields_by_key(values | user_values | implementations)
  for name, value in texts.items():
    key = name if name in fields else _key_of(name, fields)
    if key in user_values:
      raise _set_twice(key)
    text = ""
    if isinstance(value, str):
      text = value
      value = fields[key].parse(text, key)
    user_values[key] = fields[key].accept(value, key, text)
  # A new implementation may lack settings of the one before it.
  new_groups = {key.rpartition(".")[0] for key in implementations}
  for key in [key for key in values if key not in fields]:
    if key.rpartition(".")[0] not in new_groups or not _owners(key):
      raise _unknown_key(key, fields)
    del values[key]
  values |= user_values
  _drop_other_lengths(values, user_values)
  if shrink:
    _shrink(values, user_values, fields)
  return _build(values, OBJECTIVES)


def _fields_by_key(values: Values) -> dict[str, settings.Field]:
  """Returns all settings of the implementations that values choose."""
  keys = [key for key in values if key.startswith("objectives.")]
  names = [*OBJECTIVES, *(key.split(".")[1] for key in keys)]
  groups: dict[str, Any] = {"": Config, **GROUPS}
  groups |= {f"objectives.{name}": objective.KINDS for name in names}
  defaults = {f"objectives.{name}": x for name, x in OBJECTIVES.items()}
  fields = {}
  for group, section in groups.items():
    if isinstance(section, settings.Registry):
      key = f"{group}.{section.key}"
      fields[key] = _NAME_FIELD
      default = getattr(Config, group, defaults.get(group))
      name = values.get(key, getattr(default, section.key, ""))
      section = section[str(name)]
    for name, field in settings.fields_of(section).items():
      fields[f"{group}.{name}".lstrip(".")] = field
  return fields


def _key_of(name: str, fields: Mapping[str, settings.Field]) -> str:
  """Returns the key of the only setting with this last name, or raises."""
  namesakes = settings.by_name(fields).get(name, ())
  if len(namesakes) != 1 or name in _NAMES:
    raise _unknown_key(name, fields)
  return namesakes[0]


def _owners(key: str) -> list[str]:
  """Returns the implementations that have a setting, by its key."""
  group, _, name = key.rpartition(".")
  registry = REGISTRIES.get(group, {})
  if group.startswith("objectives."):
    registry = objective.KINDS
  return [
    implementation
    for implementation, section in registry.items()
    if name in settings.fields_of(section)
  ]


def _set_twice(key: str) -> UserError:
  return UserError(f"{key} is set twice: leave out one of the two")


def _unknown_key(name: str, keys: Collection[str]) -> UserError:
  """Returns the error for a name that is none of the keys of settings."""
  if members := [key for key in keys if key.startswith(f"{name}.")]:
    parts = (key[len(name) + 1 :].partition(".")[0] for key in members)
    names = ", ".join(dict.fromkeys(parts))
    return UserError(f"{name} is a group: set one setting of it ({names})")
  objective_name = re.fullmatch(r"objectives\.(\w+)\.\w+", name)
  if objective_name and f"objectives.{objective_name[1]}.kind" not in keys:
    return UserError(
      f"unknown config key {name!r}: there is no objective {objective_name[1]};"
      " give --plugin=FILE.py if a file of yours adds it, or"
      f" objectives.{objective_name[1]}.kind= to add it to the config"
    )
  group, _, _ = name.rpartition(".")
  if owners := _owners(name):
    key = REGISTRIES.get(group, objective.KINDS).key
    return UserError(
      f"{name} is a setting of {' or '.join(owners)} alone: leave it out, or"
      f" change {group}.{key}"
    )
  hint = meant_key(name, keys) or "antlm train --help lists them"
  return UserError(f"unknown config key {name!r}; {hint}")


def meant_key(
  name: str, keys: Iterable[str], shown: Callable[[str], str] = repr
) -> str:
  """Returns a hint at the keys that an unknown name may mean, or "".

  `shown` formats a key, such as `--config.KEY`.
  """
  if name in USUAL_WORDS:
    return USUAL_WORDS[name]
  # Keys by whole name, by last name, and by other libraries' words.
  keys_of_names = settings.by_name([*REGISTRIES, *keys])
  keys_of_names |= {
    word: [key] for word, key in USUAL_NAMES.items() if key in keys_of_names
  }
  group, _, last_name = name.rpartition(".")
  if group and last_name in keys_of_names:
    # Perhaps only the group is wrong: model.peak_lr for schedule.peak_lr.
    similar = similar_names(name, keys_of_names[last_name])
  else:
    similar = similar_names(name, keys_of_names)
  similar = similar or similar_names(last_name, keys_of_names)
  if not similar:
    return ""
  *candidates, last = map(shown, keys_of_names[similar[0]])
  if len(candidates) > _LISTED:
    candidates[_LISTED:] = ["..."]
  listed = f"{', '.join(candidates)} or {last}" if candidates else last
  return f"did you mean {listed}?"


def _drop_other_lengths(values: Values, user_values: Values) -> None:
  """Drops the config's length of the run if the user set another."""
  lengths = {"train.epochs", "train.steps"}
  user_lengths = lengths & user_values.keys()
  if user_lengths or _COUNTS.search(user_values.get("curriculum", "")):
    for key in lengths - user_lengths:
      values.pop(key, None)


def _build(values: Values, known_objectives: Mapping[str, Objective]) -> Config:
  """Makes a Config of values by key; missing settings have their defaults."""
  tree = traverse_util.unflatten_dict(values, sep=".")
  objectives = dict(known_objectives)
  for name, changed in tree.get("objectives", {}).items():
    merged = changed
    if name in objectives:
      merged = settings.changed_settings(objectives[name]) | changed
      # Another kind may lack settings of the one before it.
      known = settings.fields_of(objective.KINDS[str(merged.get("kind", ""))])
      names = changed.keys() | known.keys() | {"kind"}
      merged = {key: merged[key] for key in merged if key in names}
    objectives[name] = settings.build(
      objective.KINDS, merged, f"objectives.{name}"
    )
  for group in tree.keys() & GROUPS.keys():
    defaults = {}
    if group in REGISTRIES:
      defaults = {"name": getattr(Config, group).name}
    tree[group] = settings.build(GROUPS[group], defaults | tree[group], group)
  return Config(**tree | {"objectives": dict(sorted(objectives.items()))})


def leaves(config: Config) -> dict[str, Any]:
  """Returns all settings as `{"group.key": value}`."""
  return traverse_util.flatten_dict(config.to_dict(), sep=".")


_SHRUNK_MODEL = {
  "model.layers": 2,
  "model.width": 32,
  "model.heads": 4,
  "model.kv_heads": 2,
  "model.mlp_width": 64,
  "model.dtype": "float32",
}
_SHRUNK = {
  "train.batch_size": 4,
  "train.batch_schedule": (),
  "train.batch_start": 1.0,
  "train.microbatches": 1,
  "mesh.data": -1,
  "mesh.fsdp": 1,
  "mesh.tensor": 1,
  "schedule.warmup_steps": 0.1,
  "schedule.decay_steps": 0.2,
  "schedule.cooldown_steps": 0.0,
  "eval.every": 0.5,
  "eval.rows": 8,
  "checkpoint.every": 0.5,
  "checkpoint.at": (),
  "checkpoint.keep_every": 0,
  "log.every": 1,
  "log.trace": "",
}


def _shrink(
  values: Values, user_values: Values, fields: Collection[str]
) -> None:
  """Makes any config run in seconds, on the same kind of data.

  The phases of the curriculum keep their proportions. The run has the
  `train.steps` that the user asked for, and keeps only as many phases. By
  default it has 12 steps, or one for each phase if there are more.

  The `user_values` stay. A curriculum that the user wrote in steps, such as
  `8C+8M steps`, keeps its length.
  """
  small = dict(_SHRUNK)
  # A model to start from keeps its shape.
  if "init.checkpoint" in user_values or not values.get("init.checkpoint"):
    small |= _SHRUNK_MODEL
  for key, value in small.items():
    if key in fields and key not in user_values:
      values[key] = value
  text = values.get("curriculum", Config.curriculum)
  in_steps = "curriculum" in user_values and text.endswith("steps")
  if in_steps or "train.epochs" in user_values:
    return
  groups = (key.split(".") for key in fields)
  names = dict.fromkeys(key[1] for key in groups if key[0] == "objectives")
  for name in re.findall(curriculum.NAME, text):
    # A letter and a percentage, such as M30.
    if name.rstrip(string.digits) in names:
      names[name] = None
  phases = curriculum.parse_curriculum(text, names, 1000, 1000).phases
  steps = user_values.get("train.steps") or max(12, len(phases))
  values["curriculum"] = curriculum.scaled(phases, steps)
  values["train.steps"] = 0
  values["train.epochs"] = 0.0


def to_json(config: Config) -> str:
  """Returns the resolved config as JSON, which `config_from_json` reads."""
  return json.dumps(config.to_dict(), indent=2)


def config_from_json(text: str) -> Config:
  """Reads a config from the JSON of `to_json`.

  Missing settings have their defaults, and unknown settings are ignored. So are
  unused objectives of plugins that are not loaded.

  Raises:
    UserError: The text is not the JSON of a config.
  """
  try:
    stored = json.loads(text)
    if "model" not in stored:
      raise ValueError("it has no model")
    stored["objectives"] = _needed_objectives(stored)
    values = traverse_util.flatten_dict(stored, sep=".")
    fields = _fields_by_key(values)
    values = {
      key: _stored_value(value, fields.get(key))
      for key, value in values.items()
      if key in fields or key in GROUPS
    }
    # Add the built-in objectives only if the config has none itself.
    return _build(values, {} if stored["objectives"] else OBJECTIVES)
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    raise UserError(f"not the JSON of a config: {error!r:.200}") from error


def _stored_value(value: Any, field: settings.Field | None) -> Any:
  """Returns a stored value; versions before 0.2 have steps as floats."""
  is_steps = isinstance(field, settings.AmountField) and value >= 1
  return round(value) if is_steps else value


def _needed_objectives(stored: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the objectives of the curriculum, and all others of known kinds.

  Another process may have stored them, with plugins that this one lacks.
  """
  objectives = stored.get("objectives", {})
  used = _used_names(objectives, stored["curriculum"])
  return {
    name: options
    for name, options in objectives.items()
    if name in used or options.get("kind", "") in objective.KINDS
  }


def _used_names(names: Iterable[str], *curricula: str) -> set[str]:
  """Returns the objectives that curricula use, such as M for M30."""
  words = re.findall(curriculum.NAME, " ".join(curricula))
  used = [word for word in words if word not in curriculum.UNITS]
  return {x for x in names if any(word.startswith(x) for word in used)}


def stored_objectives(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the settings of a stored run's objectives, by name.

  Those of a letter and a percentage, such as M30, are added if the run trained
  or measured them. `stored` is a run's config as JSON has it. Objectives of
  plugins that are not loaded stay as they are stored.
  """
  objectives = stored["objectives"]
  names = " ".join([stored["curriculum"], *stored["eval"]["objectives"]])
  # An empty curriculum needs no objective.
  known = _needed_objectives({"curriculum": "", "objectives": objectives})
  config = config_from_json(
    json.dumps({"model": {}, "curriculum": "", "objectives": known})
  )
  return _plain_objectives(with_ratios(config.objectives, names)) | objectives


def config_differences(old: Config, new: Config) -> list[str]:
  """Lists the settings that differ and must not when a run resumes."""
  before = leaves(old)
  after = leaves(new)
  # Objectives that the curriculum does not use only matter to evaluations. A
  # version may add or remove objectives.
  used = _used_names(new.objectives, old.curriculum, new.curriculum)
  unused = set(old.objectives) ^ set(new.objectives)
  unused |= set(new.objectives) - used
  free_keys = (*FREE, *(f"objectives.{name}" for name in unused))
  differences = []
  for key in sorted(before.keys() | after.keys()):
    if any(key == free or key.startswith(free + ".") for free in free_keys):
      continue
    # A path that is gone stays relative, where the run has the whole path.
    start = after.get(key) if key == "init.checkpoint" else ""
    if start and os.path.abspath(start) == before.get(key):
      continue
    # A setting that only one of them has is a difference, too.
    if before.get(key) != after.get(key):
      value = before.get(key)
      differences.append(f"{key} was {value!r}, is {after.get(key)!r}")
  return differences
