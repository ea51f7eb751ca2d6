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
#     [--budget=25] [--runs=RUNS] [--scales=8m,24m,97m] [--rows=ROW,...] \
#     [--config.KEY=VALUE]
#
# times a step of each scale, and trains as many seeds as fit into the rest of
# the budget. It stops after --minutes with exit status 75, and the same command
# resumes it. OUTPUT gets the times of steps, each scale's report, and files of at
# most 16 MB with all losses and BLiMP's log-odds.
#
# The GPU's machine needs Python 3.12 ($PYTHON, by default python3) with jax,
# flax, optax and orbax-checkpoint. If it lacks another package, the command
# names it for --also.
set -euo pipefail
help() { sed -n '2,23s/^# \{0,1\}//p' "$0"; }
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
text='' data='' pack='' output='' also='' rows='' minutes=9 budget=25
runs="$root/runs/one_gpu" scales=8m,24m overrides=()
for word in "$@"; do
  case "$word" in
    --text=* | --data=* | --pack=* | --output=* | --runs=* | --scales=* | \
      --rows=* | --also=* | --minutes=* | --budget=*)
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

spent="$(cat "$runs/spent" 2>/dev/null || echo 0)" # seconds of earlier calls
status=0 tried=''
for scale in ${scales//,/ }; do
  asked=(--scale="$scale" ${rows:+--rows="$rows"}) times="$runs/times/$scale"
  case "$scale" in
    8m) size=8m ;;
    24m) size=24m ;;
    97m) size=97M ;;
    8m_shrink) size=tiny ;; # to try this script out
    *) fail "--scales: '$scale' is not 8m, 24m, 97m or 8m_shrink" ;;
  esac
  if [ ! -e "$times" ]; then
    "$python" -m antlm_jax.evals.benchmarks.train_step --sizes="$size" \
      --batches=clm,mlm --seconds=2 --output="$times" ||
      fail "a step of $scale has no time: see above"
  fi
  mkdir -p "$output/$scale"
  cp "$times"/*.json "$output/$scale"
  if [ ! -e "$times/seeds" ]; then
    rest=$((60 * budget - spent - (SECONDS - begun)))
    seeds="$("$python" -m antlm_jax.evals.studies.one_gpu seeds "${asked[@]}" \
      --times="$times" --seconds="$rest")"
    [ "$seeds" -gt 0 ] || continue
    echo "$seeds" > "$times/seeds" # later calls train as many
  fi
  tried="$scale" asked+=(--seeds="$(cat "$times/seeds")")
  [ ! -e "$runs/$scale/packed" ] || continue
  left=$((60 * minutes - (SECONDS - begun)))
  [ "$left" -gt 0 ] || status=75
  [ "$status" -eq 0 ] || break
  "$python" -m antlm_jax study --config=antlm_table "${asked[@]}" \
    --text="$pack/text" --data="$runs/data" --runs="$runs/$scale" \
    --together=13 --minutes="$(awk "BEGIN { print $left / 60 }")" \
    "${overrides[@]}" || status=$?
  # Also of a scale that is not done, since the machine may go away.
  "$python" -m antlm_jax.evals.studies.one_gpu pack --runs="$runs/$scale" \
    --output="$output/$scale"
  [ "$status" -eq 0 ] || break
  touch "$runs/$scale/packed"
done
echo $((spent + SECONDS - begun)) > "$runs/spent"
[ -n "$tried" ] || [ "$status" -ne 0 ] ||
  fail "no scale fits into the rest of --budget=$budget minutes"
exit "$status"
