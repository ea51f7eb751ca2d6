"""Fine-tunes a checkpoint on GLUE and SuperGLUE tasks, as BabyLM does.

  python -m evals.finetune --checkpoint=RUN --data=FOLDER --task=cola,mrpc

Trains one run for every learning rate and seed, all of them at once, and
evaluates each epoch. A run stops by itself when it gets no better; the epoch
with the best main metric counts. BabyLM's validation set is also its test
set, so that epoch is chosen on what is reported. The defaults are those of
BabyLM's 2024 pipeline.

Writes for each task summary.json, predictions.json (the best run's, in the
pipeline's form) and items.jsonl (what every run says of every example); with
--save also the best run's model, a checkpoint with the task's head. A task
that was done before with the same arguments is not done again.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

from antlm_jax import cli, settings
from antlm_jax.errors import UserError
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting
from antlm_jax.training import checkpoint
from evals import results
from evals.finetuning import glue, loop, saved, summary
from evals.finetuning.loop import Run, Settings
from evals.finetuning.task import Suite, Task, named

SUITES: tuple[Suite, ...] = (glue.SUITE,)


@dataclasses.dataclass(frozen=True)
class Grid:
  """Which runs there are of a task."""

  lrs: tuple[float, ...] = setting((5e-5,), "peak rates, with commas", over=0)
  seeds: tuple[int, ...] = setting(
    (12,), "seeds, with commas", least=0, most=2**32 - 1
  )
  limit: int = setting(
    0, "training examples, at most, a random part; 0 for all", least=0
  )
  runs_at_once: int = setting(
    0, "runs that train together; 0 for all that are asked for", least=0
  )

  @property
  def runs(self) -> list[Run]:
    """A run for every rate and seed."""
    rates, seeds = dict.fromkeys(self.lrs), dict.fromkeys(self.seeds)
    return [Run(lr, seed) for lr in rates for seed in seeds]

  @property
  def groups(self) -> Iterator[list[Run]]:
    """The runs, as many as train together at a time."""
    runs, size = self.runs, self.runs_at_once or len(self.runs)
    return (runs[i : i + size] for i in range(0, len(runs), size))


def _parser() -> cli.Parser:
  parser = cli.Parser(prog="python -m evals.finetune", description=__doc__)
  add = parser.add_argument
  checkpoint.add_arguments(parser)
  names = [name for suite in SUITES for name in suite.all_scores]
  add("--data", required=True, help="a folder that holds the tasks' files")
  add("--task", required=True, help=f"all, or of {','.join(names)}")
  for section in (Grid, Settings, *{s.Options: None for s in SUITES}):
    settings.add_arguments(parser, section)
  add(
    "--output",
    type=cli.here,
    help="holds TASK/STEP-ATTENTION; RUN/evals/finetune if unset",
  )
  add(
    "--save",
    action="store_true",
    help=f"save the best run's model, in TASK/STEP-ATTENTION/{saved.FOLDER}",
  )
  add("--overwrite", action="store_true", help="do again what was done")
  return parser


@dataclasses.dataclass(frozen=True)
class Job:
  """A task that was asked for.

  Attributes:
    task: The task.
    folder: Where its results go.
    request: All that they depend on, as JSON has it.
    done: The summary of the same request, if it is there, with its model if
      that is to be saved.
  """

  task: Task
  folder: pathlib.Path
  request: dict
  done: dict | None


def _jobs(
  args, loaded: checkpoint.Loaded, grid: Grid, how: Settings
) -> list[Job]:
  """Checks everything before anything is trained."""
  common = {
    **results.model_digest(loaded),
    **{name: getattr(grid, name) for name in ("lrs", "seeds", "limit")},
    **dataclasses.asdict(how),
  }
  output = pathlib.Path(args.output or loaded.evals / "finetune")
  jobs = []
  for task in _tasks(args):
    folder = output / task.name / f"{loaded.step}-{how.attention}"
    head = {"kind": task.head.kind, **task.head.settings}
    data = results.data_digest(task.files)
    request = {"task": task.name, "data": data, "head": head, **common}
    done = None if args.overwrite else results.finished(folder, request)
    if args.save and not (folder / saved.FOLDER).is_dir():
      done = None
    jobs.append(Job(task, folder, request, done))
    files.check_writable(folder, folder=True)
  return jobs


def _tasks(args: argparse.Namespace) -> list[Task]:
  """Makes the tasks that are asked for; of all, says which ones are absent."""
  found, absent = [], {}
  for suite, name in named(SUITES, args.task):
    options = settings.from_args(suite.Options, args)
    try:
      found.append(suite.make(args.data, name, options, args.attention))
    except UserError as error:
      if args.task != "all":
        raise
      absent[name] = error
  if not found:
    raise absent.popitem()[1]
  if absent:
    print(f"left out, not in {args.data}: {', '.join(absent)}")
  return found


def perform(
  job: Job,
  loaded: checkpoint.Loaded,
  grid: Grid,
  how: Settings,
  save: bool = False,
) -> dict:
  """Trains a task's runs, writes its results and returns the summary.

  Args:
    job: The task.
    loaded: The model that runs start from.
    grid: The runs.
    how: How to train.
    save: Whether to save the best run's model.
  """
  begun, task = time.monotonic(), job.task
  data = loop.read(loaded, task, how.max_length, grid.limit)
  best = saved.Best(grid.runs) if save else None
  outcomes = [
    outcome
    for runs in grid.groups
    for outcome in loop.fit(
      loaded,
      task,
      data,
      how,
      runs,
      track=functools.partial(progress.track, unit="step", name=task.name),
      tell=_tell,
      keep=best,
    )
  ]
  examples = {name: rows.examples for name, rows in data.evaluations.items()}
  about = {"request": job.request, "train_examples": len(data.train.examples)}
  about |= summary.summarise(task, examples, outcomes)
  about["seconds"] = round(time.monotonic() - begun, 1)
  # A model that is there always belongs to the summary beside it.
  saved.remove(job.folder)
  summary.write(job.folder, task, about, outcomes, examples)
  if best:
    saved.save(job.folder, loaded, task, how.attention, best.params)
  return about


def _tell(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parser().parse_args(argv)
  named(SUITES, args.task)  # before minutes of reading
  grid = settings.from_args(Grid, args)
  how = settings.from_args(Settings, args)
  loaded = checkpoint.load(args.checkpoint, args.step)
  done = []
  for job in _jobs(args, loaded, grid, how):
    about = job.done
    if about:
      print(f"{job.task.name} is already done: {job.folder}")
    else:
      about = perform(job, loaded, grid, how, args.save)
      print(f"{job.task.name} is written to {job.folder}", flush=True)
    done.append(about)
  print(summary.table(done, SUITES))
  for line in (line for about in done for line in summary.collapses(about)):
    print(line)


if __name__ == "__main__":
  cli.run(main)
