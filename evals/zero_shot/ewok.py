"""EWoK: the sentence that fits a context (arXiv 2405.09605).

  antlm eval ewok --checkpoint=RUN --data=FOLDER --mode=causal

The folder holds ewok_test.csv, which is EWoK-core-1.0, from its authors' page
at huggingface.co/datasets/ewok-core/ewok-core-1.0. It also holds BabyLM's word
list, vocab*.txt: `ewok/vocab.txt` of evaluation-pipeline-2024, or
`strict/evaluation_pipeline/ewok/vocab.txt` of babylm-eval. As in both, rows
with a word that is not on the list are left out, which leaves 3,809 of 4,374.
Or the folder holds the pipelines' files: a *.jsonl for each domain, with the
same fields. One line has each row, and another line has it turned around.

A row is two pairs. Target1 is the good choice after Context1, and Target2 after
Context2. With --pipeline=2026, as in EWoK's paper, Context1 is the good choice
before Target1, and Context2 before Target2: the same target is scored twice.

The UID is the domain. Do not publish the results where they can be crawled:
they contain the text of EWoK, whose authors ask for this.
"""

import collections
import dataclasses
import pathlib
import re

from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot.choices import ChoiceSettings, choice_task
from antlm_jax.evals.zero_shot.task import TASKS, Reported
from antlm_jax.inference import pairs
from antlm_jax.inference.pairs import Choice, Item, Line
from antlm_jax.runtime import files
from antlm_jax.settings import setting

FILE = "ewok_test.csv"
_TEXTS = ("Context1", "Context2", "Target1", "Target2")
_ORDERS = ("12", "21")  # a row, and the row turned around
# Words as NLTK's word_tokenize, which BabyLM filters with, cuts this text:
# clitics, `can not`, and every other sign apart. (Quotation marks, which NLTK
# rewrites, are on the list in that form, so they need no look.)
_WORD = re.compile(
  r"\bcan(?=not\b)|(?<=\bcan)not\b"
  r"|[\w-]+?(?=n't\b)|n't\b|'(?:s|ll|re|ve|d|m)\b"
  r'|[\w-]+|[^\w\s"]'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EwokSettings(ChoiceSettings):
  """The arguments of the task."""

  unfiltered: bool = setting(False, "Keep rows with words not on BabyLM's list")


def lower_case_words(text: str) -> list[str]:
  """Cuts a text into lower-case words, to look up in the list."""
  return _WORD.findall(text.lower())


def read_ewok_pairs(
  folder, limit: int = 0, unfiltered: bool = False, by_context: bool = False
) -> list[Item]:
  """Reads the pairs of a folder.

  `limit` is the largest number of pairs of each domain; 0 for all. `unfiltered`
  keeps rows with words that are not on the list. `by_context` pairs contexts of
  a target, not targets of a context. Raises a UserError if a file is missing or
  is malformed.
  """
  folder = pathlib.Path(folder)
  counts = collections.Counter()  # pairs read, by domain
  if not (folder / FILE).exists() and any(folder.glob("*.jsonl")):
    return pairs.read_items(
      folder,
      lambda line: _ewok_pair(line, "12", counts, by_context),
      limit,
      "EWoK",
    )
  rows = files.read_csv(folder / FILE, "EWoK")
  lines = [Line(folder / FILE, *row) for row in rows]
  if not unfiltered:
    paths = sorted(folder.glob("vocab*.txt"))
    if len(paths) != 1:
      raise UserError(
        f"data={folder} holds {len(paths)} files vocab*.txt, not BabyLM's one"
        " word list: put it there, or set unfiltered"
      )
    vocabulary = set(files.read_text(paths[0], "the word list").splitlines())
    lines = [
      line
      for line in lines
      if all(
        vocabulary.issuperset(lower_case_words(line.text(name)))
        for name in _TEXTS
      )
    ]
  items = [
    _ewok_pair(line, order, counts, by_context)
    for line in lines
    for order in _ORDERS
  ]
  items = [item for item in items if not limit or int(item.item_id) < limit]
  if not items:
    raise UserError(f"data={folder}: no row of {FILE} is left to score")
  return items


def _ewok_pair(
  line: Line, order: str, counts: collections.Counter, by_context: bool
) -> Item:
  """Returns one of a row's two pairs, numbered within its domain."""
  domain = line.text("Domain")
  contexts, targets = (
    [line.text(f"{name}{number}") for number in order]
    for name in ("Context", "Target")
  )
  other = (contexts[1], targets[0]) if by_context else (contexts[0], targets[1])
  number = counts[domain]
  counts[domain] += 1
  choices = Choice(contexts[0], targets[0]), Choice(*other)
  return Item(choices, str(number), domain)


TASKS["ewok"] = choice_task(
  __doc__,
  lambda settings: read_ewok_pairs(
    settings.data,
    settings.limit,
    settings.unfiltered,
    by_context=settings.pipeline == "2026",
  ),
  settings=EwokSettings,
  reported=[Reported("EWoK", "ewok", 7_618)],
  with_context=True,
  name_2024=lambda items: "ewok",
)
