#!/usr/bin/env bash
# Trains, evaluates and reports a study, on a machine with python3.
#
#   ./launch/study.sh --text=TEXT_FOLDER --data=EVALUATION_FOLDER
#
# runs on a CPU. It installs nothing if .venv, or else $PYTHON (by default
# python3), has all packages. --scale=paper --dry_run prints the cost of the
# paper's 38 models, and installs nothing. The same command resumes an
# interrupted study; --help lists all options.
set -euo pipefail
root="$(CDPATH='' cd "$(dirname "$0")/.." && pwd)"
case " $* " in
  *" --help "* | *" -h "*)
    if [ ! -x "$root/.venv/bin/python" ]; then
      sed -n '2,9s/^# \{0,1\}//p' "$0"
      echo "After $root/launch/setup.sh evals, --help lists all options."
      exit 0
    fi ;;
esac
venv="$root/.venv/bin/python" python="${PYTHON:-python3}" ready=yes
if [ -x "$venv" ]; then
  python="$venv"
  stamp="$(cd "$root" && cksum setup.py)"
  grep -qs "^$stamp " "$root/.venv/installed" || ready=
fi
# -P: the present folder may have Python files of other people.
"$python" -P -c "
import jax, flax, optax, orbax.checkpoint, grain, array_record, ml_collections
import tensorflow_datasets.core.dataset_info, huggingface_hub, matplotlib
import packaging, pyarrow, safetensors, tokenizers, tqdm, jinja2
" > /dev/null 2>&1 || ready=
if [ -z "$ready" ]; then
  case " $* " in
    *" --dry_run "* | *" --commands "* | *" --help "* | *" -h "*)
      [ -x "$venv" ] || {
        echo "error: $root/.venv is missing, and a command that only prints" \
          "installs nothing: run $root/launch/setup.sh evals first" >&2
        exit 2
      } ;;
    *) "$root/launch/setup.sh" evals ;; # the extra that reports need
  esac
  python="$venv"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# On a CPU a step maps its memory anew: in large pages (docs/explanation/speed.md).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
# -P: the present folder may have Python files of other people.
exec "$python" -P -m antlm_jax study "$@"
