#!/usr/bin/env bash
# Trains AntLM's table on one GPU of a machine without a network.
#
#   ./launch/antlm_on_gpu.sh pack --text=TEXT_FOLDER --data=EVALUATION_FOLDER \
#     --pack=PACK
#
# runs on a machine with a network. It writes into PACK the Python packages, the
# compressed text and BLiMP: about 30 MB. Then, on the machine with the GPU,
#
#   ./launch/antlm_on_gpu.sh run --pack=PACK --output=OUTPUT [--minutes=9] \
#     [--budget=25] [--runs=RUNS] [--scales=8m,24m] [--config.KEY=VALUE]
#
# times one step of each size and trains each scale whose forecast fits into what
# is left of the budget. It stops after --minutes with exit status 75, and the
# same command resumes it. OUTPUT gets the times of steps, each scale's report,
# and files of at most 16 MB with all losses and BLiMP's log-odds.
#
# The GPU's machine needs Python 3.12 ($PYTHON, by default python3) with jax,
# flax, optax and orbax-checkpoint, and nothing else.
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
text='' data='' pack='' output='' minutes=9 budget=25 runs="$root/runs/one_gpu"
scales=8m,24m overrides=()
for word in "$@"; do
  case "$word" in
    --text=* | --data=* | --pack=* | --output=* | --runs=* | --scales=* | \
      --minutes=* | --budget=*)
      name="${word%%=*}"
      printf -v "${name#--}" '%s' "${word#*=}" ;;
    --config.*=*) overrides+=("$word") ;;
    *) fail "unknown option $word; see --help" ;;
  esac
done
[ -n "$pack" ] || fail "--pack is missing: the folder to carry"
python="${PYTHON:-python3}"
# Needed to prepare text and to train, and absent on the GPU's machine.
packages=(array_record dm-tree docstring-parser grain immutabledict
  importlib_resources ml-collections portpicker promise simple-parsing
  tensorflow-datasets tensorflow-metadata termcolor toml)

if [ "$step" = pack ]; then
  [ -d "$text" ] || fail "--text=$text is no folder"
  [ -d "$data/blimp_filtered" ] || fail "--data=$data holds no blimp_filtered"
  mkdir -p "$pack/wheels" "$pack/text"
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
  tar -cJf "$pack/data.tar.xz" -C "$data" blimp_filtered
  echo "packed: $(du -sh "$pack" | cut -f1) in $pack"
  exit 0
fi

[ -d "$pack/wheels" ] || fail "--pack=$pack holds no wheels: make it with pack"
[ -n "$output" ] || fail "--output is missing: the folder for results"
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
if ! compgen -G "$output/step*.json" > /dev/null; then
  sizes="8m,24m,97M"
  [ "$scales" != 8m_shrink ] || sizes=tiny # to try this script out
  "$python" -m antlm_jax.evals.benchmarks.train_step --sizes="$sizes" \
    --batches=clm,mlm --seconds=2 --output="$output" ||
    echo "warning: a size has no time; its scale is trained all the same" >&2
fi

spent="$(cat "$runs/spent" 2>/dev/null || echo 0)" # seconds of earlier calls
status=0
for scale in ${scales//,/ }; do
  left=$((60 * minutes - (SECONDS - begun)))
  study=("$python" -m antlm_jax study --config=antlm_table --scale="$scale"
    --text="$pack/text" --data="$runs/data" --runs="$runs/$scale"
    "${overrides[@]}")
  if [ ! -e "$runs/$scale" ]; then
    needs="$("$python" -m antlm_jax.evals.one_gpu seconds --scale="$scale" \
      --times="$output")" || needs=0
    rest=$((60 * budget - spent - (SECONDS - begun)))
    echo "$scale: $needs s by forecast, $rest s of the budget are left"
    [ "$needs" -le "$rest" ] || continue
  fi
  [ "$left" -gt 0 ] || status=75
  [ "$status" -eq 0 ] || break
  "${study[@]}" --together=13 --minutes="$(awk "BEGIN { print $left / 60 }")" ||
    status=$?
  # Also of a scale that is not done, since the machine may go away.
  "$python" -m antlm_jax.evals.one_gpu pack --runs="$runs/$scale" \
    --output="$output/$scale"
  [ "$status" -eq 0 ] || break
done
echo $((spent + SECONDS - begun)) > "$runs/spent"
exit "$status"
