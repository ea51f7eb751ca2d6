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
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any

from flax import traverse_util
from ml_collections import ConfigDict

from antlm_jax import models, optim, plugins, settings
from antlm_jax.errors import UserError, suggestion
from antlm_jax.mesh import Mesh
from antlm_jax.models import llama
from antlm_jax.objectives import curriculum, objective
from antlm_jax.objectives.objective import OBJECTIVES, Objective, with_ratio
from antlm_jax.sections import Data, Eval, Init, Log, Saving, Train
from antlm_jax.settings import Section, setting

CONFIGS = pathlib.Path(__file__).parent / "configs"
STUDIES = CONFIGS / "studies"  # in a clone; the wheel has none
OPTION = "--config"  # names a config on a command line
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
      if name in REGISTRIES:
        _require_registered(name, section, REGISTRIES[name])
    for name, value in self.objectives.items():
      _require_registered(f"objectives.{name}", value, objective.KINDS)
    if self.train.epochs and self.train.steps:
      raise UserError(
        "train.epochs and train.steps are both set: choose between them"
      )
    objectives = self.known_objectives
    for value in objectives.values():
      keys = [key for key in objectives if objectives[key].name == value.name]
      if len(keys) > 1:
        raise UserError(
          f"config.objectives {' and '.join(keys)} are both named"
          f" {value.name!r}: logs would mix them up"
        )

  @functools.cached_property
  def known_objectives(self) -> dict[str, Objective]:
    """`objectives`, and those of a letter and a percentage, such as M30."""
    names = " ".join([self.curriculum, *self.eval.objectives])
    return _with_ratios(self.objectives, names)

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


def _require_registered(
  name: str, section: Section, registry: settings.Registry
) -> None:
  """Raises a UserError for a class that a checkpoint could not name."""
  # A class inherits the name of its base.
  if registry.key not in vars(type(section)):
    raise UserError(
      f"{name}: no checkpoint could name the class"
      f" {type(section).__name__}: register it, such as"
      ' with @ENCODERS.register("NAME") or @KINDS.register("NAME") above it'
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
  "batch": "train.batch_size",
  "beta1": "optimizer.b1",
  "beta2": "optimizer.b2",
  "bf16": "model.dtype",
  "data": "data.path",
  "eval_steps": "eval.every",
  "fp16": "model.dtype",
  "gradient_accumulation_steps": "train.microbatches",
  "hidden_size": "model.width",
  "intermediate_size": "model.mlp_width",
  "learning_rate": "schedule.peak_lr",
  "logging_steps": "log.every",
  "lr": "schedule.peak_lr",
  "max_grad_norm": "optimizer.clip",
  "max_steps": "train.steps",
  "mixed_precision": "model.dtype",
  "num_attention_heads": "model.heads",
  "num_epochs": "train.epochs",
  "num_hidden_layers": "model.layers",
  "num_train_epochs": "train.epochs",
  "objective": "curriculum",
  "per_device_train_batch_size": "train.batch_size",
  "precision": "model.dtype",
  "report_to": "log.writers",
  "resume_from_checkpoint": "init.checkpoint",
  "save_steps": "checkpoint.every",
  "torch_dtype": "model.dtype",
  "warmup": "schedule.warmup_steps",
  "warmup_ratio": "schedule.warmup_steps",
  "wandb": "log.writers",
}
# Hints at other libraries' words that are no setting here.
USUAL_WORDS = {
  "output_dir": "give the run's folder as workdir",
  "push_to_hub": "export the run, with --repo=USER/NAME to push it",
}
# A curriculum with counts of epochs or steps, which give its length.
_COUNTS = re.compile(r"(^|[+(])\s*[\d.]+\s*[A-Za-z]")
_SECTIONS = Data, Train, Mesh, Eval, Saving, Log, Init
GROUPS = {**REGISTRIES, **{section.group: section for section in _SECTIONS}}
_NAME_FIELD = settings.Field()  # a text without limits
Changes = dict[str, Any]  # changed settings by key, such as train.steps


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


def typed_config(changes: Config | ConfigDict | Mapping[str, Any]) -> Config:
  """Makes a Config of changed settings; returns a Config as it is.

  Missing settings have their defaults. Raises a UserError for the first setting
  that is unknown or has a bad value.
  """
  if isinstance(changes, Config):
    return changes
  if isinstance(changes, ConfigDict):
    changes = changes.to_dict()
  if not isinstance(changes, Mapping):
    raise UserError(
      f"config={changes!r:.60} is no config: give a name, a path or a Config"
    )
  for name in changes:
    if name not in _NAMES:
      hint = suggestion(name, _NAMES, "antlm train --help lists them")
      raise UserError(f"config.{name} is unknown; {hint}")
  values = _with_sections(changes)
  values["objectives"] = _changed_objectives(changes.get("objectives", {}))
  return Config(**values)


def _with_sections(
  values: Mapping[str, Any], ignore_unknown: bool = False
) -> dict[str, Any]:
  """Returns the values that a Config has, with sections for its groups."""
  values = {name: values[name] for name in values if name in _NAMES}
  for name in values:
    if name in GROUPS:
      values[name] = settings.build(
        GROUPS[name],
        values[name],
        name,
        base=getattr(Config, name),
        ignore_unknown=ignore_unknown,
      )
  return values


def _changed_objectives(changes: Mapping[str, Any]) -> dict[str, Objective]:
  """Returns all objectives, after changes of known and of new objectives."""
  settings.require_group(changes, "config.objectives")
  changed = {
    name: settings.build(
      objective.KINDS,
      values,
      f"config.objectives.{name}",
      base=OBJECTIVES.get(name),
    )
    for name, values in changes.items()
  }
  return dict(sorted((OBJECTIVES | changed).items()))


def _stored_objectives(stored: Mapping[str, Any]) -> dict[str, Objective]:
  """Returns the objectives of a run's config.

  The run had loaded its plugins, but does not need an unused objective.
  """
  objectives = {
    name: settings.build(
      objective.KINDS, values, f"config.objectives.{name}", ignore_unknown=True
    )
    for name, values in stored.get("objectives", {}).items()
    if values.get("kind", "") in objective.KINDS or name in stored["curriculum"]
  }
  return objectives or OBJECTIVES


def _with_ratios(
  objectives: Mapping[str, Objective], text: str
) -> dict[str, Objective]:
  """Adds the objectives of a letter and a percentage that a text names."""
  objectives = dict(objectives)
  for name in re.findall(curriculum.NAME, text):
    if name not in objectives and (derived := with_ratio(name, objectives)):
      objectives[name] = derived
  return objectives


def stored_objectives(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the settings of the objectives that a run trained or measured.

  They are by name in the curriculum, such as M, and M30 if it is used. `stored`
  is a run's config as JSON has it.
  """
  text = " ".join([stored["curriculum"], *stored["eval"]["objectives"]])
  objectives = stored["objectives"]
  if objectives.keys() >= {*re.findall(curriculum.NAME, text)}:
    return objectives
  derived = _with_ratios(_stored_objectives(stored), text)
  return _plain_objectives(derived) | objectives


def load_config(
  spec: str,
  changes: Iterable[str] | Mapping[str, settings.Setting | Section] = (),
) -> Config:
  """Loads `FILE.py` or `FILE.py:ARG`.

  `get_config` receives ARG without the word `shrink`, which this function
  applies after the changes. These are words `--config.key=value`, or a mapping
  that `given_config` takes. Raises a UserError if the file is no config, a key
  is unknown, or a value has a wrong type or is out of bounds. The error
  suggests the nearest known key.
  """
  from_python = isinstance(changes, Mapping)
  path, _, arg = spec.partition(":")
  option = "config" if from_python else OPTION
  label = f"{option}={path}"
  words = arg.split(",")
  shrink = "shrink" in words
  get_config = config_module(path, option).get_config
  with plugins.reported(path, label):
    file_config = get_config(",".join(w for w in words if w != "shrink"))
  if not isinstance(file_config, ConfigDict):
    raise UserError(
      f"{label}: get_config(arg) returns {type(file_config).__name__}, not a"
      " ConfigDict: return changes() with your settings"
    )
  file_groups = file_config.to_dict()
  try:
    if from_python:
      return _merged_config(file_groups, changes, shrink)
    overrides = parse_overrides(changes)
    prefix = f"{OPTION}."
    return _merged_config(
      file_groups, overrides, shrink, prefix, short_keys=False
    )
  except UserError as error:
    # The file is at fault if it fails in the same way without the changes.
    try:
      _merged_config(file_groups, {}, shrink)
    except UserError as file_error:
      if str(file_error) == str(error):
        raise UserError(f"{label}: {error}") from error
    raise


def given_config(
  config: ConfigOrName, changes: Mapping[str, settings.Setting | Section]
) -> Config:
  """Returns a config, or loads it by name or path, with changed settings.

  A key may be a setting's last name, such as `steps`, if no other setting of
  the config has it. A value may be a section, such as `optimizer=Muon()`, which
  replaces the config's. Errors are those of `load_config` and `typed_config`.
  """
  if isinstance(config, str | os.PathLike):
    return load_config(os.fspath(config), changes)
  config = typed_config(config)
  if not changes:
    return config
  groups: dict[str, Any] = {
    "seed": config.seed,
    "curriculum": config.curriculum,
    "objectives": _plain_objectives(config.objectives),
  }
  for group in GROUPS:
    groups[group] = settings.changed_settings(getattr(config, group))
  return _merged_config(groups, changes)


def named_configs() -> dict[str, pathlib.Path]:
  """Returns the configs that load by name, with those of studies in a clone."""
  paths = [*CONFIGS.glob("*.py"), *STUDIES.glob("*.py")]
  return {path.stem: path for path in sorted(paths)}


def find_config(path: str, option: str = OPTION) -> str:
  """Returns a config file's path, of our own by its name; UserError if none."""
  configs = named_configs()
  if path in configs:
    return str(configs[path])
  if not os.path.isfile(path):  # Path raises for very long names
    name, comma, arg = path.partition(",")
    if comma and name in configs:
      raise UserError(f"{option}={path}: write {option}={name}:{arg}")
    names = f"known: {', '.join(configs)}"
    hint = suggestion(pathlib.Path(path).stem, configs, names)
    if not STUDIES.is_dir():
      hint += "; studies of papers are in configs/studies of a clone"
    raise UserError(
      f"{option}={path:.60}: no such file, nor such a name; {hint}"
    )
  return path


def config_module(path: str, option: str = OPTION) -> types.ModuleType:
  """Runs a config file, and returns it as a module with `get_config`."""
  path = find_config(path, option)
  module = plugins.run_file(path, f"{option}={path}")
  if not hasattr(module, "get_config"):
    raise UserError(f"{option}={path}: it defines no get_config(arg)")
  return module


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
    text = value if equals else "True"
    field = settings.Field(value_type=parsed.get_type(name))
    parsed[name] = field.parse(text, f"config argument {part}")
    if parsed[name] not in choices.get(name, (parsed[name],)):
      raise UserError(
        f"config argument {name}={value!r} is not one of"
        f" {', '.join(choices[name])}"
      )
  return parsed


def parse_overrides(words: Iterable[str]) -> dict[str, str]:
  """Returns `KEY=VALUE` or `--config.KEY=VALUE` words as settings by key."""
  overrides = {}
  for word in words:
    key, equals, value = word.removeprefix("--config.").partition("=")
    if not equals:
      raise UserError(f"--config.{key}: give a value, --config.{key}=VALUE")
    overrides[key] = value
  return overrides


def _merged_config(
  file_groups: Mapping[str, Any],
  overrides: Mapping[str, settings.Setting | Section],
  shrink: bool = False,
  prefix: str = "",
  short_keys: bool = True,
) -> Config:
  """Makes a Config of a file's settings in groups, and of a user's overrides.

  An override replaces a setting, a group by a section, or the implementation of
  a group by its name: `optimizer=muon` means `optimizer.name=muon`. Messages
  show its key after `prefix`. Keys may be short if `short_keys` (see
  `given_config`).
  """
  for group in GROUPS:
    settings.require_group(file_groups.get(group, {}), group)
  kept_groups = {
    group: values
    for group, values in file_groups.items()
    if not isinstance(overrides.get(group), Section)
  }
  file_settings = traverse_util.flatten_dict(kept_groups, sep=".")
  section_settings = _section_settings(overrides)
  texts = _setting_texts(overrides)
  # Implementations are first, because they decide which settings exist.
  implementations = {
    key: text for key, text in texts.items() if _IMPLEMENTATION.fullmatch(key)
  }
  fields = _fields_by_key(file_settings | section_settings | implementations)
  values = _parsed(texts, fields, prefix, short_keys, taken=section_settings)
  user_settings = section_settings | values
  # Drop the settings that a new implementation does not have.
  new_groups = tuple(f"{key.rpartition('.')[0]}." for key in implementations)
  merged = {
    key: value
    for key, value in file_settings.items()
    if key in fields or not key.startswith(new_groups)
  }
  merged |= user_settings
  _make_start_path_absolute(merged)
  _drop_other_lengths(merged, user_settings)
  if shrink:
    _shrink(merged, user_settings, fields)
  return typed_config(traverse_util.unflatten_dict(merged, sep="."))


def _section_settings(
  overrides: Mapping[str, settings.Setting | Section],
) -> Changes:
  """Returns the settings of the sections that replace whole groups."""
  groups: dict[str, dict[str, Any]] = {}
  for name, value in overrides.items():
    if isinstance(value, Section):
      if value.group != name:
        raise _no_section(name, value)
      groups[name] = settings.to_dict(value)
  return traverse_util.flatten_dict(groups, sep=".")


def _setting_texts(
  overrides: Mapping[str, settings.Setting | Section],
) -> dict[str, str | None]:
  """Returns the overrides of single settings, as texts by the user's keys."""
  return {
    f"{name}.name" if name in REGISTRIES else name: settings.text(value)
    for name, value in overrides.items()
    if not isinstance(value, Section)
  }


def _parsed(
  texts: Mapping[str, str | None],
  fields: Mapping[str, settings.Field],
  prefix: str,
  short_keys: bool,
  taken: Collection[str],
) -> Changes:
  """Returns the values of texts by their keys, which are not `taken` yet."""
  values: Changes = {}
  for name, text in texts.items():
    key = _meant_key(name, fields, prefix, short_keys)
    if key in values or key in taken:
      raise UserError(f"{key} is set twice: leave out one of its names")
    if text is None:
      # A Config refuses it, unless the setting may be None.
      values[key] = None
    else:
      values[key] = fields[key].parse(text, f"{prefix}{name}={text:.100}")
  return values


def _make_start_path_absolute(merged: Changes) -> None:
  # Store an absolute path: a resumed run may start in another folder.
  start_path = str(merged.get("init.checkpoint", ""))
  if os.path.exists(start_path):
    merged["init.checkpoint"] = os.path.abspath(start_path)


def _fields_by_key(changes: Changes) -> dict[str, settings.Field]:
  """Returns the settings of the implementations that changes choose."""
  keys = [key for key in changes if key.startswith("objectives.")]
  names = [*OBJECTIVES, *(key.split(".")[1] for key in keys)]
  sections: dict[str, Any] = {"": Config, **GROUPS}
  sections |= {f"objectives.{name}": objective.KINDS for name in names}
  defaults = {f"objectives.{name}": x for name, x in OBJECTIVES.items()}
  fields = {}
  for group, section in sections.items():
    if isinstance(section, settings.Registry):
      key = f"{group}.{section.key}"
      fields[key] = _NAME_FIELD
      default = getattr(Config, group, defaults.get(group))
      kind = changes.get(key, getattr(default, section.key, ""))
      section = section[str(kind)]
    for name, field in settings.fields_of(section).items():
      fields[f"{group}.{name}".lstrip(".")] = field
  return fields


def _drop_other_lengths(merged: Changes, user_settings: Changes) -> None:
  """Drops the config's length of the run if the user set another."""
  lengths = {"train.epochs", "train.steps"}
  curriculum_text = str(user_settings.get("curriculum", ""))
  user_lengths = lengths & user_settings.keys()
  if _COUNTS.search(curriculum_text) or user_lengths:
    for key in lengths - user_lengths:
      merged.pop(key, None)


def _meant_key(
  name: str, keys: Collection[str], prefix: str, short_keys: bool
) -> str:
  """Returns a known key, or the key of the only setting with this last name.

  Raises a UserError if there is none or there are several, or if keys must not
  be short.
  """
  if name in keys:
    return name
  if members := [key for key in keys if key.startswith(f"{name}.")]:
    parts = (key[len(name) + 1 :].partition(".")[0] for key in members)
    names = ", ".join(dict.fromkeys(parts))
    raise UserError(
      f"{prefix}{name} is a group: set one setting of it ({names})"
    )
  namesakes = settings.by_name(keys).get(name, ())
  if len(namesakes) == 1 and short_keys:
    return namesakes[0]
  group = re.fullmatch(r"(objectives\.(\w+))\.\w+", name)
  if group and f"{group[1]}.kind" not in keys:
    raise UserError(
      f"unknown config key {name!r}: there is no objective {group[2]}; give"
      " --plugin=FILE.py if a file of yours adds it, or"
      f" {group[1]}.kind= to add it to the config"
    )
  hint = USUAL_WORDS.get(name)
  hint = hint or settings.meant(name, [*REGISTRIES, *keys], USUAL_NAMES)
  hint = hint or "antlm train --help lists them"
  raise UserError(f"unknown config key {name!r}; {hint}")


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
  "checkpoint.keep_every": 0,
  "log.every": 1,
}


def _shrink(
  merged: Changes, user_settings: Changes, fields: Collection[str]
) -> None:
  """Makes any config run in seconds, on the same kind of data.

  The phases of the curriculum keep their proportions. The run has the
  `train.steps` that the user asked for, and keeps only as many phases. By
  default it has 12 steps, or one for each phase if there are more.

  The `user_settings` stay. A curriculum that the user wrote in steps, such as
  `8C+8M steps`, keeps its length.
  """
  small = dict(_SHRUNK)
  # A model to start from keeps its shape.
  if "init.checkpoint" in user_settings or not merged.get("init.checkpoint"):
    small |= _SHRUNK_MODEL
  for key, value in small.items():
    if key in fields and key not in user_settings:
      merged[key] = value
  text = merged.get("curriculum", Config.curriculum)
  in_steps = "curriculum" in user_settings and text.endswith("steps")
  if in_steps or "train.epochs" in user_settings:
    return
  tree = traverse_util.unflatten_dict(merged, sep=".")
  objectives = _changed_objectives(tree.get("objectives", {}))
  objectives = _with_ratios(objectives, text)
  phases = curriculum.parse_curriculum(text, objectives, 1000, 1000).phases
  steps = max(12, len(phases))
  if "train.steps" in user_settings and merged["train.steps"]:
    steps = merged["train.steps"]
  merged["curriculum"] = curriculum.scaled(text, objectives, steps)
  merged["train.steps"] = 0
  merged["train.epochs"] = 0.0


def to_json(config: Config) -> str:
  """Returns the resolved config as JSON, which `config_from_json` reads."""
  return json.dumps(config.to_dict(), indent=2)


def config_from_json(text: str) -> Config:
  """Reads the text of `to_json`; UserError if it is not that of a config.

  Missing settings have their defaults, and unknown settings are ignored.
  """
  try:
    stored = json.loads(text)
    if "model" not in stored:
      raise ValueError("it has no model")
    values = _with_sections(stored, ignore_unknown=True)
    return Config(**values | {"objectives": _stored_objectives(stored)})
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    raise UserError(f"not the JSON of a config: {error!r:.200}") from error


def config_differences(old: Config, new: Config) -> list[str]:
  """Lists the settings that differ and must not when a run resumes."""
  before = leaves(old)
  after = leaves(new)
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
