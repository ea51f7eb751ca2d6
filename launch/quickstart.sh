#!/usr/bin/env bash
# From nothing to a trained and evaluated AntLM, on a machine with python3.
#
#   ./launch/quickstart.sh                on a small generated English, minutes
#   ./launch/quickstart.sh TEXT_FOLDER    on your own text
#
# Everything lands in runs/quickstart/, or the folder that RUNS names.
set -euo pipefail
case "${1:-}" in
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
text="${1:+$(realpath -m -- "$1")}"
cd "$(dirname "$0")/.."
launch/setup.sh
python=.venv/bin/python
run="${RUNS:-runs}/quickstart"

if [ -z "$text" ]; then
  $python -m antlm_jax.toy_english --output="$run/english"
  $python -m antlm_jax.prepare --text="$run/english/text" \
    --output="$run/data" --vocab_size=600 --seq_len=32 \
    --documents=line --packing=documents
  $python -m antlm_jax.train --config=configs/quickstart.py \
    --workdir="$run/train" --config.data.path="$run/data"
  for mode in causal mlm; do
    $python -m evals.blimp --checkpoint="$run/train" \
      --data="$run/english/pairs" --mode=$mode --output="$run/blimp-$mode"
  done
else
  run="$run-$(basename -- "$text")"
  $python -m antlm_jax.prepare --text="$text" --output="$run/data" \
    --vocab_size=8192
  $python -m antlm_jax.train --config=configs/babylm_small.py \
    --workdir="$run/train" --config.data.path="$run/data"
fi
$python -m antlm_jax.generate --checkpoint="$run/train" --prompt="The" \
  --tokens=20
echo
echo "Everything is in $run: the picture is train/curves.png, the figures"
echo "train/summary.json. The model goes on to be used with, for example,"
echo "  .venv/bin/python -m antlm_jax.fill_mask --checkpoint=$run/train \\"
echo "    --text='The <mask> is here.'"
