"""Fine-tunes a checkpoint: sentences, words, answers, retrieval.

  antlm eval finetune --checkpoint=RUN --data=FOLDER --task=cola,mrpc

Trains one run for every learning rate and seed, as many at once as is fastest,
and evaluates each epoch. A run stops by itself when it diverges or gets no
better; its best epoch counts.

--preset says which tasks there are, with which settings. An argument that is
given stands above it; the defaults below are those of 2024.

  2024       GLUE and SuperGLUE as BabyLM's pipeline of that year: ten tasks
  2025       seven of them, with the settings of that year's pipeline
  tagging    entities: CoNLL-2003, Universal NER, OntoNotes
  answering  SQuAD 1.1 and 2.0, ReCoRD
  retrieval  documents, in BEIR's form
  study      arXiv 2507.00994: the three above, SST-2, QQP and MNLI

  classification  texts, or pairs of texts, and labels of one's own: --data is
                  a file of records (csv, tsv, jsonl, parquet), of which a tenth
                  is left out to choose on, or a folder of files named train,
                  dev and test

  pairs      an embedder of one's own pairs: a query, what it is to find and, if
             there are, what it is not to; held out as for classification
  simcse     one of texts alone, lines or records' --text_column, which are
             told apart by dropout

BabyLM's validation sets are also its test sets: in 2024 and 2025 the epoch is
chosen on what is reported. The others have a set to choose on.

Writes for each task summary.json, items.jsonl (what every run says of every
example) and the best run's predictions.json and more, as the pipeline does;
with --save also its model, a checkpoint with the task's head. A task that was
done before with the same arguments is not done again.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence

import jax

from antlm_jax import cli, settings
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.finetuning import (
  answering,
  classification,
  embedding,
  glue,
  loop,
  own,
  protocol,
  retrieval,
  saved,
  summary,
  tagging,
)
from antlm_jax.evals.finetuning.loop import Run
from antlm_jax.evals.finetuning.task import Suite, Task
from antlm_jax.evals.finetuning.trial import Settings
from antlm_jax.inference.model import (
  Identity,
  Loaded,
  add_arguments,
  from_args,
  identify,
)
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting

PRESETS: Mapping[str, Suite] = {
  **glue.SUITES,
  "classification": own.SUITE,
  "tagging": tagging.SUITE,
  "answering": answering.SUITE,
  "retrieval": retrieval.SUITE,
  **embedding.SUITES,
  "study": protocol.SUITE,
}


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
    0,
    "runs that train together; 0 for one on a CPU, and for as many as there is"
    " memory for on other devices",
    least=0,
  )

  @property
  def runs(self) -> list[Run]:
    """A run for every rate and seed."""
    rates, seeds = dict.fromkeys(self.lrs), dict.fromkeys(self.seeds)
    return [Run(lr, seed) for lr in rates for seed in seeds]


@dataclasses.dataclass(frozen=True)
class Heads(
  classification.Options,
  own.Options,
  answering.Options,
  retrieval.Options,
  embedding.Options,
):
  """The settings of all heads, and of what is read for them."""


def _parser(**defaults) -> cli.Parser:
  """Makes the parser, with other defaults than the settings' own."""
  parser = cli.Parser(description=__doc__)
  add = parser.add_argument
  add_arguments(parser)
  suites = PRESETS.values()
  names = dict.fromkeys(name for suite in suites for name in suite.all_scores)
  add("--data", required=True, help="a folder that holds the tasks' files")
  add("--task", default="all", help=f"all, or of {','.join(names)}")
  add("--preset", default="2024", choices=PRESETS, help="see above")
  for section in (Grid, Settings, Heads):
    settings.add_arguments(parser, section)
  folders = " or ".join(suite.folder for suite in suites)
  add(
    "--output",
    type=cli.here,
    help=f"holds TASK/STEP-ATTENTION; in RUN/evals if unset: {folders}",
  )
  add(
    "--save",
    action="store_true",
    help=f"save the best run's model, in TASK/STEP-ATTENTION/{saved.FOLDER}",
  )
  add("--overwrite", action="store_true", help="do again what was done")
  parser.set_defaults(**defaults)
  return parser


@dataclasses.dataclass(frozen=True)
class Job:
  """A task that was asked for."""

  task: Task
  grid: Grid
  how: Settings
  folder: pathlib.Path  # where its results go
  request: dict  # all that they depend on, as JSON has it
  # The summary of the same request, if it is there, and its model, if wanted.
  done: dict | None


def _job(args, task: Task, model: Identity) -> Job:
  grid = settings.from_args(Grid, args)
  how = settings.from_args(Settings, args)
  output = args.output or model.evals / PRESETS[args.preset].folder
  name = f"{model.step}-{how.attention}"
  folder = pathlib.Path(output) / task.name / name
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
  argv: Sequence[str],
) -> tuple[list[tuple[argparse.Namespace, Task]], list[str]]:
  """Makes the tasks that are asked for, with each one's arguments.

  Also returns the names of those that are absent, if all are asked for.
  """
  asked = _parser().parse_args(argv)
  suite, found, absent = PRESETS[asked.preset], [], {}
  for name in suite.named(asked.task):
    # What is not given is as the preset has it for this task.
    args = _parser(**suite.defaults.get(name, {})).parse_args(argv)
    options = settings.from_args(Heads, args)
    try:
      task = suite.make(args.data, name, options, args.attention)
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
  """Trains a task's runs, writes its results and returns the summary."""
  begun, task, grid, how = time.monotonic(), job.task, job.grid, job.how
  tell = functools.partial(print, file=sys.stderr, flush=True)
  data = loop.read(loaded, task, how.max_length, grid.limit, tell)
  examples = {name: rows.examples for name, rows in data.evaluations.items()}
  # A CPU is busy with one run: several at once take 5 to 35 % more of its time.
  on_cpu = jax.default_backend() == "cpu"
  best = saved.Best(grid.runs) if save else None
  fit = functools.partial(
    loop.fit,
    loaded,
    task,
    data,
    how,
    track=functools.partial(progress.track, unit="step", name=task.name),
    tell=tell,
    keep=best,
  )
  at_once = grid.runs_at_once or (1 if on_cpu else len(grid.runs))
  outcomes = loop.fit_in_groups(fit, grid.runs, at_once, tell)
  about = {"request": job.request, "train_examples": len(data.train.examples)}
  about |= summary.summarise(task, examples, outcomes)
  about["seconds"] = round(time.monotonic() - begun, 1)
  # A model that is there always belongs to the summary beside it.
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
  suite.named(args.task)  # before minutes of reading
  loaded = from_args(args)
  tasks, absent = _tasks(argv)
  if absent:
    print(f"left out, not in {args.data}: {', '.join(absent)}")
  done = []
  # Everything is checked before anything is trained.
  jobs = [_job(args, task, loaded) for args, task in tasks]
  for job in jobs:
    files.check_writable(job.folder, folder=True)
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
    for line in (*summary.divergences(about), *summary.collapses(about)):
      print(line)


def done(argv: Sequence[str]) -> bool:
  """Returns whether `main` has trained every task, without loading the model.

  Raises:
    UserError: The arguments or the data cannot be read, or a folder has the
      results of another request.
  """
  args = _parser().parse_args(argv)
  tasks, _ = _tasks(argv)
  model = identify(args.checkpoint, args.step)
  return all(_job(args, task, model).done for args, task in tasks)


if __name__ == "__main__":
  cli.run(main)
