"""A zero-shot task: is a sentence likelier than its words in reverse?"""

import pathlib

from antlm_jax.evals.zero_shot.task import (
  TASKS,
  Reported,
  ZeroShotOutcome,
  ZeroShotTask,
)
from antlm_jax.inference import scoring


def read(asked):
  """Returns the lines of text.txt."""
  return pathlib.Path(asked.data, "text.txt").read_text().splitlines()


def score(loaded, items, asked):
  """Compares each sentence with its reverse."""
  both = [*items, *(" ".join(reversed(item.split())) for item in items)]
  scores = scoring.score(loaded, both, asked.mode, **asked.batches)
  right = (scores[: len(items)] > scores[len(items) :]).tolist()
  lines = [
    {"text": item, "correct": hit}
    for item, hit in zip(items, right, strict=True)
  ]
  return ZeroShotOutcome({"accuracy": sum(right) / len(right)}, lines)


TASKS["order"] = ZeroShotTask(
  about="Order: is a text likelier than its words in reverse?\n\n"
  "The folder holds text.txt, a text in each line.",
  read=read,
  score=score,
  figure="accuracy",
  table={"accuracy": "{accuracy:.1%}"},
  reported=[Reported("Word order", "sentences")],
)
