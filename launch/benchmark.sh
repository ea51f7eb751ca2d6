#!/usr/bin/env bash
# Compares the speed of antlm_jax and its peers on this machine, in half an hour
# on two cores. Leave the machine idle.
#
#   ./launch/benchmark.sh [--output=FOLDER] [--kinds=train,generate] ...
#
# Installs PyTorch, transformers, lm-eval, minicons and sentence-transformers.
# Arguments go to evals/benchmarks/peers.py.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
cd "$(dirname "$0")/.."
launch/setup.sh test-hf
# Large pages for all libraries (docs/explanation/speed.md).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
export TF_CPP_MIN_LOG_LEVEL=2 TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
.venv/bin/python -m antlm_jax.evals.benchmarks.peers "$@"
