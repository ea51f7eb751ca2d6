#!/usr/bin/env bash
# Trains on TPUs of a GKE cluster (v4 to tpu7x), using gcluster of Google's
# Cluster Toolkit (v1.103.0 or later). docs/how_to/tpu.md makes the cluster.
#
#   ./launch/gke.sh run NAME --cluster=C --type=v5litepod-256 -- \
#     --config=configs/X.py --workdir=gs://...
#   ./launch/gke.sh logs NAME --cluster=C [--follow]
#   ./launch/gke.sh status NAME --cluster=C
#   ./launch/gke.sh delete NAME --cluster=C         ends the training
#
# run adds this checkout to a base image, and each container installs it when it
# starts. GCLUSTER_IMAGE_REPO must name an Artifact Registry repository for this
# image. An --image of your own must contain antlm_jax. Kubernetes restarts all
# containers after status 75, a crash or a preemption, at most --max_restarts
# times. It does not restart them after status 2, or without the program (126,
# 127).
#
#   --type=TYPE           TPU of one slice, with its number of chips or, for
#                         tpu7x, its topology: v5litepod-256, v5p-128, v6e-256,
#                         tpu7x-4x4x4 (only v4-8 counts cores)
#   --slices=1            number of slices, joined over the network
#   --cluster, --location, --project      default: gcluster job config's
#   --base_image=python:3.12, --image=IMAGE         see above
#   --max_restarts=20     includes restarts after preemptions
#   --grace=120           seconds in which a container can save before it ends
#   --submit_args='...'   more arguments for gcluster job submit
#   --node=0, --worker=0  slice and worker whose log to print
#   --unchecked           do not compare the config and the TPUs before run
#   --dry_run             print the commands and do not run them
set -euo pipefail
launch="$(CDPATH='' cd "$(dirname "$0")" && pwd)"
root="$(dirname "$launch")"
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$launch/common.sh"
# shellcheck source-path=SCRIPTDIR source=flags.sh
. "$launch/flags.sh"

option=([cluster]="" [type]="" [slices]=1 [location]="" [project]=""
  [base_image]=python:3.12 [image]="" [max_restarts]=20 [grace]=120
  [submit_args]="" [node]=0 [worker]=0 [follow]=no [unchecked]=no
  [dry_run]=no)

# Runs a command of gcluster job with the common arguments.
job() { # COMMAND WORD...
  run gcluster job "$1" "${place[@]}" "${@:2}"
}

do_run() {
  check_training
  [ -n "${option[image]}" ] || check_packed
  check_workdir
  local tpu=("--compute-type=${option[type]}") generation more
  local local_path
  local_path="$(local_folder)"
  [ -z "$local_path" ] || note "warning: $local_path is not gs://...: it must \
be in the image, or mounted"
  case "${option[type]}" in
    v4-*) generation=v4 ;;
    v5litepod-*) generation=v5e ;;
    v5e-*) fail "--type=${option[type]}: Google calls it \
v5litepod-${option[type]#*-}" ;;
    v5p-*) generation=v5p ;;
    v6e-*) generation=v6e ;;
    tpu7x-*) generation=tpu7x
      tpu=(--compute-type=tpu7x "--topology=${option[type]#*-}") ;;
    "") fail "which TPU? --type=v5litepod-16, v5p-128, tpu7x-4x4x4, ..." ;;
    *) fail "--type=${option[type]}: must be v4-N, v5litepod-N, v5p-N, v6e-N \
or tpu7x-AxBxC (GPUs: launch/slurm.sh)" ;;
  esac
  local size="${option[type]#*-}" cores=1
  if [ "$generation" != tpu7x ]; then
    [ "${option[type]}" != v4-8 ] || cores=2
    size="$(slice_chips "$generation" "$size" "$cores")"
  fi
  check_plan "$root" "$generation:$size" "${option[slices]}"
  local image=() training=(python -m antlm_jax train "${rest[@]}") command=""
  if [ -n "${option[image]}" ]; then
    image=("--image=${option[image]}")
  else
    # The checkout may hold gigabytes in addition to its code, so pack selects.
    # gcluster copies the folder's content to the root of the image.
    local code="$root/build/gke"
    pack "$root" "$root/build/antlm_jax.tar.gz"
    run rm -rf "$code"
    run mkdir -p "$code/antlm_jax"
    run tar -xzf "$root/build/antlm_jax.tar.gz" -C "$code/antlm_jax"
    image=("--base-image=${option[base_image]}" "--build-context=$code")
    command="cd /antlm_jax && launch/setup.sh tpu && "
    training[0]=.venv/bin/python
  fi
  # With exec, training itself receives the SIGTERM of Kubernetes. A status that
  # is not in the list ends the job: 2 (bad input), and 126 and 127, with which a
  # shell cannot run its command.
  command+="exec env PYTHONUNBUFFERED=1 $(quote \
    "$(flags "$generation" "${option[slices]}")" "${training[@]}")"
  local statuses
  printf -v statuses ',%s' {3..125} {128..255}
  read -ra more <<< "${option[submit_args]}"
  job submit "--name=$name" "${tpu[@]}" "--num-slices=${option[slices]}" \
    "${image[@]}" "--restarts=${option[max_restarts]}" \
    "--restart-on-exit-codes=1$statuses" "--grace-period=${option[grace]}s" \
    "${more[@]}" "--command=$command"
}

logs() {
  need kubectl "https://kubernetes.io/docs/tasks/tools"
  # This sets kubectl up for the cluster.
  job list "--name-contains=$name"
  local pods="gcluster.google.com/workload=$name"
  pods+=",jobset.sigs.k8s.io/job-index=${option[node]}"
  pods+=",batch.kubernetes.io/job-completion-index=${option[worker]}"
  local follow=(--tail=50)
  [ "${option[follow]}" = no ] || follow+=(--follow)
  run kubectl logs "--selector=$pods" --all-containers "${follow[@]}"
}

parse "$@"
[ "${#words[@]}" -eq 2 ] || fail "give a command and a name (see --help)"
name="${words[1]}"
# The limit of gcluster, because Kubernetes derives longer names.
[[ $name =~ ^[a-z]([-a-z0-9]{0,26}[a-z0-9])?$ ]] ||
  fail "$name: a name has at most 28 small letters, digits and dashes"
numbers 1 slices
numbers 0 max_restarts grace node worker
need gcluster "https://github.com/GoogleCloudPlatform/cluster-toolkit/releases"
place=()
for key in cluster location project; do
  [ -z "${option[$key]}" ] || place+=("--$key=${option[$key]}")
done
case "${words[0]}" in
  run) do_run ;;
  logs) logs ;;
  status) job list "--name-contains=$name" ;;
  delete) job cancel "$name" ;;
  *) fail "run, logs, status or delete? (see --help)" ;;
esac
