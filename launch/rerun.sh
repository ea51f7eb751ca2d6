#!/usr/bin/env bash
# Runs a command, and runs it again after a crash or after exit status 75.
#
#   ./launch/rerun.sh [--tries=5] [--pause=10] [--end_on_75] COMMAND...
#
# The exit status decides:
#   0, 2, 130   done, bad input, interrupted: rerun.sh ends with this status
#   126, 127    the command cannot be run, or is not found: it ends as well
#   75          saved, or a bucket fails for now: rerun.sh runs the command
#               again after the pause. With --end_on_75 it ends with 75: the
#               platform runs it again
#   others      crash: rerun.sh runs the command again, at most --tries times,
#               after pauses that double from --pause seconds to five minutes
#
# After SIGTERM, SIGHUP or SIGINT, rerun.sh signals the command and does not run
# it again. After SIGUSR1 the command continues, but does not run again.
# --dry_run prints the command.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"

option=([tries]=5 [pause]=10 [end_on_75]=no [dry_run]=no)
own=()
while [[ ${1:-} == -* ]]; do
  own+=("$1")
  shift
done
parse "${own[@]}"
numbers 0 tries pause
[ $# -gt 0 ] || fail "no command to run (see --help)"
if [ "${option[dry_run]}" = yes ]; then
  run "$@"
  exit 0
fi

set -m # a separate process group, which does not ignore SIGINT
again=yes child="" sent=""
leave() { # SIGNAL
  again=no sent="$1"
  if [ -n "$child" ]; then
    kill -"$1" -- "-$child" 2> /dev/null || true
  fi
}
trap 'leave TERM' TERM HUP
trap 'leave INT' INT
trap 'again=no' USR1

# Sleeps for short times, so that a signal ends the pause.
pause() { # SECONDS
  local end=$((SECONDS + $1))
  while [ "$again" = yes ] && ((SECONDS < end)); do
    sleep 0.2
  done
}

crashes=0 pause="${option[pause]}"
while :; do
  "$@" < /dev/null 3>&- 4>&- &
  child=$!
  [ -z "$sent" ] || leave "$sent" # a signal just before the start
  await "$child"
  child=""
  case "$status" in
    0 | 2 | 126 | 127 | 130) exit "$status" ;;
    75) [ "${option[end_on_75]}" = no ] || exit 75
      reason="exit status 75, to be run again" wait="${option[pause]}" ;;
    *) crashes=$((crashes + 1))
      if ((crashes > option[tries])); then
        note "exit status $status: given up after $crashes crashes"
        exit "$status"
      fi
      reason="exit status $status, crash $crashes of ${option[tries]}"
      wait="$pause" pause=$((pause * 2 < 300 ? pause * 2 : 300)) ;;
  esac
  if [ "$again" = yes ]; then
    note "$reason: again in $wait s"
    pause "$wait"
  fi
  [ "$again" = yes ] || exit "$status"
done
