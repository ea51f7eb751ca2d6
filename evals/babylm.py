"""Evaluates a run for BabyLM 2026, in files that its pipeline collates.

  antlm eval babylm --checkpoint=RUN --data=evaluation_data --mode=causal \\
    --output=results/NAME

The data are those of babylm-org/babylm-eval. full_eval/ scores the newest
checkpoint, and its glue_filtered/ fine-tunes it (--preset=2026). fast_eval/ and
age of acquisition score each kept step of checkpoint.words. Tasks without data
or checkpoints are left out, and existing results are kept.

--mode=causal fine-tunes with causal attention, the other modes with
bidirectional attention, the default of `antlm eval finetune`. Give each of the
two its own OUTPUT.

OUTPUT is a model's folder as `collate_preds.py` of that repository reads it:
REVISION/zero_shot/MODE/... and main/finetune/.... Its summary-MODE.json has the
scores, as shares.

The table has the leaderboard's nine columns, in percent, and their mean, in
which a missing or partial column counts as 0. GlobalPIQA and reading are means
of two scores.
"""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from antlm_jax import cli, settings, tables
from antlm_jax.errors import UserError
from antlm_jax.evals import finetune, results
from antlm_jax.evals.finetuning.presets import PRESETS
from antlm_jax.evals.finetuning.summary import FineTuning
from antlm_jax.evals.score import evaluate
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.evals.zero_shot.task import mode_of
from antlm_jax.inference import model as model_lib
from antlm_jax.inference.model import Loaded, ModelOrPath
from antlm_jax.runtime import files, progress
from antlm_jax.settings import PythonOnly, argument

PIPELINE = "2026"
_TUNED = "main/finetune"
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


class Submission(NamedTuple):
  """The leaderboard's columns.

  Attributes:
    scores: Score of each column that has data, a share.
    partial: Tasks that a column has of all its tasks, such as `1 of 7`.
  """

  scores: Mapping[str, float]
  partial: Mapping[str, str]

  @property
  def mean(self) -> float:
    """Mean of all columns; a missing or partial column counts as 0."""
    whole = (x for name, x in self.scores.items() if name not in self.partial)
    return sum(whole) / len(_COLUMNS)

  @property
  def table(self) -> str:
    """The columns and their mean as text, in percent."""
    shares = {name: self.scores.get(name) for name in _COLUMNS}
    shares["mean of nine"] = self.mean
    rows = []
    for name, share in shares.items():
      score = "-" if share is None else f"{100 * share:.2f}"
      note = f"{self.partial[name]} tasks" if name in self.partial else ""
      rows.append((name, score, note))
    return tables.text_table(rows, ("task", "score (%)"), "<><")


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
) -> Submission:
  """Evaluates a run for BabyLM 2026; returns the leaderboard's columns.

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
    UserError: The output has the fine-tuning of another attention or step, or
      an argument or file is wrong.
  """
  data = pathlib.Path(data)
  output = pathlib.Path(output)
  scores: dict[str, float] = {}
  tuned = None
  absent = {}  # folders that every checkpoint lacks, told once
  with progress.quietly(quiet):
    loaded = model_lib.open_model(model, step)
    mode = mode_of(loaded, mode)
    attention = "causal" if mode == "causal" else "bidirectional"
    _check_tuned(output / _TUNED, f"{loaded.step}-{attention}")
    revisions = {}
    try:
      revisions = model_lib.revisions(loaded)
    except UserError as error:  # such as a model that was imported
      progress.say(
        f"warning: fast_eval and age of acquisition are left out: {error}"
      )
    for revision, path in {"main": loaded.path, **revisions}.items():
      revised = loaded if path == loaded.path else model_lib.load(path)
      is_fast = revision in revisions
      for name, task in (_FAST if is_fast else _FULL).items():
        if task == "aoa" and not revisions:
          continue
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
      tuned = _tuned(loaded, data / "full_eval", output / _TUNED, attention)
      scores["glue"] = tuned.score
  if not scores:
    raise UserError(
      f"--data={data} has data for no task: give the pipeline's"
      " evaluation_data, which holds full_eval/"
    )
  columns = {
    column: statistics.fmean(scores[name] for name in names)
    for column, names in _COLUMNS.items()
    if scores.keys() >= {*names}
  }
  partial = {}
  tasks = PRESETS[PIPELINE].scores
  if tuned and tuned.tasks.keys() < tasks.keys():
    partial["(Super)GLUE"] = f"{len(tuned.tasks)} of {len(tasks)}"
  result = Submission(columns, partial)
  files.write_json(
    output / f"summary-{mode}.json",
    {"step": loaded.step, "mode": mode}
    | result._asdict()
    | {"mean_of_nine": result.mean},
  )
  return result


def _check_tuned(output: pathlib.Path, name: str) -> None:
  """Raises a UserError if a folder has fine-tunings of another name.

  The pipeline reads main/finetune/TASK for every mode.
  """
  for path in sorted(output.glob(f"*/*/{results.SUMMARY}")):
    if path.parent.name != name:
      raise UserError(
        f"{path.parent} is fine-tuned with another attention or step than"
        f" {name}, and the pipeline would read it: give another --output"
      )


def _tuned(
  loaded: Loaded, data: pathlib.Path, output: pathlib.Path, attention: str
) -> FineTuning:
  """Fine-tunes a model, and puts its predictions where the pipeline reads."""
  tuned = finetune.finetune(
    loaded, data, preset=PIPELINE, attention=attention, output=output
  )
  for name, task in tuned.tasks.items():
    text = files.read_text(task.folder / "predictions.json", "predictions")
    files.write_text(output / name / "predictions.json", text)
  return tuned


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  arguments = cli.parsed(submission, argv, __doc__)
  print(submission(**arguments).table)
  print(f"written to {arguments['output']}")
