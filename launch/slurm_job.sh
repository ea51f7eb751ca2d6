#!/usr/bin/env bash
# The job of launch/slurm.sh, which submits it with sbatch.
#
#   launch/slurm_job.sh TRIES TRAINING_ARGUMENT...
#
# Slurm sends SIGUSR1 some minutes before the time limit, and SIGTERM to stop
# the job.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
# Slurm runs a copy of this file; --chdir makes the checkout its folder.
# shellcheck source-path=SCRIPTDIR source=common.sh
. launch/common.sh
# shellcheck source-path=SCRIPTDIR source=flags.sh
. launch/flags.sh

tries="$1"
leaving=no cancelled=no child=""
# Lets training save and end. It does not run again within this job.
# shellcheck disable=SC2329 # the traps call it
leave() {
  [ -z "$child" ] || kill -USR1 "$child" || true
  # Signals only the tasks, because srun kills them after a SIGTERM to itself.
  scancel --signal=TERM "$SLURM_JOB_ID" || true
}
trap 'leaving=yes; leave' USR1
trap 'cancelled=yes; leave' TERM

environment="$(flags gpu)"
export PYTHONUNBUFFERED=1 "${environment?}"
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # srun does not inherit it
fi
# After the first task ends, the others have five minutes to finish saving, or
# to notice that a peer has died.
launch/rerun.sh "--tries=$tries" --end_on_75 srun --kill-on-bad-exit=0 \
  --wait=300 .venv/bin/python -m antlm_jax train "${@:2}" &
child=$!
await "$child"

echo "slurm_job.sh: exit status $status" >&2
if [ "$cancelled" = no ]; then
  case "$status" in
    0 | 2 | 130) ;;
    75) scontrol requeue "$SLURM_JOB_ID" ;;
    *) [ "$leaving" = no ] || scontrol requeue "$SLURM_JOB_ID" ;;
  esac
fi
exit "$status"
