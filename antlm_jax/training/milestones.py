"""Milestones: the steps after which a run has seen given numbers of words."""

import bisect
import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence

from antlm_jax import units
from antlm_jax.errors import UserError

# BabyLM's checkpoints (rules of 2025 and 2026), in words of text seen. They are
# at every 1M up to 10M, every 10M up to 100M, and every 100M up to 1,000M.
BABYLM = "babylm"
_OF_BABYLM = [n * size for size in (1e6, 1e7, 1e8) for n in range(1, 10)] + [
  1e9
]
# Ten epochs of 10M words see a little less than 100M, since some text is held
# out. The last step still counts as chck_100M.
_TOLERANCE = 1.05
_NAME = re.compile(r"chck_[\d.e+-]+M")


def find_milestones(
  amounts: Sequence[str], words: Callable[[int], float], steps: int
) -> dict[str, int]:
  """Returns the steps of `checkpoint.words` by BabyLM's names, e.g. chck_1M.

  `amounts` are numbers of words, such as `1M`, or `babylm`. `words` returns how
  many words a number of steps sees, of the run's `steps`. Raises a UserError if
  a value is not a number of words, or the run never reaches it.
  """
  out = {}
  total = words(steps)
  for text in amounts:
    for count in _parse_milestone(text):
      if count <= total * _TOLERANCE:
        step = bisect.bisect_left(range(steps), count, key=words)
        out[f"chck_{count / 1e6:g}M"] = max(step, 1)
      elif text != BABYLM:
        raise UserError(
          f"checkpoint.words={text} is never reached: the run sees"
          f" {units.quantity(total)} words"
        )
  return out


def check_milestones(names: Mapping[str, int]) -> None:
  """Raises a ValueError for a name that `find_milestones` does not give.

  Names become folders, and a checkpoint may have another one, such as `../x`.
  """
  for name in names:
    if not _NAME.fullmatch(name):
      raise ValueError(f"{name!r} is no step's name, such as chck_1M")


def _parse_milestone(text: str) -> Sequence[float]:
  if text == BABYLM:
    return _OF_BABYLM
  with contextlib.suppress(ValueError):
    if 0 < (number := units.parse_quantity(text)) < math.inf:
      return [number]
  raise UserError(
    f"checkpoint.words={text!a} is not a number of words: write a number such"
    f" as 1M, or {BABYLM}"
  )
