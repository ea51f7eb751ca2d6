"""How BabyLM's evaluation pipelines score a choice, and what they write.

  ours  special tokens as in training; sums; every mode.
  2024  babylm/evaluation-pipeline-2024. causal: sums, as lm-eval's `hf`: the
        choice after " ", behind the BOS (or EOS) token if there is no context
        and behind the context alone if there is one. mlm: means over tokens,
        as its `hf-mlm` through minicons' conditional_score: framed as in
        training, the EOS token for an empty context, two spaces before the
        choice, of which the first is often a scored token of its own.
  2025  babylm/evaluation-pipeline-2025, backends causal, mlm and mntp: sums
        over the tokens that end after the context, framed as the tokenizer
        frames a text. That is `ours` for a tokenizer that frames as training
        did, so the two give the same scores.

The pipelines take the frame from a tokenizer's files; here it is what stood
around the documents of the training data: BOS and EOS, EOS twice, or nothing.
A model that is published with another frame scores otherwise there. A token
across the end of a context is the choice's, as in 2025; 2024 counts the tokens
of the context encoded alone, which is the same for tokenizers that cut at
spaces, as byte-level BPE does. Two things of 2024 are errors here: a tokenizer
without an EOS token, for which it scores behind the word "None", and a text
longer than the model's rows, which it cuts.
"""

import collections
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from antlm_jax.errors import UserError
from antlm_jax.inference.scoring import MODES, Format
from evals.zero_shot.accuracy import Results


def options(pipeline: str, mode: str) -> dict[str, Any]:
  """Returns what a pipeline tells `scoring.score`: a format and a reduction.

  Raises:
    UserError: if it has no such mode.
  """
  modes = PIPELINES[pipeline].modes
  if mode not in modes:
    raise UserError(
      f"mode {mode!r} is not one of {', '.join(modes)} of the {pipeline}"
      " pipeline"
    )
  return modes[mode]


def _predictions(results: Results, which: int, leads: Sequence[str]) -> dict:
  """Returns what was chosen, by UID, as both pipelines lay it out.

  Args:
    results: n pairs and their scores.
    which: Index of the temperature.
    leads: n texts that stand before the choices in the pipeline's strings.
  """
  out = collections.defaultdict(lambda: {"predictions": []})
  for pair, correct, lead in zip(
    results.pairs, results.correct[:, which], leads, strict=True
  ):
    chosen = out[pair.uid]["predictions"]
    text = lead + (pair.good if correct else pair.bad)
    # Numbered anew: their ids are places in the file, not the data's names.
    chosen.append({"id": f"{pair.uid}_{len(chosen)}", "pred": text})
  return out


def _files_2024(task: str, results: Results) -> dict[str, str]:
  """The task's part of what collect_results.py writes."""
  chosen = _predictions(results, 0, [" "] * len(results.pairs))
  return {"predictions.json": json.dumps({task: chosen})}


def _files_2025(task: str, results: Results) -> dict[str, str]:
  """What sentence_zero_shot writes, at the best temperature."""
  del task  # names the folder there
  leads = [" " if pair.context else "" for pair in results.pairs]
  chosen = _predictions(results, results.best, leads)
  return {
    "predictions.json": json.dumps(chosen),
    "best_temperature_report.txt": _report(results, results.best),
  }


def _report(results: Results, which: int) -> str:
  lines = [f"TEMPERATURE: {results.temperatures[which]:.2f}", ""]
  for group in dict.fromkeys(g for pair in results.pairs for g in pair.groups):
    lines.append(f"### {group.upper()} ACCURACY")
    for name, (_, share) in results.mean_by(group).items():
      lines.append(f"{name}: {100 * share[which]:.2f}")
    lines.append("")
  average = f"{100 * results.macro[which]:.2f}"
  return "\n".join([*lines, "### AVERAGE ACCURACY", average, "", ""])


class Pipeline(NamedTuple):
  """An evaluation pipeline.

  Attributes:
    modes: Its modes, with what each tells `scoring.score`.
    files: Makes its own files, text by name, of a task's name and results.
  """

  modes: Mapping[str, dict[str, Any]]
  files: Callable[[str, Results], dict[str, str]]


# 2025 scores as we do, and so by the same options.
_SUMS = {"text_format": Format(), "reduction": "sum"}
_2024 = {
  "causal": _SUMS | {"text_format": Format(framed=False, no_context="bos")},
  # minicons' conditional_score: a prefix that is never empty, and a space of
  # its own beside that of the choice.
  "mlm": {
    "text_format": Format(separator="  ", no_context="eos"),
    "reduction": "mean",
  },
}
PIPELINES = {
  "ours": Pipeline(dict.fromkeys(MODES, _SUMS), lambda task, results: {}),
  "2024": Pipeline(_2024, _files_2024),
  "2025": Pipeline(
    dict.fromkeys(("causal", "mlm", "mntp"), _SUMS), _files_2025
  ),
}
