"""Evaluates a run for BabyLM 2026, in files that its pipeline collates.

  antlm eval babylm --checkpoint=RUN --data=evaluation_data --mode=causal \\
    --output=results/NAME

The data are those of babylm-org/babylm-eval. full_eval/ scores the newest
checkpoint, and its glue_filtered/ fine-tunes it (--preset=2026). fast_eval/
scores each kept step of checkpoint.words. Tasks without data are left out, and
existing results are kept. OUTPUT is a model's folder as
`collate_preds.py` of that repository reads it: REVISION/zero_shot/MODE/... and
main/finetune/....

The table has the leaderboard's nine columns, in percent, and their mean, in
which a missing column counts as 0. GlobalPIQA and reading are means of two
scores.
"""

import pathlib
import statistics
from collections.abc import Sequence
from typing import Annotated

from antlm_jax import cli, settings, tables
from antlm_jax.errors import UserError
from antlm_jax.evals import finetune
from antlm_jax.evals.score import evaluate
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.evals.zero_shot.task import mode_of
from antlm_jax.inference import model as model_lib
from antlm_jax.inference.model import Loaded, ModelOrPath
from antlm_jax.runtime import files, progress
from antlm_jax.settings import PythonOnly, argument

PIPELINE = "2026"
# Tasks by folder of data, in full_eval or fast_eval or both.
_BOTH = {
  "global_piqa_parallel": "global_piqa",
  "global_piqa_nonparallel": "global_piqa",
  "reading": "reading",
}
_FULL = _BOTH | {
  "blimp_filtered": "blimp",
  "supplement_filtered": "blimp",
  "ewok_filtered": "ewok",
  "entity_tracking": "entity_tracking",
  "comps": "comps",
  "aoa": "aoa",
}
_FAST = _BOTH | {
  "blimp_fast": "blimp",
  "supplement_fast": "blimp",
  "ewok_fast": "ewok",
  "entity_tracking_fast": "entity_tracking",
}
# The folder of a task's results, if it is not TASK/DATA.
_PLACES = {
  "global_piqa": "{data}/{data}",
  "reading": "reading",
  "aoa": "AoA_word",
}
# Main figures that the leaderboard averages in each column, by data folder.
_COLUMNS = {
  "BLiMP": ("blimp_filtered",),
  "BLiMP supplement": ("supplement_filtered",),
  "EWoK": ("ewok_filtered",),
  "entity tracking": ("entity_tracking",),
  "COMPS": ("comps",),
  "GlobalPIQA": ("global_piqa_parallel", "global_piqa_nonparallel"),
  "reading": ("reading", "self_paced_reading"),
  "age of acquisition": ("aoa",),
  "(Super)GLUE": ("glue",),
}


@settings.checked
def submission(
  model: ModelOrPath[Loaded],
  data: files.Path,
  output: files.LocalPath,
  *,
  mode: Annotated[
    str | None, argument(choices=tuple(pipelines.PIPELINES[PIPELINE]))
  ] = None,
  tune: Annotated[
    bool, argument("--no-tune", help="Do not fine-tune", action="store_false")
  ] = True,
  step: int | None = None,
  quiet: PythonOnly[bool] = False,
) -> dict[str, float]:
  """Evaluates a run for BabyLM 2026.

  Returns the leaderboard's columns that have data, by name; accuracies are in
  [0, 1].

  Args:
    model: Model of a run, or the path to it.
    data: Path to the pipeline's `evaluation_data`.
    output: Path to a folder for the results, results/NAME of the pipeline.
    mode: Outputs that predict a token; by default the mode of training, causal
      if there are several.
    tune: Whether to fine-tune.
    step: Step of the run; by default the newest.
    quiet: Print nothing.

  Raises:
    UserError: The run kept no steps by words, or an argument or file is wrong.
  """
  data = pathlib.Path(data)
  output = pathlib.Path(output)
  scores: dict[str, float] = {}
  absent = {}  # folders that every checkpoint lacks, told once
  with progress.quietly(quiet):
    loaded = model_lib.open_model(model, step)
    mode = mode_of(loaded, mode)
    revisions = model_lib.revisions(loaded)
    for revision, path in {"main": loaded.path, **revisions}.items():
      revised = loaded if path == loaded.path else model_lib.load(path)
      is_fast = revision in revisions
      for name, task in (_FAST if is_fast else _FULL).items():
        folder = f"{'fast' if is_fast else 'full'}_eval/{name}"
        if not (data / folder).is_dir():
          absent[folder] = None
          continue
        place = _PLACES.get(task, "{task}/{data}").format(task=task, data=name)
        result = evaluate(
          revised,
          task,
          data / folder,
          mode=mode,
          pipeline=PIPELINE,
          output=output / revision / "zero_shot" / mode / place,
        )
        if revision == "main":
          scores |= result.summary | {name: result.score}
    if absent:
      progress.say(f"warning: left out, not in {data}: {', '.join(absent)}")
    if tune and (data / "full_eval/glue_filtered").is_dir():
      scores["glue"] = _tuned_score(loaded, data / "full_eval", output, mode)
  if not scores:
    raise UserError(
      f"--data={data} has data for no task: give the pipeline's"
      " evaluation_data, which holds full_eval/"
    )
  return {
    column: statistics.fmean(scores[name] for name in names)
    for column, names in _COLUMNS.items()
    if scores.keys() >= {*names}
  }


def _tuned_score(
  loaded: Loaded, data: pathlib.Path, output: pathlib.Path, mode: str
) -> float:
  """Fine-tunes a model and puts predictions in place; returns the score."""
  attention = "causal" if mode == "causal" else "bidirectional"
  output = output / "main/finetune"
  tuned = finetune.finetune(
    loaded, data, preset=PIPELINE, attention=attention, output=output
  )
  for name, task in tuned.tasks.items():
    text = files.read_text(task.folder / "predictions.json", "predictions")
    files.write_text(output / name / "predictions.json", text)
  return tuned.score


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  arguments = cli.parsed(submission, argv, __doc__)
  scores = submission(**arguments)
  rows = {name: scores.get(name) for name in _COLUMNS}
  rows["mean of nine"] = sum(scores.values()) / len(_COLUMNS)
  shares = ("-" if x is None else f"{100 * x:.2f}" for x in rows.values())
  head = "task", "score (%)"
  print(tables.text_table([*zip(rows, shares, strict=True)], head, "<>"))
  print(f"written to {arguments['output']}")
