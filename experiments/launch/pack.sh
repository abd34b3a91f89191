#!/bin/bash
# Collects in a folder what a GPU host without a network lacks to measure: packages, and text of another kind.
#
#   PYTHON=.venv/bin/python experiments/launch/pack.sh packed jax jaxlib numpy scipy
#
# Behind the folder stand packages that the host has and that need not travel. PYTHON must be of the host's version, and
# have what requirements.txt lists. Copy the folder there with the repository and run experiments/launch/unpack.sh.
set -euo pipefail
folder=$1 python=${PYTHON:-python3}
mkdir -p "$folder"
"$python" -m pip wheel --quiet --wheel-dir "$folder/wheels" -r requirements.txt pytest pytest-timeout pytest-xdist hypothesis beartype
for package in "${@:2}"; do
  rm -f "$folder/wheels/${package//-/_}"-[0-9]*.whl
done
"$python" -m experiments.quality.other_text --output="$folder/other_text.jsonl.zst"
du -sh "$folder"
