"""The settings of a configuration, as the lines of a command's help."""

from collections.abc import Mapping

from antlm_jax import settings
from antlm_jax.config import (
  GROUPS,
  OPTION,
  REGISTRIES,
  USUAL_NAMES,
  Config,
  leaves,
  meant_key,
)
from antlm_jax.objectives import objective


def described(config: Config | None = None) -> str:
  """Returns a line for each setting: key, value or default, and help text.

  If a group has several implementations, the settings that not all of them have
  are under their names. A config shows the settings of those that it chooses.
  """
  values = leaves(config) if config else {}
  lines = [_settings_lines("", settings.fields_of(Config), values)]
  for group, section in GROUPS.items():
    if group in REGISTRIES:
      default = getattr(Config, group).name
      lines += _kinds_lines(group, REGISTRIES[group], values, default)
    else:
      lines.append(_settings_lines(group, settings.fields_of(section), values))
  lines += _kinds_lines("objectives.NAME", objective.KINDS, {})
  return "\n".join(filter(None, lines))


def _kinds_lines(
  group: str, kinds: settings.Registry, values: Mapping, default: str = ""
) -> list[str]:
  """Returns the lines of a group: its choice, and each choice's settings."""
  key = f"{group}.{kinds.key}"
  chosen = values.get(key, default)
  names = ", ".join(filter(None, kinds))
  lines = [f"  {f'{key}={chosen}':33} Implementation ({names})"]
  fields = _helped(kinds[chosen])
  lines.append(_settings_lines(group, fields, values))
  for name, section in kinds.items() if not values else ():
    further = {n: f for n, f in _helped(section).items() if n not in fields}
    if further:
      lines += [
        f"  with {key}={name} also:",
        _settings_lines(group, further, values),
      ]
  return lines


def _helped(section: type) -> dict[str, settings.Field]:
  """Returns the settings of a section that have a help text."""
  fields = settings.fields_of(section)
  return {name: field for name, field in fields.items() if field.help}


def _settings_lines(
  group: str, fields: Mapping[str, settings.Field], values: Mapping
) -> str:
  """Returns a line for each setting of a group."""
  lines = []
  for name, field in fields.items():
    key = f"{group}.{name}".lstrip(".")
    choices = ", ".join(map(str, field.choices or ()))
    choices = f" ({choices})" if choices else ""
    pair = f"{key}={settings.text(values.get(key, field.default))}"
    lines.append(f"  {pair:33} {field.help}{choices}")
  return "\n".join(lines)


def meant_setting(word: str) -> str:
  """Returns a hint at the setting that an argument such as --peak_lr names."""
  keys = dict.fromkeys([*settings.fields_of(Config), *USUAL_NAMES.values()])
  for group, section in GROUPS.items():
    for kind in section.values() if group in REGISTRIES else [section]:
      names = settings.fields_of(kind)
      keys |= dict.fromkeys(f"{group}.{name}" for name in names)
  name = word.lstrip("-").partition("=")[0]
  hint = meant_key(name, keys, f"{OPTION}.{{}}".format)
  return f"; {hint}" if hint else ""
