"""Processes under the launchers: statuses, signals and preemptions.

The processes are real, but the clouds are not. Stand-ins for gcloud, srun and
scancel run their commands on this machine.
"""

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys
import time

import pytest

from tests.launching import (
  LAUNCH,
  TRAINING,
  ends_with_error,
  launch,
  run,
  start,
  write_script,
)

pytestmark = pytest.mark.skipif(
  sys.platform != "linux", reason="workers need /proc"
)


def wait_for(condition, seconds: float = 20) -> None:
  """Waits for a condition, at most for this time."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "waited for too long"
    time.sleep(0.02)


def alive(pid: int) -> bool:
  """Returns whether a process is running and not a zombie."""
  with contextlib.suppress(OSError):
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    return state.split()[0] != "Z"
  return False


def count_then(tmp_path, *statuses: int) -> list[str]:
  """Returns a command that ends with the next of `statuses` at each run."""
  script = write_script(
    tmp_path / "next",
    f"echo >> {tmp_path}/runs\nstatuses=(- {' '.join(map(str, statuses))})\n"
    f'exit "${{statuses[$(wc -l < {tmp_path}/runs)]}}"\n',
  )
  return [str(script)]


def runs(tmp_path) -> int:
  """Returns how often the command has run."""
  return (tmp_path / "runs").read_text().count("\n")


@pytest.mark.parametrize(
  "options, statuses, ran, said",
  [
    ("", [0], 1, []),  # these three are final
    ("", [2], 1, []),
    ("", [130], 1, []),
    # After 75 the command always runs again, after other failures a few times.
    ("--pause=0 --tries=2", [*[75] * 4, 1, 75, 1, 0], 8, ["again"] * 5),
    ("--pause=0 --end_on_75", [1, 75, 0], 2, []),
    ("--pause=1 --tries=2", [1, 137, 3], 3, ["1", "2", "3 crashes"]),
  ],
)
def test_what_is_run_again(options, statuses, ran, said, tmp_path):
  command = count_then(tmp_path, *statuses)
  done = launch("rerun", *options.split(), *command)
  assert (done.returncode, runs(tmp_path)) == (statuses[ran - 1], ran)
  if said:
    again = r"status 75, to be run (again)|again in ([1-9]\d*) s"
    found = re.findall(rf"{again}|after (3 crashes)", done.stderr)
    assert ["".join(groups) for groups in found] == said


def test_words_reach_the_command_as_they_are(tmp_path):
  words = ["a b", "--tries=x", "", "$c", "*"]
  script = 'printf "%s|" "$@"'
  done = launch("rerun", "--tries=1", "bash", "-c", script, "-", *words)
  assert done.stdout == "a b|--tries=x||$c|*|"


WAITS = """
import signal, sys, time
def end(status):
  print("told", flush=True)
  sys.exit(status)
signal.signal(signal.SIGTERM, lambda *_: end(75))
print("ready", flush=True)
try:
  time.sleep(60)
except KeyboardInterrupt:
  end(130)
"""


@pytest.mark.parametrize(
  "sent, status", [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize(
  "words, marks",
  [(["rerun.sh"], [""]), (["local.sh", 2, "--"], ["[0] ", "[1] "])],
)
def test_a_signal_is_passed_on_and_ends_it(sent, status, words, marks):
  command = (LAUNCH / words[0], *words[1:], sys.executable, "-c", WAITS)
  with start(*command) as process:
    ready = {process.stdout.readline() for _ in marks}
    assert ready == {f"{mark}ready\n" for mark in marks}
    process.send_signal(sent)
    assert process.wait(timeout=20) == status
    assert sorted(process.stdout) == [f"{mark}told\n" for mark in marks]


def test_a_signal_ends_a_pause(tmp_path):
  command = count_then(tmp_path, 1, 0)
  with start(LAUNCH / "rerun.sh", "--pause=60", *command) as process:
    assert "again in 60 s" in process.stderr.readline()
    process.terminate()
    assert process.wait(timeout=20) == 1
  assert runs(tmp_path) == 1


# local.sh


def test_a_last_line_without_an_end_is_printed_too():
  done = launch("local", 1, "--", "printf", "a\\n b  c")
  assert done.stdout == "[0] a\n[0]  b  c\n"


@pytest.mark.parametrize(
  "statuses, expected",
  [
    ("0 0 0", 0),
    ("0 75 0", 75),
    ("75 75 75", 75),
    ("75 1 0", 1),
    ("0 2 75", 2),
    ("0 137 0", 137),
  ],
)
def test_the_status_says_what_to_do(statuses, expected):
  script = 'statuses=($1); exit "${statuses[$JAX_PROCESS_ID]}"'
  done = launch("local", 3, "--", "bash", "-c", script, "-", statuses)
  assert done.returncode == expected, done.stderr


def test_the_first_failure_counts():
  script = "sleep 0.$((6 - 4 * JAX_PROCESS_ID)); exit $((3 + JAX_PROCESS_ID))"
  done = launch("local", 2, "--", "bash", "-c", script)
  assert done.returncode == 4, done.stderr


def test_a_dead_process_ends_the_others(tmp_path):
  """Even if they ignore signals, and with all of their children."""
  script = write_script(
    tmp_path / "hang",
    '[ "$JAX_PROCESS_ID" = 1 ] && kill -9 $$\n'
    'trap "" TERM\n'
    f'setsid bash -c "trap \\"\\" TERM; sleep 61; true" &\n'
    f"echo $! $$ > {tmp_path}/$JAX_PROCESS_ID.pids\n"
    "sleep 61\n",
  )
  begun = time.monotonic()
  done = launch("local", 3, "--grace=1", "--", script)
  assert done.returncode == 137 and time.monotonic() - begun < 20
  assert "process 1 ended with exit status 137" in done.stderr
  assert "Killed" not in done.stderr
  for i in (0, 2):
    for pid in (tmp_path / f"{i}.pids").read_text().split():
      wait_for(lambda pid=pid: not alive(int(pid)))


def test_others_that_save_when_told_do_not_hide_the_crash():
  script = '[ "$JAX_PROCESS_ID" = 0 ] && exit 3; trap "exit 75" TERM; sleep 60'
  script = script.replace("sleep 60", "sleep 60 & wait")
  done = launch("local", 2, "--grace=0", "--", "bash", "-c", script)
  assert done.returncode == 3, done.stderr


# A worker of a TPU VM, and a cloud with a single worker


@pytest.fixture
def checkout(tmp_path):
  """A checkout with our launchers and a stand-in for training.

  Setup creates a `.venv/bin/python` that runs `$TASK`.
  """
  folder = tmp_path / "checkout"
  shutil.copytree(LAUNCH, folder / "launch")
  for name in ("antlm_jax", "configs", "evals", "tests"):
    (folder / name).mkdir()
  for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
    (folder / name).touch()
  write_script(
    folder / "launch/setup.sh",
    "mkdir -p .venv/bin\n"
    "printf '#!/usr/bin/env bash\\neval \"$TASK\"\\n' > .venv/bin/python\n"
    "chmod +x .venv/bin/python\n",
  )
  return folder


@pytest.fixture
def worker(checkout):
  """Returns a function that runs `tpu_worker.sh`; kills its leftovers."""

  def call(*words, **kwargs):
    return run(checkout / "launch/tpu_worker.sh", *words, **kwargs)

  yield call
  with contextlib.suppress(OSError):
    pid = int((checkout / "build/worker/pid").read_text())
    os.killpg(pid, signal.SIGKILL)


def test_a_worker_trains_in_the_background(worker, checkout):
  assert worker("status").stdout.endswith(": none\n")
  ends_with_error(worker("log"), "nothing was started here")
  command = ("start", "bash", "-c", "echo begun; sleep 60 & wait", "a b")
  done = worker(*command)
  assert done.returncode == 0 and ": started: " in done.stdout, done.stderr
  assert worker("status").stdout.endswith(": running\n")
  wait_for(lambda: "begun" in worker("log").stdout)
  assert "running already" in worker(*command).stdout
  ends_with_error(worker("start", "true"), "another command is running")
  assert "stopped 143" in worker("stop").stdout
  assert worker("status").stdout.endswith(": stopped 143\n")
  assert "not running" in worker("stop").stdout
  worker("start", "bash", "-c", "echo second; exit 3")
  assert "second" in worker("log", "--follow").stdout, "until it ends"
  wait_for(lambda: worker("status").stdout.endswith(": ended 3\n"))
  log = (checkout / "build/worker/log").read_text()
  assert log.index("begun") < log.index("second"), "one log for all"


def test_a_worker_that_was_restarted_says_that_it_lost_its_command(
  worker, checkout
):
  worker("start", "sleep", "60")
  pid = int((checkout / "build/worker/pid").read_text())
  wait_for(lambda: os.getpgid(pid) == pid)
  os.killpg(pid, signal.SIGKILL)
  wait_for(lambda: worker("status").stdout.endswith(": lost\n"))
  assert ": started: " in worker("start", "sleep", "60").stdout


CLOUD = """
set -euo pipefail
echo "$*" >> "$CLOUD/calls"
state="$(cat "$CLOUD/state" 2> /dev/null || echo NONE)"
case "$4" in
  create) mkdir "$CLOUD/worker"; echo ACTIVE > "$CLOUD/state" ;;
  delete) rm -rf "$CLOUD/worker" "$CLOUD/state" ;;
  describe)
    [ "$state" != NONE ] || { echo "ERROR: NOT_FOUND: no such" >&2; exit 1; }
    echo "$state" ;;
  scp)
    if [ -e "$CLOUD/again" ] && [ -e "$CLOUD/1" ]; then
      rm "$CLOUD/again"
      echo SUSPENDED > "$CLOUD/state"
      exit 1
    fi
    cp "$5" "$CLOUD/worker/${6#*:}" ;;
  ssh)
    [ "$state" = ACTIVE ] || exit 0 # as gcloud does
    for word in "$@"; do
      case "$word" in
        --command=*) cd "$CLOUD/worker"; bash -c "${word#--command=}" ;;
      esac
    done ;;
esac
"""


@pytest.fixture
def cloud(checkout, tmp_path):
  """Returns a function that runs `tpu_vm.sh` with a gcloud of one worker.

  The task's first run makes `$CLOUD/1`, later runs make `$CLOUD/2`.
  """
  folder = tmp_path / "cloud"
  folder.mkdir()
  write_script(tmp_path / "bin/gcloud", CLOUD)
  env = {
    "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    "CLOUD": str(folder),
    "PYTHON": sys.executable,
  }

  def call(command, *words, task="true"):
    count = 'mkdir "$CLOUD/1" 2> /dev/null || mkdir "$CLOUD/2"; '
    return run(
      checkout / "launch/tpu_vm.sh",
      command,
      "a",
      "--poll=0",
      *words,
      env=env | {"TASK": count + task},
    )

  call.folder = folder
  yield call
  for path in folder.glob("worker/antlm_jax/build/worker/pid"):
    with contextlib.suppress(OSError):
      os.killpg(int(path.read_text()), signal.SIGKILL)


def run_in_cloud(cloud, task: str, *options):
  """Creates and sets up a resource, then runs with `--rerun`."""
  request = ("--type=v5p-8", "--spot")
  for words in (("create", *request), ("setup",)):
    done = cloud(*words)
    assert done.returncode == 0, done.stderr
  return cloud("run", "--rerun", *request, *options, *TRAINING, task=task)


def calls(cloud) -> list[str]:
  """Returns the verbs of the calls of gcloud."""
  lines = (cloud.folder / "calls").read_text().splitlines()
  return [line.split()[3] for line in lines]


PREEMPTED = """
echo "training $(ls -d "$CLOUD"/[12] | wc -l)"
[ ! -e "$CLOUD/2" ] || exit 0
trap "exit 75" TERM
sleep 0.5 # so that it is being watched
echo SUSPENDED > "$CLOUD/state"
kill -TERM -- "-$(cat build/worker/pid)"
sleep 60 & wait
"""


def test_training_survives_a_preemption(cloud):
  done = run_in_cloud(cloud, PREEMPTED)
  assert done.returncode == 0, done.stderr
  assert "training 1" in done.stdout and "training 2" in done.stdout
  assert "was preempted: requesting it again" in done.stderr
  verbs = calls(cloud)
  assert verbs.count("create") == 2 and verbs.count("delete") == 1
  assert "training has ended 0" in done.stderr
  assert "a is ACTIVE" in cloud("status").stdout


@pytest.mark.slow
def test_a_preemption_while_it_is_set_up_again_is_survived(cloud):
  (cloud.folder / "again").touch()
  done = run_in_cloud(cloud, PREEMPTED)
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("was preempted") == 2
  assert calls(cloud).count("create") == 3


@pytest.mark.slow
def test_after_a_preemption_the_code_is_the_same(cloud, checkout):
  edit = "echo new >> README.md; "  # by a person, while training runs
  task = f"(cd {shlex.quote(str(checkout))}; {edit}); {PREEMPTED}"
  assert run_in_cloud(cloud, task).returncode == 0
  assert (checkout / "README.md").read_text()
  assert not (cloud.folder / "worker/antlm_jax/README.md").read_text()


@pytest.mark.slow
def test_training_that_is_lost_is_started_again(cloud):
  task = """
    [ ! -e "$CLOUD/2" ] || exit 0
    sleep 0.5
    kill -KILL -- "-$(cat build/worker/pid)" $PPID # as by a restart
    exit 1
  """
  done = run_in_cloud(cloud, task)
  assert done.returncode == 0, done.stderr
  assert "too early (lost)" in done.stderr
  assert calls(cloud).count("create") == 1


def test_bad_input_ends_the_watching(cloud):
  done = run_in_cloud(cloud, "echo error: bad; exit 2")
  assert done.returncode == 2 and "training has ended 2" in done.stderr
  assert not (cloud.folder / "2").exists()


def test_a_resource_that_is_gone_ends_the_watching(cloud):
  task = 'rm "$CLOUD/state"; sleep 0.5; exit 3'
  done = run_in_cloud(cloud, task, "--tries=0")
  assert done.returncode == 1 and "a is NOT_FOUND" in done.stderr
  done = cloud("setup")
  assert done.returncode == 1 and "a is NOT_FOUND" in done.stderr


@pytest.fixture
def job(checkout, tmp_path):
  """Returns a function that starts a job, whose only task runs `$TASK`."""
  run(checkout / "launch/setup.sh", cwd=checkout)
  bin_folder = tmp_path / "bin"
  tell = f'echo "$(basename "$0") $*" >> {tmp_path}/told\n'
  write_script(bin_folder / "scontrol", tell)
  write_script(
    bin_folder / "scancel", f"{tell}kill -TERM $(cat {tmp_path}/task)"
  )
  write_script(
    bin_folder / "srun",
    f"{tell}while [[ $1 == --* ]]; do shift; done\n"
    f'"$@" &\necho $! > {tmp_path}/task\nwait $!\n',
  )
  # Slurm runs a copy in another folder.
  copy = shutil.copy(
    checkout / "launch/slurm_job.sh", tmp_path / "slurm_script"
  )
  env = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
  words = ["bash", copy, "0", *TRAINING[2:]]

  def start_job(task: str):
    return start(*words, env=env | {"TASK": task}, cwd=checkout)

  start_job.told = lambda: (tmp_path / "told").read_text().splitlines()
  return start_job


@pytest.mark.parametrize(
  "status, requeued", [(0, 0), (2, 0), (3, 0), (75, 1), (130, 0)]
)
def test_a_job_queues_itself_again_after_75(job, status, requeued):
  with job(f"exit {status}") as process:
    assert process.wait(timeout=20) == status, process.stderr.read()
  assert job.told()[1:] == ["scontrol requeue 17"] * requeued
  words = shlex.split(job.told()[0])
  assert words[0] == "srun" and "antlm_jax train" in job.told()[0]


SAVES = "trap 'kill $!; exit 75' TERM; echo ready; sleep 60 & wait"


@pytest.mark.parametrize(
  "sent, requeued", [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)]
)
def test_a_job_saves_when_its_time_is_over_or_it_is_stopped(
  job, sent, requeued
):
  with job(SAVES) as process:
    assert process.stdout.readline() == "ready\n"
    process.send_signal(sent)
    assert process.wait(timeout=20) == 75, process.stderr.read()
  told = job.told()[1:]
  assert told[0] == "scancel --signal=TERM 17"
  assert told[1:] == ["scontrol requeue 17"] * requeued
