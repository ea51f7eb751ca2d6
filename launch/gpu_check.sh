#!/usr/bin/env bash
# Tests and times antlm_jax on this machine's GPU, in under 10 minutes.
#
#   ./launch/gpu_check.sh [FOLDER]
#
# Tests our attention kernel, the default on Hopper, and times it against cuDNN,
# plain XLA and, if it is installed, tokamax. Then runs the other GPU tests.
# Tests of a kernel that this GPU lacks are skipped. With torch for CUDA and
# transformers, it ends with train steps in turns with these, and if they are
# installed, with sentence-transformers and minicons too. Writes the numbers to
# FOLDER (default: evals/benchmarks/results). Needs Python 3.12 with jax 0.11.2
# or 0.12 for CUDA, flax, optax and orbax-checkpoint, and for the turns
# antlm_jax's other packages: .venv/bin/python if it exists, else $PYTHON, else
# python3. Exit status: 1 if a part failed, 2 if JAX sees no GPU.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
folder="$(realpath -m -- "${1:-$(dirname "$0")/../evals/benchmarks/results}")"
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
if [ -x .venv/bin/python ]; then
  python=.venv/bin/python
fi
unset JAX_PLATFORMS # the tests compare the GPU with the CPU
export PYTHONUNBUFFERED=1
seen="$("$python" -c 'import jax; print(jax.default_backend())' 2>/dev/null)" ||
  seen="no jax at all"
if [ "$seen" != gpu ]; then
  echo "error: JAX sees no GPU here: $python has $seen; see --help" >&2
  exit 2
fi

mkdir -p "$folder"
begun="$(mktemp)"
trap 'rm -f "$begun"' EXIT
trap 'exit 130' INT # otherwise the next part would start
failed=()

# Runs a part with a time limit. A failure does not end the script.
part() { # NAME SECONDS COMMAND...
  local name="$1" seconds="$2"
  shift 2
  status=0
  echo "== $name"
  timeout --foreground --kill-after=5 "$seconds" "$@" || status=$?
  if [ "$status" -ne 0 ]; then
    failed+=("$name")
    if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
      echo "error: $name: not done after $seconds seconds" >&2
    else
      echo "error: $name: exit status $status" >&2
    fi
  fi
}

# On one H200, the tests of all widths compiled for 69 seconds.
part "our kernel" 180 "$python" -m tests.test_gpu our_kernel
without='' others='^test_(?!our_kernel)'
case "$status" in
  124 | 137) # it hangs, so leave it out, and rows for which it is the default
    without=--without=mosaic others='^test_(?!our_kernel|packed|mixed)' ;;
esac
part tests 140 "$python" -m tests.test_gpu "$others"
part attention 130 "$python" -m antlm_jax.evals.benchmarks.attention \
  ${without:+"$without"} \
  --shapes=610M,wide --masks=packed,causal,full --rounds=10 --output="$folder"
# Uses the rest of the 10 minutes, and writes each number at once.
if "$python" -c 'import torch, transformers
assert torch.cuda.is_available()' 2> /dev/null; then
  HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error part peers $((580 - SECONDS)) \
    "$python" -m antlm_jax.evals.benchmarks.peers --at_once=3 --output="$folder"
else
  echo "== peers: skipped, since $python has no torch for CUDA or transformers"
fi

echo "== files"
find "$folder" -type f -newer "$begun" | sort
if [ "${#failed[@]}" -gt 0 ]; then
  echo "error: failed: ${failed[*]}" >&2
  exit 1
fi
