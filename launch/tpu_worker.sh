#!/usr/bin/env bash
# Runs on one worker for launch/tpu_vm.sh, which calls it over ssh.
#
#   launch/tpu_worker.sh setup              installs Python and antlm_jax
#   launch/tpu_worker.sh start COMMAND...   runs the command in the background,
#                                           unless it is already running
#   launch/tpu_worker.sh status             prints none, running, lost,
#                                           stopped STATUS or ended STATUS
#   launch/tpu_worker.sh log [--follow]     prints the log's last lines
#   launch/tpu_worker.sh stop               sends SIGTERM and waits for the end
#
# A command is "lost" if it ended without a status, e.g. by a restart of the
# machine.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=common.sh
. launch/common.sh

state=build/worker
pid="$(cat "$state/pid" 2> /dev/null || true)"

say() { # MESSAGE
  echo "$(hostname): $1"
}

running() {
  [ -n "$pid" ] && grep -qs tpu_worker "/proc/$pid/cmdline"
}

# Finds or installs a supported Python, because the workers' may be too old.
find_python() {
  local python
  for python in python3.12 python3.11; do
    if "$python" -c 'import ensurepip, venv' 2> /dev/null; then
      command -v "$python"
      return
    fi
  done
  python3 -m pip install --quiet --upgrade --target .uv uv > /dev/null
  .uv/bin/uv python install --quiet 3.12 > /dev/null
  .uv/bin/uv python find --managed-python 3.12
}

# Runs the command in the background, and writes its status at the end.
keep() { # COMMAND...
  local status
  # Only now: while a program replaces another, `running` cannot see its name.
  echo $$ > "$state/pid"
  trap : TERM # the whole group receives it; the command handles it
  "$@" &
  await $!
  echo "$status" > "$state/status"
}

case "${1:-}" in
  -h | --help) usage ;;
  setup)
    [ -x .venv/bin/python ] || PYTHON="${PYTHON:-$(find_python)}"
    PYTHON="${PYTHON:-.venv/bin/python}" launch/setup.sh tpu
    say ready ;;
  start)
    shift
    wanted="$(quote "$@")"
    if running; then
      [ "$(cat "$state/command")" = "$wanted" ] ||
        fail "$(hostname): another command is running: stop it first"
      say "running already: $pid"
      exit 0
    fi
    mkdir -p "$state"
    rm -f "$state/pid" "$state/status" "$state/stopped"
    printf '%s\n' "$wanted" > "$state/command"
    printf '== %s: %s\n' "$(date -u '+%F %T')" "$wanted" >> "$state/log"
    # ssh would wait for open files.
    PYTHONUNBUFFERED=1 setsid nohup launch/tpu_worker.sh keep "$@" \
      >> "$state/log" 2>&1 < /dev/null 3>&- 4>&- &
    until [ -s "$state/pid" ]; do
      kill -0 $! || [ -s "$state/pid" ] ||
        fail "$(hostname): it has not started: see $state/log"
      sleep 0.1
    done
    say "started: $!" ;;
  keep) keep "${@:2}" ;;
  status)
    if running; then
      say "running"
    elif [ -z "$pid" ]; then
      say "none"
    elif [ ! -s "$state/status" ]; then
      say "lost"
    elif [ -e "$state/stopped" ]; then
      say "stopped $(cat "$state/status")"
    else
      say "ended $(cat "$state/status")"
    fi ;;
  log)
    [ -e "$state/log" ] || fail "$(hostname): nothing was started here"
    follow=()
    [ "${2:-}" != --follow ] || follow=(--follow=name "--pid=${pid:-0}")
    tail -n 50 "${follow[@]}" "$state/log" ;;
  stop)
    if running; then
      touch "$state/stopped"
      kill -TERM -- "-$pid"
      while running; do
        sleep 0.2
      done
      say "stopped $(cat "$state/status" 2> /dev/null || true)"
    else
      say "not running"
    fi ;;
  *) fail "setup, start, status, log or stop? (see --help)" ;;
esac
