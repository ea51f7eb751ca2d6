"""Several real processes over loopback train the same run as one process."""

import glob
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from antlm_jax import config, errors
from antlm_jax.errors import UserError
from antlm_jax.inference.model import load
from antlm_jax.runtime import processes
from antlm_jax.training import checkpoint
from antlm_jax.training import run as run_lib
from tests import helpers, pods, runs

# The run crosses a change of objective, with evaluations around it.
CURRICULUM = "curriculum=15C+15M steps"
SETTINGS = (CURRICULUM, "checkpoint.every=10", "checkpoint.keep_last=3")
SETTINGS += ("eval.rows=8", "eval.every=0")


@pytest.fixture(scope="module")
def cache(shared):
  """A folder of compiled programs, since each mesh runs several times."""
  return shared("programs", pathlib.Path.mkdir)


def nightly(*values):
  return pytest.param(*values, marks=pytest.mark.nightly)


def mesh(data=1, fsdp=1, tensor=1) -> tuple[str, ...]:
  return f"mesh.data={data}", f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}"


@pytest.fixture(scope="module")
def whole(prepared, cache, shared):
  """The run with one process on one device."""
  return shared(
    "one_process",
    lambda folder: pods.train(folder, prepared, *SETTINGS, cache=cache),
  )


def assert_same_run(workdir, whole, what: str) -> None:
  """Asserts losses within 1e-5 at every step, and prints the difference."""
  found, expected = pods.losses(workdir), pods.losses(whole)
  assert found.keys() == expected.keys()
  assert {step for step, _ in found} == set(range(31))
  worst = max(abs(found[k] / expected[k] - 1) for k in expected)
  print(f"{what}: losses differ by {worst:.1e} at most")
  assert worst < 1e-5


# With two processes and tensor=4, both read the whole batch. In the other
# meshes, each process reads a part of it.
MESHES = {
  "2 processes, data": (2, mesh(data=4)),
  "2 processes, fsdp": (2, mesh(fsdp=4)),
  "2 processes, tensor": (2, mesh(tensor=4)),
  "2 processes, mixed": (2, mesh(fsdp=2, tensor=2)),
  "4 processes, data": (4, mesh(data=8)),
  "4 processes, mixed": (4, mesh(data=2, fsdp=2, tensor=2)),
}
# This mesh splits rows and parameters; the other meshes are nightly.
MIXED = "2 processes, mixed"
MIXED_AND_NIGHTLY = [n if n == MIXED else nightly(n) for n in MESHES]


@pytest.fixture(scope="module")
def trained(prepared, cache, shared):
  """Returns a function that trains once on a mesh and returns the workdir."""

  def workdir(name):
    count, sizes = MESHES[name]
    options = {"count": count, "devices": 2, "cache": cache}
    return shared(
      name.replace(" ", "_"),
      lambda folder: pods.train(folder, prepared, *SETTINGS, *sizes, **options),
    )

  return workdir


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED_AND_NIGHTLY)
def test_processes_train_the_run_of_one(name, trained, whole):
  assert_same_run(trained(name), whole, name)
  ours = load(trained(name)).params
  theirs = load(whole).params
  for path in theirs:
    np.testing.assert_allclose(ours[path], theirs[path], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  "before, step, after",
  [
    (MIXED, 10, None),
    (None, 10, MIXED),
    nightly("4 processes, mixed", 20, "2 processes, data"),
    nightly(None, 10, "4 processes, mixed"),
    nightly("2 processes, tensor", 20, "4 processes, data"),
  ],
)
def test_a_checkpoint_goes_on_with_other_processes(
  before, step, after, trained, whole, prepared, cache, tmp_path
):
  workdir = tmp_path / "run"
  shutil.copytree(trained(before) if before else whole, workdir)
  for other in (workdir / "checkpoints").iterdir():
    if int(other.name) > step:
      shutil.rmtree(other)
  count, sizes = MESHES[after] if after else (1, mesh())
  options = {"count": count, "devices": 2 if after else 1, "cache": cache}
  out = pods.train(workdir, prepared, *SETTINGS, *sizes, **options)
  assert f"resuming from step {step}" in out
  assert_same_run(workdir, whole, f"{before} to {after} at step {step}")


@pytest.mark.slow
@pytest.mark.parametrize(
  "sent, damaged",
  [
    (signal.SIGKILL, False),
    nightly(signal.SIGKILL, True),
    nightly(signal.SIGTERM, False),
  ],
)
def test_a_disturbed_run_ends_with_the_same_bits(
  sent, damaged, trained, prepared, cache, tmp_path
):
  """Stops one of two processes; `test_train` disturbs a single process."""
  count, sizes = MESHES[MIXED]
  words = tmp_path / "run", prepared, *SETTINGS, *sizes
  options = {"count": count, "devices": 2, "cache": cache}
  working = pods.training(*words, **options)
  while working.running() and not checkpoint.checkpoint_steps(words[0]):
    time.sleep(0.002)
  working.send(sent, 1)
  status, out = working.end(120)
  assert status == (137 if sent == signal.SIGKILL else 75), out
  steps = checkpoint.checkpoint_steps(words[0])
  newest = max(steps)
  assert newest < 30
  if damaged:
    os.truncate(runs.largest_file(steps[newest] / "optimizer"), 100)
  out = pods.train(*words, **options)
  if damaged:
    assert f"kept as {newest}.unreadable" in out
  else:
    assert f"resuming from step {newest}" in out
  assert pods.losses(words[0]) == pods.losses(trained(MIXED))
  assert runs.same_params(words[0], trained(MIXED))


# Rows, masks and dropout of each process

ROWS = """
import json, pathlib, sys
from antlm_jax import cli, config
from antlm_jax.runtime import processes
from antlm_jax.training import checkpoint
from antlm_jax.training import run as run_lib
from tests import helpers, pods

def main(argv):
  folder, spec, *overrides = argv
  with processes.joined():
    import jax
    parts = run_lib.build_run(config.load_config(spec, overrides))
    source, found = parts.batches, []
    for step in (0, 14, 15, 29):
      layout = source.order.stage_at(step).layout
      known, names = parts.config.known_objectives, parts.curriculum.objectives
      shifts = [known[name].shift for name in names]
      rows, targets = helpers.by_row(source[step], layout, shifts)
      found.append([sorted(rows.items()), sorted(targets.items())])
    found.append(pods.drawn(parts.mesh))
    path = pathlib.Path(folder) / f"{jax.process_index()}.json"
    path.write_text(json.dumps(found))

cli.run_command(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED_AND_NIGHTLY)
def test_rows_masks_and_dropout_are_those_of_one_process(
  name, prepared, tmp_path
):
  count, sizes = MESHES[name]
  # A curriculum that mixes objectives within a batch, in two microbatches. The
  # data mix changes before the last step.
  settings = ("curriculum=15C:M=1:3+15M steps", "train.microbatches=2")
  settings += ("data.mix=16a:b=1:2+14b steps",)
  of = [f"--config.data.path=a={prepared},b={prepared}"]
  of += [f"--config.{o}" for o in (*pods.SMALL, *settings)]
  command = [sys.executable, "-c", ROWS, tmp_path, runs.QUICK, *of]
  command += [f"--config.{size}" for size in sizes]
  working = pods.Training(command, tmp_path / "pid", count, devices=2)
  status, out = working.end()
  assert status == 0, out

  parts = run_lib.build_run(config.load_config(runs.QUICK, of))
  source, layout = parts.batches, parts.order.stage_at(0).layout
  shifts = [
    parts.config.known_objectives[n].shift for n in parts.curriculum.objectives
  ]
  made = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
  assert len(made) == count
  assert [process.pop() for process in made] == [pods.drawn()] * count
  for i, step in enumerate((0, 14, 15, 29)):
    whole = helpers.by_row(source[step], layout, shifts)
    for part, expected in enumerate(whole):
      seen = {}
      for process in made:
        for key, value in process[i][part]:
          key = tuple(key) if part else key
          assert seen.setdefault(key, value) == value
      assert {k: tuple(v) if part else v for k, v in seen.items()} == expected


def refused(workdir, prepared, own: str, *overrides: str) -> list[str]:
  """Trains with two processes, the second after `own`; returns the errors."""
  begun = time.monotonic()
  own = f'[ "$JAX_PROCESS_ID" = 0 ] || {own}'
  working = pods.training(workdir, prepared, *overrides, count=2, own=own)
  status, out = working.end()
  assert status == 2 and "Traceback" not in out, out
  print(f"ended after {time.monotonic() - begun:.0f} s")
  return pods.errors(out)


@pytest.mark.slow
@pytest.mark.parametrize(
  "word, why",
  [
    # Bad input to one process.
    ("--config.trian.steps=3", "did you mean 'train.steps'"),
    # Processes with different settings.
    nightly("--config.schedule.peak_lr=0.5", "different settings"),
    ("--workdir={}/other", "another folder for process 1"),
  ],
)
def test_a_word_of_one_process_ends_all(word, why, prepared, tmp_path):
  own = f'set -- "$@" {word.format(tmp_path)}'
  told = refused(tmp_path / "run", prepared, own)
  assert told and all(why in line for line in told), told
  if "different" not in why and "another" not in why:
    assert len(told) == 2
    assert any("[0] error: process 1 ended: " in line for line in told)
  assert not list(tmp_path.glob("*/checkpoints/[0-9]*"))


@pytest.mark.slow
def test_a_workdir_that_one_cannot_write_ends_all(prepared, cache, tmp_path):
  workdir = tmp_path / "run"
  workdir.mkdir()
  probe = ["unshare", "-m", "mount", "--bind", str(workdir), str(workdir)]
  if subprocess.run(probe, capture_output=True).returncode:
    pytest.skip("a mount for one process is not allowed here")
  seal = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
  own = f"set -- unshare -m bash -c '{seal}' {workdir} \"$@\""
  told = refused(workdir, prepared, own, CURRICULUM, "checkpoint.every=5")
  # The system cannot create the folder unless the other process did so.
  assert told and all("cannot write step 5 under" in x for x in told), told


@pytest.mark.slow
@pytest.mark.parametrize("dead", [nightly(0), 1])
def test_a_killed_process_ends_the_others_soon(dead, prepared, cache, tmp_path):
  count, sizes = MESHES[MIXED]
  words = tmp_path / "run", prepared, "curriculum=3000C steps", *sizes
  working = pods.training(*words, count=count, devices=2, cache=cache)
  while working.running() and not pods.losses(tmp_path / "run"):
    time.sleep(0.05)
  working.send(signal.SIGKILL, dead)
  begun = time.monotonic()
  status, out = working.end(100)
  print(f"ended {time.monotonic() - begun:.1f} s after process {dead} died")
  assert status == 137  # the first failure's
  assert "Traceback" not in out
  # Usually the computation fails and we print one error line. Without process 0
  # there is no coordinator, and sometimes gloo does not notice the death. Then
  # JAX ends the process for want of heartbeats.
  told = pods.errors(out) if dead == 1 else []
  assert len(told) == 1 or "another task died" in out, out


@pytest.mark.slow
def test_told_to_end_before_the_first_step_it_is_to_be_run_again(
  prepared, tmp_path
):
  working = pods.training(tmp_path / "run", prepared, *SETTINGS, count=2)
  working.read_to("model.attention=")
  working.send(signal.SIGTERM, 1)
  status, out = working.end(100)
  assert status == 75 and "Traceback" not in out, out
  assert "run the same command again" in out
  assert not list(tmp_path.glob("run/checkpoints/[0-9]*"))


def addresses(*values: str) -> dict[str, str]:
  return dict(zip(processes.EXPLICIT, values, strict=False))


# Waits for its peers for 3 s. With an argument, a thread other than the main
# thread receives SIGTERM after a second.
JOIN = """
import signal, sys, threading, time
from antlm_jax import cli
from antlm_jax.runtime import processes, signals
def terminate():
  time.sleep(1)
  signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
def main(argv):
  processes.JOIN = 30 if argv else 3
  if argv:
    threading.Thread(target=terminate, daemon=True).start()
  with signals.listening():
    processes.initialize()
cli.run_command(main)
"""


def join(address, process=1, *argv: str) -> subprocess.CompletedProcess:
  """Runs a process that waits for its peers for a short time."""
  return subprocess.run(
    [sys.executable, "-W", "error", "-c", JOIN, *argv],
    cwd=runs.ROOT,
    env=os.environ | addresses(address, "2", str(process)),
    capture_output=True,
    text=True,
    timeout=60,
  )


@pytest.fixture
def free():
  """An address of this machine with no listener."""
  with socket.create_server(("", 0)) as server:
    return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_without_peers_does_not_wait_for_ever(process, free):
  done = join(free, process)
  assert done.returncode == 1, done.stderr
  line = done.stderr.splitlines()[-1]
  assert f"did not all join at {free} within 3 s" in line


def test_a_port_that_is_taken_is_told():
  with socket.create_server(("", 0)) as server:
    done = join(f"127.0.0.1:{server.getsockname()[1]}", 0)
  assert "cannot listen there: Address already in use" in runs.error_of(done)


def test_a_signal_ends_a_process_that_waits_for_its_peers(free):
  done = join(free, 1, "SIGTERM")
  assert done.returncode == errors.RUN_AGAIN, done.stderr
  assert done.stderr.endswith(": run the same command again\n")


@pytest.fixture
def joined(monkeypatch):
  """Arguments of calls of JAX's `initialize`, in an empty environment."""
  calls = []
  monkeypatch.setattr(
    jax.distributed, "initialize", lambda **k: calls.append(k)
  )
  monkeypatch.setattr(jax.config, "update", lambda *setting: None)
  for name in list(os.environ):
    if name.startswith(("JAX_", "SLURM_")):
      monkeypatch.delenv(name)
  return calls


SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1"}
SLURM["SLURM_STEP_NODELIST"] = "n[1-2]"
OWN = ("coordinator_address", "num_processes", "process_id")


@pytest.mark.parametrize(
  "environment, words",
  [
    ({}, None),
    (addresses("a:1", "1", "0"), None),
    (addresses("a:1", "2", "1"), dict(zip(OWN, ("a:1", 2, 1), strict=True))),
    (SLURM | {"SLURM_NTASKS": "1"}, None),
    (SLURM | {"SLURM_NTASKS": "2"}, {}),
    ({"SLURM_JOB_ID": "7"}, None),  # the job's script, not a task
  ],
)
def test_the_environment_says_who_belongs_together(
  environment, words, joined, monkeypatch
):
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  processes.initialize()
  assert len(joined) == (words is not None)
  if joined:
    assert {k: v for k, v in joined[0].items() if k in OWN} == words
    assert joined[0]["heartbeat_timeout_seconds"] <= 60


@pytest.mark.parametrize("there", [True, False])
def test_tpu_hosts_ask_their_pod(there, joined, monkeypatch):
  chips = ["/dev/vfio/0"] if there else []
  monkeypatch.setattr(glob, "glob", lambda p: chips if "vfio" in p else [])
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
  processes.initialize()
  assert len(joined) == there


@pytest.mark.parametrize(
  "values, why",
  [
    (("a:1", "2"), "JAX_PROCESS_ID must be set"),
    (("a:1",), "JAX_NUM_PROCESSES, JAX_PROCESS_ID must be set"),
    (("", "2", "0"), "JAX_COORDINATOR_ADDRESS must be set"),
    (("a:1", "2", "2"), "JAX_PROCESS_ID=2 is not one of JAX_NUM_PROCESSES=2"),
    (("a:1", "two", "0"), "numbered from 0"),
    (("a", "2", "1"), "JAX_COORDINATOR_ADDRESS=a is not HOST:PORT"),
    (("a:0", "2", "1"), "a:0 is not HOST:PORT"),
    (("a:70000", "2", "1"), "a:70000 is not HOST:PORT"),
  ],
)
def test_addresses_that_are_not_whole_are_told(
  values, why, joined, monkeypatch
):
  for name, value in addresses(*values).items():
    monkeypatch.setenv(name, value)
  with pytest.raises(UserError, match=why):
    processes.initialize()
  assert not joined
