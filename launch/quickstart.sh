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
# realpath of macOS has no -m.
absolute='import os, sys; print(os.path.realpath(sys.argv[1]))'
text="${1:+$("${PYTHON:-python3}" -c "$absolute" "$1")}"
cd "$(dirname "$0")/.."
launch/setup.sh
# On a CPU a step maps its memory anew: in large pages (docs/explanation/speed.md).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
python=.venv/bin/python
run="${RUNS:-runs}/quickstart${text:+-$(basename -- "$text")}"

antlm=.venv/bin/antlm
heading() { printf '\n== %s ==\n\n' "$1"; }

heading "1. Make the data: text, tokenizer and rows of tokens"
if [ -z "$text" ]; then
  if [ -e "$run/data" ] && [ -d "$run/english/pairs" ]; then
    echo "the generated English is already in $run/english"
  else
    $python -m antlm_jax toy_english --output="$run/english"
  fi
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
heading "2. Train: predict next tokens (clm) and masked tokens (mlm)"
$python -m antlm_jax train --config="$config" --workdir="$run/train" \
  --config.data.path="$run/data"
if [ -z "$text" ]; then
  heading "3. Test: choose the right sentence of each pair (50 % is chance)"
  echo "A UID is a file of pairs, which tests one phenomenon."
  for mode in causal mlm; do
    case $mode in
      causal) printf '\nscored from left to right:\n' ;;
      mlm) printf '\nscored by filling masks:\n' ;;
    esac
    $python -m antlm_jax eval blimp --checkpoint="$run/train" \
      --data="$run/english/pairs" --mode=$mode --output="$run/blimp-$mode"
  done
fi
heading "Use: continue '$prompt'"
$python -m antlm_jax generate --checkpoint="$run/train" --prompt="$prompt" \
  --tokens=20
heading "Use: fill '$masked'"
$python -m antlm_jax fill --checkpoint="$run/train" --text="$masked"
heading "What to do next"
of="--checkpoint=$(printf %q "$run/train")"
cat <<END
Everything is in $run. Look at train/README.md and train/curves.png.
From $PWD, try:

  $antlm generate $of --prompt="$prompt" --temperature=0.8
  $antlm fill $of --text="$masked"
  $antlm export $of --output=$(printf %q "$run/hf")
END
[ -n "$text" ] || echo "  ./launch/quickstart.sh TEXT_FOLDER   # your own text"
printf '\nTo go further, read the pages in docs/tutorials/.\n'
