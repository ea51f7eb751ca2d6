#!/usr/bin/env bash
# Trains on Cloud TPU VMs (v4, v5e, v5p, v6e), requested as a queued resource.
#
#   ./launch/tpu_vm.sh create NAME --type=v5litepod-256 [--spot]
#   ./launch/tpu_vm.sh setup NAME       waits, then copies this checkout to all
#                                       workers and installs it in their .venv/
#   ./launch/tpu_vm.sh run NAME --type=v5litepod-256 [--follow | --rerun] -- \
#     --config=configs/X.py --workdir=gs://...
#   ./launch/tpu_vm.sh logs NAME [--follow]
#   ./launch/tpu_vm.sh status NAME
#   ./launch/tpu_vm.sh stop NAME        lets training save and end
#   ./launch/tpu_vm.sh delete NAME      deletes the TPUs; asks first
#
# run starts training in the background on all workers. With --follow it prints
# the first worker's log. With --rerun it also waits until training ends. After
# a preemption it requests the resource again, sets it up and resumes, so it
# needs the options of create. Ctrl-C stops only the watching.
#
#   --type=TYPE           TPU of one slice as gcloud calls it, e.g. v5p-256
#   --slices=1            number of slices, joined over the network
#   --spot, --reserved    cheap and preemptible, or from your reservation
#   --zone, --project     default: those of gcloud
#   --runtime=VERSION     TPU software, default: the generation's
#   --iap                 use no external addresses, and IAP for ssh
#   --create_args='...'   more arguments for gcloud's create
#   --node=0, --worker=0  slice and worker whose log to print
#   --tries=5             number of runs after crashes
#   --poll=30             seconds between checks of the state
#   --yes                 delete without asking
#   --unchecked           do not compare the config and the TPUs before run
#   --dry_run             print the commands and do not run them
set -euo pipefail
launch="$(cd "$(dirname "$0")" && pwd)"
root="$(dirname "$launch")"
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$launch/common.sh"
# shellcheck source-path=SCRIPTDIR source=flags.sh
. "$launch/flags.sh"

option=([type]="" [slices]=1 [spot]=no [reserved]=no [zone]="" [project]=""
  [runtime]="" [iap]=no [create_args]="" [node]=0 [worker]=0 [tries]=5
  [poll]=30 [follow]=no [rerun]=no [yes]=no [unchecked]=no [dry_run]=no)

# Runs a gcloud command on the queued resource.
qr() { # VERB ARGUMENT...
  run gcloud compute tpus queued-resources "$1" "$name" "${place[@]}" "${@:2}"
}

# Runs a command line on workers.
remote() { # NODE WORKER COMMAND_LINE
  # A connection to a preempted TPU hangs unless ssh checks it.
  qr ssh "${via[@]}" "--node=$1" "--worker=$2" "--command=$3" \
    "--ssh-flag=-o ServerAliveInterval=30"
}

generation() {
  case "${option[type]}" in
    v4-*) echo v4 ;;
    v5litepod-*) echo v5e ;;
    v5e-*) fail "--type=${option[type]}: Google calls it \
v5litepod-${option[type]#*-}" ;;
    v5p-*) echo v5p ;;
    v6e-*) echo v6e ;;
    tpu7x*) fail "--type=${option[type]}: TPU VMs have v4 to v6e; for tpu7x \
use launch/gke.sh" ;;
    "") fail "which TPU? --type=v5litepod-16, v4-32, v5p-256, v6e-256, ..." ;;
    *) fail "--type=${option[type]}: must be v4-N, v5litepod-N, v5p-N or \
v6e-N (GPUs: launch/slurm.sh)" ;;
  esac
}

runtime() { # GENERATION
  case "$1" in
    v4) echo tpu-ubuntu2204-base ;;
    v5e) echo v2-alpha-tpuv5-lite ;;
    v5p) echo v2-alpha-tpuv5 ;;
    v6e) echo v2-alpha-tpuv6e ;;
  esac
}

# Sets `request` to the arguments of gcloud's create, and `topology`.
plan_request() {
  local kind cores=1 chips
  kind="$(generation)"
  [[ ! $kind =~ ^(v4|v5p)$ ]] || cores=2
  chips="$(slice_chips "$kind" "${option[type]#*-}" "$cores")"
  topology="$kind:$chips"
  [ "${option[spot]}${option[reserved]}" != yesyes ] ||
    fail "give --spot or --reserved, not both"
  request=("--accelerator-type=${option[type]}"
    "--runtime-version=${option[runtime]:-$(runtime "$kind")}")
  if [ "${option[slices]}" -gt 1 ]; then
    request+=("--node-count=${option[slices]}" "--node-prefix=$name")
  else
    request+=("--node-id=$name")
  fi
  [ "${option[spot]}" = no ] || request+=(--spot)
  [ "${option[reserved]}" = no ] || request+=(--reserved)
  [ "${option[iap]}" = no ] || request+=(--internal-ips)
  local more
  read -ra more <<< "${option[create_args]}"
  request+=("${more[@]}")
}

# Sets `state` to the queued resource's state, NOT_FOUND or UNKNOWN.
look() {
  local told
  state=ACTIVE # a dry run's
  if told="$(qr describe "--format=value(state.state)" 2>&1)"; then
    [ "${option[dry_run]}" = yes ] || state="${told##*$'\n'}"
    [[ $state =~ ^[A-Z_]+$ ]] || state=UNKNOWN
  elif [[ $told == *NOT_FOUND* ]]; then
    state=NOT_FOUND
  else
    state=UNKNOWN
    note "$told"
    # Waiting mends a lost connection, but no missing project, zone or login.
    [[ ! $told =~ required\ property|PERMISSION_DENIED|active\ account ]] ||
      exit 1
  fi
}

wait_until_active() {
  local last=""
  while :; do
    look
    [ "$state" = "$last" ] || [ "${option[dry_run]}" = yes ] ||
      note "$name is $state"
    case "$state" in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED | DELETING | NOT_FOUND)
        echo "error: $name is $state: see launch/tpu_vm.sh status $name" >&2
        exit 1 ;;
    esac
    last="$state"
    sleep "${option[poll]}"
  done
}

# Runs a command line on all workers and counts the expected answers, because
# gcloud ignores slices that it cannot reach.
everywhere() { # ANSWER COMMAND_LINE
  local answers line
  answers="$(remote all all "$2" | while IFS= read -r line; do
    echo "$line" >&4
    echo "$line"
  done)" || exit 1
  [ "${option[dry_run]}" = no ] || return 0
  answers="$(grep -cE "^[^ ]+: ($1)" <<< "$answers" || true)"
  note "workers that have done so: $answers"
  [ "$answers" -ge "${option[slices]}" ] || exit 1
}

# Waits until the TPUs are active, then copies and installs the checkout. With
# "again" it uses the last copy, so that the code of a run does not change.
do_setup() { # [again]
  local archive="$root/build/$name.tar.gz"
  wait_until_active
  if [ "${1:-}" != again ] || [ ! -e "$archive" ]; then
    pack "$root" "$archive"
  fi
  run gcloud compute tpus queued-resources scp "$archive" \
    "$name:antlm_jax.tar.gz" "${place[@]}" "${via[@]}" --node=all \
    --worker=all || exit 1
  everywhere ready "mkdir -p antlm_jax && tar -xzf antlm_jax.tar.gz -C \
antlm_jax && antlm_jax/launch/tpu_worker.sh setup"
}

# Starts training on the workers on which it is not running.
do_start() {
  # The firewall of TPU VMs opens this port.
  local command=(env JAX_COORDINATOR_PORT=8476)
  command+=("$(flags "$(generation)" "${option[slices]}")")
  command+=(launch/rerun.sh "--tries=${option[tries]}"
    .venv/bin/python -m antlm_jax train "${rest[@]}")
  everywhere "started|running already" \
    "antlm_jax/launch/tpu_worker.sh start $(quote "${command[@]}")"
}

follow_first() {
  remote 0 0 "antlm_jax/launch/tpu_worker.sh log --follow"
}

# Sets `answer` to the first worker's status, or to nothing.
ask_first() {
  answer="$(remote 0 0 "antlm_jax/launch/tpu_worker.sh status" 2> /dev/null)" ||
    answer=""
  answer="${answer##*$'\n'}"
  answer="${answer#*: }"
}

# Another preemption may make these fail. Then `watch` checks the state again.
request_anew() {
  qr delete --force --quiet || return
  run "$launch/rerun.sh" "--tries=${option[tries]}" gcloud compute tpus \
    queued-resources create "$name" "${place[@]}" "${request[@]}" || return
  start_anew
}

start_anew() {
  (do_setup again) && (do_start)
}

# Follows the first worker until training ends. One worker is enough, because
# all processes of a run end together.
watch() {
  while :; do
    follow_first || true
    ask_first
    case "$answer" in
      ended\ 75 | lost | none | running) ;;
      ended* | stopped*)
        note "training has $answer; the TPUs are still there: tpu_vm.sh delete"
        exit "${answer##* }" ;;
      *) answer="" ;; # no answer
    esac
    look
    case "$answer $state" in
      *" SUSPENDED")
        note "$name was preempted: requesting it again"
        request_anew || true ;;
      running* | " "*) sleep "${option[poll]}" ;;
      *" ACTIVE")
        note "training has ended too early ($answer): starting it again"
        start_anew || sleep "${option[poll]}" ;;
      *) sleep "${option[poll]}" ;;
    esac
    case "$state" in
      FAILED | DELETING | NOT_FOUND)
        echo "error: $name is $state: create it again and run this again" >&2
        exit 1 ;;
    esac
  done
}

# Prints the commands of `watch`, including those after a preemption.
watch_dry() {
  follow_first
  ask_first
  echo "# after a preemption:"
  look
  request_anew
}

parse "$@"
[ "${#words[@]}" -eq 2 ] || fail "give a command and a name (see --help)"
name="${words[1]}"
[[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
  fail "$name: a name has at most 40 small letters, digits and dashes"
numbers 1 slices
numbers 0 node worker tries poll
need gcloud "https://cloud.google.com/sdk/docs/install"
place=() via=()
[ -z "${option[zone]}" ] || place+=("--zone=${option[zone]}")
[ -z "${option[project]}" ] || place+=("--project=${option[project]}")
[ "${option[iap]}" = no ] || via=(--tunnel-through-iap)

case "${words[0]}" in
  create)
    plan_request
    qr create "${request[@]}" ;;
  setup) do_setup ;;
  run)
    check_training
    check_packed
    check_workdir
    plan_request
    check_plan "$root" "$topology" "${option[slices]}"
    do_start
    if [ "${option[rerun]}${option[dry_run]}" = yesyes ]; then
      watch_dry
    elif [ "${option[rerun]}" = yes ]; then
      watch
    elif [ "${option[follow]}" = yes ]; then
      follow_first
    fi ;;
  logs)
    follow=""
    [ "${option[follow]}" = no ] || follow=" --follow"
    remote "${option[node]}" "${option[worker]}" \
      "antlm_jax/launch/tpu_worker.sh log$follow" ;;
  status)
    look
    [ "${option[dry_run]}" = yes ] || echo "$name is $state"
    case "$state" in
      ACTIVE) remote all all "antlm_jax/launch/tpu_worker.sh status" ;;
      UNKNOWN | NOT_FOUND) exit 1 ;;
    esac ;;
  stop) remote all all "antlm_jax/launch/tpu_worker.sh stop" ;;
  delete)
    quiet=()
    [ "${option[yes]}" = no ] || quiet=(--quiet)
    qr delete --force "${quiet[@]}" ;;
  *) fail "create, setup, run, logs, status, stop or delete? (see --help)" ;;
esac
