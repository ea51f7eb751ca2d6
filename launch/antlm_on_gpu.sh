#!/usr/bin/env bash
# Trains AntLM's table on one GPU of a machine without a network.
#
#   ./launch/antlm_on_gpu.sh pack --text=TEXT_FOLDER --data=EVALUATION_FOLDER \
#     --pack=PACK [--also=PACKAGE,...]
#
# runs on a machine with a network. It writes into PACK the Python packages, the
# compressed text and BLiMP: about 30 MB. Then, on the machine with the GPU,
#
#   ./launch/antlm_on_gpu.sh run --pack=PACK --output=OUTPUT [--minutes=9] \
#     [--runs=RUNS] [--scales=8m,24m,97m] [--rows=ROW,...] [--seeds=N] \
#     [--trainings=6] [--scorings=6] [--config.KEY=VALUE]
#
# trains and scores in several processes. It stops after --minutes with exit
# status 75, and the same command resumes it. OUTPUT gets each scale's packed
# results (SCALE.tar.gz) and the output of its processes (SCALE-logs.tar.gz).
# Both are renewed every two minutes, in case the machine goes away.
#
# The GPU's machine needs Python 3.12 ($PYTHON, by default python3) with jax,
# flax, optax and orbax-checkpoint. If it lacks another package, the command
# names it for --also.
set -euo pipefail
help() { sed -n '2,21s/^# \{0,1\}//p' "$0"; }
fail() {
  echo "error: $*" >&2
  exit 2
}
root="$(cd "$(dirname "$0")/.." && pwd)"
case "${1:-}" in
  pack | run) step="$1" && shift ;;
  -h | --help) help && exit 0 ;;
  *) fail "write pack or run first; see --help" ;;
esac
text='' data='' pack='' output='' also='' rows='' minutes=9 seeds=0
runs="$root/runs/one_gpu" scales=8m,24m trainings=6 scorings=6 overrides=()
for word in "$@"; do
  case "$word" in
    --text=* | --data=* | --pack=* | --output=* | --runs=* | --scales=* | \
      --rows=* | --also=* | --minutes=* | --seeds=* | --trainings=* | --scorings=*)
      name="${word%%=*}"
      printf -v "${name#--}" '%s' "${word#*=}" ;;
    --config.*=*) overrides+=("$word") ;;
    *) fail "unknown option $word; see --help" ;;
  esac
done
[ -n "$pack" ] || fail "--pack is missing: the folder to carry"
python="${PYTHON:-python3}"
# Needed to prepare text and to train, and absent on the GPU's machine.
packages=(array_record cloudpickle dm-tree docstring-parser grain immutabledict
  importlib_resources ml-collections portpicker promise simple-parsing six
  tensorflow-datasets tensorflow-metadata termcolor toml wrapt)

if [ "$step" = pack ]; then
  [ -d "$text" ] || fail "--text=$text is no folder"
  sets=(blimp_filtered blimp_supplement_filtered)
  for name in "${sets[@]}"; do
    [ -d "$data/$name" ] || fail "--data=$data holds no $name"
  done
  mkdir -p "$pack/wheels" "$pack/text"
  IFS=, read -r -a more <<< "$also"
  packages+=("${more[@]}")
  # Two of them have no wheels: these are made here, of pure Python.
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$pack/wheels" \
    promise portpicker
  "$python" -m pip download --quiet --no-deps --dest "$pack/wheels" \
    --python-version=3.12 --platform=manylinux2014_x86_64 \
    --platform=manylinux_2_28_x86_64 --only-binary=:all: \
    --find-links "$pack/wheels" "${packages[@]}"
  for file in "$text"/*.train "$text"/*.dev; do
    bzip2 --keep --stdout "$file" > "$pack/text/$(basename "$file").bz2"
  done
  tar -cJf "$pack/data.tar.xz" -C "$data" "${sets[@]}"
  echo "packed: $(du -sh "$pack" | cut -f1) in $pack"
  exit 0
fi

[ -d "$pack/wheels" ] || fail "--pack=$pack holds no wheels: make it with pack"
[ -n "$output" ] || fail "--output is missing: the folder for results"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
  fail "$python is not Python 3.12: set PYTHON"
begun=$SECONDS
mkdir -p "$output" "$runs"
runs="$(realpath "$runs")" pack="$(realpath "$pack")"
output="$(realpath "$output")"
[ ! -d "$pack/text" ] || text="$pack/text" # else RUNS/SCALE/data must exist
if [ ! -e "$runs/installed" ]; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile \
    --target "$runs/packages" "$pack"/wheels/*.whl
  mkdir -p "$runs/data"
  tar -xJf "$pack/data.tar.xz" -C "$runs/data"
  touch "$runs/installed"
fi
export PYTHONPATH="$root:$runs/packages${PYTHONPATH:+:$PYTHONPATH}"
cd "$root"
lacks="$("$python" launch/lacks.py)"
[ -z "$lacks" ] || fail "$python lacks $lacks: pack them with --also"

one_gpu() { "$python" -m antlm_jax.evals.studies.one_gpu "$@"; }
save() { # SCALE NAME: its results so far; a file is whole, or that before
  one_gpu pack --runs="$runs/$1" --output="$runs/$2.tar.gz" &&
    mv "$runs/$2.tar.gz" "$output/$1.tar.gz" &&
    tar -czf "$output/$1-logs.tar.gz" -C "$runs/$1" logs
}
keep_saving() { # SCALE
  local seconds=0
  while sleep 5; do
    seconds=$((seconds + 5))
    ((seconds % 120)) || save "$1" "$1-early" || true
  done
}
saver='' status=0
trap '[ -z "$saver" ] || kill "$saver" 2>/dev/null || true' EXIT
for scale in ${scales//,/ }; do
  [ ! -e "$runs/$scale/packed" ] || continue
  # Half a minute is for packing.
  spent=$((SECONDS - begun + 30))
  left="$(awk "BEGIN { x = $minutes - $spent / 60; print (x > 0 ? x : 0) }")"
  [ "$left" != 0 ] || status=75
  [ "$status" -eq 0 ] || break
  keep_saving "$scale" > /dev/null 2>&1 &
  saver=$!
  one_gpu run --scale="$scale" --data="$runs/data" --runs="$runs/$scale" \
    --minutes="$left" --seeds="$seeds" --trainings="$trainings" \
    --scorings="$scorings" ${text:+--text="$text"} ${rows:+--rows="$rows"} \
    "${overrides[@]}" || status=$?
  kill "$saver" 2>/dev/null || true
  wait "$saver" 2>/dev/null || true
  saver=''
  # Also of a scale that is not done, since the machine may go away.
  save "$scale" "$scale" || [ "$status" -ne 0 ] || status=1
  [ "$status" -eq 0 ] || break
  touch "$runs/$scale/packed"
done
exit "$status"
