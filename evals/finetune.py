"""Fine-tunes a checkpoint: sentences, words, answers, retrieval.

  antlm eval finetune --checkpoint=RUN --data=reviews.csv --save
  antlm eval finetune --checkpoint=RUN --data=FOLDER --preset=2024 --task=cola

Trains one run for each learning rate and seed, as many at once as is fastest,
and evaluates each epoch. A run stops if it diverges or no longer improves; the
score is that of its best epoch.

--preset chooses the tasks and their settings. Arguments override the preset.
--preset=NAME --help shows the settings and defaults of NAME; below are the
defaults of {preset}.

{presets}

BabyLM's validation sets are also its test sets: 2024 and 2026 choose the epoch
on the scores that they report. The other presets have a dev set for it.

--epochs=0 evaluates a model without training it, such as a model that --save
wrote. Your own file is then the test set. A set without training examples is
also only evaluated. The results are in RUN/evals/untrained.

For each task, writes summary.json and items.jsonl (each run's prediction of
each example). It also writes the best run's predictions in the pipeline's
format and, with --save, its model, a checkpoint with the task's head. A task
that was done before with the same arguments is not repeated.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.arguments import add_arguments, read_arguments
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.finetuning import loop, saved, sets
from antlm_jax.evals.finetuning.batching import ExampleRows
from antlm_jax.evals.finetuning.presets import PRESETS
from antlm_jax.evals.finetuning.summary import (
  MODEL,
  FineTuning,
  Summary,
  summarise,
  tuning_result,
  write_task_results,
)
from antlm_jax.evals.finetuning.task import Task, TaskHead
from antlm_jax.evals.finetuning.trial import Hyperparameters, TrialRun
from antlm_jax.hf import export, heads
from antlm_jax.inference.model import FineTuned, Loaded, ModelOrPath, open_model
from antlm_jax.runtime import files, progress
from antlm_jax.settings import PythonOnly, Section, Setting, argument, setting
from antlm_jax.training.checkpoint import Checkpoint, check_path

UNTRAINED = "untrained"  # folder of the results of models as they are
# Training settings of a task that is only evaluated.
_WITHOUT_TRAINING = {"epochs": 0, "steps": 0, "freeze": False}
_OUTPUT = (
  "Folder for the results, as TASK/STEP-ATTENTION; by default RUN/evals/NAME,"
  " with a NAME for each preset,"
  f" {', '.join(sorted({preset.folder for preset in PRESETS.values()}))}"
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
    rates = dict.fromkeys(self.lrs)
    seeds = dict.fromkeys(self.seeds)
    return [TrialRun(lr, seed) for lr in rates for seed in seeds]


class TaskJob(NamedTuple):
  """A task with its settings, and the folder of its results."""

  task: Task
  grid: Grid
  hyperparameters: Hyperparameters
  folder: pathlib.Path
  request: dict[str, Any]  # everything that the results depend on
  summary: Summary | None = None  # of the same request, if it was done before


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
    # A wrong name must not wait for the model.
    _check_request(preset, task, settings)
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
      progress.say(f"warning: left out, not in {data}: {', '.join(absent)}")
    # Checks everything before it trains anything.
    for job in jobs:
      files.check_writable(job.folder, folder=True)
      if save and job.task.trained and not job.summary:
        check_path(job.folder)
        _advise_head(job, loaded)
    summaries = {}
    for job in jobs:
      if job.summary:
        progress.say(f"{job.task.name} is already done: {job.folder}")
      summaries[job.folder] = job.summary or perform(job, loaded, save)
    result = tuning_result(PRESETS[preset], summaries)
    for line in str(result).splitlines():
      progress.say(line)
  return result


def _check_request(
  preset: str, task_names: str, settings: Mapping[str, Setting]
) -> None:
  """Raises a UserError if a preset has no such task or setting.

  Also raises it if settings contradict each other.
  """
  name = task_names.partition(",")[0]
  owners = [key for key in PRESETS if name in PRESETS[key].owner]
  if owners and preset not in owners:
    remedy = f"give preset={' or '.join(owners)}"
    raise UserError(f"preset={preset} has no task {name!r}: {remedy}")
  PRESETS[preset].named(task_names)
  names = _setting_names(
    finetune, Grid, Hyperparameters, *PRESETS[preset].settings
  )
  help = f"antlm eval finetune --preset={preset} --help lists them"
  settings_lib.refuse_unknown(settings, names, f"preset={preset}", help)
  for name in ("steps", "freeze"):
    if settings.get("epochs") == 0 and settings.get(name):
      raise UserError(
        f"epochs=0 evaluates without training: leave out {name}, or give"
        " epochs=1"
      )


def plan_tasks(
  model: Checkpoint,
  encoder: str,
  fine_tuned: FineTuned | None,
  data: sets.Data,
  preset: str,
  task: str,
  *,
  output: str | None,
  save: bool,
  overwrite: bool,
  **settings: Setting,
) -> tuple[list[TaskJob], list[str]]:
  """Makes the tasks of a request, without the model's weights.

  `encoder` and `fine_tuned` are the model's; all others are the arguments of
  `finetune`, and its errors are those.

  Returns:
    The jobs, and the names of the tasks that the data lack if `task` is "all".
  """
  _check_request(preset, task, settings)
  names = _task_names(preset, task, data)
  data = sets.by_split(data)
  jobs = []
  absent = []
  for name in names:
    if task == "all" and name == sets.OWN and jobs:
      break  # the user's own task is for folders without known sets
    task_settings = _task_settings(preset, name, encoder, settings)
    try:
      job = _plan_task(
        model, fine_tuned, data, preset, name, task_settings, output
      )
    except sets.Absent:
      if task != "all" or len(names) == 1:
        raise
      absent.append(name)
      continue
    if not overwrite:
      job = job._replace(summary=_stored_summary(job, save))
    if name == sets.OWN:
      absent = []
    jobs.append(job)
  if not jobs:
    raise UserError(
      f"{data} has no set of preset={preset} ({', '.join(names)}):"
      f" task={names[-1]}, for example, names the files that it looks for"
    )
  return jobs, absent


def _stored_summary(job: TaskJob, save: bool) -> Summary | None:
  """Returns a task's earlier result, if it has all that is asked for."""
  stored = results.finished(job.folder, job.request)
  lacks_model = save and job.task.trained and not (job.folder / MODEL).is_dir()
  return Summary.from_json(stored) if stored and not lacks_model else None


def _task_names(preset: str, task_names: str, data: sets.Data) -> list[str]:
  """Returns the names of the tasks to look for in the data."""
  is_path = isinstance(data, str)
  is_folder = _is_folder(data)  # its name may have a dot
  is_file = is_path and not is_folder and pathlib.Path(data).suffix
  if not PRESETS[preset].in_memory and (is_file or not is_path):
    presets = ", ".join(name for name in PRESETS if PRESETS[name].in_memory)
    similar = "pairs" if preset == "retrieval" else "classification"
    raise UserError(
      f"preset {preset} reads a folder of files"
      f"{f', not {data}' * bool(is_file)}; for your own examples, choose a"
      f" preset ({presets}), such as preset={similar}"
    )
  names = PRESETS[preset].named(task_names)
  # Your own examples, or your own file, are no folder of known sets.
  only_own = task_names == "all" and sets.OWN in names and not is_folder
  return [sets.OWN] if only_own else names


def _is_folder(data: sets.Data) -> bool:
  return isinstance(data, str) and os.path.isdir(data)


def _task_settings(
  preset: str, name: str, encoder: str, settings: Mapping[str, Setting]
) -> dict[str, Any]:
  """Returns the settings of a task: the request's, else those of the preset.

  By default, the head can be exported, if the preset has such a head.
  """
  defaults = PRESETS[preset].defaults.get(name, {})
  if PRESETS[preset].exportable and settings.get("head") is None:
    attention = settings.get("attention", Hyperparameters.attention)
    defaults = {**defaults, **heads.classifier_options(encoder, attention)}
  return {**defaults, **settings}


def _plan_task(
  model: Checkpoint,
  fine_tuned: FineTuned | None,
  data: sets.Data,
  preset: str,
  name: str,
  settings: Mapping[str, Any],
  output: str | None,
) -> TaskJob:
  """Makes a task to train, or else to evaluate the model as it is."""
  task = None
  grid, hyperparameters, *options = _read_sections(preset, settings)
  only_tests = isinstance(data, Mapping) and "train" not in data
  if hyperparameters.epochs > 0 and not only_tests:
    task = PRESETS[preset].make(data, name, hyperparameters.attention, *options)
  if task and task.trained:
    _check_frozen(task, hyperparameters)
  else:
    task, grid, hyperparameters = _plan_evaluation(
      model, fine_tuned, data, preset, name, settings
    )
  attention = hyperparameters.attention
  folder_name = PRESETS[preset].folder if task.trained else UNTRAINED
  folder = pathlib.Path(
    output or model.evals / folder_name, task.name, f"{model.step}-{attention}"
  )
  request = {
    "preset": preset,
    "task": task.name,
    "data": {**results.data_digest(task.files), **task.facts},
    "head": {"kind": task.head.kind, **task.head.settings},
    **results.model_digest(model),
    **{name: getattr(grid, name) for name in ("lrs", "seeds", "limit")},
    **dataclasses.asdict(hyperparameters),
  }
  # The result outlives a change of the working directory.
  return TaskJob(task, grid, hyperparameters, folder.absolute(), request)


def _plan_evaluation(
  model: Checkpoint,
  fine_tuned: FineTuned | None,
  data: sets.Data,
  preset: str,
  name: str,
  settings: Mapping[str, Any],
) -> tuple[Task, Grid, Hyperparameters]:
  """Makes a task that evaluates the model as it is, and its settings."""
  head = None
  saved_settings = {}
  if fine_tuned:
    head = saved.saved_head(fine_tuned, model.path)
    saved_settings = _settings_of(fine_tuned, head, model.meta.row_tokens)
    if type(head) not in PRESETS[preset].heads:
      saved_settings.pop("labels")  # classes of another kind
  grid, hyperparameters, *options = _read_sections(
    preset, {**saved_settings, **settings, **_WITHOUT_TRAINING}
  )
  if name == sets.OWN and not (isinstance(data, Mapping) or _is_folder(data)):
    data = {"test": data}
  task = PRESETS[preset].make(data, name, hyperparameters.attention, *options)
  head = saved.untrained(task, head, model.path)
  task = dataclasses.replace(task, head=head, trained=False)
  return task, grid, hyperparameters


def _settings_of(
  fine_tuned: FineTuned, head: TaskHead, row_tokens: int
) -> dict[str, Any]:
  """Returns a fine-tuned model's settings, the defaults of its evaluation.

  They are its attention, its classes, the length of its longest trained row,
  and the settings of its head that only evaluate it.
  """
  lengths = {"max_length": row_tokens} if row_tokens else {}
  return {
    "attention": fine_tuned.attention,
    "labels": getattr(head, "labels", ()),
    **lengths,
    **{name: getattr(head, name) for name in head.evaluating},
  }


def _read_sections(preset: str, settings: Mapping[str, Any]) -> list[Section]:
  """Returns a task's grid, its hyperparameters, and the preset's options."""
  return [
    settings_lib.build(
      kind,
      {
        name: settings[name]
        for name in settings_lib.fields_of(kind)
        if name in settings
      },
    )
    for kind in (Grid, Hyperparameters, *PRESETS[preset].settings)
  ]


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


def perform(job: TaskJob, loaded: Loaded, save: bool) -> Summary:
  """Trains a task's runs, or evaluates the model, and writes the results."""
  start = time.monotonic()
  task = job.task
  best = loop.BestParams(job.grid.runs) if save and task.trained else None
  if task.trained:
    rows, outcomes = _train_grid(job, loaded, best)
    train_examples = len(rows["train"].examples)
  else:
    progress.say(f"{task.name} is evaluated without training")
    rows, outcome = saved.as_is(loaded, task, job.hyperparameters)
    outcomes = [outcome]
    train_examples = 0
  seconds = round(time.monotonic() - start, 1)
  examples = {name: rows[name].examples for name in task.evaluations}
  summary = summarise(
    task,
    examples,
    outcomes,
    request=job.request,
    train_examples=train_examples,
    seconds=seconds,
  )
  write_task_results(job.folder, task, summary, outcomes, examples)
  params = best.of_rate(summary.best_lr) if best else {}
  if best and not params:
    progress.say(f"warning: {task.name} is not saved: every run diverged")
  elif best:
    row_tokens = max(loaded.longest_row, rows["train"].tokens.shape[-1])
    meta = dataclasses.replace(loaded.meta, row_tokens=row_tokens)
    trained = dataclasses.replace(loaded, meta=meta)
    attention = job.hyperparameters.attention
    saved.save_model(job.folder, trained, task, attention, params)
    model = files.shown_path(job.folder / MODEL)
    progress.say(f"{task.name}: model saved to {model}")
  progress.say(f"{task.name}: written to {files.shown_path(job.folder)}")
  return summary


def _train_grid(
  job: TaskJob, loaded: Loaded, best: loop.BestParams | None
) -> tuple[dict[str, ExampleRows], list[loop.TuningOutcome]]:
  """Trains the runs of a task's grid; also returns the rows of its sets."""
  task = job.task
  settings = job.hyperparameters
  rows = loop.read_rows(loaded, task, settings.max_length, job.grid.limit)
  steps = loop.count_steps(task, rows["train"], settings)
  if steps < settings.steps:
    progress.say(
      f"{task.name}: {settings.epochs} epoch{'s' * (settings.epochs > 1)} of"
      f" {steps:,} steps in all, fewer than steps={settings.steps}"
    )
  runs = job.grid.runs
  # One run keeps a CPU busy: several at once take 5 to 35 % more of its time.
  on_cpu = jax.default_backend() == "cpu"
  at_once = job.grid.runs_at_once or (1 if on_cpu else len(runs))
  fit = functools.partial(loop.fit, loaded, task, rows, settings, best=best)
  return rows, loop.fit_in_groups(fit, runs, at_once)


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
  options = (kind for preset in PRESETS.values() for kind in preset.settings)
  return [Grid, Hyperparameters, *dict.fromkeys(options)]


def _finetune_parser(preset: str, alone: bool) -> cli.Parser:
  """Returns the command's parser, whose help shows a preset's defaults.

  With `alone`, the help leaves out the settings that only other presets have.
  """
  wrapper = textwrap.TextWrapper(
    80, subsequent_indent=" " * 18, break_on_hyphens=False
  )
  presets = "\n".join(
    wrapper.fill(f"  {name:15} {PRESETS[name].description}") for name in PRESETS
  )
  parser = cli.Parser(
    description=__doc__.format(presets=presets, preset=preset)
  )
  sources = finetune, Grid, Hyperparameters, *PRESETS[preset].settings
  names = _setting_names(*sources)
  for source in (finetune, *_sections()):
    for name, action in add_arguments(parser, source).items():
      if alone and name not in names:
        action.help = argparse.SUPPRESS
  # A default that differs by task is a text of all its values. It is only for
  # the help, because `parse_finetune` ignores the defaults of settings.
  defaults = PRESETS[preset].defaults
  task_defaults = [defaults.get(task, {}) for task in PRESETS[preset].scores]
  default_texts = {}
  for name in dict.fromkeys(itertools.chain(*task_defaults)):
    default = parser.get_default(name)
    values = (settings.get(name, default) for settings in task_defaults)
    distinct = dict.fromkeys(str(settings_lib.text(x)) for x in values)
    default_texts[name] = " or ".join(distinct)
  parser.set_defaults(**default_texts, preset=preset)
  return parser


def parse_finetune(argv: Sequence[str]) -> dict[str, Any]:
  """Returns the arguments of `finetune` that a command line gives."""
  preset = cli.value_of("--preset", argv)
  default = settings_lib.fields_of(finetune)["preset"].default
  known = preset in PRESETS
  parser = _finetune_parser(preset if known else default, alone=known)
  # Without defaults, which a preset's settings replace.
  empty = argparse.Namespace(**dict.fromkeys(_setting_names(*_sections())))
  args = parser.parse_args(argv, empty)
  arguments = read_arguments(finetune, args)
  settings = {
    name: value
    for name, value in vars(args).items()
    if name not in arguments and value is not None
  }
  return arguments | settings


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  finetune(**parse_finetune(argv))


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
  fine_tuned = task and FineTuned(**task, params={})
  jobs, _ = plan_tasks(model, encoder, fine_tuned, **arguments)
  return all(job.summary for job in jobs)
