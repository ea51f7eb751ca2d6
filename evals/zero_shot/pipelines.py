"""Scores and files of BabyLM's evaluation pipelines.

  ours  Sums, between the special tokens of training. All modes.
  2024  babylm/evaluation-pipeline-2024. causal: sums, as lm-eval's `hf`: the
        choice follows " " and the context, or the BOS (or EOS) token if there
        is no context. mlm: means over tokens, as its `hf-mlm` (minicons'
        conditional_score): the special tokens of training, the EOS token for
        an empty context, and two spaces before the choice. The first space is
        often a scored token of its own.
  2026  babylm-org/babylm-eval, backends causal, mlm and mntp: sums over the
        tokens that end after the context, as `ours`. EWoK compares contexts.

2024 and 2026 also write predictions.json in their forms.

The pipelines take special tokens from a tokenizer's files. Here they are those
of training, so a model that is published with others gets other scores there.
2024 counts the tokens of the context encoded alone, which is the same for
byte-level BPE. Two cases that 2024 scores are errors here. If a tokenizer has
no EOS token, 2024 puts the word "None". If a text is longer than the model's
rows, 2024 cuts it.

Masked scores published with 2024 are of other sentences: its `hf-mlm` sorts the
texts and returns the scores in that order. Ours are in the order of the data.
"""

from typing import Any

from antlm_jax.errors import UserError
from antlm_jax.inference.scoring import MODES, TextFormat

_RULES = __doc__.split("\n\n", 1)[1]
NOTES = f"--pipeline sets the rules:\n\n{_RULES}"


# 2026 scores as we do, and so by the same options.
_SUMS = {"text_format": TextFormat(), "reduction": "sum"}
# Options of `scoring.score` by pipeline and mode.
PIPELINES = {
  "ours": dict.fromkeys(MODES, _SUMS),
  "2024": {
    "causal": _SUMS
    | {"text_format": TextFormat(framed=False, no_context="bos")},
    # minicons' conditional_score: a prefix that is never empty, and a space of
    # its own next to that of the choice.
    "mlm": {
      "text_format": TextFormat(separator="  ", no_context="eos"),
      "reduction": "mean",
    },
  },
  "2026": dict.fromkeys(("causal", "mlm", "mntp"), _SUMS),
}
_TASKS = {"2024": ("blimp", "ewok")}  # those of a pipeline that lacks others
# Texts that pandas, with which 2026 reads CSV files, takes for missing.
NOTHING = ("", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null")


def options(pipeline: str, mode: str, task: str = "blimp") -> dict[str, Any]:
  """Returns a pipeline's options of `scoring.score`: format and reduction.

  Raises a UserError if it has no such mode or task.
  """
  modes = PIPELINES[pipeline]
  if task not in _TASKS.get(pipeline, (task,)):
    raise UserError(f"the {pipeline} pipeline has no task {task}")
  if mode not in modes:
    raise UserError(
      f"mode {mode!r} is not one of {', '.join(modes)} of the {pipeline}"
      " pipeline"
    )
  return modes[mode]


def csv_number(text: str) -> float:
  """Reads a number of a CSV file; NaN if it is missing."""
  return float("nan" if text in NOTHING else text)
