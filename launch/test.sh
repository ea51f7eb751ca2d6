#!/usr/bin/env bash
# Runs the tests, on a machine with only python3.
#
#   ./launch/test.sh            what a change should pass, 9 minutes on 2 cores
#   ./launch/test.sh --all      the slow ones too, 50 minutes; installs the
#                               compilers for TPUs and GPUs, PyTorch and what
#                               runs notebooks
#   ./launch/test.sh --nightly  the longest as well: all disturbances of a run,
#                               the quickstart and the notebook whole
#
# Further arguments go to pytest.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
cd "$(dirname "$0")/.."
extras="test,hf,notebook,libtpu,cuda-compiler"
case "${1:-}" in
  --nightly) select=() && shift ;;
  --all) select=(-m "not nightly") && shift ;;
  *) extras="test" select=(-m "not slow and not nightly") ;;
esac
launch/setup.sh "$extras"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n 2 --dist worksteal "${select[@]}" "$@"
