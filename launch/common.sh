# Shared by the launchers: options, errors, dry runs, waiting.
#
# A launcher fills `option` with its options and their defaults ("no" for one
# without a value) and calls `parse "$@"`. Then `option` holds what was asked
# for, `words` the arguments without dashes, and `rest` those after `--`.
# shellcheck shell=bash
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "error: bash $BASH_VERSION is too old: take 4.4 or later (macOS: brew" \
    "install bash)" >&2
  exit 2
fi
exec 3>&1 4>&2 # for dry runs and notes, if stdout or stderr is redirected
declare -A option
words=()
rest=()

# Ends with one line and status 2: bad input.
fail() { # MESSAGE
  echo "error: $1" >&2
  exit 2
}

# Prints a note on stderr.
note() { # MESSAGE
  echo "$(basename "$0"): $1" >&4
}

# Prints the comment at the head of the script.
usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

parse() { # ARGUMENT...
  local name value
  while [ $# -gt 0 ]; do
    case "$1" in
      --) rest=("${@:2}"); return ;;
      -h | --help) usage; exit 0 ;;
      --*) name="${1%%=*}" name="${name#--}" value="${1#*=}"
        if [[ ! -v option[$name] ]]; then
          fail "unknown option --$name (see --help)"
        elif [[ ${option[$name]} =~ ^(yes|no)$ ]]; then
          [ "$1" = "--$name" ] || fail "--$name takes no value"
          option[$name]=yes
        else
          [ "$1" != "--$name" ] || fail "--$name needs a value: --$name=VALUE"
          option[$name]="$value"
        fi ;;
      -*) fail "unknown option $1 (see --help)" ;;
      *) words+=("$1") ;;
    esac
    shift
  done
}

# Fails unless options hold whole numbers of at least 1 (or another least).
numbers() { # LEAST NAME...
  local name
  for name in "${@:2}"; do
    if [[ ! ${option[$name]} =~ ^(0|[1-9][0-9]{0,8})$ ]] ||
      ((option[$name] < $1)); then
      fail "--$name=${option[$name]}: must be a whole number of at least $1"
    fi
  done
}

# Fails if a program is missing; a dry run needs none.
need() { # PROGRAM WHERE_TO_GET_IT
  [ "${option[dry_run]}" = yes ] || command -v "$1" > /dev/null ||
    fail "$1 is not installed: $2"
}

# Prints words so that a shell reads them back as they are.
quote() { # WORD...
  local word line=""
  for word in "$@"; do
    if [[ $word =~ ^[[:alnum:]_@%+=:,./-]+$ ]]; then
      line+=" $word"
    else
      line+=" ${word@Q}"
    fi
  done
  printf '%s' "${line# }"
}

# Runs a command; in a dry run prints it instead, as one line to be pasted.
run() { # COMMAND...
  if [ "${option[dry_run]}" = yes ]; then
    printf '%s\n' "$(quote "$@")" >&3
  else
    "$@"
  fi
}

# Fails unless `rest` is what training needs.
check_training() {
  local name
  for name in config workdir; do
    [[ " ${rest[*]}" == *" --$name="?* ]] || fail "training needs --$name=..., \
after --: ... -- --config=configs/X.py --workdir=..."
  done
  [[ " ${rest[*]} " != *" --dry_run "* ]] || fail "--dry_run belongs before --"
}

# Warns if the machine's end would delete the run.
check_workdir() {
  [[ " ${rest[*]}" == *" --workdir=gs://"* ]] ||
    note "the workdir is not gs://...: it will be lost with the machine"
}

# Packs what a machine needs of the checkout to install and train.
pack() { # ROOT FILE
  run mkdir -p "$(dirname "$2")"
  run tar -C "$1" --exclude=__pycache__ -czf "$2" antlm_jax configs evals \
    launch tests LICENSE README.md pyproject.toml setup.py
}

# Waits for a background process to end, whatever traps run meanwhile, and sets
# `status` to its exit status. (A `wait` that a trap interrupts may lose it.)
# shellcheck disable=SC2034 # it is the caller's
await() { # PID
  while kill -0 "$1"; do
    sleep 0.1 || true
  done 2> /dev/null
  status=0
  wait "$1" 2> /dev/null || status=$?
}

# Prints a process and all processes below it.
family() { # PID
  local pid parent
  echo "$1"
  while read -r pid parent; do
    [ "$parent" != "$1" ] || family "$pid"
  done < <(ps -A -o pid= -o ppid=)
}
