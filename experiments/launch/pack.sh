#!/bin/bash
# Collects in a folder what a GPU host without a network lacks to measure: packages, and text of another kind.
#
#   PYTHON=.venv/bin/python experiments/launch/pack.sh packed jax jaxlib numpy scipy
#
# Behind the folder stand packages that the host has and that need not travel. PYTHON must be of the host's version, and
# have what requirements.txt lists. Copy the folder there with the repository and run experiments/launch/unpack.sh.
#
# MORE_TEXT names packages whose source is to be trained on as well, 130 million characters of it at most, for runs that
# would read the host's own too often: "homeassistant pennylane mlflow breezy apache-beam astropy twisted keras scapy
# wagtail sqlalchemy mercurial dagster mne django" have that many, in 21 MB.
set -euo pipefail
folder=$1 python=${PYTHON:-python3}
mkdir -p "$folder"
"$python" -m pip wheel --quiet --wheel-dir "$folder/wheels" -r requirements.txt pytest pytest-timeout pytest-xdist hypothesis beartype
for package in "${@:2}"; do
  rm -f "$folder/wheels/${package//-/_}"-[0-9]*.whl
done
"$python" -m experiments.quality.other_text --output="$folder/other_text"
if [[ -n "${MORE_TEXT:-}" ]]; then
  sources=$(mktemp -d)
  trap 'rm -r "$sources"' EXIT
  # shellcheck disable=SC2086
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$sources" $MORE_TEXT
  for wheel in "$sources"/*.whl; do
    unzip -q "$wheel" '*.py' -d "${wheel%.whl}"
    rm "$wheel"
  done
  "$python" -m experiments.quality.other_text --folders="$sources" --megabytes=130 --output="$folder/more_text"
fi
du -sh "$folder"
