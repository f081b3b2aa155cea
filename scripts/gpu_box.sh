#!/usr/bin/env bash
# The stages of a data curve on a GPU box without Snakemake, by the workflow's own scripts (docs/howto.md):
#
#   ENGINE_PYTHON=/envs/vllm/bin/python MODEL_PYTHON=/envs/model/bin/python GPUS="0 1" ENGINES_PER_GPU=4 \
#       scripts/gpu_box.sh FOLDER [generate] [extract] [vocabulary] [train] [evaluate] [serve] [replay]
#
# FOLDER holds target/ and prompts/pool.parquet with their manifests, and gets responses/, hidden_states/, drafters/NAME-N/
# and benchmarks/ARM/, which scripts/compare.py reads. Without stages, those up to evaluate. What is there is not made again,
# and a killed stage goes on where it was. The variables below, set from outside, are an experiment's values; those that
# stand there are experiments/data-curve.yaml's.
# shellcheck disable=SC2086 # the *_OPTIONS are words of a command line
set -euo pipefail
SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${1:?usage: gpu_box.sh FOLDER [STAGE ...]}"
FOLDER=$(cd "$1" && pwd)
shift
: "${ENGINE_PYTHON:=python}" "${MODEL_PYTHON:=$ENGINE_PYTHON}" "${HARDWARE:=cuda}" "${THREADS:=8}"
: "${GPUS:=0}" "${ENGINES_PER_GPU:=1}" # GPUS: numbers with blanks between them
: "${SIZE:=22560}" "${SHARD_SIZE:=2820}" "${SAMPLES_PER_PROMPT:=4}" "${GREEDY_FIRST=--greedy-first}" "${ENGINE:=vllm}"
SAMPLING=${SAMPLING:-'{"max_tokens": 256, "temperature": 0.7, "top_p": 1, "seed": 0}'}
# A fixed cache: engines side by side would take each other's memory for their own while they measure what is free.
SETTINGS=${SETTINGS:-'{"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 512, "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 17179869184}'}
ENVIRONMENT=${ENVIRONMENT:-'{}'}
: "${NAME:=own}" "${POINTS:=10000 20000 44000 88000}" "${VOCABULARY:=16000}" "${INITIALISE_FROM:=target}"
TRAINING=${TRAINING:-'{"ttt_steps": 5, "epochs": 3, "learning_rate": 0.001, "batch_tokens": 8192, "seed": 0}'}
: "${TRAIN_RANKS:=1}" # GPUs that train a drafter together; no more than "batches_per_step" in TRAINING
# What the drafters learn from: hidden_states, extracted before into the folder STORE; or responses, where the scripts take
# --responses and run the target inside the training step.
: "${DATA:=hidden_states}" "${STORE:=hidden_states}"
: "${EXTRACT_OPTIONS:=--codec int8 --batch-tokens 65536}" "${TRAIN_OPTIONS:=--batch-tokens 65536}"
# What is served: `plain`, or a folder of drafters/ with the drafted tokens per step behind it; pass by pass, all arms in each.
: "${ARMS:=plain $NAME-${POINTS##* }-k3}" "${SUFFIX:=}" "${PASSES:=1 2 3}" "${PROMPTS:=$SCRIPTS/../resources/quick-prompts.jsonl}"
PROTOCOL=${PROTOCOL:-'{"name": "quick", "max_tokens": 128, "temperature": 0, "seed": 0}'}
SERVER=${SERVER:-'{"flags": {"dtype": "bfloat16", "max-model-len": 4096, "max-num-seqs": 4, "no-enable-prefix-caching": true,
    "gpu-memory-utilization": 0.6}}'}
export ENGINE_PYTHON MODEL_PYTHON HARDWARE THREADS GPUS SCRIPTS FOLDER SHARD_SIZE SAMPLES_PER_PROMPT GREEDY_FIRST ENGINE
export SAMPLING SETTINGS ENVIRONMENT NAME VOCABULARY INITIALISE_FROM TRAINING TRAIN_RANKS DATA STORE EXTRACT_OPTIONS
export TRAIN_OPTIONS SUFFIX PROMPTS PROTOCOL SERVER

generate() {
    "$ENGINE_PYTHON" "$SCRIPTS/generate_responses.py" --target "$FOLDER/target" --pool "$FOLDER/prompts/pool.parquet" \
        --start "$1" --count "$SHARD_SIZE" --engine "$ENGINE" --sampling "$SAMPLING" $GREEDY_FIRST \
        --samples-per-prompt "$SAMPLES_PER_PROMPT" --settings "$SETTINGS" --environment "$ENVIRONMENT" \
        --hardware "$HARDWARE" --out "$FOLDER/responses/shard-$1.parquet"
}
extract() {
    "$MODEL_PYTHON" "$SCRIPTS/extract_hidden_states.py" --target "$FOLDER/target" $EXTRACT_OPTIONS \
        --responses "$FOLDER/responses/shard-$1.parquet" --device "$HARDWARE" --threads "$THREADS" \
        --out "$FOLDER/$STORE/shard-$1.safetensors"
}
vocabulary() {
    "$MODEL_PYTHON" "$SCRIPTS/build_vocabulary.py" --target "$FOLDER/target" "${data[@]}" --size "$VOCABULARY" \
        --samples "$1" --out "$FOLDER/drafters/$NAME-$1/vocabulary.safetensors"
}
train() {
    "$MODEL_PYTHON" "$SCRIPTS/train_drafter.py" --target "$FOLDER/target" "${data[@]}" --samples "$1" \
        --vocabulary "$FOLDER/drafters/$NAME-$1/vocabulary.safetensors" --settings "$TRAINING" $TRAIN_OPTIONS \
        --initialise-from "$INITIALISE_FROM" --device "$HARDWARE" --threads "$THREADS" --ranks "$TRAIN_RANKS" \
        --out "$FOLDER/drafters/$NAME-$1/checkpoint"
}
evaluate() {
    "$MODEL_PYTHON" "$SCRIPTS/evaluate_drafter.py" --target "$FOLDER/target" "${data[@]}" --device "$HARDWARE" \
        --checkpoint "$FOLDER/drafters/$NAME-$1/checkpoint" --threads "$THREADS" \
        --by-sequence "$FOLDER/drafters/$NAME-$1/offline_by_sequence.parquet" \
        --out "$FOLDER/drafters/$NAME-$1/offline.parquet"
}
serve() { # ARM/pass-NUMBER
    local arm=${1%%/*} drafter=() json
    json="\"name\": \"$ENGINE-$arm$SUFFIX\", \"engine\": \"$ENGINE\""
    if [[ $arm =~ ^(.+)-k([0-9]+)$ ]]; then
        drafter=(--checkpoint "$FOLDER/drafters/${BASH_REMATCH[1]}/checkpoint")
        json+=", \"drafter\": \"${BASH_REMATCH[1]}\", \"k\": ${BASH_REMATCH[2]}"
    fi
    "$ENGINE_PYTHON" "$SCRIPTS/benchmark.py" --arm "{$json}" --pass "${1##*-}" "${drafter[@]}" --engine-settings "$SERVER" \
        --protocol "$PROTOCOL" --prompts "$PROMPTS" --engine-python "$ENGINE_PYTHON" --hardware "$HARDWARE" \
        --target "$FOLDER/target" --out "$FOLDER/benchmarks/$ENGINE-$arm$SUFFIX/${1##*/}.parquet"
}
replay() { # ARM, one with a drafter
    local arm=$FOLDER/benchmarks/$ENGINE-$1$SUFFIX
    "$MODEL_PYTHON" "$SCRIPTS/replay_served.py" --target "$FOLDER/target" --checkpoint "$FOLDER/drafters/${1%-k*}/checkpoint" \
        --served "$arm/pass-1.parquet" --k "${1##*-k}" --device "$HARDWARE" --threads "$THREADS" --out "$arm/offline.parquet" \
        --what-if "$arm/what_if.parquet"
}
# One item of a stage, unless its result is there: on the GPUs of its slot, with a log of its own.
one() {
    shopt -s nullglob
    local gpus each result log=$1-$NAME-$2 data=(--hidden-states "$FOLDER/$STORE"/shard-*.safetensors)
    [ "$DATA" = hidden_states ] || data=(--responses "$FOLDER"/responses/shard-*.parquet)
    read -ra gpus <<<"$GPUS"
    case $1 in
    generate) result=responses/shard-$2.manifest.json log=$1-$2 ;;
    extract) result=$STORE/shard-$2.manifest.json log=$1-$STORE-$2 ;;
    vocabulary) result=drafters/$NAME-$2/vocabulary.manifest.json ;;
    train) result=drafters/$NAME-$2/checkpoint/manifest.json ;;
    evaluate) result=drafters/$NAME-$2/offline.manifest.json ;;
    serve) result=benchmarks/$ENGINE-${2/\//$SUFFIX/}.manifest.json log=serve-$ENGINE-${2/\//$SUFFIX-} ;;
    replay) result=benchmarks/$ENGINE-$2$SUFFIX/what_if.manifest.json log=replay-$ENGINE-$2$SUFFIX ;;
    esac
    [ ! -f "$FOLDER/$result" ] || return 0
    echo "$(date +%T) $1 $2"
    mkdir -p "$FOLDER/logs"
    case $1 in train) each=$TRAIN_RANKS ;; serve) each=${#gpus[@]} ;; *) each=1 ;; esac
    CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${gpus[*]:SLOT*each%${#gpus[@]}:each}") "$1" "$2" >"$FOLDER/logs/$log.log" 2>&1 ||
        { echo "error: $1 $2 failed; see $FOLDER/logs/$log.log" >&2 && return 1; }
}
export -f generate extract vocabulary train evaluate serve replay one
[ $(($(wc -w <<<"$GPUS") % TRAIN_RANKS)) = 0 ] ||
    { echo "error: TRAIN_RANKS ($TRAIN_RANKS) must divide the number of GPUS ($GPUS)" >&2 && exit 1; }
[ $# -gt 0 ] || set -- generate extract vocabulary train evaluate
n_gpus=$(wc -w <<<"$GPUS")
for stage; do
    case $stage in
    generate | extract) items=$(seq -f %06.0f 0 "$SHARD_SIZE" $((SIZE - 1))) ;;
    vocabulary | train | evaluate) items=$POINTS ;;
    # From last to first, as the others.
    serve) items=$(for n in $PASSES; do printf "%s/pass-$n\n" $ARMS; done | tac) ;;
    replay) items=$(tr ' ' '\n' <<<"$ARMS" | sed '/^plain$/d') ;;
    *)
        echo "error: there is no stage $stage; stages are generate, extract, vocabulary, train, evaluate, serve, replay" >&2
        exit 1
        ;;
    esac
    [ "$stage $DATA" != "extract responses" ] || continue
    case $stage in
    generate) at_once=$((n_gpus * ENGINES_PER_GPU)) ;;
    train) at_once=$((n_gpus / TRAIN_RANKS)) ;;
    serve) at_once=1 ;;
    *) at_once=$n_gpus ;;
    esac
    # The longest first, so that none is left over at the end.
    tr ' ' '\n' <<<"$items" | tac | xargs -P "$at_once" --process-slot-var=SLOT -I{} bash -euo pipefail -c "one $stage {}"
done
