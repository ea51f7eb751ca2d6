"""Scores a zero-shot task: BabyLM's, LAMBADA, or the perplexity of texts.

  antlm eval score --task=comps --checkpoint=RUN --data=FOLDER --mode=causal

--task=TASK --help describes a task and its options. The files of all but
lambada and perplexity, which read any texts, are those of BabyLM's pipeline of
2026, babylm-org/babylm-eval.
"""

import argparse
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from antlm_jax import cli, tables
from antlm_jax import settings as settings_lib
from antlm_jax.arguments import add_arguments, read_arguments
from antlm_jax.evals.zero_shot import task as task_lib
from antlm_jax.evals.zero_shot.task import TaskSettings, evaluate, mode_of
from antlm_jax.evals.zero_shot.tasks import TASKS
from antlm_jax.runtime import files
from antlm_jax.training.checkpoint import Checkpoint

_WRITES = """\
Writes summary.json (the figures) and items.jsonl (every item with its scores).
If the output folder has results of the same request, prints those instead."""


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  arguments, checkpoint = _read_task_arguments(argv)
  result = evaluate(checkpoint.path, **arguments)
  print(result)
  if result.reused:
    print(f"already scored: {result.folder} (--overwrite scores again)")
  else:
    print(f"written to {files.shown_path(result.folder)}")


def done(argv: Sequence[str]) -> bool:
  """Returns whether `main` has written its results; reads no model.

  Raises a UserError if the arguments are wrong, the checkpoint or the data
  cannot be read, or the folder has the results of another request.
  """
  arguments, checkpoint = _read_task_arguments(argv)
  name = arguments["task"]
  keys = settings_lib.fields_of(TASKS[name].settings)
  settings = task_lib.build_settings(
    name,
    arguments["data"],
    arguments["mode"],
    {key: arguments[key] for key in keys},
  )
  items = TASKS[name].read(settings)
  request = task_lib.request_of(name, settings, checkpoint, items)
  return task_lib.finished_summary(arguments["output"], request) is not None


def _read_task_arguments(
  argv: Sequence[str],
) -> tuple[dict[str, Any], Checkpoint]:
  """Returns the arguments of `evaluate`, with defaults, and the checkpoint."""
  name = cli.value_of("--task", argv)
  args = _parser(name).parse_args(argv)
  arguments = read_arguments(evaluate, args)
  settings_class = TASKS[name].settings
  arguments |= {
    key: getattr(args, key) for key in settings_lib.fields_of(settings_class)
  }
  checkpoint = Checkpoint(arguments.pop("model"), arguments.pop("step"))
  arguments["mode"] = mode_of(checkpoint.path, arguments["mode"])
  if arguments["output"] is None:
    # Tasks without this setting have a default of their class.
    pipeline = arguments.get("pipeline", settings_class.pipeline)
    arguments["output"] = _default_output(
      checkpoint, arguments["data"], arguments["mode"], pipeline
    )
  arguments["output"] = pathlib.Path(arguments["output"])
  return arguments, checkpoint


def _default_output(
  checkpoint: Checkpoint, data: str, mode: str, pipeline: str
) -> pathlib.Path:
  """Returns the folder RUN/evals/DATA/STEP-MODE, with -PIPELINE if not ours."""
  folder = "-".join((str(checkpoint.step), mode, pipeline))
  data_name = os.path.basename(os.path.abspath(data))  # also of ".."
  return checkpoint.evals / data_name / folder.removesuffix("-ours")


def _parser(name: str | None) -> cli.Parser:
  """Returns the command's parser, for the task that --task names."""
  task = TASKS.get(name)
  rows = [(f"  {n}", t.about.partition("\n")[0]) for n, t in TASKS.items()]
  overview = f"{__doc__}\nThe tasks:\n\n{tables.text_table(sorted(rows))}"
  description = task.about if task else overview
  parser = cli.Parser(description=f"{description.strip()}\n\n{_WRITES}")
  actions = add_arguments(parser, evaluate)
  if task:
    if parser.prog == f"antlm eval {name}":  # the command is the task's
      actions["task"].help = argparse.SUPPRESS
    actions["data"].help = task.reads or actions["data"].help
  add_arguments(parser, task.settings if task else TaskSettings)
  return parser


if __name__ == "__main__":
  cli.run_command(main)
