"""Makes AntLM's table on one GPU, in processes side by side, and packs it.

To train and score runs, and to resume them:

    python -m antlm_jax.evals.studies.one_gpu run --scale=8m --data=FOLDER \\
      --runs=RUNS --minutes=8

To pack their results, and to restore them for `antlm report` elsewhere:

    python -m antlm_jax.evals.studies.one_gpu pack --runs=RUNS --output=FILE
    python -m antlm_jax.evals.studies.one_gpu unpack --packed=FILE --runs=RUNS

Small models leave a GPU idle while Python works. So several processes train,
each some seeds of a row, and others score the runs that have ended. The packed
file has the log-odds of each pair as float16, instead of both scores.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import io
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import tarfile
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import jax
import numpy as np

from antlm_jax import cli, settings
from antlm_jax.arguments import add_arguments, read_arguments
from antlm_jax.commands import train as training
from antlm_jax.errors import RUN_AGAIN, Stopped, UserError
from antlm_jax.evals import results
from antlm_jax.evals.studies import jobs as jobs_lib
from antlm_jax.evals.studies import study as study_lib
from antlm_jax.evals.studies import sweep
from antlm_jax.evals.studies.jobs import Job
from antlm_jax.evals.zero_shot.command import ITEMS
from antlm_jax.inference.framing import trained_modes
from antlm_jax.runtime import files, progress
from antlm_jax.settings import PythonOnly, argument
from antlm_jax.training import checkpoint, metrics, saving
from antlm_jax.units import duration

_POLL = 0.3  # seconds between looks at the processes
_PATIENCE = 20  # seconds that a process has to save
_ODDS = "odds.npy"
_PACKED = (saving.CONFIG, metrics.METRICS, metrics.SUMMARY)
_TEXT = ("uid", "id", "choices")  # of a pair, equal in all runs


class _Lanes:
  """Processes that run jobs side by side, at most `most` at a time.

  Each job writes its output into a file of its own, LOGS/KIND-NUMBER-ROW.log.
  """

  def __init__(self, kind: str, most: int, logs: pathlib.Path):
    self._kind, self._most, self._logs = kind, most, logs
    self.waiting: list[Job] = []
    self.failed: list[Job] = []
    self._running: dict[subprocess.Popen, tuple[Job, pathlib.Path]] = {}
    self._started = 0

  @property
  def busy(self) -> bool:
    return bool(self._running or self.waiting)

  def poll(self) -> None:
    """Forgets jobs that have ended, and starts jobs that wait."""
    for process in [p for p in self._running if p.poll() is not None]:
      job, log = self._running.pop(process)
      if process.returncode not in (0, RUN_AGAIN):
        self.failed.append(job)
        lines = log.read_text(errors="replace").splitlines()[-15:]
        progress.say("\n".join([f"error: {job.about}, see {log}:", *lines]))
    while self.waiting and len(self._running) < self._most:
      job = self.waiting.pop(0)
      self._started += 1
      name = f"{self._kind}-{self._started}-{job.folder.parent.name}.log"
      log = self._logs / name
      with log.open("w") as output:
        process = jobs_lib.start_job(job, output)
      self._running[process] = job, log

  def stop(self) -> None:
    """Asks all processes to save and to end, and then ends them."""
    self.waiting = []
    for process in self._running:
      process.send_signal(signal.SIGTERM)
    until = time.monotonic() + _PATIENCE
    for process in self._running:
      try:
        process.wait(max(0.1, until - time.monotonic()))
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    self._running = {}


@dataclasses.dataclass(frozen=True)
class _JobsOfRun:
  """Jobs of a run: its training and its evaluations.

  `later` has the evaluations in a mode that it does not train.
  """

  train: Job
  first: tuple[Job, ...]
  later: tuple[Job, ...]

  @property
  def ended(self) -> bool:
    """Whether it is trained, and its last checkpoint is complete."""
    folder = self.train.folder
    if not (folder / metrics.SUMMARY).is_file() or not self.train.done:
      return False
    summary = files.read_json(folder / metrics.SUMMARY, "the run's summary")
    return (folder / checkpoint.FOLDER / str(summary["steps"])).is_dir()


@settings.checked
def run(
  *,
  scale: str,
  data: str,
  runs: files.LocalPath,
  text: str | None = None,
  rows: tuple[str, ...] = (),
  seeds: Annotated[int, argument(least=0)] = 0,
  minutes: Annotated[float, argument(over=0)] = 9.0,
  reserve: Annotated[float, argument(least=0)] = 60.0,
  trainings: Annotated[int, argument(least=1, most=64)] = 6,
  scorings: Annotated[int, argument(least=1, most=64)] = 6,
  overrides: PythonOnly[Sequence[str]] = (),
) -> None:
  """Trains and scores runs side by side; the same call resumes.

  A run is scored as soon as it has ended, first in the modes that it trains.

  Args:
    scale: Scale of configs/antlm_table.py.
    data: Path to the folder of evaluation sets.
    runs: Path to the folder for all results.
    text: Path to a folder of *.train and *.dev files; None if RUNS/data exists.
    rows: Rows to make; all by default.
    seeds: Pretrainings of each row; 0 for as many as the config says.
    minutes: Time limit, in minutes.
    reserve: Seconds at the end in which runs are scored, and none is trained.
    trainings: Number of processes that train.
    scorings: Number of processes that score.
    overrides: `--config.KEY=VALUE` for every training.

  Raises:
    UserError: The text or the evaluation sets cannot be used, or a job failed.
    Stopped: The time limit or a signal ended the runs.
  """
  begun = time.monotonic()
  folder = pathlib.Path(runs).absolute()
  todo = _jobs(scale, rows, seeds, overrides, folder, text, data)
  with files.writing(folder):
    (folder / "logs").mkdir(parents=True, exist_ok=True)
  with files.file_lock(folder / "lock"):
    for job in todo:
      if job.command == "prepare" and not job.done:
        jobs_lib.run_job(job)
    train = _Lanes("train", trainings, folder / "logs")
    score = _Lanes("score", scorings, folder / "logs")
    left = _runs(todo)
    train.waiting = _join_seeds(left, trainings)
    try:
      _train_and_score(left, train, score, begun + 60 * minutes, reserve)
    finally:
      train.stop()
      score.stop()
      progress.say(f"after {duration(time.monotonic() - begun)}")
  if train.failed or score.failed:
    count = len(train.failed) + len(score.failed)
    raise UserError(f"{count} processes failed: see above")
  progress.say("all done")


def _jobs(scale, rows, seeds, overrides, folder, text, data) -> list[Job]:
  """Returns the jobs of all rows, each as a study of its own.

  Rows of one study would share steps, so that some wait for others.
  """
  read = functools.partial(study_lib.read_study, "antlm_table", scale)
  out = {}
  for row in rows or read().rows:
    study = read([row], seeds, overrides)
    found = study_lib.evaluation_data(study, data)
    out |= dict.fromkeys(study_lib.study_jobs(study, folder, text, found))
  return [*out]


def _runs(todo: Sequence[Job]) -> list[_JobsOfRun]:
  """Returns the runs that some of the jobs make."""
  by_folder = collections.defaultdict(list)
  for job in todo:
    if job.command != "prepare":
      by_folder[job.folder].append(job)
  out = []
  for train, *scored in by_folder.values():
    config, _ = training.read_run_arguments(train.arguments)
    own = {f"--mode={mode}" for mode in trained_modes(config)}
    first = tuple(job for job in scored if own.intersection(job.arguments))
    later = tuple(job for job in scored if job not in first)
    out.append(_JobsOfRun(train, first, later))
  return out


def _join_seeds(left: Sequence[_JobsOfRun], processes: int) -> list[Job]:
  """Returns trainings in about so many processes, each with a row's seeds."""
  todo = {
    run.train: training.read_run_arguments(run.train.arguments)[0]
    for run in left
    if not run.train.done
  }
  by_row = collections.Counter(job.folder.parent for job in todo)
  most = max(by_row.values(), default=1)
  each = -(-most // max(1, processes // max(1, len(by_row))))
  return sweep.join_trainings(todo, each)


def _train_and_score(
  left: Sequence[_JobsOfRun],
  train: _Lanes,
  score: _Lanes,
  until: float,
  reserve: float,
) -> None:
  """Trains and scores until all is done, or raises `Stopped` at a time."""
  left, later = list(left), []

  def terminated(*_) -> None:
    raise Stopped(RUN_AGAIN)

  before = signal.signal(signal.SIGTERM, terminated)
  begun, stopped, count = time.monotonic(), False, len(left)
  try:
    while left or later or train.busy or score.busy:
      train.poll()
      for run in [run for run in left if run.ended]:
        left.remove(run)
        score.waiting += _as_one(run.first)
        later += _as_one(run.later)
        spent = duration(time.monotonic() - begun)
        name = "/".join(run.train.folder.parts[-2:])
        progress.say(f"{name} trained, {count - len(left)} of {count}: {spent}")
      if not train.busy and not stopped:
        left = [run for run in left if run.ended]  # those of failed processes
      if not (train.busy or score.waiting):
        score.waiting, later = later, []
      score.poll()
      now = time.monotonic()
      if not stopped and now > until - reserve and train.busy:
        progress.say(f"training stops: {duration(now - begun)}")
        train.stop()
        stopped = True
        continue  # some runs have ended meanwhile
      if now > until or (stopped and not (score.busy or later)):
        progress.say("stopped: run the same command to resume")
        raise Stopped(RUN_AGAIN, saved=True)
      time.sleep(_POLL)
  finally:
    signal.signal(signal.SIGTERM, before)


def _as_one(jobs: Sequence[Job]) -> list[Job]:
  """Returns one process for all jobs that are not done."""
  todo = [job for job in jobs if not job.done]
  return jobs_lib.join_jobs(todo, len(todo)) if todo else []


# -------------------------------------------------------------- packed results


@settings.checked
def pack(*, runs: files.Path, output: files.Path) -> None:
  """Packs the results of runs into one file.

  `odds.npy` has float16 `[pairs]`: the log-probability of each right sentence
  minus that of the wrong sentence, in nats.

  Args:
    runs: Path to the folder of all runs.
    output: Path to the packed file, such as runs.tar.gz.
  """
  runs, texts = pathlib.Path(runs), set()
  configs = sorted(runs.glob(f"*/*/{saving.CONFIG}"))
  scored = [
    items
    for config in configs
    for items in sorted(config.parent.glob(f"evals/*/*/{ITEMS}"))
    if items.with_name(results.SUMMARY).is_file()  # else it is being written
  ]
  pathlib.Path(output).parent.mkdir(parents=True, exist_ok=True)
  with tarfile.open(output, "w:gz", compresslevel=6) as tar, _pool() as pool:
    for path in (c.with_name(name) for c in configs for name in _PACKED):
      if path.is_file():
        tar.add(path, path.relative_to(runs))
    for items, odds in zip(scored, pool.map(_read_odds, scored), strict=True):
      summary, place = items.with_name(results.SUMMARY), items.relative_to(runs)
      tar.add(summary, place.with_name(results.SUMMARY))
      _add_file(tar, str(place.with_name(_ODDS)), odds)
      name = _pairs_name(files.read_json(summary, "the summary"))
      if name not in texts:  # each pair once for all runs
        texts.add(name)
        lines = (line for _, line in files.read_jsonl(items, "the items"))
        rows = (json.dumps({k: line[k] for k in _TEXT}) for line in lines)
        _add_file(tar, name, "".join(f"{row}\n" for row in rows).encode())
  size = os.path.getsize(output) / 2**20
  progress.say(f"packed: {len(scored)} scored sets, {size:.1f} MB in {output}")


def _pool() -> concurrent.futures.Executor:
  """Returns processes that read; a run's scores take one of them a second."""
  count = min(8, os.cpu_count() or 1)
  context = multiprocessing.get_context("spawn")
  return concurrent.futures.ProcessPoolExecutor(count, context)


def _read_odds(items: pathlib.Path) -> bytes:
  """Returns the log-odds of a scored set's pairs as the content of a .npy."""
  lines = (line for _, line in files.read_jsonl(items, "the items"))
  odds = [line["scores"][0] - line["scores"][1] for line in lines]
  content = io.BytesIO()
  np.save(content, np.array(odds, np.float16))
  return content.getvalue()


@settings.checked
def unpack(*, packed: files.Path, runs: files.Path) -> None:
  """Restores the folder of runs from a packed file, for `antlm report`.

  The scores of a pair are its log-odds and 0.

  Args:
    packed: Path to the packed file.
    runs: Path to the folder to write.
  """
  runs = pathlib.Path(runs)
  with tarfile.open(packed) as tar:
    # Python has the filter from 3.11.4 on.
    tar.extraction_filter = getattr(tarfile, "data_filter", None)
    tar.extractall(runs)
  for odds in sorted(runs.glob(f"*/*/evals/*/*/{_ODDS}")):
    summary = odds.with_name(results.SUMMARY)
    name = _pairs_name(files.read_json(summary, "the summary"))
    scored = np.load(odds).astype(float).tolist()
    lines = [line for _, line in files.read_jsonl(runs / name, "the pairs")]
    rows = (
      json.dumps({**line, "scores": [score, 0.0], "correct": score > 0}) + "\n"
      for line, score in zip(lines, scored, strict=True)
    )
    odds.with_name(ITEMS).write_text("".join(rows))
    odds.unlink()


def _pairs_name(summary: Mapping) -> str:
  """Returns the name of the file of a scored set's pairs."""
  return f"pairs/{summary['request']['data']['crc32']}.jsonl"


def _add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
  about = tarfile.TarInfo(name)
  about.size = len(content)
  tar.addfile(about, io.BytesIO(content))


def main(argv: Sequence[str]) -> None:
  """Runs the command; --config.KEY=VALUE goes to every training."""
  first, *words = argv or [""]
  if (packing := {"pack": pack, "unpack": unpack}.get(first)) is not None:
    cli.call_with_arguments(packing, words, __doc__)
    return
  if first != "run":
    raise UserError("write run, pack or unpack first")
  parser = cli.Parser(description=__doc__)
  add_arguments(parser, run)
  args, overrides = parser.parse_with_overrides(words)
  jax.config.update("jax_platforms", "cpu")  # the processes have the GPU
  # They share its memory.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  run(**read_arguments(run, args), overrides=overrides)


if __name__ == "__main__":
  cli.run_command(main)
