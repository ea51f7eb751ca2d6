"""Jobs: running, skipping and stopping them."""

import json
import shutil
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
  jobs.run_job(timed("c"))
  jobs.run_jobs([*todo, timed("c")], tmp_path)
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


def test_a_folder_is_worked_on_by_one_process(timed, tmp_path):
  refused = pytest.raises(UserError, match="is in use by process")
  with files.file_lock(tmp_path / ".jobs.lock"), refused:
    jobs.run_jobs([timed("a")], tmp_path)
  jobs.run_jobs([timed("a")], tmp_path)


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
