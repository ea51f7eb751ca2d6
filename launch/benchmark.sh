#!/usr/bin/env bash
# Compares the speed of antlm_jax and its peers on this machine, in half an hour
# on two cores. Leave the machine idle: the benchmark detects disturbed turns
# and repeats them.
#
#   ./launch/benchmark.sh [--output=FOLDER] [--pairs=FOLDER] [--text=PATH] ...
#
# Installs PyTorch, transformers, lm-eval and minicons. Arguments go to
# evals/benchmarks/peers.py. If there is a GPU, launch/gpu_check.sh then times
# attention and train steps.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
cd "$(dirname "$0")/.."
launch/setup.sh test-hf
# Large pages for all libraries (docs/explanation/speed.md).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
export TF_CPP_MIN_LOG_LEVEL=2 TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
.venv/bin/python -m antlm_jax.evals.benchmarks.peers "$@"
if nvidia-smi > /dev/null 2>&1; then
  launch/gpu_check.sh
fi
