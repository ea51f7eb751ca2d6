"""The configuration of a run: typed settings, config files, overrides.

A config file is Python: `get_config(arg)` returns a sparse ConfigDict, which
has only the settings that it changes. `--config=FILE.py:ARG` loads it, and
`--config.key=value` changes one setting. The files of configs/ also load by
name: `--config=quickstart`. The argument `shrink` makes every config run in
seconds: `--config=quickstart:shrink`.

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
from antlm_jax.errors import UserError
from antlm_jax.mesh import Mesh
from antlm_jax.models import llama
from antlm_jax.objectives import curriculum, objective
from antlm_jax.objectives.objective import OBJECTIVES, Objective, with_ratio
from antlm_jax.sections import Data, Eval, Init, Log, Saving, Train
from antlm_jax.settings import Section, nearest, setting

CONFIGS = pathlib.Path(__file__).parent / "configs"
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
  "model.remat",
  "model.scan_layers",
  "train.loss_chunk",
  "train.max_epochs",
  "train.microbatches",
)


@dataclasses.dataclass(frozen=True)
class Config:
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
    settings.check_section(self)
    for name in GROUPS:
      section = getattr(self, name)
      own = isinstance(section, Section) and section.group == name
      if not own:
        raise _no_section(name, section)
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
    used = " ".join([self.curriculum, *self.eval.objectives])
    return _with_ratios(self.objectives, used)

  @property
  def trained(self) -> list[Objective]:
    """The objectives of the curriculum, in order."""
    names = curriculum.objective_names(self.curriculum, self.known_objectives)
    return [self.known_objectives[name] for name in names]

  def to_dict(self) -> dict[str, Any]:
    """Returns all settings as plain values, in groups."""
    out = {name: getattr(self, name) for name in _NAMES}
    each = self.objectives.items()
    out["objectives"] = {name: settings.to_dict(of) for name, of in each}
    return out | {name: settings.to_dict(out[name]) for name in GROUPS}


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
# Groups with several implementations, then groups with a single section.
KINDS = {
  "model": models.ENCODERS,
  "optimizer": optim.OPTIMIZERS,
  "schedule": optim.SCHEDULES,
}
_CHOICE = re.compile(rf"({'|'.join(KINDS)})\.name|objectives\.\w+\.kind")
# Other libraries' names of settings whose own name is not similar.
USUAL_NAMES = {
  "batch": "train.batch_size",
  "data": "data.path",
  "gradient_accumulation_steps": "train.microbatches",
  "hidden_size": "model.width",
  "intermediate_size": "model.mlp_width",
  "learning_rate": "schedule.peak_lr",
  "lr": "schedule.peak_lr",
  "max_steps": "train.steps",
  "num_attention_heads": "model.heads",
  "num_hidden_layers": "model.layers",
  "num_train_epochs": "train.epochs",
  "per_device_train_batch_size": "train.batch_size",
  "warmup": "schedule.warmup_steps",
  "warmup_ratio": "schedule.warmup_steps",
}
# A curriculum with counts of epochs or steps, which give its length.
_COUNTS = re.compile(r"(^|[+(])\s*[\d.]+\s*[A-Za-z]")
_SECTIONS = Data, Train, Mesh, Eval, Saving, Log, Init
GROUPS = {**KINDS, **{section.group: section for section in _SECTIONS}}


CHOSEN = {group: getattr(Config, group).name for group in KINDS}
_NAME = settings.of(Config)["curriculum"]  # a text without limits
Changes = dict[str, Any]  # changed settings by key, such as train.steps


def changes(encoder: str | models.EncoderConfig = "llama") -> ConfigDict:
  """Returns a ConfigDict for a config file's changes, with empty groups.

  The file may then choose an optimizer or schedule by its `name`. All settings
  that it leaves out keep their defaults.

  Args:
    encoder: An encoder's name, or its configuration.
  """
  own = {"name": encoder}
  if not isinstance(encoder, str):
    own = settings.changed_settings(encoder)
  empty = {group: {} for group in GROUPS}
  each = {name: {} for name in OBJECTIVES}
  # A Config checks the types.
  return ConfigDict(empty | {"model": own, "objectives": each}, type_safe=False)


def typed_config(
  given: Config | ConfigDict | Mapping[str, Any], old: bool = False
) -> Config:
  """Makes a Config of changed settings; returns a Config as it is.

  Missing settings have their defaults. Raises a UserError for the first setting
  that is unknown or has a bad value. `old` settings are those of a run, of
  which an older version may have written some that are now unknown.
  """
  if isinstance(given, Config):
    return given
  tree = given.to_dict() if isinstance(given, ConfigDict) else given
  if not isinstance(tree, Mapping):
    raise UserError(
      f"config={given!r:.60} is no config: give a name, a path or a Config"
    )
  made = {**tree, "objectives": _objectives(tree, old)}
  for name in sorted(made.keys() - {*_NAMES}):
    if not old:
      raise UserError(f"config.{name} is unknown; {nearest(name, _NAMES)}")
    del made[name]
  for group in made.keys() & GROUPS.keys():
    own = dict(settings.require_group(made[group], group))
    section = GROUPS[group]
    if group in KINDS:
      section = section[own.pop("name", CHOSEN[group])]
    made[group] = settings.from_dict(section, own, group, old)
  return Config(**made)


def _objectives(tree: Mapping[str, Any], old: bool) -> dict[str, Objective]:
  """Returns the objectives of a tree by name, as `typed_config` makes them."""
  own = settings.require_group(tree.get("objectives", {}), "config.objectives")
  if old:
    # The run had loaded its plugins, but does not need an unused objective.
    made = {
      name: objective.make_objective(values, f"config.objectives.{name}", old)
      for name, values in own.items()
      if values.get("kind", "") in objective.KINDS or name in tree["curriculum"]
    }
    return made or OBJECTIVES
  made = {name: objective.changed(name, values) for name, values in own.items()}
  return dict(sorted((OBJECTIVES | made).items()))


def _with_ratios(
  objectives: Mapping[str, Objective], used: str
) -> dict[str, Objective]:
  """Adds the objectives of a letter and a percentage that a text names."""
  out = dict(objectives)
  for name in re.findall(curriculum.NAME, used):
    if name not in out and (made := with_ratio(name, out)):
      out[name] = made
  return out


def stored_objectives(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the settings of the objectives that a run trained or measured.

  They are by name in the curriculum, such as M, and M30 if it is used. `stored`
  is a run's config as JSON has it.
  """
  used = " ".join([stored["curriculum"], *stored["eval"]["objectives"]])
  known = stored["objectives"]
  if known.keys() >= {*re.findall(curriculum.NAME, used)}:
    return known
  every = _with_ratios(_objectives(stored, old=True), used)
  return {name: settings.to_dict(of) for name, of in every.items()} | known


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
  python = isinstance(changes, Mapping)
  path, _, arg = spec.partition(":")
  argument = "config" if python else OPTION
  words, where = arg.split(","), f"{argument}={path}"
  get_config = config_module(path, argument).get_config
  with plugins.reported(path, where):
    made = get_config(",".join(word for word in words if word != "shrink"))
  if not isinstance(made, ConfigDict):
    raise UserError(
      f"{where}: get_config(arg) returns {type(made).__name__}, not a"
      " ConfigDict: return changes() with your settings"
    )
  file, shrink = made.to_dict(), "shrink" in words
  try:
    if python:
      return _overridden(file, changes, shrink)
    return _overridden(file, parse_overrides(changes), shrink, f"{OPTION}.")
  except UserError as error:
    # The file is at fault if it fails in the same way without the changes.
    try:
      _overridden(file, {}, shrink)
    except UserError as alone:
      if str(alone) == str(error):
        raise UserError(f"{where}: {error}") from error
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
  own = {"seed": config.seed, "curriculum": config.curriculum}
  for group in GROUPS:
    own[group] = settings.changed_settings(getattr(config, group))
  each = config.objectives.items()
  own["objectives"] = {name: settings.to_dict(of) for name, of in each}
  return _overridden(own, changes)


def find_config(path: str, argument: str = OPTION) -> str:
  """Returns a config file's path, of our own by its name; UserError if none."""
  own = {file.stem: file for file in sorted(CONFIGS.glob("*.py"))}
  if path in own:
    return str(own[path])
  if not pathlib.Path(path).is_file():
    name, comma, arg = path.partition(",")
    if comma and name in own:
      raise UserError(f"{argument}={path}: write {argument}={name}:{arg}")
    near = nearest(pathlib.Path(path).stem, own, f"known: {', '.join(own)}")
    raise UserError(f"{argument}={path}: no such file, nor such a name; {near}")
  return path


def config_module(path: str, argument: str = OPTION) -> types.ModuleType:
  """Runs a config file, and returns it as a module with `get_config`."""
  path = find_config(path, argument)
  out = plugins.run_file(path, f"{argument}={path}")
  if not hasattr(out, "get_config"):
    raise UserError(f"{argument}={path}: it defines no get_config(arg)")
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
    text, kind = value if equals else "True", parsed.get_type(name)
    parsed[name] = settings.parse_value(text, kind, f"config argument {part}")
    if parsed[name] not in choices.get(name, (parsed[name],)):
      known = ", ".join(choices[name])
      raise UserError(f"config argument {name}={value!r} is not one of {known}")
  return parsed


def parse_overrides(words: Iterable[str]) -> dict[str, str]:
  """Returns `KEY=VALUE` or `--config.KEY=VALUE` words as settings by key."""
  out = {}
  for word in words:
    key, equals, value = word.removeprefix("--config.").partition("=")
    if not equals:
      raise UserError(f"--config.{key}: give a value, --config.{key}=VALUE")
    out[key] = value
  return out


def _overridden(
  tree: Mapping[str, Any],
  overrides: Mapping[str, settings.Setting | Section],
  shrink: bool = False,
  prefix: str = "",
) -> Config:
  """Makes a Config of changed settings in groups, and of overrides.

  An override replaces a setting, a group by a section, or the implementation of
  a group by its name: `optimizer=muon` means `optimizer.name=muon`. A command
  has a `prefix` of keys for messages. Without it, keys may be short (see
  `given_config`).
  """
  for group in GROUPS:
    settings.require_group(tree.get(group, {}), group)
  found: Changes = traverse_util.flatten_dict(tree, sep=".")
  own, texts = set(), {}  # the keys of overrides, and those of one value
  for name, value in overrides.items():
    if isinstance(value, Section):
      own |= _replace_group(found, name, value)
    else:
      key = f"{name}.name" if name in KINDS else name
      texts[key] = settings.text(value)
  for key in filter(_CHOICE.fullmatch, texts):  # the others depend on these
    _choose(found, key, texts[key])
  known = _known_settings(found)
  for name, text in texts.items():
    key = name if name in known else _meant_key(name, known, prefix)
    if key in own:
      raise UserError(f"{key} is set twice: leave out one of its names")
    own.add(key)
    found[key] = text
    if text is not None:  # else a Config refuses it, unless it may be None
      found[key] = known[key].parse(text, f"{prefix}{name}={text:.100}")
  # A run keeps this path, and may resume from another folder.
  start = str(found.get("init.checkpoint", ""))
  if os.path.exists(start):
    found["init.checkpoint"] = os.path.abspath(start)
  _replace_length(found, own)
  if shrink:
    _shrink(found, own)
  return typed_config(traverse_util.unflatten_dict(found, sep="."))


def _replace_group(found: Changes, group: str, section: Section) -> set[str]:
  """Replaces a group's changes by a section; returns the section's keys."""
  if section.group != group:
    raise _no_section(group, section)
  for key in [key for key in found if key.startswith(f"{group}.")]:
    del found[key]
  own = {f"{group}.{name}": x for name, x in settings.to_dict(section).items()}
  found |= own
  return {*own}


def _choose(found: Changes, key: str, name: str) -> None:
  """Chooses the implementation of a group.

  The group's other changes stay if the implementation has their settings, too.
  """
  found[key], group = name, key.rpartition(".")[0]
  known = _known_settings(found)
  for other in [*found]:
    if other.startswith(f"{group}.") and other not in known:
      del found[other]


def _replace_length(found: Changes, own: Collection[str]) -> None:
  """Removes the config's length of the run if the keys `own` set another."""
  lengths = {"train.epochs", "train.steps"}
  counted = "curriculum" in own and _COUNTS.search(found["curriculum"])
  if counted or lengths & {*own}:
    for key in lengths - {*own}:
      found.pop(key, None)


def _known_settings(found: Changes) -> dict[str, settings.Field]:
  """Returns all settings of the chosen implementations, by key."""
  sections, out = {"": Config, **GROUPS}, {}
  for group, kinds in KINDS.items():
    key = f"{group}.name"
    out[key] = _NAME
    # A config file may have a list there, which a registry cannot look up.
    sections[group] = kinds[str(found.get(key, CHOSEN[group]))]
  added = [key.split(".")[1] for key in found if key.startswith("objectives.")]
  for name in dict.fromkeys([*OBJECTIVES, *added]):
    key = f"objectives.{name}.kind"
    out[key] = _NAME
    kind = objective.kind_of(name, found.get(key))
    sections[f"objectives.{name}"] = kind
  for group, section in sections.items():
    for name, field in settings.of(section).items():
      out[f"{group}.{name}".lstrip(".")] = field
  return out


def _meant_key(name: str, known: Collection[str], prefix: str) -> str:
  """Returns the key of the only setting with this last name.

  Raises a UserError if there is none or there are several, or with a `prefix`.
  """
  if inside := [one for one in known if one.startswith(f"{name}.")]:
    names = ", ".join(one.removeprefix(f"{name}.") for one in inside)
    raise UserError(
      f"{prefix}{name} is a group: set one setting of it ({names})"
    )
  found = settings.by_name(known).get(name, ())
  if len(found) == 1 and not prefix:
    return found[0]
  hint = settings.meant(name, [*KINDS, *known], USUAL_NAMES)
  hint = hint or "antlm train --help lists them"
  raise UserError(f"unknown config key {name!r}; {hint}")


def leaves(config: Config) -> dict[str, Any]:
  """Returns all settings as `{"group.key": value}`."""
  return traverse_util.flatten_dict(config.to_dict(), sep=".")


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


def _shrink(found: Changes, own: Collection[str]) -> None:
  """Makes any config run in seconds, on the same kind of data.

  The phases of the curriculum keep their proportions. The run has the
  `train.steps` that the user asked for, and keeps only as many phases. By
  default it has 12 steps, or one for each phase if there are more.

  `own` has the keys that the user set, which stay. A curriculum that the user
  wrote in steps, such as `8C+8M steps`, keeps its length.
  """
  model = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2}
  model |= {"mlp_width": 64, "dtype": "float32"}
  if found.get("init.checkpoint") and "init.checkpoint" not in own:
    model = {}  # the config file starts from a model
  small = {f"model.{name}": value for name, value in model.items()} | _SHRUNK
  here = _known_settings(found).keys() - {*own}
  found |= {key: value for key, value in small.items() if key in here}
  text = found.get("curriculum", Config.curriculum)
  in_steps = "curriculum" in own and text.endswith("steps")
  if not in_steps and "train.epochs" not in own:
    tree = traverse_util.unflatten_dict(found, sep=".")
    known = _with_ratios(_objectives(tree, old=False), text)
    phases = curriculum.parse_curriculum(text, known, 1000, 1000).phases
    asked = found["train.steps"] if "train.steps" in own else 0
    steps = asked or max(12, len(phases))
    found["curriculum"] = curriculum.scaled(text, known, steps)
    found |= {"train.steps": 0, "train.epochs": 0.0}


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
    return typed_config(stored, old=True)
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    raise UserError(f"not the JSON of a config: {error!r:.200}") from error


def config_differences(old: Config, new: Config) -> list[str]:
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
    # A path that is gone stays relative, where the run has the whole path.
    start = after.get(key) if key == "init.checkpoint" else ""
    if start and os.path.abspath(start) == before.get(key):
      continue
    # A setting that only one of them has is a difference, too.
    if before.get(key) != after.get(key):
      out.append(f"{key} was {before.get(key)!r}, is {after.get(key)!r}")
  return out
