"""The CUDA kernels, compiled for the CPU and run thread by thread, against numpy.

Nothing here needs CUDA: cuda_emulation/ stands in for it. What this proves is the arithmetic of
indices, the barriers (the threads run in several orders) and that no access leaves its buffer (the
address sanitizer, where there is one). It proves nothing about a GPU's own arithmetic.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native_build import directory

pytestmark = pytest.mark.native

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = ROOT / "build" / "llama.cpp"
EMULATION = Path(__file__).resolve().parent / "cuda_emulation"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

AMPERE, TURING = 860, 750  # with tensor cores for every 16-bit type, and without
ORDERS = (0, 7)  # of threads and blocks: ascending, shuffled
EPS = 1e-6

# Largest error as a share of the largest value. F32 differs from numpy's float64 by its rounding.
# In 16 bits an activation on the edge between two values may be rounded to the other one.
TOLERANCE = {"f32": 2e-5, "f16": 3e-4, "bf16": 3e-3}
# Such an edge is rare: nearly all results are as exact as in F32.
TYPICAL = 2e-6

REFUSED = 4  # the emulator's exit code


class NotSupportedError(Exception):
    """supports_op says no."""


Array = np.ndarray
Arrays = dict[str, Array]
Orders = tuple[int, ...]
Run = Callable[..., Array]


def compiles(compiler: str, flags: list[str], folder: Path) -> bool:
    """Whether a program with these flags can be linked."""
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [compiler, *flags, str(source), "-o", str(folder / "empty")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The emulator, compiled; or what DSPINE_KERNELS names instead, a program for a GPU."""
    given = os.environ.get("DSPINE_KERNELS")
    if given:
        return shlex.split(given)
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    if not (UPSTREAM / "ggml").is_dir():
        pytest.skip(f"{UPSTREAM} is missing: make setup")
    folder = tmp_path_factory.mktemp("emulation")
    found = folder / "emulate"
    library = directory("lib")
    includes = (EMULATION / "stand_in", ROOT / "native/cuda", ROOT / "native/src")
    includes += (UPSTREAM / "ggml/include", UPSTREAM / "ggml/src")
    command = [compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    # pragmas for nvcc; upstream's header of static helpers
    command += ["-Wno-unknown-pragmas", "-Wno-unused-function", "-DDSPINE_CUDA_KERNELS"]
    command += SANITIZERS if compiles(compiler, SANITIZERS, folder) else []
    command += [f"-I{path}" for path in includes]
    command += ["-x", "c++", str(ROOT / "native/cuda/dspine-cuda.cu")]
    command += [str(EMULATION / "emulate.cpp"), str(EMULATION / "on_cpu.cpp")]
    command += ["-x", "none", "-o", str(found)]
    command += [f"-L{library}", f"-Wl,-rpath,{library}", "-lggml-base"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [str(found)]


@pytest.fixture(scope="module")
def run(program: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(op, arrays, order, capability, **keys): what the kernels write."""
    folder = tmp_path_factory.mktemp("arrays")

    def call(op: str, arrays: Arrays, order: int, capability: int, **keys: object) -> Array:
        for name, values in arrays.items():
            suffix = "i32" if values.dtype == np.int32 else "f32"
            values.tofile(folder / f"{name}.{suffix}")
        pairs = [f"{key}={value}" for key, value in keys.items()]
        command = [*program, str(folder), op, str(order), str(capability), *pairs]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == REFUSED:
            raise NotSupportedError
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
        return np.fromfile(folder / "out.f32", np.float32)

    return call


def rounded(values: Array, kind: str) -> Array:
    """Float32 values that the type holds, the nearest to `values`."""
    values = np.asarray(values, np.float32)
    if kind == "f16":
        return values.astype(np.float16).astype(np.float32)
    if kind == "bf16":
        bits = values.view(np.uint32)
        bits = bits + 0x7FFF + ((bits >> 16) & 1) & np.uint32(0xFFFF0000)
        return bits.view(np.float32)
    return values


@dataclass(frozen=True)
class Shape:
    """Sizes of one case; rows and scored are those of a block."""

    kind: str
    n_embd: int
    rank: int
    message: int
    top_k: int
    rows: int
    scored: int
    n_blocks: int
    head: str = "f32"
    n_vocab: int = 40

    @property
    def all_rows(self) -> int:
        return self.rows * self.n_blocks


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def length(h: Array) -> Array:
    """||h|| / sqrt(H) of each row."""
    return np.sqrt(np.mean(np.square(h, dtype=np.float64), axis=-1, keepdims=True))


def gate_case(shape: Shape, seed: int) -> tuple[Arrays, Array]:
    """Inputs of ggml_dspine_gate and its result in float64, as [2, rows, M]."""
    rng = np.random.default_rng(seed)
    normal = lambda *size: rng.standard_normal(size).astype(np.float32)  # noqa: E731
    weight = lambda: rounded(normal(shape.message, shape.rank) / shape.rank**0.5, shape.kind)  # noqa: E731
    x = {
        "h": normal(shape.all_rows, shape.n_embd) * 3,
        "a": normal(shape.all_rows, shape.rank) * rng.uniform(1e-3, 1e3),
        "anchor_value": normal(shape.n_blocks, shape.message),
        "anchor_gate": normal(shape.n_blocks, shape.message),
        "w_message": weight(),
        "w_receiver": weight(),
        "w_pred": weight(),
        "bias": normal(shape.message),
    }
    a = x["a"].astype(np.float64)
    feature = a * shape.rank**0.5 / np.maximum(np.linalg.norm(a, axis=-1, keepdims=True), 1e-12)
    feature = rounded(feature, shape.kind).astype(np.float64)
    receiver = feature @ x["w_receiver"].T + x["bias"]
    value, gate = feature @ x["w_message"].T, feature @ x["w_pred"].T
    message = np.zeros_like(receiver)
    for row in range(shape.all_rows):
        block, t = divmod(row, shape.rows)
        if t > 0:
            sent = value[row - 1] if t > 1 else x["anchor_value"][block]
            opening = gate[row - 1] if t > 1 else x["anchor_gate"][block]
            message[row] = length(x["h"][row]) * sigmoid(receiver[row] + opening) * sent
    return x, np.stack([message, receiver])


def head_rows(rng: np.random.Generator, shape: Shape) -> Array:
    """Values that the head's type holds without rounding: multiples of one step, of 127 at most."""
    steps = rng.integers(-127, 128, (shape.n_vocab, shape.n_embd))
    steps[:, ::32] = 127  # a block's scale is its largest value by 127
    return (steps / 2048).astype(np.float32)


def cache_case(shape: Shape, seed: int) -> tuple[Arrays, Array]:
    """Inputs of ggml_dspine_cache and its result in float64, as [rows, H]."""
    rng = np.random.default_rng(seed)
    normal = lambda *size: rng.standard_normal(size).astype(np.float32)  # noqa: E731
    k, n_positions = shape.top_k, max(shape.scored - 2, 0) * shape.n_blocks
    ids = [rng.choice(shape.n_vocab, k, replace=False) for _ in range(shape.all_rows)]
    x = {
        "head": head_rows(rng, shape),
        "norm": rng.uniform(0.5, 1.5, shape.n_embd).astype(np.float32),
        "write": rounded(normal(shape.n_embd, shape.message) / shape.message**0.5, shape.kind),
        "h": normal(shape.all_rows, shape.n_embd),
        "gated": normal(2, shape.all_rows, shape.message),
        "sent_value": normal(k * n_positions, shape.message),
        "sent_gate": normal(k * n_positions, shape.message),
        "candidates": np.array(ids, np.int32),
        "logits": normal(shape.all_rows, shape.n_vocab),
    }
    packed = np.zeros((shape.all_rows, shape.n_embd))
    for row in range(shape.all_rows):
        block, t = divmod(row, shape.rows)
        if not 0 < t < shape.scored:
            continue
        packed[row, :k] = ids[row]
        if t == 1:
            scores = np.tile(x["logits"][row, ids[row]], (k, 1))
        else:
            position = block * (shape.scored - 2) + t - 2
            mine = slice(k * position, k * (position + 1))
            opened = sigmoid(x["gated"][1, row] + x["sent_gate"][mine].astype(np.float64))
            message = rounded(length(x["h"][row]) * opened * x["sent_value"][mine], shape.kind)
            refined = x["h"][row] + message.astype(np.float64) @ x["write"].T
            refined /= np.sqrt(np.mean(refined**2, axis=-1, keepdims=True) + EPS)
            scores = (refined * x["norm"]) @ x["head"][ids[row]].T
        packed[row, k : k * (k + 1)] = scores.ravel()
    return x, packed


def judge(found: Array, expected: Array, kind: str) -> None:
    error = np.abs(found - expected) / max(np.abs(expected).max(), 1e-30)
    assert error.max() <= TOLERANCE[kind]
    assert np.median(error) <= TYPICAL


def check_gate(run: Run, shape: Shape, capability: int, orders: Orders, seed: int) -> None:
    x, expected = gate_case(shape, seed)
    keys = {"bridge": shape.kind, "n_embd": shape.n_embd, "rank": shape.rank}
    keys |= {"message": shape.message, "rows": shape.rows, "n_blocks": shape.n_blocks}
    outs = [run("gate", x, order, capability, **keys) for order in orders]
    assert all(out.tobytes() == outs[0].tobytes() for out in outs)
    found = outs[0].reshape(expected.shape)
    assert not found[0, :: shape.rows].any()
    for plane in range(2):
        judge(found[plane], expected[plane], shape.kind)


def check_cache(run: Run, shape: Shape, capability: int, orders: Orders, seed: int) -> None:
    x, expected = cache_case(shape, seed)
    keys = {
        "bridge": shape.kind,
        "head": shape.head,
        "n_embd": shape.n_embd,
        "message": shape.message,
    }
    keys |= {"rows": shape.rows, "n_blocks": shape.n_blocks, "scored": shape.scored}
    keys |= {"top_k": shape.top_k, "n_vocab": shape.n_vocab, "eps": EPS}
    outs = [run("cache", x, order, capability, **keys) for order in orders]
    assert all(out.tobytes() == outs[0].tobytes() for out in outs)
    found, k = outs[0].reshape(expected.shape), shape.top_k
    assert np.array_equal(found[:, :k], expected[:, :k])
    assert not found[:, k * (k + 1) :].any()
    assert not found[(expected == 0).all(axis=1)].any()
    if shape.scored > 1:
        judge(found[:, k : k * (k + 1)], expected[:, k : k * (k + 1)], shape.kind)


# Tiles are 64 wide, 16 rows or four positions high, chunks 32 long: on that, below it, beyond it.
SHAPES = {
    "aligned": ("bf16", 320, 256, 64, 16, 8, 8, 1),
    "several blocks": ("bf16", 384, 320, 32, 16, 8, 6, 3),
    "half": ("f16", 272, 96, 96, 16, 7, 7, 2),
    "narrow": ("bf16", 56, 32, 32, 6, 5, 5, 2),
    "odd sizes": ("f32", 91, 33, 19, 9, 6, 6, 2),
    "odd bridge in 16 bits": ("f16", 61, 45, 33, 7, 4, 4, 1),
    "odd message": ("bf16", 90, 64, 19, 5, 5, 5, 2),
    "one candidate": ("bf16", 70, 64, 32, 1, 9, 9, 1),
    "more rows than are scored": ("f32", 300, 40, 24, 16, 11, 4, 2),
    "two rows": ("bf16", 300, 32, 32, 16, 2, 2, 3),
    "one row": ("f32", 40, 16, 8, 5, 1, 1, 4),
    "quantized head": ("bf16", 288, 32, 32, 16, 4, 4, 2, "q8_0"),
    "half head": ("f32", 290, 20, 20, 16, 4, 4, 2, "f16"),
}


@pytest.mark.parametrize("capability", [AMPERE, TURING])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("check", [check_gate, check_cache])
def test_shapes(
    check: Callable[[Run, Shape, int, Orders, int], None],
    name: str,
    capability: int,
    run: Run,
) -> None:
    check(run, Shape(*SHAPES[name]), capability, ORDERS, 1)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    top_k, rows = draw(st.integers(1, 16)), draw(st.integers(2, 16))
    chunks = st.integers(1, 3).map(lambda n: 32 * n)
    return Shape(
        kind=draw(st.sampled_from(["f32", "f16", "bf16"])),
        n_embd=top_k * (top_k + 1) + draw(st.integers(0, 90)),
        rank=draw(st.one_of(chunks, st.integers(2, 70))),
        message=draw(st.one_of(chunks, st.integers(2, 50))),
        top_k=top_k,
        rows=rows,
        scored=draw(st.integers(1, rows)),
        n_blocks=draw(st.integers(1, 8)),
    )


@settings(max_examples=12)
@given(shape=shapes(), capability=st.sampled_from([AMPERE, TURING]), seed=st.integers(0, 999))
def test_random_shapes(run: Run, shape: Shape, capability: int, seed: int) -> None:
    check_gate(run, shape, capability, (seed,), seed)
    check_cache(run, shape, capability, (seed,), seed)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"kind": "q8_0"}, check_gate),
        ({"kind": "q8_0"}, check_cache),
        ({"top_k": 17, "n_embd": 320}, check_cache),
        ({"head": "q4_0"}, check_cache),
    ],
)
def test_what_is_not_handled_is_refused(
    change: dict[str, Any], check: Callable[[Run, Shape, int, Orders, int], None], run: Run
) -> None:
    shape = Shape("f32", 288, 32, 32, 16, 4, 4, 1)
    check(run, shape, AMPERE, (0,), 1)
    with pytest.raises(NotSupportedError):
        check(run, replace(shape, **change), AMPERE, (0,), 1)
