"""The tasks: which items their files hold, and what is made of the scores.

Files are those of BabyLM's evaluation-pipeline-2025, a folder of *.jsonl.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from antlm_jax.evals.zero_shot import command as command_lib
from antlm_jax.evals.zero_shot import ewok
from antlm_jax.evals.zero_shot.age_of_acquisition import AgeOfAcquisition
from antlm_jax.evals.zero_shot.choices import NOTES, Choices, Settings
from antlm_jax.evals.zero_shot.command import Task
from antlm_jax.evals.zero_shot.lambada import Lambada
from antlm_jax.evals.zero_shot.metrics import SPEARMAN
from antlm_jax.evals.zero_shot.perplexity import Perplexity
from antlm_jax.evals.zero_shot.reading import Reading
from antlm_jax.inference import pairs
from antlm_jax.inference.pairs import Choice, Item, Line
from antlm_jax.settings import setting

# The tables that entity tracking has: how boxes are named, what is moved.
_SPLITS = ("regular", "ambiref", "move_contents")
# COMPS: the UIDs by the files' names.
_COMPS = {
  "comps_base": "base",
  "comps_wugs": "wugs",
  "comps_wugs_dist-before": "wugs_dist_before",
  "comps_wugs_dist-in-between": "wugs_dist_in_between",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _EwokSettings(Settings):
  unfiltered: bool = setting(False, "keep words BabyLM's list lacks")
  full_sentence_scores: bool = setting(False, "score contexts, too")


def _read(parse):
  """Returns what reads a folder of *.jsonl, whose lines are parsed."""
  return lambda asked: pairs.read(asked.data, parse, asked.limit)


def _blimp_or_supplement(items: Sequence[Item]) -> str:
  """Only BLiMP's own lines have a field."""
  known = any("field" in item.groups for item in items)
  return "blimp" if known else "blimp_supplement"


def _item(line: Line, uid: str, choices, rating: float | None = None) -> Item:
  return Item(tuple(choices), str(line.number - 1), {"UID": uid}, rating)


def _number(line: Line, name: str) -> float:
  """Reads a field that is a number, or a text of one."""
  try:
    return float(line.fields[name])
  except (KeyError, TypeError, ValueError) as error:
    raise line.error(f"no number {name!r}") from error


def _wug(uid: str, about: str) -> Choices:
  """Forms of a made-up word, and the share of people who take the first."""

  def parse(line: Line) -> Item:
    forms = line.text("sentences").split("\t")
    if len(forms) < 2:
      raise line.error("no tab in 'sentences', which stands between forms")
    choices = (Choice("", form) for form in forms)
    return _item(line, uid, choices, _number(line, "ratio"))

  return Choices(about, _read(parse), metric=SPEARMAN)


def _entity_tracking(line: Line) -> Item:
  context, options = line.text("input_prefix"), line.fields.get("options")
  texts = isinstance(options, list) and all(isinstance(o, str) for o in options)
  if not texts or len(options) < 2:
    raise line.error("no texts 'options'")
  if not line.path.stem.startswith(_SPLITS):
    raise line.error(f"the file's name is none of {', '.join(_SPLITS)}")
  uid = f"{line.path.stem}_{_number(line, 'numops'):g}_ops"
  return _item(line, uid, (Choice(context, option) for option in options))


def _comps(line: Line) -> Item:
  if (uid := _COMPS.get(line.path.stem)) is None:
    raise line.error(f"the file's name is none of {', '.join(_COMPS)}")
  phrase = line.text("property_phrase")
  # Of the space between, the pipeline scores nothing.
  choices = (
    Choice(line.text(f"prefix_{which}") + " ", phrase)
    for which in ("acceptable", "unacceptable")
  )
  return _item(line, uid, choices)


TASKS: dict[str, Task] = {
  "blimp": Choices(
    "minimal pairs in BLiMP's form, and its supplement",
    lambda asked: pairs.minimal_pairs(asked.data, asked.limit),
    known_as=_blimp_or_supplement,
    notes=f"{pairs.__doc__}\n{NOTES}",
  ),
  "ewok": Choices(
    "which sentence fits a context",
    lambda asked: ewok.read(
      asked.data, asked.limit, asked.unfiltered, asked.full_sentence_scores
    ),
    known_as=lambda items: "ewok",
    settings=_EwokSettings,
    notes=f"{ewok.__doc__}\n{NOTES}",
  ),
  "wug_adj": _wug("wug_adj", "nouns of made-up adjectives, beside people's"),
  "wug_past": _wug("wug_past", "past tenses of made-up verbs, beside people's"),
  "comps": Choices(
    "which concept a property fits, inherited by made-up words",
    _read(_comps),
    glue="",
    with_context=True,
  ),
  "entity_tracking": Choices(
    "what is in a box after some moves",
    _read(_entity_tracking),
    glue="",
    splits=_SPLITS,
  ),
  "reading": Reading(),
  "aoa": AgeOfAcquisition(),
  "lambada": Lambada(),
  "perplexity": Perplexity(),
}


def command(description: str, *names: str) -> tuple[Callable, Callable]:
  """Returns `main` and `done` of the command that scores tasks of these names.

  Both take the command's arguments; see `command.run` and `command.done`.
  """
  how = {"description": description, "tasks": {n: TASKS[n] for n in names}}
  return (
    functools.partial(command_lib.run, **how),
    functools.partial(command_lib.done, **how),
  )
