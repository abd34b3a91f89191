#!/bin/bash
# Makes a host without a network ready to measure, from the folder of pack.sh: packages, and two prepared corpora.
#
#   experiments/launch/unpack.sh packed data
#   python3 -m pytest -m gpu tests/ops tests/recipes tests/model
#   python3 -m experiments.quality.time_to_loss --data=data/python --second_data=data/other --suite=afm_4_layers ...
#
# The first corpus is the source of all packages that this host has, and of those that pack.sh added.
set -euo pipefail
folder=$1 data=$2
python3 -m pip install --quiet --no-index --find-links="$folder/wheels" -r requirements.txt pytest pytest-timeout pytest-xdist hypothesis beartype
packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
files=(--files="$packages/**/*.py")
[[ ! -e "$folder/more_text" ]] || files+=(--files="$folder/more_text/*")
[[ -e "$data/python" ]] || python3 -m sparse_lm.prepare_data "${files[@]}" --vocab_size=16384 --seq_len=1024 --output="$data/python"
[[ -e "$data/other" ]] || python3 -m sparse_lm.prepare_data --files="$folder/other_text/*" --seq_len=1024 \
  --tokenizer="$data/python/tokenizer.json" --output="$data/other"
