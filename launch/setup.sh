#!/usr/bin/env bash
# Makes .venv/ with antlm_jax in it; does nothing if it is up to date.
# Needs only python3 (3.11 or later).
#
#   launch/setup.sh [EXTRA,...]  of setup.py: test, hf, notebook, tpu, cuda, gcs
#   launch/setup.sh libtpu        the compiler alone for TPUs that are not here
set -euo pipefail
cd "$(dirname "$0")/.."

extras=",${1:-},"
libtpu=no
case "$extras" in *,libtpu,*) libtpu=yes ;; esac
extras="${extras//,libtpu,/,}"
extras="${extras#,}"
extras="${extras%,}"
python="${PYTHON:-python3}"
stamp=".venv/installed"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$python" --version) is too old: antlm_jax needs Python 3.11" \
    "or later; set PYTHON to one" >&2
  exit 2
}
# Extras add up: what was installed for the tests stays for the quickstart.
wanted="$(cksum setup.py) $extras"
if ! grep -qsxF "$wanted" "$stamp"; then
  echo "installing into .venv/ (a few minutes, once)"
  [ -x .venv/bin/python ] || "$python" -m venv .venv || {
    echo "error: $python cannot make virtual environments: install its venv" \
      "module (Debian: apt-get install python3-venv)" >&2
    exit 2
  }
  .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
    --editable ".${extras:+[$extras]}"
  echo "$wanted" >> "$stamp"
fi
# Beside the packages, not among them: in their midst, every command of a
# machine without a TPU would look for one.
if [ "$libtpu" = yes ] && [ ! -e .venv/libtpu/libtpu/libtpu.so ]; then
  echo "installing libtpu into .venv/libtpu/ (700 MB)"
  needed="$(.venv/bin/python -c '
from importlib.metadata import requires
print(*(r.partition(";")[0] for r in requires("jax") if "libtpu" in r))')"
  .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
    --no-deps --target .venv/libtpu "$needed"
fi
