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
from antlm_jax.evals.finetuning.task import Suite, TaskHead

PRESETS: dict[str, Suite] = {
  "2024": glue.OF_2024,
  "2026": glue.OF_2026,
  "superglue": glue.SUPER,
  "classification": labelled.CLASSIFICATION,
  "regression": labelled.REGRESSION,
  "tagging": tagging.SUITE,
  "answering": answering.SUITE,
  "retrieval": retrieval.SUITE,
  "pairs": embedding.PAIRS,
  "simcse": embedding.SIMCSE,
  "study": protocol.SUITE,
}


def head_types() -> dict[str, type[TaskHead]]:
  """Returns the types of head that saved models may have, by kind."""
  return {h.kind: h for suite in PRESETS.values() for h in suite.heads}
