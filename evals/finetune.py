"""Fine-tunes a checkpoint: sentences, words, answers, retrieval.

  antlm eval finetune --checkpoint=RUN --data=FOLDER --task=cola,mrpc

Trains one run for each learning rate and seed, as many at once as is fastest,
and evaluates each epoch. A run stops if it diverges or no longer improves; its
best epoch counts.

--preset chooses the tasks and their settings. Arguments override the preset.
The defaults shown below are those of 2024.

{presets}

BabyLM's validation sets are also its test sets: 2024 and 2025 choose the epoch
on the scores that they report. The other presets have a dev set for it.

Writes summary.json and items.jsonl (each run's prediction of each example) for
each task, and the best run's predictions in the pipeline's format. With --save
also writes the best run's model, a checkpoint with the task's head. Does not
repeat a task that was done before with the same arguments.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from antlm_jax import cli, settings
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.finetuning import loop, saved, summary
from antlm_jax.evals.finetuning.presets import PRESETS
from antlm_jax.evals.finetuning.task import Task
from antlm_jax.evals.finetuning.trial import Run, Settings
from antlm_jax.hf import export, heads
from antlm_jax.inference.model import (
  Identity,
  Loaded,
  add_arguments,
  from_args,
  identify,
)
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting
from antlm_jax.training import checkpoint


@dataclasses.dataclass(frozen=True)
class Grid:
  """The runs of a task."""

  lrs: tuple[float, ...] = setting(
    (5e-5,), "peak learning rates, with commas", over=0
  )
  seeds: tuple[int, ...] = setting(
    (12,), "random seeds, with commas", least=0, most=2**32 - 1
  )
  limit: int = setting(
    0, "largest number of training examples, a random part; 0 for all", least=0
  )
  runs_at_once: int = setting(
    0,
    "runs that train together; 0 for one on a CPU, and for as many as fit in"
    " memory on other devices",
    least=0,
  )

  @property
  def runs(self) -> list[Run]:
    """A run for each learning rate and seed."""
    rates, seeds = dict.fromkeys(self.lrs), dict.fromkeys(self.seeds)
    return [Run(lr, seed) for lr in rates for seed in seeds]


def _parser(**defaults) -> cli.Parser:
  """Makes the parser, with these defaults in place of the settings' own."""
  suites = PRESETS.values()
  wrapped = textwrap.TextWrapper(
    80, subsequent_indent=" " * 18, break_on_hyphens=False
  )
  presets = "\n".join(
    wrapped.fill(f"  {name:15} {suite.about}")
    for name, suite in PRESETS.items()
  )
  parser = cli.Parser(description=__doc__.format(presets=presets))
  add = parser.add_argument
  add_arguments(parser)
  names = dict.fromkeys(name for suite in suites for name in suite.scores)
  add("--data", required=True, help="folder, or file, of the tasks' examples")
  add(
    "--task",
    default="all",
    help=f"all tasks of the preset, or some of {','.join(names)}",
  )
  add(
    "--preset", default="2024", choices=PRESETS, help="kind of task; see above"
  )
  own = dict.fromkeys(section for suite in suites for section in suite.settings)
  for section in (Grid, Settings, *own):
    settings.add_arguments(parser, section)
  folders = ", ".join(sorted({suite.folder for suite in suites}))
  add(
    "--output",
    type=cli.here,
    help="folder of the results, TASK/STEP-ATTENTION in it (default: in"
    f" RUN/evals, by preset one of {folders})",
  )
  add(
    "--save",
    action="store_true",
    help=f"save the best run's model as TASK/STEP-ATTENTION/{saved.FOLDER}",
  )
  add("--overwrite", action="store_true", help="replace existing results")
  parser.set_defaults(**defaults)
  return parser


class Job(NamedTuple):
  """A task to do, or that is done."""

  task: Task
  grid: Grid
  how: Settings
  folder: pathlib.Path  # of its results
  request: dict  # everything that they depend on, as JSON
  # Summary of the same request, if it exists, and its model, if wanted.
  done: dict | None


def _job(args, task: Task, model: Identity) -> Job:
  grid, how = (settings.from_args(of, args) for of in (Grid, Settings))
  output = args.output or model.evals / PRESETS[args.preset].folder
  name = f"{model.step}-{how.attention}"
  folder = pathlib.Path(output, task.name, name)
  request = {
    "preset": args.preset,
    "task": task.name,
    "data": {**results.data_digest(task.files), **task.about},
    "head": {"kind": task.head.kind, **task.head.settings},
    **results.model_digest(model),
    **{name: getattr(grid, name) for name in ("lrs", "seeds", "limit")},
    **dataclasses.asdict(how),
  }
  done = None if args.overwrite else results.finished(folder, request)
  if args.save and not (folder / saved.FOLDER).is_dir():
    done = None
  return Job(task, grid, how, folder, request, done)


def _tasks(
  argv: Sequence[str], encoder: str
) -> tuple[list[tuple[argparse.Namespace, Task]], list[str]]:
  """Makes the tasks that are asked for, with each one's arguments.

  `encoder` is the model's. Also returns the names of the missing tasks, if all
  are asked for.
  """
  asked = _parser().parse_args(argv)
  suite, found, absent = PRESETS[asked.preset], [], {}
  for name in suite.named(asked.task):
    defaults = dict(suite.defaults.get(name, {}))
    if suite.exportable and asked.head is None:
      defaults |= heads.classifier(encoder, asked.attention)
    args = _parser(**defaults).parse_args(argv)
    own = [settings.from_args(section, args) for section in suite.settings]
    try:
      task = suite.make(args.data, name, args.attention, *own)
    except UserError as error:
      if args.task != "all":
        raise
      absent[name] = error
    else:
      found.append((args, task))
  if not found:
    raise absent.popitem()[1]
  return found, list(absent)


def perform(job: Job, loaded: Loaded, save: bool) -> dict:
  """Trains a task's runs, writes the results and returns the summary."""
  begun, task, grid, how = time.monotonic(), job.task, job.grid, job.how
  tell = functools.partial(print, file=sys.stderr, flush=True)
  data = loop.read(loaded, task, how.max_length, grid.limit, tell)
  best = saved.Best(grid.runs) if save else None
  track = functools.partial(progress.track, unit="step", name=task.name)
  fit = functools.partial(
    loop.fit, loaded, task, data, how, track=track, tell=tell, keep=best
  )
  # One run keeps a CPU busy: several at once take 5 to 35 % more of its time.
  on_cpu = jax.default_backend() == "cpu"
  at_once = grid.runs_at_once or (1 if on_cpu else len(grid.runs))
  outcomes = loop.fit_in_groups(fit, grid.runs, at_once, tell)
  examples = {name: rows.examples for name, rows in data.evaluations.items()}
  about = {"request": job.request, "train_examples": len(data.train.examples)}
  about |= summary.summarise(task, examples, outcomes)
  about["seconds"] = round(time.monotonic() - begun, 1)
  # A model always belongs to the summary next to it.
  saved.remove(job.folder)
  summary.write(job.folder, task, about, outcomes, examples)
  if best and not best.params:
    print(f"{task.name} is not saved: every run diverged")
  elif best:
    longest = max(loaded.longest_row, data.train.tokens.shape[-1])
    trained = dataclasses.replace(loaded, row_tokens=longest)
    saved.save(job.folder, trained, task, how.attention, best.params)
  return about


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parser().parse_args(argv)
  suite = PRESETS[args.preset]
  suite.named(args.task)  # an unknown name must not wait for the model
  loaded = from_args(args)
  tasks, absent = _tasks(argv, loaded.config.model.name)
  if absent:
    print(f"left out, not in {args.data}: {', '.join(absent)}")
  done = []
  # Checks everything before it trains anything.
  jobs = [_job(own, task, loaded) for own, task in tasks]
  for job in jobs:
    files.check_writable(job.folder, folder=True)
    if args.save and not job.done:
      _advise(job, loaded)
  for job in jobs:
    about = job.done
    if about:
      print(f"{job.task.name} is already done: {job.folder}")
    else:
      about = perform(job, loaded, args.save)
      print(f"{job.task.name} is written to {job.folder}", flush=True)
    done.append(about)
  print(summary.table(done, suite))
  for about in done:
    for line in summary.remarks(about):
      print(line)


def _advise(job: Job, loaded: Loaded) -> None:
  """Prints a tip if transformers has no model with a task's head."""
  task = saved.fine_tuned(job.task, job.how.attention)
  try:
    target = export.target_of(loaded, task.attention)
    heads.config(dataclasses.replace(loaded, task=task), target)
  except UserError as error:
    print(f"tip: `antlm export` will refuse {job.task.name}: {error}")


def done(argv: Sequence[str]) -> bool:
  """Returns whether `main` has trained every task, without loading the model.

  Raises:
    UserError: The arguments or the data cannot be read, or a folder has the
      results of another request.
  """
  args = _parser().parse_args(argv)
  model = identify(args.checkpoint, args.step)
  encoder = checkpoint.Checkpoint(model.path).meta.config.model.name
  tasks, _ = _tasks(argv, encoder)
  return all(_job(own, task, model).done for own, task in tasks)


if __name__ == "__main__":
  cli.run(main)
