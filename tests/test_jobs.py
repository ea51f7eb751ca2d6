"""Jobs: running, skipping and stopping them."""

import dataclasses
import json
import shutil
import signal
import time

import pytest

from antlm_jax.commands import prepare, train
from antlm_jax.errors import RUN_AGAIN, Stopped, UserError
from antlm_jax.evals import score
from antlm_jax.evals.studies import jobs
from antlm_jax.inference import model
from antlm_jax.runtime import files
from tests import runs

# A command that sleeps, then makes a folder with its arguments.
COMMAND = """
import pathlib, sys, time
def done(argv):
  made = pathlib.Path(argv[0], "argv")
  return made.exists() and made.read_text() == str(list(argv))
def main(argv):
  time.sleep(float(argv[1]))
  pathlib.Path(argv[0]).mkdir()
  pathlib.Path(argv[0], "argv").write_text(str(argv))
if __name__ == "__main__":
  main(sys.argv[1:])
"""


@pytest.fixture
def timed(tmp_path, monkeypatch):
  """Returns a function that makes jobs of the command above."""
  (tmp_path / "code").mkdir()
  (tmp_path / "code/timed_command.py").write_text(COMMAND)
  monkeypatch.syspath_prepend(tmp_path / "code")
  monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))

  def make(name, seconds=0.0):
    words = str(tmp_path / name), str(seconds)
    return jobs.Job(name, "timed_command", words, tmp_path / name)

  return make


def test_what_is_done_is_not_done_again(timed, tmp_path, capfd):
  todo = [timed("a"), timed("b")]
  jobs.run_jobs(todo, tmp_path)
  assert "[1/2] a" in capfd.readouterr().out
  jobs.run_jobs(todo, tmp_path)  # mkdir would fail
  assert "[" not in capfd.readouterr().out
  # A job is not done without its result, or with other arguments.
  (tmp_path / "b/argv").unlink()
  (tmp_path / "b").rmdir()
  jobs.run_jobs(todo, tmp_path)
  assert "[2/2] b" in capfd.readouterr().out
  assert not timed("b", 0.5).done
  # A command may have run elsewhere.
  done = timed("c")
  jobs.start_job(done).wait()
  jobs.run_jobs([*todo, done], tmp_path)
  assert "[" not in capfd.readouterr().out


def test_a_job_that_fails_ends_it_and_is_tried_again(timed, tmp_path):
  (tmp_path / "a").mkdir()
  with pytest.raises(UserError, match=r"a failed \(status 1\): see above"):
    jobs.run_jobs([timed("a")], tmp_path)
  (tmp_path / "a").rmdir()
  jobs.run_jobs([timed("a")], tmp_path)


def test_it_stops_in_time_and_resumes(timed, tmp_path, capfd):
  todo = [timed("a"), timed("b", seconds=60)]
  with pytest.raises(Stopped) as stopped:
    jobs.run_jobs(todo, tmp_path, 3.0)
  assert stopped.value.status == RUN_AGAIN
  assert "run the same command to resume" in capfd.readouterr().out
  assert [job.done for job in todo] == [True, False]


def test_a_signal_ends_the_job_too(tmp_path):
  term = "__import__('os').kill(__import__('os').getppid(), 15)"
  wait = "__import__('time').sleep(60)"
  code = ("-n", "1", "-r", "1", "-s", term, wait)
  begun = time.monotonic()
  with pytest.raises(Stopped) as stopped:
    jobs.run_jobs([jobs.Job("a", "timeit", code, tmp_path)], tmp_path)
  assert stopped.value.status == RUN_AGAIN
  assert time.monotonic() - begun < 50


# A job that signals its parent twice, and takes a second to save.
SAVES = """
import os, pathlib, signal, sys, time
def save(*_):
  os.kill(os.getppid(), int(sys.argv[2]))
  time.sleep(1)
  pathlib.Path(sys.argv[1]).write_text("saved")
  sys.exit(75)
if __name__ == "__main__":
  signal.signal(signal.SIGTERM, save)
  os.kill(os.getppid(), int(sys.argv[2]))
  time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_leaves_jobs_the_time_to_save(
  number, timed, tmp_path, monkeypatch
):
  """Catches jobs that outlive this process, as launchers signal twice."""
  monkeypatch.syspath_prepend(tmp_path / "code")
  (tmp_path / "code/job_saves.py").write_text(SAVES)
  words = str(tmp_path / "saved"), str(int(number))
  job = jobs.Job("a", "job_saves", words, tmp_path)
  with pytest.raises(Stopped) as stopped:
    jobs.run_jobs([job], tmp_path)
  assert stopped.value.status == RUN_AGAIN and stopped.value.saved
  assert (tmp_path / "saved").read_text() == "saved"


def test_jobs_run_side_by_side_and_wait_for_what_they_need(timed, tmp_path):
  """Catches a job that starts before its start exists, or after all others."""
  begun = time.monotonic()
  slow = [timed(name, 3.0) for name in "abc"]
  after = dataclasses.replace(timed("d"), needs=(tmp_path / "a",))
  free = timed("e")
  assert not jobs.run_jobs([*slow, after, free], tmp_path / "all", at_once=3)
  assert time.monotonic() - begun < 9  # the sum of all is over 9
  made = {name: (tmp_path / name / "argv").stat().st_mtime for name in "abcde"}
  assert made["a"] < made["d"] and made["b"] - made["a"] < 3
  assert len([*(tmp_path / "all/logs").iterdir()]) == 5


def test_side_by_side_only_the_jobs_that_need_a_failed_job_are_lost(
  timed, tmp_path, capfd
):
  (tmp_path / "a").mkdir()  # its command fails
  todo = [timed("a"), timed("b", 1.0), timed("d")]
  todo.insert(2, dataclasses.replace(timed("c"), needs=(tmp_path / "a",)))
  failed = jobs.run_jobs(todo, tmp_path / "all", go_on=True, at_once=2)
  assert [job.title for job in failed] == ["a", "c"]
  assert todo[1].done and todo[3].done
  said = capfd.readouterr().out
  assert "a failed (status 1)" in said and "FileExistsError" in said


def test_side_by_side_all_stop_in_time_and_resume(timed, tmp_path):
  """Catches a job that outlives the process which started it."""
  todo = [timed("a"), timed("b", 60), timed("c", 60)]
  with pytest.raises(Stopped) as stopped:
    jobs.run_jobs(todo, tmp_path / "all", 4.0, at_once=3)
  assert stopped.value.status == RUN_AGAIN and stopped.value.saved
  assert [job.done for job in todo] == [True, False, False]
  todo[1:] = [timed("b"), timed("c")]
  assert not jobs.run_jobs(todo, tmp_path / "all", at_once=3)
  assert all(job.done for job in todo)


@pytest.mark.parametrize(("at_once", "told"), [(1, None), (2, "false")])
def test_a_gpu_is_shared_by_jobs_side_by_side_alone(
  at_once, told, timed, tmp_path, monkeypatch
):
  """Catches a first process that takes the memory of the others."""
  monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
  (tmp_path / "code/said.py").write_text(
    "import os, pathlib, sys\n"
    "text = str(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'))\n"
    # Its job is looked up by importing it, with the arguments of pytest.
    "if __name__ == '__main__':\n"
    "  pathlib.Path(sys.argv[1]).write_text(text)\n"
  )
  monkeypatch.chdir(tmp_path / "code")
  file = tmp_path / "said"
  job = jobs.Job("says", "said", (str(file),), tmp_path / "run")
  jobs.run_jobs([job], tmp_path / "all", at_once=at_once)
  assert file.read_text() == str(told)


def test_a_folder_is_worked_on_by_one_process(timed, tmp_path):
  refused = pytest.raises(UserError, match="is in use by process")
  with files.file_lock(tmp_path / ".jobs.lock"), refused:
    jobs.run_jobs([timed("a")], tmp_path)
  jobs.run_jobs([timed("a")], tmp_path)


@pytest.mark.slow
def test_commands_tell_whether_they_are_done(
  english, prepared, tmp_path, monkeypatch
):
  run, data = tmp_path / "run", f"--data={english / 'pairs'}"
  training = runs.train_args(run, prepared, "model.layers=1", "eval.every=0")
  scoring = ["--task=blimp", f"--checkpoint={run}", data]
  scoring += ["--mode=causal", "--limit=2"]
  assert not train.done(training)
  train.main(training)
  # Settings without an influence on parameters do not count.
  assert train.done([*training, "--config.eval.rows=9"])
  assert not train.done([*training, "--config.seed=1"])
  # Other rows under the same settings are another run; those that are gone
  # cannot be compared.
  other = shutil.copytree(prepared, tmp_path / "rows") / "manifest.json"
  moved = [*training, f"--config.data.path={other.parent}"]
  assert train.done(moved)
  manifest = json.loads(other.read_text())
  manifest["splits"]["train"]["sha256"] = "0" * 64
  other.write_text(json.dumps(manifest))
  assert not train.done(moved)
  shutil.rmtree(other.parent)
  assert train.done(moved)
  score.main(scoring)
  with monkeypatch.context() as only:
    only.delattr(model, "load")  # the check does not read the model
    assert score.done(scoring) and score.done([*scoring, "--step=40"])
  assert not score.done([*scoring, "--mode=mlm"])
  with pytest.raises(UserError, match=r"another request \(limit differ"):
    score.done([*scoring, "--limit=3"])
  others = shutil.copytree(english / "pairs", tmp_path / "others/pairs")
  for path in others.glob("*.jsonl"):
    path.write_text("\n".join(path.read_text().split("\n")[::-1]).strip())
  with pytest.raises(UserError, match=r"another request \(data differ"):
    score.done([*scoring[:2], f"--data={others}", *scoring[3:]])
  for name in ("items.jsonl", "summary.json"):
    score.main([*scoring, "--overwrite"])
    (run / f"evals/pairs/40-causal/{name}").unlink()
    assert not score.done(scoring)
  making = [f"--text={english / 'text'}", f"--output={prepared}"]
  making += ["--vocab_size=400", "--seq_len=32", "--documents=line"]
  assert prepare.done([*making, "--packing=documents"])
  others = shutil.copytree(english / "text", tmp_path / "text")
  making[0] = f"--text={others}"
  assert prepare.done([*making, "--packing=documents"])
  with next(others.glob("*.train")).open("a") as file:
    file.write("more\n")
  assert not prepare.done([*making, "--packing=documents"])
  shutil.rmtree(others)
  assert prepare.done([*making, "--packing=documents"])
  assert not prepare.done(making)
