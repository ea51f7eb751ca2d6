#!/usr/bin/env bash
# Trains, evaluates and reports AntLM's table, on a machine with python3.
#
#   ./launch/antlm_table.sh --text=BABYLM_FOLDER --data=EVALUATION_FOLDER
#
# on a CPU, --scale=paper on an accelerator; --help says more. The same command
# goes on where it was interrupted.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
exec "$root/launch/study.sh" --config="$root/configs/antlm_table.py" "$@"
