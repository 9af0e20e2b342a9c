#!/usr/bin/env bash
# The fused operations against the CPU's, and the workloads `draft` and `tasks`, on a GPU machine
# without a network, from this tree and a build that is carried there.
#
#   bench/gpu.sh pack [DIR]   here: programs, libraries, Python packages and the golden pair into
#                             DIR (gpu-build), at most 64 MiB. With nvcc also a program of our
#                             kernels alone, for the card ARCH. The rest is what `build` holds: for
#                             more than that program, first DSPINE_CUDA=1 make setup, with CMAKE_ARGS
#                             naming the one card (-DCMAKE_CUDA_ARCHITECTURES=90-real). cuBLAS is not
#                             carried: it is looked for in the system, a toolkit, Python's packages
#   bench/gpu.sh run [DIR]    there: measure; results go to $OUT (gpu-out), in under 8 minutes
#   bench/gpu.sh dry [DIR]    anywhere: the same on the CPU with the smallest sizes, in about a minute
#
# `run` needs the Python for which DIR was packed: pythonX.Y, or python3 where it is that one. So does
# `dry`, but without it takes .venv and its packages. `pack` refuses a folder that holds other files.
#
# Results: ops.json (our kernels alone against numpy, plain and from a CUDA graph; test-ops, the same
# operations inside llama.cpp; both also under compute-sanitizer, where it is installed), tasks.json,
# draft-SHAPE.json, and draft-SHAPE-composed.json of the first shape without the fused operations.
#
# Settings: PYTHON (that one and no other, for run and dry), GPU_PYTHON and ARCH (3.12 and 90: those of
# the GPU machine, for pack), TARGET and DRAFT (a pair for `tasks` instead of the golden one),
# SHAPES ("small mid medium 27b"), LIMIT (460 seconds).
# Every part is independent: one that fails or runs out of time leaves the others' results, and
# the exit code is 1.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

PYTHON=${PYTHON:-}
GPU_PYTHON=${GPU_PYTHON:-3.12}
ARCH=${ARCH:-90}
LIMIT=${LIMIT:-460}
MAX_MIB=64
PROGRAMS="llama-server test-ops"
# what the measured commands import, without what they do not (matplotlib, hub clients)
PACKAGES="pytest pytest-timeout hypothesis numpy gguf pydantic typer rich httpx huggingface_hub safetensors jinja2 diskcache"

fail() { echo "gpu.sh: $*" >&2; exit 1; }

# what pack writes, the two marks of a pack last, so that an interrupted removal leaves one
PACKED=(.gitignore bin site models commit packed-for packed.tar.xz)

# ends where DIR holds files that no pack wrote
refuse_foreign() {
    local dir=$1
    if [ -n "$(ls -A "$dir" 2>/dev/null)" ] && [ ! -f "$dir/packed.tar.xz" ] && [ ! -f "$dir/packed-for" ]; then
        fail "$dir is not empty and holds no earlier pack (packed.tar.xz): name a new or an empty folder"
    fi
}

pack() {
    local dir=$1 venv=.venv/bin/python
    refuse_foreign "$dir"
    [ -x "$venv" ] || fail "no .venv here: make setup"
    local name
    for name in $PROGRAMS; do
        [ -x "build/bin/$name" ] || fail "build/bin/$name is missing: make setup"
    done
    [ -e build/bin/libggml-cuda.so ] || echo "gpu.sh: build has no CUDA backend: no workload will run" >&2
    rm -rf "${PACKED[@]/#/$dir/}" || exit 1
    mkdir -p "$dir" && echo "$GPU_PYTHON" > "$dir/packed-for" || exit 1
    mkdir -p "$dir/bin" "$dir/site" "$dir/models" || exit 1
    "$venv" scripts/check_cuda.py --program "$dir/bin/dspine-kernels" --arch "$ARCH" || exit 1
    for name in $PROGRAMS; do cp -L "build/bin/$name" "$dir/bin/" || exit 1; done
    cp -P build/bin/*.so* "$dir/bin/" || exit 1
    find "$dir/bin" -type f -exec strip --strip-unneeded {} + 2>/dev/null
    # compiled for the Python that is there, not for the one that is here
    "$venv" -m pip install --quiet --disable-pip-version-check --target "$dir/site" \
        --python-version "$GPU_PYTHON" --only-binary=:all: --no-compile $PACKAGES \
        || fail "pip has no wheels for Python $GPU_PYTHON"
    local declarations
    declarations=$("$venv" -c 'import importlib.util as u; print(u.find_spec("llama_cpp").submodule_search_locations[0])') \
        || fail "llama_cpp is missing in .venv: make setup"
    echo "*" > "$dir/.gitignore"
    mkdir -p "$dir/site/llama_cpp" && cp "$declarations"/*.py "$dir/site/llama_cpp/" || exit 1
    rm -rf "$dir"/site/bin "$dir"/site/*/tests "$dir"/site/numpy/*/tests
    find "$dir/site" -name __pycache__ -prune -exec rm -rf {} +
    PYTHONPATH=bindings:bench:converter "$venv" -m dspine_bench.golden_bench "$dir/models" || exit 1
    git rev-parse HEAD > "$dir/commit" || exit 1
    [ -z "$(git status --porcelain -- . ':!bench/results')" ] || sed -i 's/$/-dirty/' "$dir/commit"
    XZ_OPT="-1 -T0" tar -C "$dir" -cJf "$dir/packed.tar.xz" bin site models && rm -rf "$dir"/{bin,site,models} || exit 1
    local mib
    mib=$(du -sm "$dir" | cut -f1)
    [ "$mib" -le "$MAX_MIB" ] || fail "$dir has $mib MiB, $MAX_MIB allowed"
    echo "$dir: $mib MiB, commit $(cat "$dir/commit")"
}

# $PYTHON becomes one for which DIR was packed, as no other loads the carried packages ($carried is 1).
# Where there is none, a dry run takes the checkout's own with its packages ($carried is 0).
choose_python() {
    local dir=$1 verb=$2 wanted name version found=
    wanted=$(cat "$dir/packed-for" 2>/dev/null) || wanted=$GPU_PYTHON
    local -a names=("python$wanted" python3)
    [ -z "$PYTHON" ] || names=("$PYTHON")
    for name in "${names[@]}"; do
        version=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
        if [ "$version" = "$wanted" ]; then
            PYTHON=$name carried=1
            return
        fi
        found+="${found:+, }$name is ${version:-no Python that runs}"
    done
    if [ "$verb" = dry ] && [ -z "$PYTHON" ] && [ -x .venv/bin/python ]; then
        PYTHON=.venv/bin/python carried=0
        echo "gpu.sh: no Python $wanted ($found): .venv and its packages, not the carried ones"
        return
    fi
    fail "$dir is packed for Python $wanted, $found: name one with PYTHON=/path/to/python$wanted"
}

unpack() {
    local dir=$1 verb=$2 error
    [ -f "$dir/packed.tar.xz" ] || fail "$dir/packed.tar.xz is missing: bench/gpu.sh pack $dir"
    choose_python "$dir" "$verb"
    place=$(mktemp -d) || exit 1
    trap 'rm -rf "$place"' EXIT
    tar -C "$place" -xJf "$dir/packed.tar.xz" || fail "$dir/packed.tar.xz cannot be unpacked"
    export DSPINE_BIN_DIR=$place/bin DSPINE_LIB_DIR=$place/bin LLAMA_CPP_LIB_PATH=$place/bin
    export PYTHONPATH=$PWD/bindings:$PWD/bench:$PWD/converter PYTHONUNBUFFERED=1
    [ "$carried" = 0 ] || PYTHONPATH=$PYTHONPATH:$place/site
    cuda_libraries
    export DSPINE_BENCH_COMMIT
    DSPINE_BENCH_COMMIT=$(cat "$dir/commit" 2>/dev/null)
    error=$("$PYTHON" -c 'import numpy, pydantic_core, dspine_bench.cli' 2>&1) \
        || fail "$PYTHON cannot import what the measurements need: ${error##*$'\n'}"
}

# puts the cuBLAS of this machine where the carried backend finds it
cuda_libraries() {
    [ -e "$place/bin/libggml-cuda.so" ] || return 0
    ldconfig -p 2>/dev/null | grep -q 'libcublas\.so' && return 0
    local dir
    for dir in "${CUDA_PATH:-/usr/local/cuda}/lib64" $("$PYTHON" -c '
import site, sysconfig
from pathlib import Path
for root in {sysconfig.get_path("purelib"), *site.getsitepackages()}:
    print(*Path(root).glob("nvidia/*/lib"), sep="\n")'); do
        if compgen -G "$dir/libcublas.so*" >/dev/null; then
            export LD_LIBRARY_PATH=$dir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
            return 0
        fi
    done
    fail "libcublas is neither in the system, nor in ${CUDA_PATH:-/usr/local/cuda}, nor in Python's packages"
}

# limited NAME SECONDS COMMAND...: run it with what is left of the time; its code is in $code
limited() {
    local name=$1 most=$2 left begin=$SECONDS
    shift 2
    code=124
    left=$((LIMIT - SECONDS))
    [ "$left" -gt "$most" ] && left=$most
    if [ "$left" -lt 10 ]; then
        echo "gpu.sh: $name: no time left" >&2
        failed=1
        return
    fi
    timeout --kill-after=5 "$left" "$@"
    code=$?
    seconds=$((SECONDS - begin))
    if [ "$code" = 0 ]; then
        echo "gpu.sh: $name: done in $seconds s"
    else
        echo "gpu.sh: $name: failed ($code) after $seconds s" >&2
        failed=1
    fi
}

# part NAME SECONDS COMMAND...: a workload of dspine-bench; its result is NAME.json
part() {
    local name=$1 most=$2 kind=${1%%-*}
    shift 2
    limited "$name" "$most" "$PYTHON" -m dspine_bench "$@" -o "$place/out-$name"
    [ -f "$place/out-$name/$kind.json" ] && cp "$place/out-$name/$kind.json" "$OUT/$name.json"
}

# ops NAME SECONDS COMMAND...: a run of test-ops, added to ops.json; on a GPU, one must have computed
ops() {
    local name=$1 most=$2 log=$place/ops-$1.log
    shift 2
    seconds=0
    limited "$name" "$most" "$@" >"$log" 2>&1
    cat "$log"
    "$PYTHON" -m dspine_bench.op_tests "$OUT/ops.json" "$name" "$code" "$seconds" "$log" "$@" || failed=1
}

# kernels NAME SECONDS TESTS [PREFIX...]: tests/native of the program of our kernels, added to ops.json
kernels() {
    local name=$1 most=$2 tests=$3
    shift 3
    CI=true DSPINE_KERNELS="$* $place/bin/dspine-kernels" ops "$name" "$most" "$PYTHON" -m pytest -q \
        -p no:cacheprovider -k "$tests" tests/native/test_cuda_emulation.py
}

on_gpu() {
    local tool
    local -a tools=()
    command -v compute-sanitizer >/dev/null && tools=(memcheck racecheck)
    if [ -x "$place/bin/dspine-kernels" ]; then
        kernels kernels 120 ""
        for tool in ${tools[@]+"${tools[@]}"}; do
            kernels "kernels-$tool" 90 "several or sizes" compute-sanitizer --tool "$tool" --error-exitcode 9
        done
    fi
    grep -qE '^ +[A-Za-z]+[0-9]+: ' <<<"$devices" \
        || fail "llama.cpp finds no GPU here; bench/gpu.sh dry tries the script on a CPU"
    ops plain 60 "$DSPINE_BIN_DIR/test-ops"
    for tool in ${tools[@]+"${tools[@]}"}; do
        ops "$tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 9 "$DSPINE_BIN_DIR/test-ops" --random 6 1
    done
}

measure() {
    local dry=$1 shape shapes=${SHAPES:-small mid medium 27b}
    [ "$dry" = 0 ] || shapes=small
    OUT=${OUT:-gpu-out}
    mkdir -p "$OUT" || exit 1
    # an earlier run's results would pass for this one's where a part fails or is not reached
    rm -f "$OUT"/{ops,tasks}.json
    for shape in $shapes; do rm -f "$OUT/draft-$shape.json" "$OUT/draft-$shape-composed.json"; done
    failed=0
    local devices
    devices=$("$DSPINE_BIN_DIR/llama-server" --list-devices 2>&1) || fail "llama-server does not run: $devices"
    echo "$devices"
    nvidia-smi 2>/dev/null || true
    local target=${TARGET:-$place/models/target.gguf} draft=${DRAFT:-$place/models/draft.gguf}
    local -a prompts=() size=(--repeats 5)
    # one CPU thread for the tiny golden pair: more would only wait for each other
    [ -n "${TARGET:-}" ] || prompts=(--prompts "$place/models/prompts.jsonl" -c 2048 --flag=-t --flag=1)
    local -a threads=()
    [ "$dry" = 0 ] || { size=(--quick --repeats 2); threads=(-t 1); }
    # the shortest first, so that something is there if the time runs out
    if [ "$dry" = 0 ]; then
        on_gpu
    else
        ops plain-cpu 60 "$DSPINE_BIN_DIR/test-ops" --random 8 1
    fi
    part tasks 90 tasks -m "$target" -md "$draft" "${prompts[@]}" -n 64 "${size[@]}"
    local first=1
    for shape in $shapes; do
        part "draft-$shape" 240 draft --shape "$shape" --folder "$place" "${size[@]}" "${threads[@]}"
        [ "$first" = 0 ] || DSPINE_FUSED=0 part "draft-$shape-composed" 240 \
            draft --shape "$shape" --folder "$place" "${size[@]}" "${threads[@]}"
        first=0
    done
    ls -l "$OUT"
    return "$failed"
}

main() {
    local dir=${2:-gpu-build}
    case ${1:-} in
        pack) pack "$dir" ;;
        run)
            unpack "$dir" run
            mkdir -p "${OUT:=gpu-out}" || exit 1
            measure 0 2>&1 | tee "$OUT/gpu.log"
            return "${PIPESTATUS[0]}"
            ;;
        dry) unpack "$dir" dry; measure 1 ;;
        *) sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; return 2 ;;
    esac
}

main "$@"
exit
