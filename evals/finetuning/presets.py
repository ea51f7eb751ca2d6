"""Table of the presets of `antlm eval finetune`, one row for each kind of task.

The command's options, its help, the heads of saved models and the report derive
from this table.
"""

from antlm_jax.evals.finetuning import (
  answering,
  embedding,
  glue,
  labelled,
  protocol,
  retrieval,
  tagging,
)
from antlm_jax.evals.finetuning.task import Preset, TaskHead

PRESETS: dict[str, Preset] = {
  "2024": glue.OF_2024,
  "2026": glue.OF_2026,
  "superglue": glue.SUPER,
  "classification": labelled.CLASSIFICATION,
  "regression": labelled.REGRESSION,
  "tagging": tagging.PRESET,
  "answering": answering.PRESET,
  "retrieval": retrieval.PRESET,
  "pairs": embedding.PAIRS,
  "simcse": embedding.SIMCSE,
  "study": protocol.PRESET,
}


def head_types() -> dict[str, type[TaskHead]]:
  """Returns the types of head that saved models may have, by kind."""
  return {h.kind: h for preset in PRESETS.values() for h in preset.heads}
