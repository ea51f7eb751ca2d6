#!/usr/bin/env bash
# Runs the tests, on a machine with only python3.
#
#   ./launch/test.sh            what a change should pass, 9 minutes on 2 cores
#   ./launch/test.sh --all      the slow ones too, half an hour; installs the
#                               compilers for TPUs and GPUs, PyTorch and what
#                               runs notebooks
#   ./launch/test.sh --nightly  the longest as well: more ways to disturb several
#                               processes, the quickstart whole
#   ./launch/test.sh --mosaic   the kernel for Hopper GPUs, interpreted, and
#                               compiled for an H100, with jax 0.11 and 0.12;
#                               no GPU, but Python 3.12 ($PYTHON, or
#                               python3.12), 1 GB, an hour
#
# Further arguments go to pytest.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
cd "$(dirname "$0")/.."
if [ "${1:-}" = --mosaic ]; then
  # Environments of their own: they have a later JAX than .venv, only what these
  # tests import, and beside the packages what compiles for a GPU.
  for jax in 0.11 0.12; do
    venv=.venv/mosaic-$jax
    if [ ! -e "$venv/installed" ]; then
      echo "installing into $venv/ (a minute or two, once)"
      "${PYTHON:-python3.12}" -m venv "$venv"
      pip=("$venv/bin/python" -m pip install --quiet --quiet
        --disable-pip-version-check)
      "${pip[@]}" "jax==$jax.*" hypothesis numpy pytest
      version="$("$venv/bin/python" -c \
        'import jaxlib; print(jaxlib.__version__)')"
      "${pip[@]}" --no-deps "jax-cuda13-pjrt==$version" \
        "jax-cuda13-plugin==$version" nvidia-cuda-nvcc nvidia-nvvm \
        nvidia-cuda-nvdisasm
      touch "$venv/installed"
    fi
    # Not conftest: it imports what is not installed there.
    JAX_PLATFORMS=cpu "$venv/bin/python" -m pytest --noconftest \
      tests/test_mosaic.py "${@:2}"
  done
  exit
fi
extras="test,hf,notebook,wandb,datatrove,docs,libtpu,cuda-compiler"
case "${1:-}" in
  --nightly) select=() && shift ;;
  --all) select=(-m "not nightly") && shift ;;
  *) extras="test" select=(-m "not slow and not nightly") ;;
esac
launch/setup.sh "$extras"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n 2 --dist worksteal "${select[@]}" "$@"
