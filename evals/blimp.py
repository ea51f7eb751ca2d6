"""Zero-shot accuracy on minimal pairs in BLiMP's form (arXiv 1912.00582).

python -m evals.blimp --checkpoint=RUN --data=FOLDER --mode=causal
"""

import dataclasses
from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax.inference import pairs
from antlm_jax.settings import setting
from evals.zero_shot import command


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(command.Settings):
  """The command's arguments."""

  data: str = setting(help="folder of *.jsonl files")


def _task(found: Sequence[pairs.Pair]) -> str:
  """Names the pipelines' task: only BLiMP's own lines have a field."""
  known = any("field" in pair.groups for pair in found)
  return "blimp" if known else "blimp_supplement"


def main(argv: Sequence[str]) -> None:
  """Runs the command."""

  def read(asked: Settings) -> list[pairs.Pair]:
    return pairs.minimal_pairs(asked.data, asked.limit)

  about = f"{__doc__}\n{pairs.__doc__}"
  command.run(argv, "evals.blimp", about, Settings, read, _task)


if __name__ == "__main__":
  cli.run(main)
