#!/usr/bin/env bash
# Trains on one worker of a TPU. launch/tpu_vm.sh runs it at each start of the
# machine.
#
#   launch/tpu_worker.sh train FOLDER EXTRA,... COMMAND...
#
# The first worker installs and shares its environment in the folder, which is in
# a bucket, so that all workers, also after a preemption, run the same packages.
# Each worker copies its log there. When the command ends for good, or the folder
# has a file `stop` and training has saved, the first worker writes the exit
# status there and runs $AT_END, which deletes the TPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=common.sh
. launch/common.sh

# Seconds between two copies of the log
every="${COPY_EVERY:-30}"
metadata=http://metadata.google.internal/computeMetadata/v1/instance/attributes

# Prints a value of the TPU's environment, or 0.
tpu_env() { # NAME
  local value
  value="$(sed -n "s/^$1: *'\([0-9]*\)'.*/\1/p" build/tpu-env)"
  echo "${value:-0}"
}

fetch_environment() {
  gcloud storage cp "$folder/environment.tar" . 2> /dev/null && tar -xf environment.tar &&
    rm environment.tar
}

install() { # EXTRA,...
  [ ! -e .venv/installed ] || return 0
  fetch_environment && return
  if [ "$me" != 0-0 ]; then
    echo "waiting for the environment of the first worker"
    until fetch_environment || [ -n "$told" ]; do
      sleep "$every"
    done
    return
  fi
  launch/setup.sh "$1" || return
  mkdir -p .python
  tar -cf environment.tar .venv .python || return
  gcloud storage cp environment.tar "$folder/environment.tar" || return
  rm environment.tar
}

copy_log() {
  gcloud storage cp build/log "$folder/logs/$me.log" > /dev/null 2>&1 || true
}

# Copies the log, and ends the command if the folder has a file `stop`.
attend() {
  while sleep "$every"; do
    copy_log
    if gcloud storage ls "$folder/stop" > /dev/null 2>&1; then
      kill -TERM "$1"
    fi
  done
}

train() { # EXTRA,... COMMAND...
  local status=1 child="" copier
  trap 'told=yes; [ -z "$child" ] || kill -TERM "$child"' TERM
  # A package index or a bucket may fail for some minutes.
  for try in {1..10}; do
    ! install "$1" || break
    echo "could not install (try $try of 10)"
    sleep "$every"
  done
  if [ -z "$told" ] && [ -e .venv/installed ]; then
    "${@:2}" &
    child=$!
    attend "$child" &
    copier=$!
    await "$child"
    kill "$copier" 2> /dev/null || true
  fi
  echo "training has ended $status"
  copy_log
  # After SIGTERM, as at a preemption, the next machine continues.
  [ -z "$told" ] && [ "$me" = 0-0 ] || return 0
  sleep "$every" "$every" # so that all workers have copied their logs
  gcloud storage rm "$folder/startup.sh" || true # may hold keys
  echo "$status" > build/status
  gcloud storage cp build/status "$folder/status" || true
  eval "$AT_END"
}

case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  train) ;;
  *) fail "train? (see --help)" ;;
esac
folder="$2"
told="" # yes after SIGTERM
mkdir -p build
curl --silent --show-error --fail --retry 10 --retry-all-errors \
  --header "Metadata-Flavor: Google" "$metadata/tpu-env" > build/tpu-env || {
  eval "$AT_END"
  exit 1
}
me="$(tpu_env MEGASCALE_SLICE_ID)-$(tpu_env WORKER_ID)"
[ -e build/log ] || gcloud storage cp "$folder/logs/$me.log" build/log || true
exec >> build/log 2>&1 < /dev/null
echo "== $(date -u '+%F %T'): worker $me"
copy_log
export PYTHONUNBUFFERED=1
train "${@:3}"
