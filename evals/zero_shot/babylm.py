"""BabyLM's tasks in which a model chooses between sentences.

The data are folders of *.jsonl, in the form of babylm-org/babylm-eval.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Sequence

from antlm_jax.evals.zero_shot import choices
from antlm_jax.evals.zero_shot.choices import ChoiceSettings
from antlm_jax.evals.zero_shot.task import TASKS, Reported, ZeroShotTask
from antlm_jax.inference import pairs
from antlm_jax.inference.pairs import Choice, Item, Line
from antlm_jax.inference.scoring import REDUCTIONS
from antlm_jax.settings import setting

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanSettings(ChoiceSettings):
  """The settings of tasks that average over tokens."""

  reduction: str = setting(
    "mean", "Sum or mean over the tokens of a choice", choices=REDUCTIONS
  )


def _babylm_task(parse: Callable[[Line], Item | None], **rules) -> ZeroShotTask:
  """Returns a task whose lines `parse` reads and describes.

  `rules` are those of `choices.choice_task`.
  """

  def read(settings: ChoiceSettings) -> list[Item]:
    return pairs.read_items(settings.data, parse, settings.limit)

  return choices.choice_task(inspect.getdoc(parse), read, **rules)


def of_2024(items: Sequence[Item]) -> str:
  """Tells BLiMP from its supplement, whose lines have no phenomenon."""
  has_terms = any(item.term for item in items)
  return "blimp" if has_terms else "blimp_supplement"


def _integer(line: Line, name: str) -> int:
  """Reads a field that is a whole number, or its text."""
  try:
    return int(line.fields[name])
  except (KeyError, TypeError, ValueError) as error:
    raise line.error(f"no number {name!r}") from error


def entity_tracking(line: Line) -> Item | None:
  """Entity tracking: the contents of a box after some moves.

  The folder holds regular.jsonl, ambiref.jsonl and move_contents.jsonl. As in
  2026, questions with the word "nothing" in an option are left out. The result
  is the mean over these files of the means over numbers of moves.
  """
  context = line.text("input_prefix")
  options = line.fields.get("options")
  texts = isinstance(options, list) and all(isinstance(o, str) for o in options)
  if not texts or len(options) < 2:
    raise line.error("no texts 'options'")
  if (split := line.path.stem) not in _SPLITS:
    raise line.error(f"the file's name is none of {', '.join(_SPLITS)}")
  uid = f"{split}_{_integer(line, 'numops')}_ops"
  if any("nothing" in option for option in options):
    return None
  box_contents = tuple(Choice(context, option) for option in options)
  return Item(box_contents, str(line.number - 1), uid, split)


def comps(line: Line) -> Item:
  """COMPS: the concept that a property fits, and made-up words.

  The folder holds comps_*.jsonl. A line has a property and two concepts, and
  the property is scored after each of them.
  """
  if (uid := _COMPS.get(line.path.stem)) is None:
    raise line.error(f"the file's name is none of {', '.join(_COMPS)}")
  phrase = line.text("property_phrase").strip()
  # The space between belongs to the context: the pipeline does not score it.
  concepts = tuple(
    Choice(f"{line.text(f'prefix_{judgement}').strip()} ", phrase)
    for judgement in ("acceptable", "unacceptable")
  )
  return Item(concepts, str(line.number - 1), uid)


def global_piqa(line: Line) -> Item:
  """Global PIQA: everyday reasoning (arXiv 2510.24081).

  The folder holds *.jsonl of huggingface.co/datasets/mrlbenchmarks, from
  global-piqa-parallel (four solutions of a prompt) or global-piqa-nonparallel
  (two of them). A solution's score is the mean over its tokens.
  """
  fields = (line.fields.get(f"solution{n}") for n in itertools.count())
  texts = [*itertools.takewhile(lambda text: text, fields)]
  label = _integer(line, "label")
  if len(texts) < 2 or not 0 <= label < len(texts):
    raise line.error(f"no two solutions, or no text 'solution{label}'")
  prompt = line.fields.get("prompt") or ""
  solutions = [Choice(prompt, f" {text}") for text in texts]
  solutions.insert(0, solutions.pop(label))
  return Item(tuple(solutions), line.text("example_id"), line.path.stem)


TASKS["blimp"] = choices.choice_task(
  _BLIMP,
  lambda settings: pairs.read_minimal_pairs(settings.data, settings.limit),
  reported=[  # as BabyLM filters them
    Reported("BLiMP", "blimp_filtered", 59_875),
    Reported("BLiMP supplement", "blimp_supplement_filtered", 5_218),
  ],
  name_2024=of_2024,
  in_memory=True,
)
TASKS["comps"] = _babylm_task(comps, glue="", with_context=True)
TASKS["entity_tracking"] = _babylm_task(entity_tracking, by_term=True)
TASKS["global_piqa"] = _babylm_task(
  global_piqa, settings=MeanSettings, by_id=True
)
