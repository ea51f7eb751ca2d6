#!/usr/bin/env bash
# Trains on Cloud TPU VMs (v4, v5e, v5p, v6e), requested as a queued resource.
#
#   ./launch/tpu_vm.sh run NAME --zone=ZONE --type=v5litepod-256 [--spot] -- \
#     --config=configs/X.py --workdir=gs://BUCKET/NAME --config.data.path=gs://...
#   ./launch/tpu_vm.sh watch NAME --zone=ZONE --workdir=gs://BUCKET/NAME
#   ./launch/tpu_vm.sh logs NAME --workdir=gs://BUCKET/NAME
#   ./launch/tpu_vm.sh status NAME --zone=ZONE --workdir=gs://BUCKET/NAME
#   ./launch/tpu_vm.sh stop NAME --workdir=gs://...    lets training save and end
#   ./launch/tpu_vm.sh delete NAME --zone=ZONE         deletes the TPUs; asks
#
# run copies this checkout to WORKDIR-launch and requests TPUs. These install
# it, train, copy their logs there every half minute, and delete themselves when
# training ends or fails for good. run then watches: it prints the first
# worker's log, and requests the TPUs again after a preemption. Ctrl-C ends only
# the watching, and watch continues it. With --watcher, a small VM watches.
#
#   --type=TYPE           TPU of one slice as gcloud calls it, e.g. v5p-256
#   --slices=1            number of slices, joined over the network
#   --spot, --reserved    cheap and preemptible, or from your reservation
#   --zone, --project     the project's default is that of gcloud
#   --watcher             watch on a VM (e2-micro), which then deletes itself
#   --keep                do not delete the TPUs at the end
#   --env=NAME,...        environment variables to copy, e.g. WANDB_API_KEY. Their
#                         values lie in build/NAME, and in the bucket until
#                         training ends
#   --extras=NAME,...     more extras to install, e.g. wandb
#   --service_account=EMAIL       of the TPUs and of the watcher
#   --internal            give the TPUs no external addresses
#   --runtime=VERSION     TPU software, default: the generation's
#   --create_args='...'   more arguments for gcloud's create
#   --node=0, --worker=0  slice and worker whose log to print
#   --tries=5             number of runs after crashes
#   --poll=30             seconds between checks of the state
#   --yes                 delete without asking
#   --unchecked           do not compare the config and the TPUs before run
#   --dry_run             print the commands and do not run them
set -euo pipefail
launch="$(CDPATH='' cd "$(dirname "$0")" && pwd)"
root="$(dirname "$launch")"
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$launch/common.sh"
# shellcheck source-path=SCRIPTDIR source=flags.sh
. "$launch/flags.sh"

option=([type]="" [slices]=1 [spot]=no [reserved]=no [zone]="" [project]=""
  [workdir]="" [watcher]=no [keep]=no [env]="" [extras]="" [service_account]=""
  [internal]=no [runtime]="" [create_args]="" [node]=0 [worker]=0 [tries]=5
  [poll]=30 [yes]=no [unchecked]=no [dry_run]=no)

# Runs a gcloud command on the queued resource.
qr() { # VERB ARGUMENT...
  run gcloud compute tpus queued-resources "$1" "$name" "${place[@]}" "${@:2}"
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

# Sets `request` to the arguments of gcloud's create, and `kind`, `topology` and
# `hosts`.
plan_request() {
  local cores=1 chips more
  kind="$(generation)"
  [[ ! $kind =~ ^(v4|v5p)$ ]] || cores=2
  chips="$(slice_chips "$kind" "${option[type]#*-}" "$cores")"
  topology="$kind:$chips"
  # A host has four chips. Up to eight chips of v5e and v6e are one host.
  hosts=$((chips > 4 ? chips / 4 : 1))
  [[ $topology != v[56]e:8 ]] || hosts=1
  hosts=$((hosts * option[slices]))
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
  [ "${option[internal]}" = no ] || request+=(--internal-ips)
  [ -z "${option[service_account]}" ] ||
    request+=("--service-account=${option[service_account]}")
  read -ra more <<< "${option[create_args]}"
  request+=("${more[@]}")
}

# Writes a file of `made`. A dry run writes it too, because its commands need it.
write() { # NAME LINE...
  (umask 077 && mkdir -p "$made" && printf '%s\n' "${@:2}" > "$made/$1")
}

# Prints a script's first lines, which fetch the code from the bucket.
fetch_code() { # SCRIPT
  cat <<END
#!/usr/bin/env bash
# Made by launch/tpu_vm.sh. Google Cloud runs it at each start of the machine.
export HOME="\${HOME:-/root}"
mkdir -p "\${TPU_FOLDER:-/opt/antlm_jax}" && cd "\${TPU_FOLDER:-/opt/antlm_jax}"
for try in {1..30}; do
  [ ! -e launch/$1 ] || break
  gcloud storage cp $(quote "$folder/antlm_jax.tar.gz") . &&
    tar -xzf antlm_jax.tar.gz || sleep 10
done
END
}

# Writes what each worker runs. If it cannot fetch the code, it deletes the TPUs.
write_startup() {
  local key at_end=(true) lines=() training=(env JAX_COORDINATOR_PORT=8476)
  # The firewall of TPU VMs opens this port.
  training+=("$(flags "$kind" "${option[slices]}")")
  training+=(launch/rerun.sh "--tries=${option[tries]}"
    .venv/bin/python -m antlm_jax train "${rest[@]}")
  [ "${option[keep]}" = yes ] || at_end=(gcloud compute tpus queued-resources
    delete "$name" "${place[@]}" --force --quiet --async)
  for key in ${option[env]//,/ }; do
    lines+=("export $key=${!key@Q}")
  done
  write startup.sh "$(fetch_code tpu_worker.sh)" "${lines[@]}" \
    "export AT_END=$(quote "$(quote "${at_end[@]}")")" \
    "[ -e launch/tpu_worker.sh ] || exec $(quote "${at_end[@]}")" \
    "exec launch/tpu_worker.sh train $(quote "$folder" \
      "tpu${option[extras]:+,${option[extras]}}" "${training[@]}")"
}

# Copies the code and the request to the bucket, and requests the TPUs.
create() {
  local file watcher=("$name-watcher" "${place[@]}")
  write_startup
  write request "$(quote "${request[@]}")" "$hosts" "${option[keep]}"
  pack "$root" "$made/antlm_jax.tar.gz"
  # One by one: files of an earlier run, of which some may be missing.
  for file in status stop environment.tar; do
    run gcloud storage rm "$folder/$file" 2> /dev/null || true
  done
  run gcloud storage cp "$made/antlm_jax.tar.gz" "$made/startup.sh" \
    "$made/request" "$folder/"
  request_tpus
  [ "${option[watcher]}" = yes ] || return 0
  write watcher.sh "$(fetch_code tpu_vm.sh)" "launch/tpu_vm.sh watch $name \
$(quote "${place[@]}" "--workdir=$workdir" "--poll=${option[poll]}")" \
    "gcloud compute instances delete $(quote "${watcher[@]}") --quiet"
  local account=()
  [ -z "${option[service_account]}" ] ||
    account=("--service-account=${option[service_account]}")
  run gcloud compute instances create "${watcher[@]}" --machine-type=e2-micro \
    --image-family=debian-12 --image-project=debian-cloud \
    --scopes=cloud-platform "${account[@]}" \
    "--metadata-from-file=startup-script=$made/watcher.sh"
}

# Requests the TPUs. Words before the command may repeat it after a failure.
request_tpus() { # [WORD...]
  run "$@" gcloud compute tpus queued-resources create "$name" "${place[@]}" \
    "${request[@]}" "--metadata-from-file=startup-script=$made/startup.sh"
}

# Sets `state` to the queued resource's state, NOT_FOUND or UNKNOWN.
look() {
  local told
  state=NOT_FOUND # a dry run's
  if told="$(qr describe "--format=value(state.state)" 2>&1)"; then
    [ "${option[dry_run]}" = yes ] || state="${told##*$'\n'}"
    [[ $state =~ ^[A-Z_]+$ ]] || state=UNKNOWN
  elif [[ $told == *NOT_FOUND* ]]; then
    state=NOT_FOUND
  else
    state=UNKNOWN
    note "$told"
    # Waiting mends a lost connection, but no missing project, zone or login.
    [[ ! $told =~ required\ property|PERMISSION_DENIED|gcloud\ auth\ login ]] ||
      exit 1
  fi
}

# Prints what a worker's log has after its first `printed` bytes.
print_log() {
  local log="$folder/logs/${option[node]}-${option[worker]}.log"
  if run gcloud storage cat "--range=$printed-" "$log" > "$made/log" \
    2> /dev/null; then
    cat "$made/log"
    printed=$((printed + $(wc -c < "$made/log")))
  fi
}

# Sets `ended` to training's exit status, or to nothing.
ask_status() {
  ended="$(run gcloud storage cat "$folder/status" 2> /dev/null)" || ended=""
}

# Deletes preempted TPUs and requests them again. Another preemption may make
# this fail; then `watch` looks again.
request_anew() {
  run gcloud storage cp "$folder/startup.sh" "$made/startup.sh" || return
  qr delete --force --quiet || return
  request_tpus "$launch/rerun.sh" "--tries=${option[tries]}"
}

# Sets `request`, and `asked` to the lines of the request in the bucket.
fetch_request() {
  run gcloud storage cp "$folder/request" "$made/request" > /dev/null 2>&1 ||
    fail "cannot read $folder: is --workdir right?"
  [ "${option[dry_run]}" = no ] || return 0
  mapfile -t asked < "$made/request"
  eval "request=(${asked[0]})"
}

# Prints the log and requests preempted TPUs again, until training ends.
watch() {
  local last="" printed=0
  fetch_request
  [ "${option[dry_run]}" = no ] || { watch_dry; return; }
  while :; do
    print_log
    look
    # The workers write the status before they delete the TPUs.
    ask_status
    if [ -n "$ended" ]; then
      print_log
      note "training has ended $ended"
      [ "$state" = NOT_FOUND ] || [ "${asked[2]}" = yes ] ||
        qr delete --force --quiet 2> /dev/null || true
      exit "$ended"
    fi
    [ "$state" = "$last" ] || note "$name is $state"
    last="$state"
    case "$state" in
      SUSPENDED)
        note "$name was preempted: requesting it again"
        request_anew || true ;;
      FAILED | NOT_FOUND)
        echo "error: $name is $state: delete what is left, and run it again" >&2
        exit 1 ;;
    esac
    sleep "${option[poll]}"
  done
}

# Prints the commands of `watch`, including those after a preemption.
watch_dry() {
  run gcloud storage cat --range=0- "$folder/logs/0-0.log"
  qr describe "--format=value(state.state)"
  run gcloud storage cat "$folder/status"
  echo "# after a preemption:"
  request_anew
}

parse "$@"
[ "${#words[@]}" -eq 2 ] || fail "give a command and a name (see --help)"
name="${words[1]}"
[[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
  fail "$name: a name has at most 40 small letters, digits and dashes"
numbers 1 slices
numbers 0 node worker tries
[[ ${option[poll]} =~ ^[0-9]+(\.[0-9]+)?$ ]] ||
  fail "--poll=${option[poll]}: must be a number of seconds"
place=("--zone=${option[zone]}")
[ -z "${option[project]}" ] || place+=("--project=${option[project]}")
made="$root/build/$name"
workdir="${option[workdir]}"
if [ "${words[0]}" = run ]; then
  plan_request
  check_training
  check_packed
  for key in ${option[env]//,/ }; do
    [[ $key =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] ||
      fail "--env=$key: give the name of a variable that you have exported"
    [ -n "${!key:-}" ] || fail "--env=$key: the variable is not set"
  done
  for extra in ${option[extras]//,/ }; do
    [[ $(< "$root/setup.py") == *"\"$extra\": ["* ]] ||
      fail "--extras=$extra: setup.py has no such extra"
  done
  if [[ ,$(trained_with config.log.writers), == *,wandb,* ]]; then
    [[ ,${option[extras]}, == *,wandb,* ]] ||
      fail "log.writers=wandb: the TPUs lack the package: give --extras=wandb"
    [[ ,${option[env]}, == *,WANDB_API_KEY,* ]] ||
      fail "log.writers=wandb: the TPUs lack the key: give --env=WANDB_API_KEY"
  fi
  local_path="$(local_folder)"
  [ -z "$local_path" ] || fail "$local_path: the TPUs have no folder of this machine: copy \
it to the bucket, and give gs://BUCKET/FOLDER"
  workdir="$(trained_with workdir)"
fi
case "${words[0]}" in
  run | watch | logs | status | stop)
    [[ $workdir =~ ^gs://[^/]+/[^/] ]] || fail "give \
--workdir=gs://BUCKET/$name, the run's folder in a bucket" ;;
esac
case "${words[0]}" in
  run | watch | status | delete)
    [ -n "${option[zone]}" ] || fail "which zone? --zone=us-west4-a, ..." ;;
esac
folder="${workdir%/}-launch"
need gcloud "https://cloud.google.com/sdk/docs/install"
mkdir -p "$made"

case "${words[0]}" in
  run)
    check_plan "$root" "$topology" "${option[slices]}"
    look
    if [ "$state" = NOT_FOUND ]; then
      create
      [ "${option[dry_run]}" = yes ] ||
        note "requested $hosts hosts; logs: $folder/logs"
    elif [ "$state" = UNKNOWN ]; then
      exit 1 # `look` has said why
    else
      note "$name is $state: it is not requested again"
    fi
    [ "${option[watcher]}" = yes ] || watch ;;
  watch) watch ;;
  logs)
    run gcloud storage cat \
      "$folder/logs/${option[node]}-${option[worker]}.log" ;;
  status)
    look
    [ "${option[dry_run]}" = yes ] || echo "$name is $state"
    fetch_request
    logs="$(run gcloud storage ls "$folder/logs/" 2> /dev/null | grep -c .)" ||
      true
    [ "${option[dry_run]}" = yes ] ||
      echo "$logs of ${asked[1]} hosts have a log"
    ask_status
    [ -z "$ended" ] || echo "training has ended $ended" ;;
  stop)
    fetch_request # or the folder is another, and nothing would stop
    write stop "by launch/tpu_vm.sh"
    run gcloud storage cp "$made/stop" "$folder/stop" ;;
  delete)
    quiet=()
    [ "${option[yes]}" = no ] || quiet=(--quiet)
    qr delete --force "${quiet[@]}" ;;
  *) fail "run, watch, logs, status, stop or delete? (see --help)" ;;
esac
