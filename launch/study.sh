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
exec "$root/.venv/bin/python" -m evals.study "$@"
