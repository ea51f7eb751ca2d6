#!/usr/bin/env bash
# Runs the tests, on a machine with only python3.
#
#   ./launch/test.sh          all but the slow ones, under 20 minutes on 2 cores
#   ./launch/test.sh --all    the slow ones too, under 75 minutes; installs
#                             libtpu, PyTorch and what runs notebooks
#
# Further arguments go to pytest.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
cd "$(dirname "$0")/.."
extras="test"
select=(-m "not slow")
if [ "${1:-}" = --all ]; then
  extras=test,hf,notebook,libtpu
  select=()
  shift
fi
launch/setup.sh "$extras"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n 2 --dist loadfile "${select[@]}" "$@"
