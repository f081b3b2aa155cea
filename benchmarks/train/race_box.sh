#!/usr/bin/env bash
# The race on a GPU box without Snakemake: race_box.sh FOLDER OUT.json [further options of race.py]
#
# FOLDER as scripts/gpu_box.sh fills it: target/, hidden_states/shard-*.safetensors, drafters/*/vocabulary.safetensors.
# PYTHON has torch, transformers and benchmarks/train/peers.lock. TOTAL: seconds for all.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${2:?usage: race_box.sh FOLDER OUT.json [OPTION ...]}" "${PYTHON:=python3}" "${TOTAL:=330}"
FOLDER=$1 OUT=$2
shift 2
: "${VOCABULARY:=$(find "$FOLDER/drafters" -name vocabulary.safetensors | sort | head -n 1)}"
exec "$PYTHON" "$HERE/race.py" --target "$FOLDER/target" --hidden-states "$FOLDER"/hidden_states/shard-*.safetensors \
    --vocabulary "$VOCABULARY" --random llama-8b --random-steps 40 --device cuda --tokens 800000 --seconds 12 \
    --total "$TOTAL" --limit 80 --out "$OUT" "$@"
