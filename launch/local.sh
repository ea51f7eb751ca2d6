#!/usr/bin/env bash
# Runs a command as N processes that train together on the CPU of this machine.
#
#   ./launch/local.sh N [--devices=D] -- COMMAND...
#
# Each process gets D devices (default 1) and the variables
# JAX_COORDINATOR_ADDRESS (a free port of the loopback, or --port),
# JAX_NUM_PROCESSES and JAX_PROCESS_ID. Its number precedes each line it prints.
# SIGTERM and SIGINT go on to the processes (SIGHUP as SIGTERM). If one process
# fails, the others have --grace=30 seconds to end. Then they get SIGTERM, and
# SIGKILL after the same time.
#
# Exit status: 0 if all processes end with 0; 75 (run me again) if one ends with
# 75 and none crashes; else the status of the first that fails. --dry_run prints
# the commands.
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

# A port that nobody listens on, below those that the system gives out itself.
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

# Ends all, with what they started in whatever group.
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
exec 2> /dev/null # bash's own words on those that get killed
set -m            # each in a group of its own, in which SIGINT is not ignored
for ((i = 0; i < count; i++)); do
  print_lines "$i" < "$scratch/$i" &
  printers+=($!)
  "${shared[@]}" "JAX_PROCESS_ID=$i" "${rest[@]}" > "$scratch/$i" 2>&1 \
    < /dev/null 3>&- 4>&- &
  pids+=($!)
done
[ -z "$sent" ] || pass "$sent" # it came before all were there

# Told to end, a process is not to blame for how it ends.
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

# What they printed last; not for ever, as something may have outlived them.
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
