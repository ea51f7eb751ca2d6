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
    ("", [0], 1, []),  # these five are final
    ("", [2], 1, []),
    ("", [126], 1, []),
    ("", [127], 1, []),
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


# TPU VMs, in a cloud on this machine


@pytest.fixture
def checkout(tmp_path):
  """A checkout with our launchers and a stand-in for training.

  Setup creates a `.venv/bin/python` that runs `$TASK`.
  """
  folder = tmp_path / "checkout"
  shutil.copytree(LAUNCH, folder / "launch")
  for name in ("antlm_jax", "configs", "evals", "tests"):
    (folder / name).mkdir()
  for name in ("LICENSE", "README.md", "pyproject.toml"):
    (folder / name).touch()
  shutil.copy(LAUNCH.parent / "setup.py", folder)
  write_script(
    folder / "launch/setup.sh",
    'echo "setup $1" >> "${CLOUD:-.}/calls"\n'
    "mkdir -p .venv/bin && touch .venv/installed\n"
    "printf '#!/usr/bin/env bash\\neval \"$TASK\"\\n' > .venv/bin/python\n"
    "chmod +x .venv/bin/python\n",
  )
  return folder


CLOUD = r"""
set -euo pipefail
echo "$*" >> "$CLOUD/calls"
there() { sed "s|^gs://|$CLOUD/|" <<< "$1"; }
start() { # FOLDER SCRIPT
  mkdir -p "$1"
  TPU_FOLDER="$1" NUMBER="${1##*-}" setsid nohup bash "$2" \
    > "$1/serial" 2>&1 < /dev/null 3>&- 4>&- &
  echo $! > "$1/pid"
}
option() { # NAME WORD...
  local word
  for word in "${@:2}"; do
    [[ $word != --$1=* ]] || echo "${word#--$1=}"
  done
}
script="$(option metadata-from-file "$@")"
case "$1 $2 ${4:-}" in
  "storage cp "*)
    target="$(there "${@: -1}")"
    [[ $target != */ ]] || mkdir -p "$target"
    mkdir -p "$(dirname "$target")"
    for word in "${@:3:$#-3}"; do cp "$(there "$word")" "$target"; done ;;
  "storage cat"*)
    file="$(there "${@: -1}")" first="$(option range "$@")"
    tail -c "+$((${first%-} + 1))" "$file" ;;
  "storage ls"*) ls "$(there "$3")" ;;
  "storage rm "*) for word in "${@:3}"; do rm "$(there "$word")"; done ;;
  "compute tpus create")
    [ ! -e "$CLOUD/state" ]
    if [ -e "$CLOUD/again" ] && [ -e "$CLOUD/1" ]; then
      rm "$CLOUD/again"
      echo SUSPENDED > "$CLOUD/state"
      exit
    fi
    echo ACTIVE > "$CLOUD/state"
    for n in $(seq 0 $((WORKERS - 1))); do
      start "$CLOUD/worker-$n" "${script#*=}"
    done ;;
  "compute tpus delete")
    rm "$CLOUD/state"
    pids="$(cat "$CLOUD"/worker-*/pid || true)"
    rm -rf "$CLOUD"/worker-*
    for pid in $pids; do kill -KILL -- "-$pid" || true; done ;;
  "compute tpus describe")
    cat "$CLOUD/state" || { echo "ERROR: NOT_FOUND: no such" >&2; exit 1; } ;;
  "compute instances "*)
    if [ "$3" = create ]; then start "$CLOUD/watcher-0" "${script#*=}"; fi ;;
esac
"""


@pytest.fixture
def cloud(checkout, tmp_path):
  """Returns a function that runs `tpu_vm.sh` in a cloud of `workers` workers.

  The task's first run makes `$CLOUD/1`, later runs make `$CLOUD/2`.
  """
  folder = tmp_path / "cloud"
  folder.mkdir()
  write_script(tmp_path / "bin/gcloud", CLOUD)
  write_script(tmp_path / "bin/curl", "echo \"WORKER_ID: '$NUMBER'\"")
  env = {
    "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    "CLOUD": str(folder),
    "PYTHON": sys.executable,
    "COPY_EVERY": "0.2",
  }

  def call(command, *words, task="true", workers=1, **kwargs):
    count = 'mkdir "$CLOUD/1" 2> /dev/null || mkdir -p "$CLOUD/2"; '
    place = [] if command in ("logs", "stop") else ["--zone=z"]
    if command not in ("run", "delete"):
      place.append("--workdir=gs://b/a run")
    call.env = env | {"TASK": count + task, "WORKERS": str(workers)}
    call.env |= kwargs
    script = checkout / "launch/tpu_vm.sh"
    return run(script, command, "a", "--poll=0.1", *place, *words, env=call.env)

  call.folder = folder
  yield call
  for path in folder.glob("*/pid"):
    with contextlib.suppress(OSError):
      os.killpg(int(path.read_text()), signal.SIGKILL)


def train_in(cloud, task: str, *options, **kwargs):
  """Runs a training in the cloud and watches it."""
  options = ("--type=v5p-8", "--spot", *options)
  return cloud("run", *options, *TRAINING, task=task, **kwargs)


def calls(cloud, *words: str) -> int:
  """Returns how often gcloud was called with these words."""
  lines = (cloud.folder / "calls").read_text().splitlines()
  return sum({*words} <= {*line.split()} for line in lines)


PREEMPTED = """
echo "training $(ls -d "$CLOUD"/[12] | wc -l)"
[ ! -e "$CLOUD/2" ] || exit 0
trap "exit 75" TERM
sleep 1 # so that its log is copied
echo SUSPENDED > "$CLOUD/state"
kill -TERM -- "-$(cat "$CLOUD/worker-0/pid")"
sleep 60 & wait
"""


def test_training_survives_a_preemption_and_deletes_its_tpus(cloud, checkout):
  """The code and the packages stay; one log has both parts."""
  edit = "echo new >> README.md; "  # by a person, while training runs
  shows = 'echo "code: $(cat README.md)."; '  # before each run's edit
  task = f"{shows}(cd {shlex.quote(str(checkout))}; {edit}); {PREEMPTED}"
  done = train_in(cloud, task)
  assert done.returncode == 0, done.stderr
  assert "was preempted: requesting it again" in done.stderr
  assert "training has ended 0" in done.stderr
  log = cloud("logs").stdout
  assert log.index("training 1") < log.index("training 2")
  assert log.count("code: .") == 2 and "new" not in log, log
  assert (calls(cloud, "tpus", "create"), calls(cloud, "setup")) == (2, 1)
  # The worker or the watching command deletes them.
  wait_for(lambda: not (cloud.folder / "state").exists())
  assert not (cloud.folder / "b/a run-launch/startup.sh").exists()
  assert "a is NOT_FOUND" in cloud("status").stdout


@pytest.mark.slow
def test_a_preemption_while_it_is_requested_again_is_survived(cloud):
  (cloud.folder / "again").touch()
  done = train_in(cloud, PREEMPTED)
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("was preempted") == 2
  assert calls(cloud, "tpus", "create") == 3


def test_all_workers_log_and_only_the_first_installs(cloud):
  """Also without anybody who watches, with variables and extras."""
  task = 'echo "$KEY of $NUMBER"; [ $NUMBER = 0 ] || sleep 60'
  words = "--env=KEY", "--extras=wandb", "--watcher", "--service_account=e"
  words += ("--type=v5p-16",)
  done = train_in(cloud, task, *words, workers=2, KEY="a 'key'")
  assert done.returncode == 0 and "requested 2 hosts" in done.stderr
  wait_for(lambda: not (cloud.folder / "state").exists())
  logs = cloud.folder / "b/a run-launch/logs"
  for n in range(2):
    assert f"a 'key' of {n}" in (logs / f"0-{n}.log").read_text()
  assert (
    "2 of 2 hosts have a log\ntraining has ended 0" in cloud("status").stdout
  )
  assert calls(cloud, "setup", "tpu,wandb") == calls(cloud, "setup") == 1
  # The watcher deletes itself.
  wait_for(lambda: calls(cloud, "instances", "delete", "a-watcher"))
  assert calls(cloud, "--service-account=e") == 2


def test_a_restarted_machine_continues(cloud):
  task = """
    [ ! -e "$CLOUD/2" ] || exit 0
    script="$CLOUD/b/a run-launch/startup.sh"
    setsid bash -c 'sleep 1; exec bash "$0"' "$script" > /dev/null 2>&1 &
    kill -KILL -- "-$(cat "$TPU_FOLDER/pid")" $PPID
  """
  done = train_in(cloud, task)
  assert done.returncode == 0, done.stderr
  assert calls(cloud, "tpus", "create") == 1


def test_stop_saves_and_ends_and_keep_leaves_the_tpus(cloud):
  saves = "trap 'echo saved; exit 75' TERM; sleep 60 & wait"
  train_in(cloud, saves, "--keep", "--watcher")
  wait_for(lambda: (cloud.folder / "1").exists())
  assert cloud("stop").returncode == 0
  done = cloud("watch")
  assert done.returncode == 75 and "saved" in done.stdout, done.stderr
  assert cloud("watch").returncode == 75
  assert (cloud.folder / "state").exists()


def test_a_deletion_also_ends_the_watcher(cloud):
  """Catches a small VM that costs money after its TPUs are deleted."""
  train_in(cloud, "sleep 60", "--watcher")
  wait_for(lambda: (cloud.folder / "1").exists())
  assert cloud("delete", "--yes").returncode == 0
  wait_for(lambda: calls(cloud, "instances", "delete", "a-watcher"))
  assert calls(cloud, "tpus", "create") == 1


def test_bad_input_ends_the_run(cloud):
  done = train_in(cloud, "echo error: bad; exit 2")
  assert done.returncode == 2 and "training has ended 2" in done.stderr
  assert "error: bad" in done.stdout
  assert not (cloud.folder / "2").exists()


def test_a_resource_that_is_gone_ends_the_watching(cloud):
  done = train_in(cloud, 'rm "$CLOUD/state"; sleep 60')
  assert done.returncode == 1 and "a is NOT_FOUND" in done.stderr
  for command in ("watch", "stop"):
    done = cloud(command, "--workdir=gs://b/c")
    ends_with_error(done, "cannot read gs://b/c")


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
