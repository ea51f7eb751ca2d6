#!/usr/bin/env bash
# Installs antlm_jax into .venv/, unless it is up to date. Uses Python 3.11 or
# later: $PYTHON, or python3. If python3 is older, it fetches Python 3.12.
#
#   launch/setup.sh [EXTRA,...]   extras of setup.py: cuda, cuda12, tpu, gcs, hf,
#                                 datasets, evals, wandb, notebook, datatrove,
#                                 mteb, docs, test, test-hf
#   launch/setup.sh libtpu        only the compiler for TPUs, for `antlm plan`
#   launch/setup.sh cuda-compiler      only the compiler for GPUs
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
cd "$(dirname "$0")/.."

extras=",${1:-},"
compilers=
for name in libtpu cuda-compiler; do
  case "$extras" in *",$name,"*) compilers+=" $name" ;; esac
  extras="${extras//,$name,/,}"
done
extras="${extras#,}"
extras="${extras%,}"
python="${PYTHON:-python3}"
stamp=".venv/installed"

# Without PYTHON, an old python3 does not matter, as on TPU VMs.
recent='import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))'
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
  python=.venv/bin/python
elif [ -z "${PYTHON:-}" ] && ! python3 -c "$recent" 2> /dev/null &&
  python3 -m pip --version > /dev/null 2>&1; then
  echo "fetching Python 3.12 into .python/: $(python3 --version) is too old," \
    "or lacks its module venv"
  export UV_PYTHON_INSTALL_DIR="$PWD/.python"
  python3 -m pip install --quiet --upgrade --target .uv uv
  .uv/bin/uv python install --quiet 3.12
  python="$(.uv/bin/uv python find --managed-python 3.12)"
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$python" --version) is too old: antlm_jax needs Python 3.11" \
    "or later; set PYTHON to a newer Python" >&2
  exit 2
}
# pip installs nothing for an unknown extra, and succeeds.
known="$("$python" - <<'END'
import ast

for node in ast.walk(ast.parse(open("setup.py").read())):
  if isinstance(node, ast.keyword) and node.arg == "extras_require":
    print(*(key.value for key in node.value.keys))
END
)"
for name in ${extras//,/ }; do
  case " $known " in
    *" $name "*) ;;
    *)
      echo "error: no extra $name in setup.py; known: $known libtpu" \
        "cuda-compiler" >&2
      exit 2 ;;
  esac
done
# If $PYTHON names another version than that of .venv/, or the Python of .venv/
# is gone, .venv/ is made again.
version='import sys; print(*sys.version_info[:2], sep=".")'
if [ -e "$stamp" ] && [ "$(.venv/bin/python -c "$version" 2> /dev/null)" != \
  "$("$python" -c "$version")" ]; then
  echo "replacing .venv/ by one of $("$python" --version)"
  rm -rf .venv
fi
# Extras accumulate: a later call without an extra does not uninstall it.
wanted="$(cksum setup.py) $extras"
if ! grep -qsxF "$wanted" "$stamp"; then
  echo "installing into .venv/ (a few minutes, once)"
  echo "  1. a virtual environment of $("$python" --version)"
  [ -x .venv/bin/python ] || "$python" -m venv .venv || {
    echo "error: $python cannot make virtual environments: install its venv" \
      "module (Debian: apt-get install python3-venv)" >&2
    exit 2
  }
  echo "  2. antlm_jax${extras:+ with $extras}, and the packages that it needs:"
  # pip's lines of packages, without those that are there or are only metadata.
  .venv/bin/python -m pip install --disable-pip-version-check \
    --progress-bar=off --editable ".${extras:+[$extras]}" |
    sed -nu 's/^Collecting \([^ ]*\).*/     \1/p; s/^Installing .*/  3. installing them/p'
  echo "$wanted" >> "$stamp"
fi
# Compilers have separate folders. In site-packages, they would make every
# command look for a TPU or a GPU.
for name in $compilers; do
  case "$name" in
    libtpu) file=libtpu/libtpu.so size="700 MB" ;;
    cuda-compiler) file=jax_plugins/xla_cuda13/version.py size="400 MB" ;;
  esac
  [ ! -e ".venv/$name/$file" ] || continue
  echo "installing $name into .venv/$name/ ($size)"
  needed="$(.venv/bin/python - "$name" <<'END'
import sys
from importlib.metadata import requires, version

of_jax = [line.partition(";")[0] for line in requires("jax")]
libtpu = next(package for package in of_jax if "libtpu" in package)
cuda = f"jax-cuda13-pjrt=={version('jaxlib')}"
print({"libtpu": libtpu, "cuda-compiler": cuda}[sys.argv[1]])
END
)"
  .venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
    --no-deps --target ".venv/$name" "$needed"
done
