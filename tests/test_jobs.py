"""Pieces of work: what runs, what is skipped, and what ends them."""

import json
import time

import pytest

from antlm_jax.errors import RUN_AGAIN, Stopped, UserError
from antlm_jax.evals import jobs
from antlm_jax.runtime import files


def timed(folder, name, seconds=0.0):
  """A job that waits and leaves its folder."""
  code = f"__import__('time').sleep({seconds})"
  made = f"__import__('pathlib').Path({str(folder / name)!r}).mkdir()"
  arguments = ("-n", "1", "-r", "1", "-s", made, code)
  return jobs.Job(name, "timeit", arguments, folder / name)


def test_what_is_done_is_not_done_again(tmp_path, capfd):
  todo = [timed(tmp_path, "a"), timed(tmp_path, "b")]
  jobs.run(todo, tmp_path, None)
  assert "[1/2] a" in capfd.readouterr().out
  jobs.run(todo, tmp_path, None)  # mkdir would fail
  assert "[1/2]" not in capfd.readouterr().out
  (tmp_path / "b").rmdir()
  jobs.run(todo, tmp_path, None)
  assert "[2/2] b" in capfd.readouterr().out
  assert len(json.loads((tmp_path / jobs.DONE).read_text())) == 2


def test_a_piece_that_fails_ends_it_and_is_tried_again(tmp_path):
  (tmp_path / "a").mkdir()
  with pytest.raises(UserError, match=r"a failed \(status 1\): see above"):
    jobs.run([timed(tmp_path, "a")], tmp_path, None)
  (tmp_path / "a").rmdir()
  jobs.run([timed(tmp_path, "a")], tmp_path, None)


def test_it_stops_in_time_and_goes_on(tmp_path, capfd):
  todo = [timed(tmp_path, "a"), timed(tmp_path, "b", seconds=60)]
  with pytest.raises(Stopped) as stopped:
    jobs.run(todo, tmp_path, 3.0)
  assert stopped.value.status == RUN_AGAIN
  assert "the same command goes on" in capfd.readouterr().out
  assert len(json.loads((tmp_path / jobs.DONE).read_text())) == 1


def test_a_signal_ends_the_piece_too(tmp_path, capfd):
  term = "__import__('os').kill(__import__('os').getppid(), 15)"
  wait = "__import__('time').sleep(60)"
  code = ("-n", "1", "-r", "1", "-s", term, wait)
  begun = time.monotonic()
  with pytest.raises(Stopped) as stopped:
    jobs.run([jobs.Job("a", "timeit", code, tmp_path)], tmp_path)
  assert stopped.value.status == RUN_AGAIN
  assert time.monotonic() - begun < 50  # the job did not wait to its end
  assert not (tmp_path / jobs.DONE).exists()


def test_a_folder_is_worked_on_by_one_process(tmp_path):
  todo = [timed(tmp_path, "a")]
  refused = pytest.raises(UserError, match="is in use by process")
  with files.locked(tmp_path / "lock"), refused:
    jobs.run(todo, tmp_path)
  jobs.run(todo, tmp_path)
