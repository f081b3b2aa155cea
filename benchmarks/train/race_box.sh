#!/usr/bin/env bash
# The race on a GPU box without Snakemake: race_box.sh FOLDER OUT.json [further options of race.py]
#
# FOLDER as scripts/gpu_box.sh fills it: target/, hidden_states/shard-*.safetensors, drafters/*/vocabulary.safetensors.
# PYTHON has torch, transformers and benchmarks/train/peers.lock. RACER_LIMIT: seconds for all runs of one racer.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${2:?usage: race_box.sh FOLDER OUT.json [OPTION ...]}" "${PYTHON:=python3}" "${RACER_LIMIT:=105}"
FOLDER=$1 OUT=$2
shift 2
: "${VOCABULARY:=$(find "$FOLDER/drafters" -name vocabulary.safetensors | sort | head -n 1)}"
exec "$PYTHON" "$HERE/race.py" --target "$FOLDER/target" --hidden-states "$FOLDER"/hidden_states/shard-*.safetensors \
    --vocabulary "$VOCABULARY" --random llama-8b --random-steps 40 --device cuda --tokens 1000000 --seconds 15 \
    --racer-limit "$RACER_LIMIT" --limit 75 --out "$OUT" "$@"
