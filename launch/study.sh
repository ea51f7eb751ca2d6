#!/usr/bin/env bash
# Trains, evaluates and reports a study, on a machine with python3.
#
#   ./launch/study.sh --text=TEXT_FOLDER --data=EVALUATION_FOLDER
#
# runs on a CPU. --scale=paper --dry_run prints what the paper's 38 models take,
# and installs nothing. The same command resumes an interrupted study; --help
# lists all options.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="$root/.venv/bin/python"
case " $* " in
  *" --dry_run "* | *" --commands "* | *" --help "* | *" -h "*)
    [ -x "$python" ] || {
      echo "error: $root/.venv is missing, and a command that only prints" \
        "installs nothing: run $root/launch/setup.sh evals first" >&2
      exit 2
    } ;;
  *) "$root/launch/setup.sh" evals ;; # the extra that reports need
esac
# On a CPU a step maps its memory anew: in large pages (docs/explanation/speed.md).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
exec "$python" -m antlm_jax study "$@"
