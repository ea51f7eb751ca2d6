"""The settings of a configuration, as the lines of a command's help."""

from collections.abc import Mapping

from antlm_jax import settings
from antlm_jax.config import (
  CHOSEN,
  GROUPS,
  KINDS,
  OPTION,
  USUAL_NAMES,
  Config,
  leaves,
)
from antlm_jax.objectives import objective


def described(config: Config | None = None) -> str:
  """Returns a line for each setting: key, value or default, and help text.

  If a group has several implementations, the settings that not all of them have
  are under their names. A config shows the settings of those that it chooses.
  """
  values = leaves(config) if config else {}
  lines = [_settings_lines("", settings.of(Config), values)]
  for group, found in GROUPS.items():
    if group in KINDS:
      lines += _kinds_lines(group, found, values)
    else:
      lines.append(_settings_lines(group, settings.of(found), values))
  lines += _kinds_lines("objectives.NAME", objective.KINDS, {}, "kind")
  return "\n".join(filter(None, lines))


def _kinds_lines(
  group: str, kinds: Mapping[str, type], values: Mapping, choice: str = "name"
) -> list[str]:
  """Returns the lines of a group: its choice, and each choice's settings."""
  key, known = f"{group}.{choice}", ", ".join(filter(None, kinds))
  name = values.get(key, CHOSEN.get(group, ""))
  out = [f"  {f'{key}={name}':33} Implementation ({known})"]
  chosen = {n: f for n, f in settings.of(kinds[name]).items() if f.help}
  out.append(_settings_lines(group, chosen, values))
  for other, section in kinds.items() if not values else ():
    known = settings.of(section).items()
    own = {n: f for n, f in known if f.help and n not in chosen}
    if own:
      out += [
        f"  with {key}={other} also:",
        _settings_lines(group, own, values),
      ]
  return out


def _settings_lines(
  group: str, fields: Mapping[str, settings.Field], values: Mapping
) -> str:
  """Returns a line for each setting of a group."""
  out = []
  for name, field in fields.items():
    key = f"{group}.{name}".lstrip(".")
    choices = ", ".join(map(str, field.choices or ()))
    choices = f" ({choices})" if choices else ""
    pair = f"{key}={settings.text(values.get(key, field.default))}"
    out.append(f"  {pair:33} {field.help}{choices}")
  return "\n".join(out)


def meant_setting(word: str) -> str:
  """Returns a hint at the setting that an argument such as --peak_lr names."""
  known = dict.fromkeys([*settings.of(Config), *KINDS])
  for group, found in GROUPS.items():
    for section in found.values() if group in KINDS else [found]:
      known |= dict.fromkeys(f"{group}.{own}" for own in settings.of(section))
  name, shown = word.lstrip("-").partition("=")[0], f"{OPTION}.{{}}".format
  hint = settings.meant(name, known, USUAL_NAMES, shown)
  return f"; {hint}" if hint else ""
