"""The configuration of a run: every setting, its default, and how to set it.

A config file is Python: `get_config(arg)` returns `default()` with changes.
`--config=FILE.py:ARG` loads it, `--config.key=value` changes one setting.
"""

import dataclasses
import difflib
import importlib.util
import json
import pathlib
from collections.abc import Iterable

from ml_collections import ConfigDict, config_dict

from antlm_jax import models
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.objective import OBJECTIVES, Objective

# What may differ when a run goes on: it changes no parameter.
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
)


def default(encoder: str = "llama") -> ConfigDict:
  """Returns every setting with its default; amounts in the unit named.

  Args:
    encoder: A key of `models.ENCODERS`, whose settings `model` has.
  """
  return ConfigDict(
    {
      "seed": 0,
      # What trains when; see antlm_jax.objectives.curriculum.
      "curriculum": "4C+16M+4C",
      "objectives": {
        name: _objective_settings(objective)
        for name, objective in OBJECTIVES.items()
      },
      "data": {
        "path": "",  # a folder made by antlm_jax.prepare
        "rounding": "carry",  # at an epoch's end: carry, up or down
        "shuffle": True,
        "short": 0.0,  # share of the rows cut off at a random place
        "threads": 2,
      },
      "model": {"name": encoder, **models.defaults(encoder)},
      "train": {
        "batch_size": 128,  # rows in a step, over all devices
        # Other batches from parts of the run on: ("64x128@0.5", "32x512@0.9")
        # is 64 rows of 128 tokens from its half on, then 32 of 512.
        "batch_schedule": (),
        "microbatches": 1,  # parts of a batch that are computed in turn
        "epochs": 0.0,  # length of the run, where the curriculum has
        "steps": 0,  # none; at most one of the two
        "loss_chunk": 2048,  # targets whose scores are in memory at once
      },
      "optimizer": {
        "name": "adamw",  # or lamb
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decay_scope": "matrices",  # all, matrices or hidden
        "clip": 1.0,  # largest gradient norm; 0 for no clipping
        "ema": 0.0,  # decay of the parameters' average; 0 for none
        "reset_at_switch": False,  # forget the moments at each switch
      },
      "schedule": {
        "name": "wsd",  # or cosine
        "peak_lr": 1e-3,
        "warmup_steps": 0.02,  # steps, or if under 1 a share of the run
        "decay_steps": 0.1,  # likewise
        "decay": "linear",  # linear, cosine or 1-sqrt
        "min_lr_ratio": 0.0,  # last rate, as a share of the peak
        "restart_at_switch": False,  # a schedule for each phase
      },
      "mesh": {"data": -1, "fsdp": 1, "tensor": 1},
      "eval": {
        "every": 0.05,  # steps, or if under 1 a share of the run
        "rows": 512,  # held-out rows, at most
        "objectives": ("C", "M"),
      },
      "checkpoint": {
        "every": 0.1,  # steps, or if under 1 a share of the run
        "keep_last": 2,
        "keep_every": 0,  # steps whose multiples are kept; 0 for none
      },
      "log": {
        "every": 20,
        "tensorboard": True,
        "trace": "",  # profile steps FIRST:LAST, into WORKDIR/trace
      },
      "init": {
        "checkpoint": "",  # start from this run or checkpoint
        "optimizer": "keep",  # its optimizer state: keep or reset
        "step": "keep",  # its step: keep (go on) or reset (to 0)
      },
    }
  )


def _objective_settings(objective: Objective) -> dict:
  settings = dataclasses.asdict(objective)
  settings["mask_ratio_end"] = config_dict.placeholder(float)
  if objective.mask_ratio_end is not None:
    settings["mask_ratio_end"] = objective.mask_ratio_end
  return settings


def load(spec: str, overrides: Iterable[str] = ()) -> ConfigDict:
  """Loads `FILE.py` or `FILE.py:ARG` and applies overrides.

  Args:
    spec: The config file, and the argument of its `get_config`.
    overrides: Each `--config.key.key=value`.

  Returns:
    The config, locked.

  Raises:
    UserError: for a file that is not a config, an unknown key (with the
      nearest right one) or a value of another type.
  """
  path, _, arg = spec.partition(":")
  config = module(path).get_config(arg)
  for override in overrides:
    _override(config, override)
  _check(config)
  return config.lock()


# The smallest value of each setting that has one.
_AT_LEAST = {
  "train.batch_size": 1,
  "train.microbatches": 1,
  "train.loss_chunk": 1,
  "train.epochs": 0,
  "train.steps": 0,
  "data.threads": 1,
  "eval.every": 0,
  "eval.rows": 0,
  "checkpoint.every": 0,
  "checkpoint.keep_last": 1,
  "checkpoint.keep_every": 0,
  "log.every": 1,
  "optimizer.clip": 0,
  "optimizer.ema": 0,
  "schedule.warmup_steps": 0,
  "schedule.decay_steps": 0,
}


def _check(config: ConfigDict) -> None:
  settings = leaves(config)
  for key, least in _AT_LEAST.items():
    if not settings[key] >= least:
      raise UserError(f"{key}={settings[key]} is not at least {least}")
  if not 0 <= config.data.short <= 1:
    raise UserError(f"data.short={config.data.short} is not in [0, 1]")
  if config.optimizer.ema >= 1:
    raise UserError(f"optimizer.ema={config.optimizer.ema} is not under 1")
  if config.train.epochs and config.train.steps:
    raise UserError("train.epochs and train.steps are both set: choose one")


def module(path: str):
  """Runs a config file, and returns it as a module with `get_config`."""
  if not pathlib.Path(path).is_file():
    raise UserError(f"--config={path}: no such file")
  found = importlib.util.spec_from_file_location("config_file", path)
  if found is None:
    raise UserError(f"--config={path}: not a Python file")
  out = importlib.util.module_from_spec(found)
  try:
    found.loader.exec_module(out)
  except SyntaxError as error:
    raise UserError(
      f"--config={path}, line {error.lineno}: {error.msg}"
    ) from error
  if not hasattr(out, "get_config"):
    raise UserError(f"--config={path}: it defines no get_config(arg)")
  return out


def parse_arg(arg: str, **defaults):
  """Parses a config's argument, such as `shrink,curriculum=24M`.

  Args:
    arg: Comma-separated `name` (for True) or `name=value`.
    **defaults: The names that may appear, with what they are without it.

  Returns:
    A ConfigDict of them all.
  """
  parsed = ConfigDict(defaults)
  for part in filter(None, arg.split(",")):
    name, equals, value = part.partition("=")
    if name not in defaults:
      raise UserError(
        f"config argument {name!r} is unknown;{_nearest(name, defaults)}"
      )
    _set(parsed, name, value if equals else "True", f"config argument {part}")
  return parsed


def _override(config: ConfigDict, override: str) -> None:
  key, equals, value = override.partition("=")
  key = key.removeprefix("--config.")
  if not equals:
    raise UserError(f"--config.{key}: give a value, --config.{key}=VALUE")
  node, *rest = config, *key.split(".")
  for depth, part in enumerate(rest):
    if not isinstance(node, ConfigDict) or part not in node:
      known = leaves(config)
      raise UserError(f"unknown config key {key!r};{_nearest(key, known)}")
    if depth < len(rest) - 1:
      node = node[part]
  _set(node, rest[-1], value, f"--config.{key}={value}")


def _nearest(name: str, known: Iterable[str]) -> str:
  near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
  if near:
    return f" did you mean {near[0]!r}?"
  return f" known: {', '.join(sorted(known))}"


def _set(node: ConfigDict, name: str, text: str, what: str) -> None:
  """Sets `node.name` from text, read as the type that it has."""
  kind = node.get_type(name)
  try:
    node[name] = _read(text, kind)
  except (ValueError, KeyError, TypeError) as error:
    expected = getattr(kind, "__name__", str(kind))
    if kind in (ConfigDict, dict):
      expected = f"a group of settings ({', '.join(node[name])})"
    raise UserError(f"{what}: not {expected}") from error


_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def _read(text: str, kind: type):
  if kind is str:
    return text
  if kind is bool:
    return _BOOLS[text.lower()]
  if kind is tuple:
    return tuple(part for part in text.strip("()").split(",") if part)
  if kind is float:
    return float(text)
  if kind is int and float(text).is_integer():  # 1e4 is a fine way to write it
    return int(float(text))
  raise ValueError(text)


def leaves(config: ConfigDict, prefix: str = "") -> dict:
  """Returns all settings as `{"group.key": value}`."""
  out = {}
  for key in config:
    value = config[key]
    if isinstance(value, ConfigDict):
      out |= leaves(value, f"{prefix}{key}.")
    else:
      out[prefix + key] = value
  return out


def shrink(config: ConfigDict, steps: int = 12) -> None:
  """Makes any config run in seconds, on the same kind of data.

  The curriculum keeps its phases and their proportions, over `steps` steps.
  """
  # A thousand, so that no phase is under a step before it is scaled.
  parsed = curriculum.parse(
    config.curriculum, list(config.objectives), 1000, 1000
  )
  lengths = [phase.stop - phase.start for phase in parsed.phases]
  scale = steps / sum(lengths)
  config.curriculum = "+".join(
    f"{max(1, round(length * scale))}{_mix(phase)}"
    for length, phase in zip(lengths, parsed.phases, strict=True)
  ) + " steps"  # fmt: skip
  config.train.update(
    batch_size=4, microbatches=1, batch_schedule=(), epochs=0.0, steps=0
  )
  config.model.update(
    layers=2, width=32, heads=4, mlp_width=64, dtype="float32"
  )
  if "kv_heads" in config.model:
    config.model.kv_heads = 2
  config.schedule.update(warmup_steps=0.1, decay_steps=0.2)
  config.eval.update(every=0.5, rows=8)
  config.checkpoint.update(every=0.5, keep_every=0)
  config.log.every = 1


def _mix(phase: curriculum.Phase) -> str:
  names, shares = list(phase.shares), phase.shares.values()
  if len(names) == 1:
    return names[0]
  return f"{':'.join(names)}={':'.join(f'{share:.6f}' for share in shares)}"


def to_json(config: ConfigDict) -> str:
  """Writes the resolved config, so that `from_json` gives it back."""
  return json.dumps(config.to_dict(), indent=2)


def from_json(text: str) -> ConfigDict:
  """Reads `to_json`'s text."""
  settings = json.loads(text)
  config = default(settings["model"]["name"])
  config.unlock()
  config.update(settings)
  return config.lock()


def differences(old: ConfigDict, new: ConfigDict) -> list[str]:
  """Says which settings differ, but those that are free to on resuming."""
  before, after = leaves(old), leaves(new)
  out = []
  for key in sorted(before.keys() | after.keys()):
    if any(key == free or key.startswith(free + ".") for free in FREE):
      continue
    if before.get(key) != after.get(key):
      out.append(f"{key} was {before.get(key)!r}, is {after.get(key)!r}")
  return out


def objectives(config: ConfigDict) -> dict[str, Objective]:
  """Makes the objectives of a config, by name in the curriculum."""
  names = {field.name for field in dataclasses.fields(Objective)}
  out = {}
  for name, settings in config.objectives.items():
    for key in set(settings) - names:
      raise UserError(
        f"config.objectives.{name}.{key} is unknown;{_nearest(key, names)}"
      )
    out[name] = Objective(**settings)
    same = [n for n in out if out[n].name == out[name].name]
    if len(same) > 1:
      raise UserError(
        f"config.objectives {' and '.join(same)} are both named"
        f" {out[name].name!r}: logs would mix them up"
      )
  return out
