"""Zero-shot accuracy on EWoK: which sentence fits a context (arXiv 2405.09605).

  python -m evals.ewok --checkpoint=RUN --data=FOLDER --mode=causal

The folder holds ewok_test.csv, EWoK-core-1.0, whose authors give it out at
huggingface.co/datasets/ewok-core/ewok-core-1.0 and ask not to publish its text
where it can be crawled; what this command writes holds such text too. Beside
it stands BabyLM's word list, vocab*.txt, one word a line (`ewok/vocab.txt` of
evaluation-pipeline-2024, `evaluation_pipeline/ewok/vocab.txt` of -2025). As in
both, rows with a word that the list lacks are left out, which leaves 3,809 of
4,374; `--unfiltered` keeps all of them.

A row is two pairs: after Context1 Target1 is the good choice, after Context2
Target2. The UID is the domain, of which there are eleven.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from antlm_jax import cli
from antlm_jax.errors import UserError
from antlm_jax.inference.pairs import Pair
from antlm_jax.runtime import files
from antlm_jax.settings import setting
from evals.zero_shot import command

FILE = "ewok_test.csv"
_TEXTS = ("Context1", "Context2", "Target1", "Target2")
# What pipeline 2025 reports accuracies by, with its names for the columns.
_GROUPS = {
  "UID": "Domain",
  "context_type": "ContextType",
  "context_contrast": "ContextDiff",
  "target_contrast": "TargetDiff",
}
# Words as NLTK's word_tokenize, which BabyLM filters with, cuts this text:
# clitics, `can not`, and every other sign apart. (Quotation marks, which NLTK
# rewrites, are on the list in that form, so they need no look.)
_WORD = re.compile(
  r"\bcan(?=not\b)|(?<=\bcan)not\b"
  r"|[\w-]+?(?=n't\b)|n't\b|'(?:s|ll|re|ve|d|m)\b"
  r'|[\w-]+|[^\w\s"]'
)


def words(text: str) -> list[str]:
  """Cuts a text into the lower-case words that the list is asked about."""
  return _WORD.findall(text.lower())


def read(folder, limit: int = 0, unfiltered: bool = False) -> list[Pair]:
  """Reads the pairs of a folder.

  Args:
    folder: Holds ewok_test.csv and, unless unfiltered, one vocab*.txt.
    limit: At most so many pairs of each domain; 0 for all.
    unfiltered: Whether to keep rows with words that are not on the list.

  Raises:
    UserError: if a file is missing or is not what it should be.
  """
  folder = pathlib.Path(folder)
  rows = _rows(folder / FILE)
  if not unfiltered:
    known = _vocabulary(folder)
    rows = [row for row in rows if known.issuperset(_words(row))]
  seen, out = collections.Counter(), []
  for pair in (pair for row in rows for pair in _pairs(row, seen)):
    if not limit or int(pair.pair_id) < limit:
      out.append(pair)
  if not out:
    raise UserError(f"--data={folder}: no row of {FILE} is left to score")
  return out


def _words(row: Mapping[str, str]) -> Iterator[str]:
  return (word for name in _TEXTS for word in words(row[name]))


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
  rows = []
  for line, row in files.read_csv(path, "EWoK"):
    missing = [n for n in (*_TEXTS, *_GROUPS.values()) if not row.get(n)]
    if missing:
      raise UserError(f"{path}, line {line}: no {', '.join(missing)}")
    rows.append(row)
  return rows


def _vocabulary(folder: pathlib.Path) -> set[str]:
  paths = sorted(folder.glob("vocab*.txt"))
  if len(paths) != 1:
    raise UserError(
      f"--data={folder} holds {len(paths)} files vocab*.txt, not BabyLM's one"
      " word list: put it there, or use --unfiltered"
    )
  return set(files.read_text(paths[0], "the word list").split("\n"))


def _pairs(row: Mapping[str, str], seen: collections.Counter) -> Iterator[Pair]:
  """Yields a row's two pairs, numbered within their domain."""
  groups = {name: row[column] for name, column in _GROUPS.items()}
  # Each target fits one of the contexts, and is the bad choice in the other.
  for good, bad in (("1", "2"), ("2", "1")):
    yield Pair(
      context=row[f"Context{good}"],
      good=row[f"Target{good}"],
      bad=row[f"Target{bad}"],
      pair_id=str(seen[groups["UID"]]),
      groups=groups,
    )
    seen[groups["UID"]] += 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(command.Settings):
  """The command's arguments."""

  data: str = setting(help=f"folder with {FILE} and BabyLM's word list")
  unfiltered: bool = setting(False, "keep words BabyLM's list lacks")


def main(argv: Sequence[str]) -> None:
  """Runs the command."""

  def found(asked: Settings) -> list[Pair]:
    return read(asked.data, asked.limit, asked.unfiltered)

  command.run(argv, "evals.ewok", __doc__, Settings, found, lambda _: "ewok")


if __name__ == "__main__":
  cli.run(main)
