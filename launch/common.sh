# Options, errors, dry runs and waiting for the launchers.
#
# A launcher fills `option` with its options and their defaults ("no" if an
# option takes no value) and calls `parse "$@"`. Then `option` holds the values,
# `words` the arguments without dashes, and `rest` those after `--`.
# shellcheck shell=bash
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "error: bash $BASH_VERSION is too old: use 4.4 or later (macOS: brew" \
    "install bash)" >&2
  exit 2
fi
exec 3>&1 4>&2 # for dry runs and notes, if stdout or stderr is redirected
declare -A option
words=()
rest=()

# Ends with one line and status 2, which means bad input.
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

# Fails unless options are whole numbers of at least LEAST.
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

# Prints words quoted for a shell.
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

# Runs a command. In a dry run, prints it as a line that a shell can run.
run() { # COMMAND...
  if [ "${option[dry_run]}" = yes ]; then
    printf '%s\n' "$(quote "$@")" >&3
  else
    "$@"
  fi
}

# Prints the value that training takes for an option: the last of this name.
trained_with() { # NAME
  local word value=""
  for word in "${rest[@]}"; do
    [[ $word != "--$1="* ]] || value="${word#*=}"
  done
  printf '%s' "$value"
}

# Fails unless `rest` has the options that training needs.
check_training() {
  local name word
  for name in config workdir; do
    [ -n "$(trained_with "$name")" ] || fail "training needs --$name=..., \
after --: ... -- --config=configs/X.py --workdir=..."
  done
  for word in "${rest[@]}"; do
    [[ $word != --config* || $word == *=* ]] ||
      fail "$word needs a value: $word=VALUE"
  done
  [[ " ${rest[*]} " != *" --dry_run "* ]] || fail "--dry_run belongs before --"
  [[ " ${rest[*]}/" != *"gs://BUCKET/"* ]] ||
    fail "gs://BUCKET: write the name of your bucket"
}

# Prints the number of chips of a TPU type, and fails for a slice that does not
# exist.
slice_chips() { # GENERATION COUNT CORES_PER_CHIP
  local type="${option[type]}" count="$2" chips below="" above=""
  local name="${type%"$2"}"
  [[ $count =~ ^[1-9][0-9]{0,4}(x[1-9][0-9]{0,3})*$ ]] ||
    fail "--type=$type: end it with a number, such as ${name}8"
  local sizes=(1 4 8 16 32 64 128 256)
  [[ ! $1 =~ ^(v4|v5p)$ ]] ||
    read -ra sizes <<< "4 8 16 32 $(seq -s " " 64 64 6144)"
  if [[ $count == *x* ]]; then
    fail "--type=$type: write the number, $name$((${count//x/*} * $3))"
  fi
  for chips in "${sizes[@]}"; do
    if ((chips * $3 == count)); then
      echo "$chips"
      return
    elif ((chips * $3 < count)); then
      below="$name$((chips * $3))"
    else
      above="${below:+ or }$name$((chips * $3))"
      break
    fi
  done
  fail "--type=$type: there is no such slice; the nearest: $below$above"
}

# Checks the config against the devices before asking for a machine. Skips the
# check if no Python here has antlm_jax.
check_plan() { # ROOT TOPOLOGY SLICES
  [ "${option[unchecked]}" = no ] || return 0
  [ -n "$(trained_with config.data.path)" ] ||
    fail "training needs --config.data.path=..., after --"
  local python word words=()
  for word in "${rest[@]}"; do
    [[ $word == --workdir=* || $word == --speed ]] || words+=("$word")
  done
  for python in "$1/.venv/bin/python" python3; do
    if (cd "$1" && "$python" -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, sys.argv[1:])))' antlm_jax jax flax \
      ml_collections) 2> /dev/null; then
      (cd "$1" && JAX_PLATFORMS=cpu "$python" -m antlm_jax plan --check \
        "--topology=$2" "--slices=$3" "${words[@]}" > /dev/null) || exit $?
      return 0
    fi
  done
  note "the config is not checked against the devices: antlm_jax is not \
installed here"
}

# Fails for a config or plugin of one's own that `pack` leaves out.
check_packed() {
  local word file
  for word in "${rest[@]}"; do
    case "$word" in
      --config=* | --plugin=*) file="${word#*=}" && file="${file%%:*}" ;;
      *) continue ;;
    esac
    [[ $file != *.py || $file =~ ^(antlm_jax|configs|evals|launch|tests)/ ]] ||
      fail "$word: the machines get only the folders antlm_jax, configs, \
evals, launch and tests of this checkout: copy the file into one, and write \
${word%%=*}=configs/$(basename "$file")"
  done
}

# Prints the first folder that is in no bucket, with its option: data, pairs, or a
# model to start from.
local_folder() {
  local name folder folders model hub='^(hf://.*|[[:alnum:]_][^/]*/[^/]+)$'
  for name in data.path eval.data eval.pairs pairs; do
    IFS=, read -ra folders <<< "$(trained_with "config.$name")"
    for folder in "${folders[@]}"; do
      [[ $folder =~ ^([^=/]+=)?gs:// ]] || {
        printf '%s' "--config.$name=$folder"
        return
      }
    done
  done
  model="$(trained_with config.init.checkpoint)"
  # A name on the Hub is no path from an existing folder.
  if [[ -n $model && $model != gs://* ]] &&
    [[ ! $model =~ $hub || -d ${model%/*} ]]; then
    printf '%s' "--config.init.checkpoint=$model"
  elif [[ $(trained_with config) =~ [:,]model=([^,]+) ]] &&
    [ -e "${BASH_REMATCH[1]}" ]; then
    printf '%s' "--config=...:model=${BASH_REMATCH[1]}"
  fi
}

# Warns if the workdir is lost with the machine.
check_workdir() {
  [[ $(trained_with workdir) == gs://* ]] ||
    note "warning: the workdir is not gs://...: it will be lost with the machine"
}

# Packs the files that a machine needs to install antlm_jax and train.
pack() { # ROOT FILE
  run mkdir -p "$(dirname "$2")"
  run tar -C "$1" --exclude=__pycache__ -czf "$2" antlm_jax configs evals \
    launch tests LICENSE README.md pyproject.toml setup.py
}

# Waits for a background process and sets `status` to its exit status. Traps may
# run meanwhile. (A `wait` that a trap interrupts may lose the status.)
# shellcheck disable=SC2034 # the caller uses it
await() { # PID
  while kill -0 "$1"; do
    sleep 0.1 || true
  done 2> /dev/null
  status=0
  wait "$1" 2> /dev/null || status=$?
}

# Prints a process and its descendants.
family() { # PID
  local pid parent
  echo "$1"
  while read -r pid parent; do
    [ "$parent" != "$1" ] || family "$pid"
  done < <(ps -A -o pid= -o ppid=)
}
