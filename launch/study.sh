#!/usr/bin/env bash
# Trains, evaluates and reports a study, on a machine with python3.
#
#   ./launch/study.sh --text=TEXT_FOLDER --data=EVALUATION_FOLDER
#
# on a CPU; --scale=paper --dry_run says what the paper's 38 models take; --help
# says more. The same command goes on where it was interrupted.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
"$root/launch/setup.sh"
# On a CPU a step maps its memory anew: in large pages (docs/speed.md).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
exec "$root/.venv/bin/python" -m antlm_jax.evals.study "$@"
