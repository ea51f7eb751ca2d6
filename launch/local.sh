#!/usr/bin/env bash
# Runs a command as N processes that train together on this machine's CPU.
#
#   ./launch/local.sh N [--devices=D] -- COMMAND...
#
# Each process gets D devices (default 1) and the variables
# JAX_COORDINATOR_ADDRESS (a free port on loopback, or --port),
# JAX_NUM_PROCESSES and JAX_PROCESS_ID. Each line of output begins with the
# number of its process. local.sh passes SIGTERM and SIGINT to the processes,
# and SIGHUP as SIGTERM. If a process fails, the others have --grace=30 seconds
# to end. Then they get SIGTERM and, after the same time, SIGKILL.
#
# The exit status is 0 if all processes end with 0. It is 75 (run me again) if a
# process ends with 75 and none crashes. Otherwise it is the status of the first
# failure. --dry_run prints the commands.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"

option=([devices]=1 [port]=0 [grace]=30 [dry_run]=no)
parse "$@"
[[ ${#words[@]} -eq 1 && ${words[0]} =~ ^[1-9][0-9]{0,3}$ ]] ||
  fail "how many processes? (see --help)"
[ "${#rest[@]}" -gt 0 ] || fail "no command: local.sh N -- COMMAND..."
numbers 1 devices
numbers 0 port grace
count="${words[0]}"
port="${option[port]}"

# Finds a free port below those that the system assigns.
while [ "$port" -eq 0 ]; do
  port=$((20000 + RANDOM % 12000))
  if (exec 5<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
    port=0
  fi
done
devices="--xla_force_host_platform_device_count=${option[devices]}"
shared=(env JAX_PLATFORMS=cpu "XLA_FLAGS=${XLA_FLAGS:+$XLA_FLAGS }$devices"
  "JAX_COORDINATOR_ADDRESS=127.0.0.1:$port" "JAX_NUM_PROCESSES=$count")
if [ "${option[dry_run]}" = yes ]; then
  for ((i = 0; i < count; i++)); do
    run "${shared[@]}" "JAX_PROCESS_ID=$i" "${rest[@]}"
  done
  exit 0
fi

scratch="$(mktemp -d)"
pids=() printers=() sent=""
trap 'end KILL; rm -rf "$scratch"' EXIT
trap 'pass TERM' TERM HUP
trap 'pass INT' INT

pass() { # SIGNAL
  local pid
  sent="$1"
  for pid in "${pids[@]}"; do
    [ -z "$pid" ] || kill -"$1" -- "-$pid" 2> /dev/null || true
  done
}

# Signals all processes and their descendants in any process group.
end() { # SIGNAL
  local pid member
  for pid in "${pids[@]}"; do
    [ -n "$pid" ] || continue
    for member in $(family "$pid"); do
      kill -"$1" "$member" 2> /dev/null || true
    done
  done
}

print_lines() { # NUMBER
  local line
  while IFS= read -r line || [ -n "$line" ]; do
    printf '[%s] %s\n' "$1" "$line"
  done
}

for ((i = 0; i < count; i++)); do
  mkfifo "$scratch/$i"
done
exec 2> /dev/null # hides bash's messages about killed processes
set -m            # separate process groups, which do not ignore SIGINT
for ((i = 0; i < count; i++)); do
  print_lines "$i" < "$scratch/$i" &
  printers+=($!)
  "${shared[@]}" "JAX_PROCESS_ID=$i" "${rest[@]}" > "$scratch/$i" 2>&1 \
    < /dev/null 3>&- 4>&- &
  pids+=($!)
done
[ -z "$sent" ] || pass "$sent" # a signal before all had started

# A failure does not count after the process was told to end.
left="$count" crashed=0 saved=no told="" deadline=""
while ((left > 0)); do
  sleep 0.1
  for ((i = 0; i < count; i++)); do
    pid="${pids[i]}"
    if [ -z "$pid" ] || kill -0 "$pid" 2> /dev/null; then
      continue
    fi
    await "$pid"
    pids[i]="" left=$((left - 1))
    [ "$status" -ne 0 ] || continue
    note "process $i ended with exit status $status"
    deadline="${deadline:-$((SECONDS + option[grace]))}"
    if [ "$status" -eq 75 ]; then
      saved=yes
    elif [ -z "$told" ] && [ "$crashed" -eq 0 ]; then
      crashed="$status"
    fi
  done
  if [ -n "$deadline" ] && ((left > 0 && SECONDS >= deadline)); then
    if [ -z "$told" ]; then
      told=TERM deadline=$((SECONDS + option[grace]))
      note "still running: $left; they get SIGTERM"
      pass TERM
    else
      end KILL
    fi
  fi
done

# Waits for the last output, at most 2 s, because a descendant may live on.
deadline=$((SECONDS + 2))
for pid in "${printers[@]}"; do
  while kill -0 "$pid" 2> /dev/null && ((SECONDS < deadline)); do
    sleep 0.05
  done
done
pids=("${printers[@]}")
if [ "$crashed" -eq 0 ] && [ "$saved" = yes ]; then
  exit 75
fi
exit "$crashed"
