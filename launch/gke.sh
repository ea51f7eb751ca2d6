#!/usr/bin/env bash
# Trains on TPUs of a GKE cluster (v4 to tpu7x), using xpk (pip install xpk).
#
#   ./launch/gke.sh create_cluster --cluster=C --type=v5litepod-256 --spot
#   ./launch/gke.sh run NAME --cluster=C --type=v5litepod-256 -- \
#     --config=configs/X.py --workdir=gs://...
#   ./launch/gke.sh logs NAME --cluster=C [--follow]
#   ./launch/gke.sh status NAME --cluster=C
#   ./launch/gke.sh delete NAME --cluster=C         ends the training
#   ./launch/gke.sh delete_cluster --cluster=C      asks first
#
# run adds this checkout to a base image, and each container installs it when it
# starts. An --image of your own must contain antlm_jax. Kubernetes restarts all
# containers after status 75, a crash or a preemption, at most --max_restarts
# times. It does not restart them after status 2.
#
#   --type=TYPE           TPU of one slice, in xpk's terms: v5litepod-256,
#                         v5p-256, v6e-256, tpu7x-4x4x4, ...
#   --slices=1            number of slices, joined over the network
#   --zone, --project     default: gcloud's own
#   --spot, --on_demand, --reservation=R      capacity of the cluster
#   --base_image=python:3.12, --image=IMAGE
#   --max_restarts=20     includes restarts after preemptions
#   --grace=120           seconds that a container has to save before it ends
#   --node=0, --worker=0  slice and worker whose log to print
#   --yes                 delete_cluster without asking
#   --dry_run             print the commands and do not run them
set -euo pipefail
launch="$(cd "$(dirname "$0")" && pwd)"
root="$(dirname "$launch")"
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$launch/common.sh"
# shellcheck source-path=SCRIPTDIR source=flags.sh
. "$launch/flags.sh"

option=([cluster]="" [type]="" [slices]=1 [zone]="" [project]="" [spot]=no
  [on_demand]=no [reservation]="" [base_image]=python:3.12 [image]=""
  [max_restarts]=20 [grace]=120 [node]=0 [worker]=0 [follow]=no [yes]=no
  [dry_run]=no)

check_type() {
  case "${option[type]}" in
    v4-*) generation=v4 ;;
    v5litepod-*) generation=v5e ;;
    v5p-*) generation=v5p ;;
    v6e-*) generation=v6e ;;
    tpu7x-*) generation=tpu7x ;;
    "") fail "which TPU? --type=v5litepod-16, v5p-256, tpu7x-4x4x4, ..." ;;
    *) fail "--type=${option[type]}: must be v4-N, v5litepod-N, v5p-N, v6e-N \
or tpu7x-AxBxC" ;;
  esac
}

# xpk with what all its commands take.
xpk_() { # WORD...
  run xpk "$1" "$2" "--cluster=${option[cluster]}" "${place[@]}" "${@:3}"
}

create_cluster() {
  check_type
  local capacity=()
  [ "${option[spot]}" = no ] || capacity+=(--spot)
  [ "${option[on_demand]}" = no ] || capacity+=(--on-demand)
  [ -z "${option[reservation]}" ] ||
    capacity+=("--reservation=${option[reservation]}")
  [ "${#capacity[@]}" -eq 1 ] ||
    fail "give one of --spot, --on_demand and --reservation=R"
  xpk_ cluster create "--tpu-type=${option[type]}" \
    "--num-slices=${option[slices]}" "${capacity[@]}"
}

do_run() {
  check_training
  check_workdir
  check_type
  local image=() training=(python -m antlm_jax.train "${rest[@]}") command=""
  if [ -n "${option[image]}" ]; then
    image=("--docker-image=${option[image]}")
  else
    # Packed and unpacked: beside the checkout's code there may be gigabytes.
    local code="$root/build/gke"
    pack "$root" "$root/build/antlm_jax.tar.gz"
    run rm -rf "$code"
    run mkdir -p "$code"
    run tar -xzf "$root/build/antlm_jax.tar.gz" -C "$code"
    image=("--base-docker-image=${option[base_image]}" "--script-dir=$code")
    command="launch/setup.sh tpu && "
    training[0]=.venv/bin/python
  fi
  # As a process of its own, training gets the SIGTERM that xpk's shell passes
  # on. xpk lets a JobSet restart after statuses 42 and 127 to 255; with these,
  # 75 among them, after all but 2: bad input.
  command+="exec $(quote "${training[@]}")"
  local environment
  environment="$(flags "$generation" "${option[slices]}")"
  xpk_ workload create "--workload=$name" "--tpu-type=${option[type]}" \
    "--num-slices=${option[slices]}" "${image[@]}" \
    "--max-restarts=${option[max_restarts]}" --restart-on-exit-codes=1,3-126 \
    "--termination-grace-period-seconds=${option[grace]}" \
    "--env=PYTHONUNBUFFERED=1" "--env=$environment" "--command=$command"
}

logs() {
  need kubectl "https://kubernetes.io/docs/tasks/tools"
  # This sets kubectl up for the cluster.
  xpk_ workload list "--filter-by-job=$name"
  local pods="xpk.google.com/workload=$name"
  pods+=",jobset.sigs.k8s.io/job-index=${option[node]}"
  pods+=",batch.kubernetes.io/job-completion-index=${option[worker]}"
  local follow=(--tail=50)
  [ "${option[follow]}" = no ] || follow+=(--follow)
  run kubectl logs "--selector=$pods" --container=jax-tpu "${follow[@]}"
}

parse "$@"
[ "${#words[@]}" -gt 0 ] || fail "give a command (see --help)"
numbers 1 slices
numbers 0 max_restarts grace node worker
need xpk "pip install xpk"
place=()
[ -z "${option[zone]}" ] || place+=("--zone=${option[zone]}")
[ -z "${option[project]}" ] || place+=("--project=${option[project]}")
[ -n "${option[cluster]}" ] || fail "which cluster? --cluster=NAME"
force=()
[ "${option[yes]}" = no ] || force=(--force)
case "${words[0]}" in
  create_cluster | delete_cluster)
    [ "${#words[@]}" -eq 1 ] || fail "name it with --cluster=NAME" ;;
  *)
    [ "${#words[@]}" -eq 2 ] || fail "give a command and a name (see --help)"
    name="${words[1]}"
    # What xpk takes; it makes longer names of it.
    [[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
      fail "$name: a name has at most 40 small letters, digits and dashes" ;;
esac
case "${words[0]}" in
  create_cluster) create_cluster ;;
  run) do_run ;;
  logs) logs ;;
  status) xpk_ workload list "--filter-by-job=$name" ;;
  delete) xpk_ workload delete "--workload=$name" ;;
  delete_cluster) xpk_ cluster delete "${force[@]}" ;;
  *) fail "create_cluster, run, logs, status, delete or delete_cluster? (see \
--help)" ;;
esac
