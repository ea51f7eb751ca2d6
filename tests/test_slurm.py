"""Slurm with Debian's daemons: two nodes on this host, as root.

These tests need `apt-get install slurmctld slurmd slurm-client munge`. The GPUs
of the nodes are files, which Slurm counts and JAX on CPUs ignores.
"""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from antlm_jax.data import toy_english
from antlm_jax.data.prepared_folder import Manifest, PreparedData
from tests import runs

PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol"
PATH = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
pytestmark = [
  pytest.mark.nightly,
  pytest.mark.skipif(bool(MISSING), reason=f"Slurm lacks {MISSING}"),
  pytest.mark.skipif(os.geteuid() != 0, reason="the daemons need root"),
]
# JAX connects to the first node by this name.
NODES = "127.0.0.1", "127.0.0.2"
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=1,batch_sched_delay=0
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 \
Port=[{first}-{last}] CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 \
ThreadsPerCore=1 Gres=gpu:1 RealMemory=16000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm():
  """Runs the daemons; returns the environment of Slurm's commands."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm"))  # a short path
  folder.chmod(0o755)
  key = folder / "key"
  key.write_bytes(os.urandom(128))
  key.chmod(0o400)
  (folder / "state").mkdir()
  (folder / "gpu").touch()
  (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu\n")
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    first = min(free.getsockname()[1], 65_000)
  names = {"host": socket.gethostname().partition(".")[0], "folder": folder}
  ports = {"first": first, "last": first + 1, "port": first + 2}
  (folder / "slurm.conf").write_text(CONFIG.format(**names, **ports))
  environment = os.environ | {
    "PATH": PATH,
    "SLURM_CONF": str(folder / "slurm.conf"),
    "JAX_PLATFORMS": "cpu",
  }
  words = ["munged", "--foreground", "--force", f"--key-file={key}"]
  words += [f"--{what}-file={folder}/munge.{what}" for what in ("pid", "seed")]
  words += [f"--log-file={folder}/munge.log", f"--socket={folder}/munge"]
  daemons = [words, ["slurmctld", "-D"]]
  daemons += [["slurmd", "-D", "-N", node] for node in NODES]
  quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
  started = []
  try:
    for daemon in daemons:
      program = subprocess.Popen(daemon, env=environment, **quiet)
      started.append(program)
      time.sleep(1)
    states = ["sinfo", "--noheader", "--format=%T"]
    until(lambda: output(states, environment).split() == ["idle"], 30)
    yield environment
  finally:
    for program in reversed(started):
      program.terminate()
      program.wait(20)
    shutil.rmtree(folder)


def output(words, environment) -> str:
  done = subprocess.run(
    words, env=environment, cwd=runs.ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, (words, done.stdout, done.stderr)
  return done.stdout


def until(happens, seconds: float) -> None:
  end = time.monotonic() + seconds
  while not happens():
    assert time.monotonic() < end, happens
    time.sleep(0.2)


def states(environment, job: str) -> dict[str, str]:
  """Returns the states of a job's tasks by number, or of the job itself."""
  told = output(["scontrol", "show", "job", job, "--oneliner"], environment)
  pattern = r"(?:JobId=(\d+) .*?)(?:ArrayTaskId=(\d+) .*?)?JobState=(\w+)"
  found = (re.search(pattern, line) for line in told.splitlines())
  return {match[2] or "": match[3] for match in found}


def submit(environment, *words: str) -> str:
  return output(["sbatch", "--parsable", *words], environment).strip()


def test_prepare_as_an_array_of_which_a_task_is_killed(slurm, tmp_path):
  toy_english.write_toy_english(tmp_path / "toy")
  words = f"prepare --text {tmp_path}/toy/text --vocab_size=500 --seq_len=64"
  alone = runs.run("antlm_jax", *words.split(), f"--output={tmp_path}/alone")
  assert alone.returncode == 0, alone.stderr
  words += f" --output={tmp_path}/out --tasks=4 --task=$SLURM_ARRAY_TASK_ID"
  command = " ".join(runs.command("antlm_jax")) + " " + words
  log = f"--output={tmp_path}/%A_%a.log"
  how = [log, f"--chdir={runs.ROOT}", f"--wrap=exec {command}"]
  job = submit(slurm, "--array=0-3", *how)
  until(lambda: states(slurm, job).get("1") == "RUNNING", 60)
  output(["scancel", "--signal=KILL", "--full", f"{job}_1"], slurm)
  ended = {"COMPLETED", "FAILED", "CANCELLED"}
  until(lambda: {*states(slurm, job).values()} <= ended, 120)
  others = states(slurm, job)
  assert others.pop("1") != "COMPLETED" and {*others.values()} == {"COMPLETED"}
  assert not (tmp_path / "out/manifest.json").exists()
  again = submit(slurm, "--array=1", *how)
  until(lambda: {*states(slurm, again).values()} == {"COMPLETED"}, 60)
  made, whole = (Manifest.load(tmp_path / name) for name in ("out", "alone"))
  assert len(made.splits["train"].shards) == 4
  for name, split in whole.splits.items():
    assert made.splits[name].sha256 == split.sha256
    assert made.splits[name].tokens == split.tokens


def test_datatrove_runs_as_arrays(slurm, tmp_path):
  """Catches a step that is lost between this process and a node."""
  pytest.importorskip("datatrove", reason="pip install .[datatrove]")
  from tests.test_datatrove import document

  lines = [{"text": document(seed)} for seed in range(200)]
  runs.write_lines(tmp_path / "raw/a.jsonl", lines)  # other tasks have no file
  words = f"--text {tmp_path}/raw --output={tmp_path}/out"
  words += f" --work={tmp_path}/work"
  words += " --executor=slurm --option=partition=main,time=1:00:00 --tasks=3"
  words += " --vocab_size=400 --seq_len=32"
  script = [sys.executable, "launch/prepare_datatrove.py", *words.split()]
  programs = os.path.dirname(sys.executable)
  output(script, slurm | {"PATH": f"{programs}:{PATH}"})
  until((tmp_path / "out/manifest.json").exists, 300)
  PreparedData.open(tmp_path / "out").verify()


@pytest.fixture
def trained(slurm, prepared, tmp_path):
  """Returns a function that trains by launch/slurm.sh; it returns the log."""
  logs = []

  def train(name: str, *while_it_runs) -> pathlib.Path:
    args = runs.train_args(
      tmp_path / name, prepared, "curriculum=150C+150M steps"
    )
    script = [str(runs.ROOT / "launch/slurm.sh"), "run", name]
    script += ["--nodes=2", "--gpus=1", "--", *args]
    said = output(script, slurm)
    job = said.split()[-1]
    logs.append(runs.ROOT / f"runs/slurm/{name}-{job}.log")
    for happens in while_it_runs:
      happens(job, logs[-1])
    until(lambda: states(slurm, job)[""] == "COMPLETED", 200)
    return logs[-1]

  yield train
  for log in logs:
    log.unlink(missing_ok=True)


def test_a_training_of_two_nodes_is_queued_again(slurm, trained, tmp_path):
  def leave(job, log):
    until(lambda: log.exists() and "step 50/300" in log.read_text(), 120)
    output(["scancel", "--batch", "--signal=USR1", job], slurm)
    until(lambda: "exit status 75" in log.read_text(), 60)

  told = trained("stopped", leave).read_text()
  assert "saved: run the same command to resume" in told
  assert re.search(r"resuming from step \d+", told)
  trained("whole")
  assert runs.same_params(tmp_path / "stopped", tmp_path / "whole")
