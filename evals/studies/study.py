"""Makes a study: trains its rows, evaluates them, and writes its report.

    antlm study --text=TEXT_FOLDER --data=EVALUATION_FOLDER

A study is a config with rows. In a clone, configs/studies has clm_or_mlm, which
compares CLM with MLM (arXiv 2507.00994), and antlm_table (arXiv 2412.03275).
Trainings that begin in the same way share that part, which is trained once.
Jobs whose results exist are skipped, so the same command resumes after any
interruption. --minutes stops the study by itself, with exit status 75. --jobs=N
runs up to N trainings and evaluations at once, on one GPU or CPU. --together=N
puts up to N trainings of a row, or N evaluations, into one process, which saves
their start. --dry_run prints the steps and FLOPs of the trainings, and writes
nothing.

--text holds *.train and *.dev files, such as BabyLM's. It may be left out if
RUNS/data exists. --data holds the evaluation sets.
"""

import collections
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
from antlm_jax.commands import train as training
from antlm_jax.data import prepared_folder
from antlm_jax.errors import UserError
from antlm_jax.evals.studies import branches, design, sweep
from antlm_jax.evals.studies import jobs as jobs_lib
from antlm_jax.evals.studies.design import Study
from antlm_jax.evals.studies.jobs import Job
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


def read_study(
  config: str,
  scale: str,
  rows: Sequence[str] = (),
  seeds: int = 0,
  overrides: Sequence[str] = (),
) -> Study:
  """Reads a study's config.

  Args:
    config: Name or path of the study's config.
    scale: Scale of the study.
    rows: Rows to make; all by default.
    seeds: Pretrainings of each row; 0 for as many as its config says.
    overrides: `--config.KEY=VALUE` for every training.

  Raises:
    UserError: The config has no such scale or row.
  """
  path = pathlib.Path(config_lib.find_config(config)).absolute()
  found, there = design.read_scale(path, scale)
  for name in rows:
    if name not in there:
      raise UserError(f"--rows: {name!r} is not one of {', '.join(there)}")
  wanted = set()
  for name in rows or there:
    while name and name not in wanted:  # also the row that it begins after
      wanted.add(name)
      name = there[name].after
  own = {name: row for name, row in there.items() if name in wanted}
  return Study(path, scale, found, there, own, tuple(overrides), seeds)


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
    output = _data(study, runs, family)
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


def _data(study: Study, runs: pathlib.Path, family: str) -> pathlib.Path:
  # Families with the same options share data, named after the first family.
  options = study.scale.prepare
  same = [name for name in options if options[name] == options[family]]
  return runs / "data" / same[0].lower()


def _training_job(study: Study, runs, name: str, seed: int) -> Job:
  workdir, kept = runs / name / str(seed), study.kept(name)
  data = _data(study, runs, study.rows[name].family)
  arguments = (
    f"--config={study.config_name}:{study.argument(name, seed)}",
    f"--workdir={workdir}",
    f"--config.data.path={data}",
    *study.overrides,
  )
  if kept:
    arguments += (f"--config.checkpoint.at={','.join(map(str, kept))}",)
  arguments += _start_settings(study, runs, name, seed)
  about = f"{name}, seed {seed}: training"
  starts = study.row_starts(name)
  needs = data, *(runs / start / str(seed) for start in starts)
  return Job(about, "train", arguments, workdir, needs)


def _start_settings(
  study: Study, runs, name: str, seed: int
) -> tuple[str, ...]:
  """Returns the settings that say where a run begins."""
  row, branch = study.rows[name], study.plan[name]
  begin, began = "--config.init.checkpoint=", None
  begun = runs / name / str(seed) / saving.CONFIG
  if begun.exists():
    began = files.read_json(begun, "the run's config")["init"]["checkpoint"]

  def start(*parts: str) -> str:
    # A run that was trained elsewhere, such as in a bucket, keeps its path.
    same = pathlib.PurePath(began or "").parts[-len(parts) :] == parts
    return f"{begin}{began if same else runs.joinpath(*parts)}"

  if branch:
    step = checkpoint.FOLDER, str(branch.step)
    trunk = start(branch.trunk, str(seed), *step)
    branches_off = branch.trunk in study.rows
    if began is not None:  # resumes as it began, whichever rows are made now
      branches_off = trunk == f"{begin}{began}"
    if branches_off:
      # It continues the trunk in all, wherever the row itself begins.
      keep = "--config.init.step=keep", "--config.init.optimizer=keep"
      return trunk, *keep
  return (start(row.after, str(seed)),) if row.after else ()


def _evaluations(
  study: Study, runs, name: str, seed: int, data: str
) -> Iterator[Job]:
  row, run = study.rows[name], runs / name / str(seed)
  for evaluation in study.scale.evaluations:
    if evaluation.seeds and seed >= evaluation.seeds:
      continue
    at = {"": run}
    if evaluation.looks:
      steps = run / checkpoint.FOLDER
      at = {f" at step {step}": steps / str(step) for step in study.looks(name)}
    by_mode = any("{mode}" in option for option in evaluation.options)
    for where, path in at.items():
      for mode in row.modes if by_mode else ("",):
        known = {"data": data, "attention": row.attention, "mode": mode}
        options = (option.format(**known) for option in evaluation.options)
        arguments = f"--checkpoint={path}", *options
        about = f"{name}, seed {seed}{where}: {evaluation.about}"
        yield Job(about, evaluation.command, arguments, run)


def _join_evaluations(todo: Sequence[Job]) -> list[Job]:
  """Returns the jobs with a run's evaluations in one process."""
  out = []
  for (evaluates, _), some in itertools.groupby(
    todo, lambda job: (job.command not in ("prepare", "train"), job.folder)
  ):
    jobs = list(some)
    out += jobs_lib.join_jobs(jobs, len(jobs)) if evaluates else jobs
  return out


def _join_jobs_by_kind(todo: Sequence[Job], most: int) -> list[Job]:
  """Returns the jobs with up to `most` of a kind in each process.

  Trainings that begin at another one's checkpoint wait until it exists.
  """
  kinds = collections.defaultdict(list)
  for job in todo:
    kinds[job.command].append(job)
  prepared, trained = kinds.pop("prepare", []), kinds.pop("train", [])
  configs = {
    job: training.read_run_arguments(job.arguments)[0] for job in trained
  }
  later = [job for job in trained if configs[job].init.checkpoint]
  first = {job: configs[job] for job in trained if job not in later}
  scored = [
    part for some in kinds.values() for part in jobs_lib.join_jobs(some, most)
  ]
  return [*prepared, *sweep.join_trainings(first, most), *later, *scored]


# ------------------------------------------------------------------- the cost


def costs(study: Study, runs: pathlib.Path) -> str:
  """Lays out the cost of a study's trainings, and the savings by shared steps.

  Epochs are those of the data in `runs`, or else of `ExpectedText.rows`.
  """
  rows, known, total, epoch = [], {}, np.zeros(3), 0
  for name, row in study.rows.items():
    run, seeds = _planned(study, runs, name), study.seeds(name)
    branch, steps = study.branches[name], run.curriculum.steps
    begin, begins = 0, "from scratch"
    if branch:
      begin, begins = branch.step, f"{branch.trunk} at {branch.step:,}"
    elif row.after:
      begins = f"{row.after}, at its end"
    if not run.config.data.path and branches.steps_of(run.config) is None:
      epoch = len(run.sources.rows)  # of the stand-in data
    own, work = steps - begin, search.train_flops(run, begin, known)
    tokens = own * run.config.train.batch_size * run.sources.rows.seq_len
    cells = f"{steps:,}", f"{own:,}", quantity(tokens), quantity(work), seeds
    hours = f"{_work_hours(seeds * work):,.1f}"
    rows.append((name, run.config.curriculum, begins, *cells, hours))
    total += seeds * np.array([steps, own, work])
  head = ("row", "curriculum", "begins", "steps", "to train", "tokens")
  head += ("FLOPs", "seeds", "chip-hours")
  steps, own, work = total
  lines = [
    tables.text_table(rows, head, "<<<>"),
    "",
    f"{len(rows)} rows, {sum(map(study.seeds, study.rows))} runs",
    f"{steps:,.0f} steps, of which {steps - own:,.0f} are shared, and trained"
    f" once: {own:,.0f} are left to train",
    f"{quantity(work, 'FLOPs')}: {_work_hours(work):,.1f} hours of a v5p chip"
    f" at {_UTILIZATION:.0%} of its peak (assumed; its bound: antlm plan)",
  ]
  if epoch:
    lines.append(
      f"{runs} has no data yet: epochs are estimated at {epoch:,} rows, of the"
      " text that the study's config is for"
    )
  return "\n".join(lines)


def _planned(study: Study, runs: pathlib.Path, name: str) -> Run:
  """Builds a row's run of the data that exist, or of stand-ins for them."""
  overrides, data = study.overrides, _data(study, runs, study.rows[name].family)
  if (data / prepared_folder.MANIFEST).exists():
    overrides += (f"--config.data.path={data}",)
  spec = f"{study.path}:{study.argument(name, 0)}"
  text = dataclasses.asdict(study.scale.text)
  pod = search.Pod(
    spec, config_lib.parse_overrides(overrides), jax.devices()[:1], **text
  )
  # Any mesh takes the same number of FLOPs.
  return pod.run(("mesh.data=-1", "mesh.fsdp=1", "mesh.tensor=1"))


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
  together: Annotated[int, argument(least=1, most=256)] = 1,
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
    together: Number of trainings or evaluations in one process.
    dry_run: Print steps, tokens and chip-hours of each row, and write nothing.
    commands: Print all commands, to run them on other machines.
    overrides: `--config.KEY=VALUE` for every training.

  Raises:
    UserError: The config, the text or the evaluation sets cannot be used.
    Stopped: The time limit or a signal ended the study.
  """
  if jobs > 1 and together > 1:
    raise UserError("--jobs and --together: choose one of them")
  study = read_study(config, scale, rows, seeds, overrides)
  name = f"{study.path.stem}_{study.name}"
  folder = pathlib.Path(runs or f"runs/{name}").absolute()
  if dry_run:
    print(costs(study, folder))
    return
  todo = list(study_jobs(study, folder, text, evaluation_data(study, data)))
  if jobs > 1:
    todo = _join_evaluations(todo)
  if together > 1:
    todo = _join_jobs_by_kind(todo, together)
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
