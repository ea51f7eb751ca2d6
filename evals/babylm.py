"""Evaluates a run for BabyLM 2026, in files that its pipeline collates.

  antlm eval babylm --checkpoint=RUN --data=evaluation_data --mode=causal \\
    --output=results/NAME

The data are those of babylm-org/babylm-eval. The newest checkpoint is scored on
full_eval/ and fine-tuned on its glue_filtered/ (--preset=2026), and each kept
step of checkpoint.words is scored on fast_eval/. Tasks without data are left
out, and results that exist are kept. OUTPUT is a model's folder as
`collate_preds.py` of that repository reads it: REVISION/zero_shot/MODE/... and
main/finetune/....

The table has the leaderboard's nine columns, in percent, and their mean, in
which a missing one counts as 0. GlobalPIQA and reading are means of two.
"""

import pathlib
import statistics
from collections.abc import Mapping, Sequence

from antlm_jax import cli, tables
from antlm_jax.evals import finetune
from antlm_jax.evals.score import evaluate
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.inference.model import (
  Loaded,
  add_arguments,
  from_args,
  load,
  opened,
  revisions,
)
from antlm_jax.runtime import files, progress

PIPELINE = "2026"
# The task of each folder of data, and the folder of its results.
_ALWAYS = {
  "global_piqa_parallel": ("global_piqa", "global_piqa_parallel/{folder}"),
  "global_piqa_nonparallel": (
    "global_piqa",
    "global_piqa_nonparallel/{folder}",
  ),
  "reading": ("reading", "reading"),
}
_FULL = _ALWAYS | {
  "blimp_filtered": ("blimp", "blimp/{folder}"),
  "supplement_filtered": ("blimp", "blimp/{folder}"),
  "ewok_filtered": ("ewok", "ewok/{folder}"),
  "entity_tracking": ("entity_tracking", "entity_tracking/{folder}"),
  "comps": ("comps", "comps/{folder}"),
  "aoa": ("aoa", "AoA_word"),
}
_FAST = _ALWAYS | {
  "blimp_fast": ("blimp", "blimp/{folder}"),
  "supplement_fast": ("blimp", "blimp/{folder}"),
  "ewok_fast": ("ewok", "ewok/{folder}"),
  "entity_tracking_fast": ("entity_tracking", "entity_tracking/{folder}"),
}
# The figures that the leaderboard averages in each of its columns.
_COLUMNS = {
  "BLiMP": ("blimp_filtered macro_accuracy",),
  "BLiMP supplement": ("supplement_filtered macro_accuracy",),
  "EWoK": ("ewok_filtered macro_accuracy",),
  "entity tracking": ("entity_tracking macro_accuracy",),
  "COMPS": ("comps macro_accuracy",),
  "GlobalPIQA": (
    "global_piqa_parallel macro_accuracy",
    "global_piqa_nonparallel macro_accuracy",
  ),
  "reading": ("reading eye_tracking", "reading self_paced_reading"),
  "age of acquisition": ("aoa correlation",),
  "(Super)GLUE": ("glue score",),
}


def submission(
  model: Loaded | files.Path,
  data: files.Path,
  output: files.Path,
  *,
  mode: str,
  tune: bool = True,
  quiet: bool = False,
) -> dict[str, float]:
  """Evaluates a run for BabyLM 2026.

  Returns the leaderboard's columns that have data, by name; accuracies are in
  [0, 1].

  Args:
    model: Model of a run, or the path to it.
    data: Path to the pipeline's `evaluation_data`.
    output: Folder for the results, whose name is the model's.
    mode: Outputs that predict a token: `causal`, `mlm` or `mntp`.
    tune: Whether to fine-tune.
    quiet: Whether to print nothing.

  Raises:
    UserError: The run kept no steps by words, or an argument or file is wrong.
  """
  data, output = pathlib.Path(data), pathlib.Path(output)
  found, absent = {}, []
  with progress.quietly(quiet):
    loaded = opened(model)
    kept = revisions(loaded)
    for name, path in {"main": loaded.path, **kept}.items():
      one = loaded if path == loaded.path else load(path)
      kind, parts = ("fast", _FAST) if name in kept else ("full", _FULL)
      for folder, (task, place) in parts.items():
        where = data / f"{kind}_eval" / folder
        if not where.is_dir():
          absent.append(str(where))
          continue
        to = output / name / "zero_shot" / mode / place.format(folder=folder)
        how = {"mode": mode, "pipeline": PIPELINE, "output": to}
        summary = evaluate(one, task, where, **how).summary
        if name not in kept:
          found |= {f"{folder} {key}": x for key, x in summary.items()}
    if tune and (data / "full_eval/glue_filtered").is_dir():
      score = _tuned(loaded, data / "full_eval", output, mode)
      found["glue score"] = score
    if absent:
      progress.say(f"left out: {', '.join(dict.fromkeys(absent))}")
  return {
    column: statistics.fmean(found[figure] for figure in figures)
    for column, figures in _COLUMNS.items()
    if found.keys() >= {*figures}
  }


def _tuned(
  loaded: Loaded, data: pathlib.Path, output: pathlib.Path, mode: str
) -> float:
  """Fine-tunes a model and puts predictions in place; returns the score."""
  attention = "causal" if mode == "causal" else "bidirectional"
  output = output / "main/finetune"
  how = {"preset": PIPELINE, "attention": attention, "output": output}
  tuned = finetune.finetune(loaded, data, **how)
  for name, task in tuned.tasks.items():
    text = files.read_text(task.folder / "predictions.json", "predictions")
    files.write_text(output / name / "predictions.json", text)
  return tuned.score


def table(columns: Mapping[str, float]) -> str:
  """Lays out the leaderboard's columns, and their mean, in percent."""
  rows = {name: columns.get(name) for name in _COLUMNS}
  rows["mean of nine"] = sum(columns.values()) / len(_COLUMNS)
  shown = (
    (name, "-" if share is None else f"{100 * share:.2f}")
    for name, share in rows.items()
  )
  return tables.text(shown, align="<>")


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  add_arguments(parser)
  add = parser.add_argument
  add("--data", required=True, help="Path to the pipeline's evaluation_data")
  add(
    "--mode",
    required=True,
    choices=pipelines.PIPELINES[PIPELINE],
    help="Outputs that predict a token, the pipeline's backend",
  )
  about = "Path to a folder for the results, results/NAME of the pipeline"
  add("--output", required=True, type=cli.here, help=about)
  add("--no-tune", dest="tune", action="store_false", help="Do not fine-tune")
  args = parser.parse_args(argv)
  how = {"mode": args.mode, "tune": args.tune}
  print(table(submission(from_args(args), args.data, args.output, **how)))
  print(f"written to {args.output}")


if __name__ == "__main__":
  cli.run(main)
