#!/usr/bin/env bash
# Runs the tests on a machine with only python3.
#
#   ./launch/test.sh            tests to pass before a commit: 5 minutes on 2
#                               cores
#   ./launch/test.sh --all      also slow tests: 50 minutes; installs PyTorch,
#                               Jupyter and the compilers for TPUs and GPUs
#   ./launch/test.sh --nightly  also the longest tests: more disturbances of
#                               several processes, more pages, the whole quickstart
#   ./launch/test.sh --lowest   the tests to pass before a commit, with the lowest
#                               versions that setup.py allows
#   ./launch/test.sh --mosaic   the kernel for Hopper GPUs, interpreted and
#                               compiled for an H100, with jax 0.11 and 0.12: an
#                               hour; needs 1 GB and Python 3.12 ($PYTHON, or
#                               python3.12), but no GPU
#
# More arguments go to pytest.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
cd "$(dirname "$0")/.."
if [ "${1:-}" = --mosaic ]; then
  # These environments have a later JAX than .venv, the few packages that these
  # tests import, and the compiler for GPUs.
  for jax in 0.11 0.12; do
    venv=.venv/mosaic-$jax
    if [ ! -e "$venv/installed" ]; then
      echo "installing into $venv/ (a minute or two, once)"
      "${PYTHON:-python3.12}" -m venv "$venv"
      pip=("$venv/bin/python" -m pip install --quiet --quiet
        --disable-pip-version-check)
      "${pip[@]}" "jax==$jax.*" hypothesis numpy pytest tokamax==0.0.17
      version="$("$venv/bin/python" -c \
        'import jaxlib; print(jaxlib.__version__)')"
      "${pip[@]}" --no-deps "jax-cuda13-pjrt==$version" \
        "jax-cuda13-plugin==$version" nvidia-cuda-nvcc nvidia-nvvm \
        nvidia-cuda-nvdisasm
      touch "$venv/installed"
    fi
    # conftest imports packages that are not installed there.
    JAX_PLATFORMS=cpu "$venv/bin/python" -m pytest --noconftest \
      tests/test_mosaic.py tests/test_tokamax.py "${@:2}"
  done
  exit
fi
# Three processes for two cores, because tests also wait.
run_pytest() { # PYTHON [ARGUMENT ...]
  "$1" -m pytest -n 3 --dist worksteal "${@:2}"
}
before_commit=(-m "not slow and not nightly")
if [ "${1:-}" = --lowest ]; then
  venv=.venv/lowest
  if ! cksum setup.py | cmp -s - "$venv/installed"; then
    echo "installing into $venv/ (a few minutes, once)"
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
    VIRTUAL_ENV="$venv" "$venv/bin/uv" pip install --quiet \
      --resolution lowest-direct --editable ".[test]"
    cksum setup.py > "$venv/installed"
  fi
  run_pytest "$venv/bin/python" "${before_commit[@]}" "${@:2}"
  exit
fi
extras="test,test-hf,notebook,wandb,datatrove,docs,libtpu,cuda-compiler"
case "${1:-}" in
  --nightly) select=() && shift ;;
  --all) select=(-m "not nightly") && shift ;;
  *) extras="test" select=("${before_commit[@]}") ;;
esac
launch/setup.sh "$extras"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
run_pytest .venv/bin/python "${select[@]}" "$@"
