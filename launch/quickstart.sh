#!/usr/bin/env bash
# From nothing to a trained and evaluated AntLM, on a machine with python3.
#
#   ./launch/quickstart.sh                on a small generated English, minutes
#   ./launch/quickstart.sh TEXT_FOLDER    on your own text
#
# Everything lands in runs/quickstart/, or under the folder that RUNS names.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
text="${1:+$(realpath -m -- "$1")}"
cd "$(dirname "$0")/.."
launch/setup.sh
# On a CPU a step maps its memory anew: in large pages (docs/explanation/speed.md).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
python=.venv/bin/python
run="${RUNS:-runs}/quickstart${text:+-$(basename -- "$text")}"

if [ -z "$text" ]; then
  $python -m antlm_jax toy_english --output="$run/english"
  $python -m antlm_jax prepare --text="$run/english/text" \
    --output="$run/data" --vocab_size=600 --seq_len=32 \
    --documents=line --packing=documents
  config=configs/quickstart.py
  prompt="the dogs near" masked="the dogs near the house <mask> often rested ."
else
  $python -m antlm_jax prepare --text="$text" --output="$run/data" \
    --vocab_size=8192
  config="${CONFIG:-configs/babylm_small.py}"
  prompt="The" masked="The <mask> is here."
fi
$python -m antlm_jax train --config="$config" --workdir="$run/train" \
  --config.data.path="$run/data"
if [ -z "$text" ]; then
  for mode in causal mlm; do
    echo
    echo "minimal pairs, scored $mode:"
    $python -m antlm_jax eval blimp --checkpoint="$run/train" \
      --data="$run/english/pairs" --mode=$mode --output="$run/blimp-$mode"
  done
fi
echo
echo "a continuation of '$prompt':"
$python -m antlm_jax generate --checkpoint="$run/train" --prompt="$prompt" \
  --tokens=20
echo
echo "'$masked', filled:"
$python -m antlm_jax fill --checkpoint="$run/train" --text="$masked"
echo
echo "Everything is in $run: look at train/curves.png; the figures are in"
echo "$(cd "$run" && echo */summary.json)."
