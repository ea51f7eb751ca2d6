"""Makes a study: trains its rows, evaluates them, and writes its report.

    antlm study --text=TEXT_FOLDER --data=EVALUATION_FOLDER

A study is a config with rows. In a clone, configs/studies has clm_or_mlm, which
compares CLM with MLM (arXiv 2507.00994), and antlm_table (arXiv 2412.03275).
Trainings that begin in the same way share that part, which is trained once.
Jobs whose results exist are skipped, so the same command resumes after any
interruption. --minutes stops the study by itself, with exit status 75. --jobs=N
runs up to N trainings and evaluations at once, on one GPU or CPU. --dry_run
prints the steps and FLOPs of the trainings, and writes nothing.

--text holds *.train and *.dev files, such as BabyLM's. It may be left out if
RUNS/data exists. --data holds the evaluation sets.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Annotated

import jax
import numpy as np

from antlm_jax import cli, tables
from antlm_jax import config as config_lib
from antlm_jax import settings as settings_lib
from antlm_jax.arguments import add_arguments, read_arguments
from antlm_jax.data import prepared_folder
from antlm_jax.errors import UserError
from antlm_jax.evals.studies import branches
from antlm_jax.evals.studies import jobs as jobs_lib
from antlm_jax.evals.studies.jobs import Job
from antlm_jax.evals.studies.study import Study, read_study
from antlm_jax.planning import search
from antlm_jax.runtime import chips, files
from antlm_jax.settings import PythonOnly, argument
from antlm_jax.training import checkpoint, saving
from antlm_jax.training.run import Run
from antlm_jax.units import quantity

# Share of a chip's peak, an assumption: a real step reaches about half of the
# bound that `antlm plan` prints.
_UTILIZATION = 0.4
_CHIP = "TPU v5"  # v5p


# ------------------------------------------------------------------- the jobs


def study_jobs(
  study: Study, runs: pathlib.Path, text: str | None, data: str
) -> Iterator[Job]:
  """Yields the commands that make a study, in order.

  Args:
    study: The study.
    runs: Path to the folder of all results.
    text: Path to the folder to prepare the data from; None if they exist.
    data: Path to the folder of evaluation sets.

  Raises:
    UserError: There are no data, and no text.
  """
  for family in dict.fromkeys(row.family for row in study.rows.values()):
    output = _data_folder(study, runs, family)
    if text:
      source = pathlib.Path(text).absolute()  # jobs may run elsewhere
      options = f"--text={source}", f"--output={output}"
      options += study.scale.prepare[family]
      yield Job(f"text for {family}", "prepare", options, output)
    elif not output.is_dir():
      raise UserError(f"{output} is not there yet: give --text")
  for seed in range(max(map(study.seeds, study.rows))):
    # All rows of a seed before the next seed, so that finished rows compare.
    names = [name for name in study.rows if seed < study.seeds(name)]
    for name in names:
      yield _training_job(study, runs, name, seed)
    for name in names:
      yield from _evaluations(study, runs, name, seed, data)


def _data_folder(study: Study, runs: pathlib.Path, family: str) -> pathlib.Path:
  # Families with the same options share data, named after the first family.
  options = study.scale.prepare
  names = [name for name in options if options[name] == options[family]]
  return runs / "data" / names[0].lower()


def _training_job(study: Study, runs, name: str, seed: int) -> Job:
  workdir = runs / name / str(seed)
  data = _data_folder(study, runs, study.rows[name].family)
  arguments = [
    f"--config={study.config_name}:{study.argument(name, seed)}",
    f"--workdir={workdir}",
    f"--config.data.path={data}",
    *study.overrides,
  ]
  if steps := study.kept_steps(name):
    arguments.append(f"--config.checkpoint.at={','.join(map(str, steps))}")
  arguments += _start_settings(study, runs, name, seed)
  starts = [runs / start / str(seed) for start in study.row_starts(name)]
  return Job(
    title=f"{name}, seed {seed}: training",
    command="train",
    arguments=tuple(arguments),
    folder=workdir,
    needs=(data, *starts),
  )


def _start_settings(study: Study, runs, name: str, seed: int) -> list[str]:
  """Returns the settings that say where a run begins."""
  row = study.rows[name]
  branch = study.plan[name]
  before = None  # where the run began, if it has begun
  config = runs / name / str(seed) / saving.CONFIG
  if config.exists():
    before = files.read_json(config, "the run's config")["init"]["checkpoint"]

  def start(*parts: str) -> str:
    # A run that was trained elsewhere, such as in a bucket, keeps its path.
    if before and pathlib.PurePath(before).parts[-len(parts) :] == parts:
      return before
    return str(runs.joinpath(*parts))

  if branch:
    trunk = start(branch.trunk, str(seed), checkpoint.FOLDER, str(branch.step))
    branches_off = branch.trunk in study.rows
    if before is not None:  # resumes as it began, whichever rows are made now
      branches_off = trunk == before
    if branches_off:
      # It continues the trunk in all, wherever the row itself begins.
      return [
        f"--config.init.checkpoint={trunk}",
        "--config.init.step=keep",
        "--config.init.optimizer=keep",
      ]
  if row.after:
    return [f"--config.init.checkpoint={start(row.after, str(seed))}"]
  return []


def _evaluations(
  study: Study, runs, name: str, seed: int, data: str
) -> Iterator[Job]:
  row = study.rows[name]
  run = runs / name / str(seed)
  for evaluation in study.scale.evaluations:
    if evaluation.seeds and seed >= evaluation.seeds:
      continue
    checkpoints = {"": run}
    if evaluation.looks:
      steps = run / checkpoint.FOLDER
      checkpoints = {
        f" at step {step}": steps / str(step) for step in study.looks(name)
      }
    by_mode = any("{mode}" in option for option in evaluation.options)
    modes = row.modes if by_mode else ("",)
    for (suffix, path), mode in itertools.product(checkpoints.items(), modes):
      values = {"data": data, "attention": row.attention, "mode": mode}
      options = (option.format(**values) for option in evaluation.options)
      title = f"{name}, seed {seed}{suffix}: {evaluation.title}"
      arguments = f"--checkpoint={path}", *options
      yield Job(title, evaluation.command, arguments, run)


def _join_evaluations(todo: Sequence[Job]) -> list[Job]:
  """Returns the jobs with a run's evaluations in one process."""
  joined = []
  for (evaluates, _), group in itertools.groupby(
    todo, lambda job: (job.command not in ("prepare", "train"), job.folder)
  ):
    jobs = list(group)
    joined += [jobs_lib.join_jobs(jobs)] if evaluates else jobs
  return joined


# ------------------------------------------------------------------- the cost


def costs(study: Study, runs: pathlib.Path) -> str:
  """Lays out the cost of a study's trainings, and the savings by shared steps.

  Epochs are those of the data in `runs`, or else of `ExpectedText.rows`.
  """
  rows = []
  flops_cache = {}
  total = np.zeros(3)  # steps, steps to train, FLOPs
  epoch = 0  # rows of an epoch, where they are estimated
  for name, row in study.rows.items():
    run = _planned_run(study, runs, name)
    seeds = study.seeds(name)
    branch = study.branches[name]
    begin = branch.step if branch else 0
    begins = "from scratch"
    if branch:
      begins = f"{branch.trunk} at {branch.step:,}"
    elif row.after:
      begins = f"{row.after}, at its end"
    if not run.config.data.path and branches.steps_of(run.config) is None:
      # A plan's artificial data has this number of rows.
      epoch = len(run.sources.rows)
    steps = run.curriculum.steps
    new_steps = steps - begin
    work = search.train_flops(run, begin, flops_cache)
    tokens = new_steps * run.config.train.batch_size * run.sources.rows.seq_len
    rows.append(
      (
        name,
        run.config.curriculum,
        begins,
        f"{steps:,}",
        f"{new_steps:,}",
        quantity(tokens),
        quantity(work),
        seeds,
        f"{_work_hours(seeds * work):,.1f}",
      )
    )
    total += seeds * np.array([steps, new_steps, work])
  head = ("row", "curriculum", "begins", "steps", "to train", "tokens")
  head += ("FLOPs", "seeds", "chip-hours")
  steps, new_steps, work = total
  lines = [
    tables.text_table(rows, head, "<<<>"),
    "",
    f"{len(rows)} rows, {sum(map(study.seeds, study.rows))} runs",
    f"{steps:,.0f} steps, of which {steps - new_steps:,.0f} are shared, and"
    f" trained once: {new_steps:,.0f} are left to train",
    f"{quantity(work, 'FLOPs')}: {_work_hours(work):,.1f} hours of a v5p chip"
    f" at {_UTILIZATION:.0%} of its peak (assumed; its bound: antlm plan)",
  ]
  if epoch:
    lines.append(
      f"{runs} has no data yet: epochs are estimated at {epoch:,} rows, of the"
      " text that the study's config is for"
    )
  return "\n".join(lines)


def _planned_run(study: Study, runs: pathlib.Path, name: str) -> Run:
  """Builds a row's run of the data that exist, or of stand-ins for them."""
  overrides = study.overrides
  data = _data_folder(study, runs, study.rows[name].family)
  if (data / prepared_folder.MANIFEST).exists():
    overrides += (f"--config.data.path={data}",)
  pod = search.Pod(
    study.spec(name, 0),
    config_lib.parse_overrides(overrides),
    jax.devices()[:1],
    **dataclasses.asdict(study.scale.text),
  )
  # Any mesh takes the same number of FLOPs.
  return pod.build_run(("mesh.data=-1", "mesh.fsdp=1", "mesh.tensor=1"))


def _work_hours(work: float) -> float:
  return work / (chips.CHIPS[_CHIP].flops * _UTILIZATION) / 3600


# ------------------------------------------------------------------ the command


@settings_lib.checked
def make(
  *,
  data: str | None = None,
  config: str = "clm_or_mlm",
  text: str | None = None,
  scale: str = "tiny",
  runs: files.LocalPath | None = None,
  rows: tuple[str, ...] = (),
  seeds: Annotated[int, argument(least=0)] = 0,
  minutes: Annotated[float | None, argument(over=0)] = None,
  jobs: Annotated[int, argument(least=1, most=64)] = 1,
  dry_run: bool = False,
  commands: bool = False,
  overrides: PythonOnly[Sequence[str]] = (),
) -> None:
  """Makes a study, or prints its cost or its commands.

  Args:
    data: Path to the folder of evaluation sets.
    config: Name or path of the study's config.
    text: Path to a folder of *.train and *.dev files.
    scale: Scale of the study; tiny fits a CPU.
    runs: Path to the folder for all results; runs/STUDY_SCALE by default.
    rows: Rows to make; all by default.
    seeds: Pretrainings of each row; 0 for as many as its config says.
    minutes: Time limit, in minutes.
    jobs: Number of trainings and evaluations at once, each in a process.
    dry_run: Print steps, tokens and chip-hours of each row, and write nothing.
    commands: Print all commands, to run them on other machines.
    overrides: `--config.KEY=VALUE` for every training.

  Raises:
    UserError: The config, the text or the evaluation sets cannot be used.
    Stopped: The time limit or a signal ended the study.
  """
  study = read_study(config, scale, rows, seeds, overrides)
  name = f"{study.path.stem}_{study.name}"
  folder = pathlib.Path(runs or f"runs/{name}").absolute()
  if dry_run:
    print(costs(study, folder))
    return
  todo = list(study_jobs(study, folder, text, evaluation_data(study, data)))
  if jobs > 1:
    todo = _join_evaluations(todo)
  if commands:
    for job in todo:
      print(job.command_line)
    return
  options = f"--runs={folder}", f"--config={study.path}"
  options += (f"--scale={study.name}", f"--output={folder}/report")
  results = tuple(dict.fromkeys(job.folder for job in todo))
  todo.append(Job("the report", "report", options, folder, results))
  limit = minutes and 60 * minutes
  failed = jobs_lib.run_jobs(todo, folder, limit, jobs > 1, jobs)
  if failed:
    raise UserError(f"{len(failed)} jobs failed: see above")


def main(argv: Sequence[str]) -> None:
  """Runs the command; --config.KEY=VALUE goes to every training."""
  parser = cli.Parser(description=__doc__)
  add_arguments(parser, make)
  args, overrides = parser.parse_with_overrides(argv)
  # The jobs need the accelerator, which only one process can have.
  jax.config.update("jax_platforms", "cpu")
  make(**read_arguments(make, args), overrides=overrides)


def evaluation_data(study: Study, data: str | None) -> str:
  """Returns the folder of evaluation sets, which holds all that they need.

  Raises:
    UserError: It does not.
  """
  if not study.scale.evaluations:
    return ""
  if not data:
    raise UserError("--data is missing: the folder that evaluations read")
  for name in study.scale.needs:
    if not (pathlib.Path(data) / name).exists():
      raise UserError(
        f"--data={data} holds no {name}: unpack the evaluations' data there"
      )
  return str(pathlib.Path(data).absolute())
