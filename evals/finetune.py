"""Fine-tunes a checkpoint: sentences, words, answers, retrieval.

  antlm eval finetune --checkpoint=RUN --data=reviews.csv --save
  antlm eval finetune --checkpoint=RUN --data=FOLDER --preset=2024 --task=cola

Trains one run for each learning rate and seed, as many at once as is fastest,
and evaluates each epoch. A run stops if it diverges or no longer improves; the
score is that of its best epoch.

--preset chooses the tasks and their settings. Arguments override the preset.
--preset=NAME --help shows the defaults of NAME; below are those of {preset}.

{presets}

BabyLM's validation sets are also its test sets: 2024 and 2026 choose the epoch
on the scores that they report. The other presets have a dev set for it.

--epochs=0 evaluates a model without training it, such as a model that --save
wrote. Your own file is then the test set. A set without training examples is
also only evaluated, unless --train_on names another set. The results are in
RUN/evals/untrained.

For each task, writes summary.json and items.jsonl (each run's prediction of
each example). It also writes the best run's predictions in the pipeline's
format and, with --save, its model, a checkpoint with the task's head. A task
that was done before with the same arguments is not repeated.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import jax

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.arguments import add_arguments, read_arguments
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.finetuning import loop, saved, sets, summary
from antlm_jax.evals.finetuning import task as task_lib
from antlm_jax.evals.finetuning.presets import PRESETS
from antlm_jax.evals.finetuning.summary import MODEL, FineTuning
from antlm_jax.evals.finetuning.task import Suite, Task, TaskHead
from antlm_jax.evals.finetuning.trial import Hyperparameters, TrialRun
from antlm_jax.hf import export, heads
from antlm_jax.inference.model import FineTuned, Loaded, ModelOrPath, open_model
from antlm_jax.runtime import files, progress
from antlm_jax.settings import PythonOnly, Section, Setting, argument, setting
from antlm_jax.training.checkpoint import Checkpoint, check_path

UNTRAINED = "untrained"  # folder of the results of models as they are


T = TypeVar("T")
_OUTPUT = (
  "Folder for the results, as TASK/STEP-ATTENTION; by default RUN/evals/NAME,"
  " with a NAME for each preset,"
  f" {', '.join(sorted({suite.folder for suite in PRESETS.values()}))}"
)


@dataclasses.dataclass(frozen=True)
class Grid(Section):
  """The runs of a task."""

  lrs: tuple[float, ...] = setting(
    (5e-5,), "Peak learning rates, separated by commas", over=0
  )
  seeds: tuple[int, ...] = setting(
    (12,), "Random seeds, separated by commas", least=0, most=2**32 - 1
  )
  limit: int = setting(
    0, "Number of training examples, drawn at random; 0 for all", least=0
  )
  runs_at_once: int = setting(
    0,
    "Number of runs that train together; 0 for one on a CPU, or as many as fit"
    " in memory on other devices",
    least=0,
  )

  @property
  def runs(self) -> list[TrialRun]:
    """A run for each learning rate and seed."""
    return [
      TrialRun(lr, seed)
      for lr in dict.fromkeys(self.lrs)
      for seed in dict.fromkeys(self.seeds)
    ]


@dataclasses.dataclass(frozen=True)
class Request:
  """A task that is asked for, with its data and its settings."""

  preset: str
  name: str  # of the task
  data: sets.Data
  settings: Mapping[str, Any]  # the preset's, or the user's

  @classmethod
  def of(
    cls,
    preset: str,
    name: str,
    encoder: str,
    data: sets.Data,
    settings: Mapping[str, Setting],
  ) -> "Request":
    """Returns the request for a task of a preset, with the user's settings."""
    suite = PRESETS[preset]
    defaults = dict(suite.defaults.get(name, {}))
    if suite.exportable and settings.get("head") is None:
      attention = settings.get("attention", Hyperparameters.attention)
      defaults |= heads.classifier_options(encoder, attention)
    return cls(preset, name, data, {**defaults, **settings})

  def section(self, kind: type[T]) -> T:
    """Returns the settings of a section."""
    names = settings_lib.fields_of(kind).keys() & self.settings.keys()
    return settings_lib.build(kind, {n: self.settings[n] for n in names})

  @property
  def may_train(self) -> bool:
    """Whether it asks for training, unless a folder has no set for it."""
    tests_alone = isinstance(self.data, Mapping) and "train" not in self.data
    return self.section(Hyperparameters).epochs > 0 and not tests_alone

  def without_training(
    self, tuned: FineTuned | None, head: TaskHead | None, longest: int
  ) -> "Request":
    """Returns the request for an evaluation alone.

    By default, it takes the attention from the model's own task, `tuned`. It
    takes the classes and the settings that only evaluate from the head, and the
    length from the longest row of training. A file or list of examples is the
    test set.
    """
    defaults: dict[str, Any] = {}
    if tuned and head:
      defaults["attention"] = tuned.attention
      defaults["labels"] = getattr(head, "labels", ())
      if longest:
        defaults["max_length"] = longest
      defaults |= {name: getattr(head, name) for name in head.evaluating}
    untrained = {"epochs": 0, "steps": 0, "train_on": "", "freeze": False}
    data = self.data
    has_splits = isinstance(data, Mapping) or _is_folder(data)
    if self.name == sets.OWN and not has_splits:
      data = {"test": data}
    settings = {**defaults, **self.settings, **untrained}
    return dataclasses.replace(self, data=data, settings=settings)

  def task(self) -> Task:
    """Makes the task; raises a UserError if its data cannot be read."""
    suite = PRESETS[self.preset]
    attention = self.section(Hyperparameters).attention
    sections = map(self.section, suite.settings)
    return suite.make(self.data, self.name, attention, *sections)

  def to_json(self, task: Task, model: Checkpoint) -> dict[str, Any]:
    """Returns everything that the results of the task depend on."""
    grid = self.section(Grid)
    return {
      "preset": self.preset,
      "task": task.name,
      "data": {**results.data_digest(task.files), **task.about},
      "head": {"kind": task.head.kind, **task.head.settings},
      **results.model_digest(model),
      **{name: getattr(grid, name) for name in ("lrs", "seeds", "limit")},
      **dataclasses.asdict(self.section(Hyperparameters)),
    }


def _is_folder(data: sets.Data) -> bool:
  return isinstance(data, str) and os.path.isdir(data)


class TaskJob(NamedTuple):
  """A task to do, or that is done."""

  task: Task
  grid: Grid
  hyperparameters: Hyperparameters
  folder: pathlib.Path  # of its results
  depends_on: dict  # everything that they depend on, `Request.to_json`
  # Summary of the same request, if it exists, and its model, if wanted.
  done: dict | None

  @property
  def training(self) -> tuple:
    """Equal for jobs that share their trained runs."""
    task = self.task
    data = task.trained_on or task.name
    return data, task.head, self.grid, self.hyperparameters


@settings_lib.checked
def finetune(
  model: ModelOrPath[Loaded],
  data: Annotated[
    files.Path | sets.Records,
    argument(help="Path to the folder or file of the tasks' examples"),
  ],
  *,
  preset: Annotated[
    str, argument(help="Kind of task, see above", choices=PRESETS)
  ] = "classification",
  task: str = "all",
  output: Annotated[
    files.Path | None, argument(help=_OUTPUT, read=cli.local_path)
  ] = None,
  save: bool = False,
  overwrite: bool = False,
  step: int | None = None,
  quiet: PythonOnly[bool] = False,
  **settings: Setting,
) -> FineTuning:
  """Fine-tunes a model: one run for each task, learning rate and seed.

      pairs = [("what a film", "good"), ("a waste of time", "bad"), ...]
      tuned = finetune("runs/x", pairs, preset="classification", save=True)
      tuned.score, tuned.model

  Does not repeat a task that was done before with the same arguments. With
  `epochs=0`, or without a set to train on, evaluates the model as it is.

  Args:
    model: Pretrained model, or the path to its run or checkpoint.
    data: Path to the folder, or file, of the tasks' examples. Presets of your
      own examples also take a list of them, or a mapping of train, dev and test
      to lists or files: `(text, label)`, `((text, text), label)`, `(text,
      [label, ...])`, `(text, number)` for regression, `(words, tags)`,
      `(question, context, answers)`, `(query, positive)`, texts alone for
      simcse, or mappings with the columns of a file.
    preset: Kind of task, a key of `presets.PRESETS`.
    task: Names of tasks, separated by commas; all for every task of the preset.
    output: Folder for the results; in RUN/evals by default.
    save: Save the best run's model as TASK/STEP-ATTENTION/model.
    overwrite: Replace existing results.
    step: Step of the run; by default the newest.
    quiet: Print nothing.
    **settings: Settings that replace the preset's, such as `lrs=(1e-5, 3e-5)`:
      the options of `antlm eval finetune`.

  Raises:
    UserError: A name or a value is wrong, the model or the data cannot be read,
      or the output cannot be written or has results of another request.
  """
  data = os.fspath(data) if isinstance(data, os.PathLike) else data
  with progress.quietly(quiet):
    _suite(preset, task, settings)  # a wrong name must not wait for the model
    loaded = open_model(model, step)
    encoder = loaded.config.model.name
    jobs, absent = plan_tasks(
      loaded.saved,
      encoder,
      loaded.task,
      data,
      preset,
      task,
      output=output,
      save=save,
      overwrite=overwrite,
      **settings,
    )
    if absent:
      progress.say(f"warning: left out, not in {data}: {_list_missing(absent)}")
    # Checks everything before it trains anything.
    for job in jobs:
      files.check_writable(job.folder, folder=True)
      if save and job.task.trained and not job.done:
        check_path(job.folder)
        _advise_head(job, loaded)
    summaries = {job.folder: job.done for job in jobs}
    for job in jobs:
      if job.done:
        progress.say(f"{job.task.name} is already done: {job.folder}")
      elif not summaries[job.folder]:  # not done with another
        together = [
          other
          for other in jobs
          if other.training == job.training and not other.done
        ]
        summaries |= perform(together, loaded, save)
  return summary.tuning_result(PRESETS[preset], summaries)


def _list_missing(absent: Mapping[str, str]) -> str:
  """Lists missing tasks, and those whose training set is missing."""
  text = ", ".join(name for name, source in absent.items() if not source)
  for source in dict.fromkeys(filter(None, absent.values())):
    names = [name for name in absent if absent[name] == source]
    text += f"; {', '.join(names)}, which train on {source}"
  return text.removeprefix("; ")


def _suite(preset: str, task: str, settings: Mapping[str, Setting]) -> Suite:
  """Returns the suite of a preset.

  Raises a UserError if it has no such task or setting, or settings contradict
  each other.
  """
  suite = PRESETS[preset]
  first = task.partition(",")[0]
  owners = [name for name, other in PRESETS.items() if first in other.owner]
  if owners and first not in suite.owner:
    raise UserError(
      f"preset={preset} has no task {first!r}: give"
      f" preset={' or '.join(owners)}"
    )
  suite.named(task)
  names = _setting_names(finetune, Grid, Hyperparameters, *suite.settings)
  help = "antlm eval finetune --help lists them"
  settings_lib.refuse_unknown(settings, names, f"preset={preset}", help)
  for trains in ("steps", "train_on", "freeze"):
    if settings.get("epochs") == 0 and settings.get(trains):
      raise UserError(
        f"epochs=0 evaluates without training: leave out {trains}, or give"
        " epochs=1"
      )
  return suite


def plan_tasks(
  model: Checkpoint,
  encoder: str,
  tuned: FineTuned | None,
  data: sets.Data,
  preset: str,
  task: str,
  *,
  output: str | None,
  save: bool,
  overwrite: bool,
  **settings: Setting,
) -> tuple[list[TaskJob], dict[str, str]]:
  """Makes the tasks that are asked for, without the model's weights.

  `encoder` and `tuned` are the model's; all others are the arguments of
  `finetune`, and its errors are those. Also returns the missing tasks, if all
  are asked for, and the set that each of them trains on and lacks, or "".
  """
  suite = _suite(preset, task, settings)
  names = _task_names(suite, preset, task, data)
  jobs: list[TaskJob] = []
  absent: dict[str, str] = {}
  for name in names:
    if task == "all" and name == sets.OWN and jobs:
      continue  # a folder of known sets
    request = Request.of(preset, name, encoder, data, settings)
    try:
      request, new_task = _make_task(request, tuned, model)
    except sets.Absent as error:
      if task != "all" or len(names) == 1:
        raise
      absent[name] = error.trains_on
      continue
    jobs.append(_job(request, new_task, model, output, save, overwrite))
    if name == sets.OWN:  # nobody asked for the known sets
      absent.clear()
  if not jobs:
    raise UserError(
      f"{data} has no set of preset={preset} ({', '.join(absent)}):"
      f" task={name}, for example, names the files that it looks for"
    )
  absent.pop(sets.OWN, None)
  return jobs, absent


def _task_names(
  suite: Suite, preset: str, task: str, data: sets.Data
) -> list[str]:
  """Returns the names of the tasks to look for in the data."""
  file = isinstance(data, str) and pathlib.Path(data).suffix
  if not suite.in_memory and (file or not isinstance(data, str)):
    presets = ", ".join(n for n, suite in PRESETS.items() if suite.in_memory)
    raise UserError(
      f"preset {preset} reads a folder of files"
      f"{f', not {data}' * bool(file)}; for your own examples, choose a"
      f" preset ({presets}), such as preset=classification"
    )
  names = suite.named(task)
  only_own = task == "all" and sets.OWN in names and not _is_folder(data)
  return [sets.OWN] if only_own else names


def _job(
  request: Request,
  task: Task,
  model: Checkpoint,
  output: str | None,
  save: bool,
  overwrite: bool,
) -> TaskJob:
  """Returns the job of a task, with its results if they exist."""
  hyperparameters = request.section(Hyperparameters)
  preset = PRESETS[request.preset].folder if task.trained else UNTRAINED
  name = f"{model.step}-{hyperparameters.attention}"
  folder = pathlib.Path(output or model.evals / preset, task.name, name)
  folder = folder.absolute()  # the result outlives a change of the folder
  depends_on = request.to_json(task, model)
  done = None if overwrite else results.finished(folder, depends_on)
  if save and task.trained and not (folder / MODEL).is_dir():
    done = None
  grid = request.section(Grid)
  return TaskJob(task, grid, hyperparameters, folder, depends_on, done)


def _make_task(
  request: Request, tuned: FineTuned | None, model: Checkpoint
) -> tuple[Request, Task]:
  """Makes a task to train, or else to evaluate the model as it is.

  `tuned` is the task of this model. Also returns the request of the task, which
  is `request` or its evaluation alone.
  """
  if request.may_train:
    trained = request.task()
    if trained.trained:
      _check_frozen(trained, request.section(Hyperparameters))
      return request, trained
  tuned_head = saved.saved_head(tuned, model.path) if tuned else None
  longest = model.meta.row_tokens if tuned_head else 0
  request = request.without_training(tuned, tuned_head, longest)
  evaluated = request.task()
  head = saved.untrained(evaluated, tuned_head, model.path)
  return request, dataclasses.replace(evaluated, head=head, trained=False)


def _check_frozen(task: Task, hyperparameters: Hyperparameters) -> None:
  """Raises a UserError if a frozen encoder leaves nothing to train."""
  if not hyperparameters.freeze:
    return
  if not task.head.parameters(1):
    raise UserError(
      f"freeze trains the head alone, but {task.name} has no head with"
      " parameters: leave out freeze"
    )
  if hyperparameters.encoder_dropout:
    raise UserError(
      f"encoder_dropout={hyperparameters.encoder_dropout:g}: a frozen encoder"
      " has no dropout: leave out freeze or encoder_dropout"
    )


def perform(
  jobs: Sequence[TaskJob], loaded: Loaded, save: bool
) -> dict[pathlib.Path, dict]:
  """Trains the runs that tasks share, and writes the results of each.

  Returns:
    The summary of each task, by its folder.
  """
  start = time.monotonic()
  first = jobs[0]
  best = None
  joined = task_lib.join_tasks([job.task for job in jobs])
  if joined.trained:
    best = saved.Best(first.grid.runs) if save else None
    data, outcomes = _train_grid(joined, first, loaded, best)
    examples = {name: rows.examples for name, rows in data.evaluations.items()}
    train_examples = len(data.train.examples)
    longest = data.train.tokens.shape[-1]
  else:
    progress.say(f"{joined.name} is evaluated without training")
    outcome, examples = saved.as_is(loaded, joined, first.hyperparameters)
    outcomes = [outcome]
    train_examples = 0
  seconds = round(time.monotonic() - start, 1)
  summaries = {}
  for job in jobs:
    task = job.task
    folder = job.folder
    scored = {name: examples[name] for name in task.scored}
    task_outcomes = [outcome.on(task.evaluations) for outcome in outcomes]
    task_summary = {
      "request": job.depends_on,
      "train_examples": train_examples,
      **summary.summarise(task, scored, task_outcomes),
      "seconds": seconds,
    }
    # A model always belongs to the summary next to it.
    saved.remove_saved(folder)
    summary.write_task_results(
      folder, task, task_summary, task_outcomes, scored
    )
    params = best.of_rate(task_summary["best_lr"]) if best else {}
    if best and not params:
      progress.say(f"warning: {task.name} is not saved: every run diverged")
    elif best:
      rows = max(loaded.longest_row, longest)
      meta = dataclasses.replace(loaded.meta, row_tokens=rows)
      trained = dataclasses.replace(loaded, meta=meta)
      attention = job.hyperparameters.attention
      saved.save_model(folder, trained, task, attention, params)
      path = files.shown_path(folder / MODEL)
      progress.say(f"{task.name}: model saved to {path}")
    progress.say(f"{task.name}: written to {files.shown_path(folder)}")
    summaries[folder] = task_summary
  return summaries


def _train_grid(
  task: Task, job: TaskJob, loaded: Loaded, best: saved.Best | None
) -> tuple[loop.TaskData, list[loop.TuningOutcome]]:
  """Trains the runs of a job's grid on a task."""
  grid = job.grid
  tuning = job.hyperparameters
  data = loop.read_task_data(loaded, task, tuning.max_length, grid.limit)
  steps = loop.count_steps(task, data.train, tuning)
  if steps < tuning.steps:
    epochs = f"{tuning.epochs} epoch{'s' * (tuning.epochs > 1)}"
    progress.say(
      f"{task.name}: {epochs} of {steps:,} steps in all, fewer than"
      f" steps={tuning.steps}"
    )
  # One run keeps a CPU busy: several at once take 5 to 35 % more of its time.
  on_cpu = jax.default_backend() == "cpu"
  at_once = grid.runs_at_once or (1 if on_cpu else len(grid.runs))
  fit = functools.partial(loop.fit, loaded, task, data, tuning, keep=best)
  return data, loop.fit_in_groups(fit, grid.runs, at_once)


def _advise_head(job: TaskJob, loaded: Loaded) -> None:
  """Prints a tip if transformers has no model with a task's head."""
  task = saved.fine_tuned(job.task, job.hyperparameters.attention)
  try:
    target = export.target_of(loaded, task.attention)
    heads.head_config(dataclasses.replace(loaded, task=task), target)
  except UserError as error:
    progress.say(f"tip: `antlm export` will refuse {job.task.name}: {error}")


def _setting_names(*sources: Callable) -> list[str]:
  return [name for source in sources for name in settings_lib.fields_of(source)]


def _sections() -> list[type]:
  """Returns the sections of the command's options, each once."""
  sections = dict.fromkeys(
    section for suite in PRESETS.values() for section in suite.settings
  )
  return [Grid, Hyperparameters, *sections]


def _finetune_parser(preset: str) -> cli.Parser:
  """Returns the command's parser, with the defaults of a preset."""
  wrapped = textwrap.TextWrapper(
    80, subsequent_indent=" " * 18, break_on_hyphens=False
  )
  presets = "\n".join(
    wrapped.fill(f"  {name:15} {suite.about}")
    for name, suite in PRESETS.items()
  )
  description = __doc__.format(presets=presets, preset=preset)
  parser = cli.Parser(description=description)
  for source in (finetune, *_sections()):
    add_arguments(parser, source)
  # Some settings differ by task: the help shows each of their values.
  suite = PRESETS[preset]
  tasks = [suite.defaults.get(task, {}) for task in suite.scores]
  defaults = {}
  for name in dict.fromkeys(name for task in tasks for name in task):
    values = (task.get(name, parser.get_default(name)) for task in tasks)
    texts = dict.fromkeys(str(settings_lib.text(value)) for value in values)
    defaults[name] = " or ".join(texts)
  parser.set_defaults(**defaults, preset=preset)
  return parser


def parse_finetune(argv: Sequence[str]) -> dict[str, Any]:
  """Returns the arguments of `finetune` that a command line gives."""
  preset = cli.value_of("--preset", argv)
  default = settings_lib.fields_of(finetune)["preset"].default
  shown = preset if preset in PRESETS else default
  # Without defaults, which a preset's settings replace.
  unset = argparse.Namespace(**dict.fromkeys(_setting_names(*_sections())))
  args = _finetune_parser(shown).parse_args(argv, unset)
  arguments = read_arguments(finetune, args)
  for name, value in vars(args).items():
    if name not in arguments and value is not None:
      arguments[name] = value
  return arguments


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  print(finetune(**parse_finetune(argv)))


def done(argv: Sequence[str]) -> bool:
  """Returns whether `main` has trained every task, without loading the model.

  Raises:
    UserError: The arguments or the data cannot be read, or a folder has the
      results of another request.
  """
  arguments = parse_finetune(argv)
  model = Checkpoint(arguments.pop("model"), arguments.pop("step"))
  encoder = model.meta.config.model.name
  task = model.fields.get("task")
  tuned = task and FineTuned(**task, params={})
  jobs, _ = plan_tasks(model, encoder, tuned, **arguments)
  return all(job.done for job in jobs)
