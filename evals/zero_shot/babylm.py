"""BabyLM's tasks in which a model chooses between sentences.

The data are folders of *.jsonl, in the form of evaluation-pipeline-2025.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence

from antlm_jax.evals.zero_shot import choices
from antlm_jax.evals.zero_shot.choices import ChoiceSettings
from antlm_jax.evals.zero_shot.command import TASKS, Reported, Task
from antlm_jax.evals.zero_shot.metrics import SPEARMAN
from antlm_jax.inference import pairs
from antlm_jax.inference.pairs import Choice, Item, Line

# Files of entity tracking: how boxes are named, or their contents moved.
_SPLITS = ("regular", "ambiref", "move_contents")
# COMPS: the UIDs by the files' names.
_COMPS = {
  "comps_base": "base",
  "comps_wugs": "wugs",
  "comps_wugs_dist-before": "wugs_dist_before",
  "comps_wugs_dist-in-between": "wugs_dist_in_between",
}
_PAIRS = pairs.__doc__.partition("\n\n")[2]  # the form of their files
_BLIMP = f"""\
Minimal pairs: BLiMP (arXiv 1912.00582) and its supplement.

  antlm eval blimp --checkpoint=RUN --data=FOLDER --mode=causal

{_PAIRS}"""
_WUG = """\
The folder holds *.jsonl with the fields `sentences`, the forms with a tab
between them, and `ratio`, the share of people who choose the first one. The
figure is Spearman's correlation of these shares with the probabilities of the
first forms."""


def _task(about: str, parse: Callable[[Line], Item], **rules) -> Task:
  """Returns a task whose lines `parse` reads, with `rules` of `Rules`."""

  def read(asked: ChoiceSettings) -> list[Item]:
    return pairs.read(asked.data, parse, asked.limit)

  return choices.task(about, read, **rules)


def of_2024(items: Sequence[Item]) -> str:
  """Tells BLiMP from its supplement, whose lines have no field."""
  known = any("field" in item.groups for item in items)
  return "blimp" if known else "blimp_supplement"


def _item(line: Line, uid: str, texts: Iterable[Choice], rating=None) -> Item:
  return Item(tuple(texts), str(line.number - 1), {"UID": uid}, rating)


def _number(line: Line, name: str) -> float:
  """Reads a field that is a number, or a text of one."""
  try:
    return float(line.fields[name])
  except (KeyError, TypeError, ValueError) as error:
    raise line.error(f"no number {name!r}") from error


def _wug(uid: str, about: str) -> Task:
  def parse(line: Line) -> Item:
    forms = line.text("sentences").split("\t")
    if len(forms) < 2:
      raise line.error("no tab in 'sentences', which stands between forms")
    texts = (Choice("", form) for form in forms)
    return _item(line, uid, texts, _number(line, "ratio"))

  return _task(f"{about}\n\n{_WUG}", parse, metric=SPEARMAN)


def entity_tracking(line: Line) -> Item:
  """Entity tracking: the contents of a box after some moves.

  The folder holds regular.jsonl, ambiref.jsonl and move_contents.jsonl. The
  result is the mean over these files of the means over numbers of moves.
  """
  context, options = line.text("input_prefix"), line.fields.get("options")
  texts = isinstance(options, list) and all(isinstance(o, str) for o in options)
  if not texts or len(options) < 2:
    raise line.error("no texts 'options'")
  if not line.path.stem.startswith(_SPLITS):
    raise line.error(f"the file's name is none of {', '.join(_SPLITS)}")
  uid = f"{line.path.stem}_{_number(line, 'numops'):g}_ops"
  return _item(line, uid, (Choice(context, option) for option in options))


def comps(line: Line) -> Item:
  """COMPS: the concept that a property fits, and made-up words.

  The folder holds comps_*.jsonl. A line has a property and two concepts, and
  the property is scored after each of them.
  """
  if (uid := _COMPS.get(line.path.stem)) is None:
    raise line.error(f"the file's name is none of {', '.join(_COMPS)}")
  phrase = line.text("property_phrase")
  # The space between belongs to the context: the pipeline does not score it.
  both = (
    Choice(line.text(f"prefix_{which}") + " ", phrase)
    for which in ("acceptable", "unacceptable")
  )
  return _item(line, uid, both)


TASKS["blimp"] = choices.task(
  _BLIMP,
  lambda asked: pairs.minimal_pairs(asked.data, asked.limit),
  reported=[  # as BabyLM filters them
    Reported("BLiMP", "blimp_filtered", 59_875),
    Reported("BLiMP supplement", "blimp_supplement_filtered", 5_218),
  ],
  name_2024=of_2024,
)
TASKS["wug_adj"] = _wug("wug_adj", "Nouns of made-up adjectives.")
TASKS["wug_past"] = _wug("wug_past", "Past tenses of made-up verbs.")
TASKS["comps"] = _task(inspect.getdoc(comps), comps, glue="", with_context=True)
TASKS["entity_tracking"] = _task(
  inspect.getdoc(entity_tracking), entity_tracking, glue="", splits=_SPLITS
)
