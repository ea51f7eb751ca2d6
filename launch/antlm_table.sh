#!/usr/bin/env bash
# Trains, evaluates and reports AntLM's table, on a machine with python3.
#
#   ./launch/antlm_table.sh --text=BABYLM_FOLDER --data=EVALUATION_FOLDER
#
# runs on a CPU, and with --scale=paper on an accelerator. The same command
# resumes an interrupted table; --help lists all options.
set -euo pipefail
root="$(CDPATH='' cd "$(dirname "$0")/.." && pwd)"
exec "$root/launch/study.sh" --config="$root/configs/studies/antlm_table.py" "$@"
