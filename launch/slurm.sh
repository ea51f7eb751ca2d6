#!/usr/bin/env bash
# Trains on the GPUs of a Slurm cluster, from a checkout that all nodes see.
#
#   ./launch/slurm.sh setup             installs into .venv/, on the login node
#   ./launch/slurm.sh run NAME --nodes=4 --gpus=8 --time=24:00:00 -- \
#     --config=configs/X.py --workdir=...
#   ./launch/slurm.sh logs NAME [--follow]
#   ./launch/slurm.sh status NAME
#   ./launch/slurm.sh stop NAME         lets training save and end for good
#   ./launch/slurm.sh delete NAME       cancels the job, waiting or running
#
# Before its time limit, the job saves and queues itself again. It does the same
# after status 75, and Slurm does so after a node fails. After a crash, training
# starts again within the job, at most --tries times. Status 2 ends the job.
#
#   --nodes=1, --gpus=8   number of nodes, and of GPUs per node
#   --time=HH:MM:SS       time limit of the job, default: the partition's
#   --leave=300           seconds before the limit at which training saves
#   --partition, --account
#   --sbatch_args='...'   more arguments for sbatch, such as --mem=0
#   --tries=3             number of runs after crashes, within the time limit
#   --unchecked           do not compare the config and the GPUs before run
#   --dry_run             print the commands and do not run them
set -euo pipefail
launch="$(CDPATH='' cd "$(dirname "$0")" && pwd)"
root="$(dirname "$launch")"
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$launch/common.sh"

option=([nodes]=1 [gpus]=8 [time]="" [leave]=300 [partition]="" [account]=""
  [sbatch_args]="" [tries]=3 [follow]=no [unchecked]=no
  [dry_run]=no)
logs="$root/runs/slurm"
shopt -s extglob

# Fails for a time limit that Slurm does not read, or under --leave.
check_time() {
  local time="${option[time]}" hours="" days=0 parts=() seconds
  [ -n "$time" ] || return 0
  [[ ! $time =~ ^([0-9]+)[hH]$ ]] || hours=": write ${BASH_REMATCH[1]}:00:00"
  [[ $time =~ ^([0-9]+-[0-9]+(:[0-9]+){0,2}|[0-9]+(:[0-9]+){0,2})$ ]] ||
    fail "--time=$time: must be HH:MM:SS or DAYS-HH:MM:SS$hours"
  IFS=: read -ra parts <<< "${time#*-}"
  if [[ $time == *-* ]]; then
    days="${time%%-*}"
    parts+=(0 0)
  elif [ "${#parts[@]}" -lt 3 ]; then # minutes and seconds
    parts=(0 "${parts[0]}" "${parts[1]:-0}")
  fi
  seconds=$((10#$days * 86400 + 10#${parts[0]} * 3600 + 10#${parts[1]} * 60 +
    10#${parts[2]}))
  ((seconds > option[leave])) ||
    fail "--time=$time: training saves --leave=${option[leave]} seconds \
before the limit, so give more time"
}

# JAX expects a task per GPU, and each task to see all GPUs of its node. Each
# process then uses the GPU of its own number. (With --gpus-per-task, each task
# would see only a GPU 0.)
do_run() {
  check_training
  check_time
  check_plan "$root" "gpu:${option[nodes]}x${option[gpus]}" 1
  need sbatch "run this on a login node of the cluster"
  [ "${option[unchecked]}${option[dry_run]}" != nono ] ||
    [ -x "$root/.venv/bin/python" ] ||
    fail "the nodes need $root/.venv: run launch/slurm.sh setup first"
  local jobs more request=("--job-name=$name" "--nodes=${option[nodes]}"
    "--ntasks-per-node=${option[gpus]}" "--gpus-per-node=${option[gpus]}")
  [ -z "${option[time]}" ] || request+=("--time=${option[time]}")
  [ -z "${option[partition]}" ] || request+=("--partition=${option[partition]}")
  [ -z "${option[account]}" ] || request+=("--account=${option[account]}")
  request+=(--requeue "--signal=B:USR1@${option[leave]}" --open-mode=append
    "--chdir=$root" "--output=$logs/$name-%j.log")
  read -ra more <<< "${option[sbatch_args]}"
  need squeue "run this on a login node of the cluster"
  # In a bucket, nothing else keeps two runs out of one workdir.
  jobs="$(run squeue --noheader "--format=%i is %T" "--name=$name" \
    "--user=$(id -un)")"
  [ -z "$jobs" ] || fail "$name has a job (${jobs%%$'\n'*}): stop or delete \
it, or give another name"
  run mkdir -p "$logs"
  run sbatch "${request[@]}" "${more[@]}" "$launch/slurm_job.sh" \
    "${option[tries]}" "${rest[@]}"
}

# Sets `log` to the newest log of the name, or to a pattern in a dry run.
find_log() {
  local path
  log=""
  # Digits alone: a name may be the beginning of another.
  for path in "$logs/$name"-+([0-9]).log; do
    if [ -z "$log" ] || [ "$path" -nt "$log" ]; then
      log="$path"
    fi
  done
  [ "${option[dry_run]}" = yes ] || [ -e "$log" ] ||
    fail "$name has no log yet: see launch/slurm.sh status $name"
}

parse "$@"
numbers 1 nodes gpus
numbers 0 tries leave
[ "${#words[@]}" -gt 0 ] || fail "give a command (see --help)"
if [ "${words[0]}" != setup ]; then
  [ "${#words[@]}" -eq 2 ] || fail "give a command and a name (see --help)"
  name="${words[1]}"
  [[ $name =~ ^[A-Za-z][A-Za-z0-9_.-]*$ ]] ||
    fail "$name: a name has letters, digits, dots, dashes and underscores"
fi
case "${words[0]}" in
  setup) run "$launch/setup.sh" cuda ;;
  run) do_run ;;
  logs)
    find_log
    follow=()
    [ "${option[follow]}" = no ] || follow=(--follow=name)
    run tail -n 50 "${follow[@]}" "$log" ;;
  status)
    need squeue "run this on a login node of the cluster"
    run squeue "--name=$name" "--user=$(id -un)" ;;
  stop)
    need scancel "run this on a login node of the cluster"
    run scancel --batch --signal=TERM "--name=$name" "--user=$(id -un)" ;;
  delete)
    need scancel "run this on a login node of the cluster"
    run scancel "--name=$name" "--user=$(id -un)" ;;
  *) fail "setup, run, logs, status, stop or delete? (see --help)" ;;
esac
