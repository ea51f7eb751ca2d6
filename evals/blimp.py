"""Zero-shot accuracy on minimal pairs in BLiMP's form (arXiv 1912.00582).

  python -m evals.blimp --checkpoint=RUN --data=FOLDER --mode=causal

Every *.jsonl of the folder holds one pair a line: `sentence_good` and
`sentence_bad`, and, if known, `UID`, `linguistics_term`, `field` and
`pair_id`. BabyLM's filtered BLiMP and its supplement are such folders. The
UID is the file's name where a line names none, as in the supplement.
"""

import dataclasses
from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax.inference.pairs import Pair, minimal_pairs
from antlm_jax.settings import setting
from evals.zero_shot import command


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(command.Settings):
  """The command's arguments."""

  data: str = setting(help="folder of *.jsonl files")


def _task(found: Sequence[Pair]) -> str:
  """Names the pipelines' task: only BLiMP's own lines have a field."""
  known = any("field" in pair.groups for pair in found)
  return "blimp" if known else "blimp_supplement"


def main(argv: Sequence[str]) -> None:
  """Runs the command."""

  def read(asked: Settings) -> list[Pair]:
    return minimal_pairs(asked.data, asked.limit)

  command.run(argv, "evals.blimp", __doc__, Settings, read, _task)


if __name__ == "__main__":
  cli.run(main)
