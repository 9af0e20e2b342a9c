"""The plan's terms against what llama-server logs when it allocates them, on the CPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from dspine._headers import open_header
from dspine._memory import Device, PlanRequest, make_plan
from dspine._packing import cpu_features
from support.drafters import RandomDrafter, convert
from support.server import Files, run_program, server
from support.targets import Shape, write_random_target
from support.workshop import Workshop

pytestmark = pytest.mark.e2e

MIB = 1 << 20
RAM = Device("RAM", 1 << 40, is_gpu=False, cpu_features=cpu_features())
SHARE = 0.05
ROUNDING = 0.006  # MiB: the log has two decimals

SMALL = PlanRequest(n_ctx=2048, type_k="f16", type_v="f16", type_k_draft="f16", type_v_draft="f16")
# A llama target and a drafter of the kind that the demo pair is, with fewer layers and tokens.
DEMO_TARGET = Shape(hidden=576, vocab=2048, layers=5, heads=9, kv_heads=3, head_dim=64, ffn=1536)
DEMO_DRAFTER = RandomDrafter(
    hidden=576,
    vocab=2048,
    target_layers=5,
    layers=3,
    heads=9,
    kv_heads=3,
    head_dim=64,
    ffn=1536,
    rank=128,
    message=96,
    top_k=16,
    block=16,
    taps=(0, 1, 3),
)
WIDE_TARGET = Shape(hidden=512, vocab=4096, layers=3, heads=8, kv_heads=4, head_dim=64, ffn=1024)
WIDE_DRAFTER = RandomDrafter(
    hidden=512,
    vocab=4096,
    target_layers=3,
    heads=8,
    kv_heads=4,
    head_dim=64,
    ffn=1024,
    rank=256,
    taps=(0, 1),
)
# The injection and the transition cache are what takes most here, not the logits.
WIDE_INJECTION = RandomDrafter(
    hidden=64, vocab=128, target_layers=4, rank=1024, message=768, top_k=6, heads=2
)
SLIDING = RandomDrafter(
    hidden=64, vocab=256, target_layers=4, layers=3, windows=(0, 2), window=300, head_dim=64
)


@dataclass(frozen=True)
class Logged:
    """MiB that a server logged: of the target, and of the drafter."""

    weights: list[float]
    packed: list[float]
    caches: list[float]
    state: float
    compute: list[float]


def _sizes(text: str, what: str, name: str = r"\w+") -> list[float]:
    """Sizes of buffers; `name` is a pattern for theirs."""
    found = re.findall(rf" ({name}) {what} buffer size = +([\d.]+) MiB", text)
    return [float(size) for _, size in found]


def _logged(files: Files | tuple[Path, None], request: PlanRequest, root: Path) -> Logged:
    """Start llama-server with the flags of a request; the taps are reserved at the first batch."""
    words = ["-lv", "4", "-fit", "off", "-t", "1", "--no-warmup", "-dev", "none"]
    words += ["-c", request.n_ctx]
    words += ["-np", request.n_parallel, "-ub", request.n_ubatch]
    words += ["-fa", "on" if request.flash_attn else "off"]
    words += ["-ctk", request.type_k, "-ctv", request.type_v]
    if files[1] is not None:
        words += ["-ctkd", request.type_k_draft, "-ctvd", request.type_v_draft, "-devd", "none"]
        if request.n_draft is not None:
            words += ["--spec-draft-n-max", request.n_draft]
        if request.n_ubatch_draft is not None:
            words += ["--spec-draft-ubatch", request.n_ubatch_draft]
        words += ["--swa-full"] if request.swa_full else []
    with server(root, files, *map(str, words)) as running:
        running.complete([1, 2, 3], 2)
    log = running.log  # another thread writes it: whole only when the server has ended
    target, _, draft = log.partition("loading draft model")
    compute = [_sizes(target, "compute")[0]]
    if draft:
        again = _sizes(draft, "compute")
        compute = [again[-1], again[0]]
    return Logged(
        [sum(_sizes(part, "model", "CPU_Mapped")) for part in (target, draft) if part],
        [sum(_sizes(part, "model", "AMX|CPU_REPACK")) for part in (target, draft) if part],
        [sum(_sizes(part, "KV")) for part in (target, draft) if part],
        sum(_sizes(target, "RS")),
        compute,
    )


def _compare(files: Files | tuple[Path, None], request: PlanRequest, root: Path) -> None:
    logged = _logged(files, request, root)
    headers = open_header(str(files[0])), open_header(str(files[1])) if files[1] else None
    plan = make_plan(*headers, request, RAM)
    assert not plan.estimated
    planned = {c.name: c.bytes / MIB for c in plan.components}
    planned["target compute"] += planned.pop("taps", 0)
    found = {
        "target weights": logged.weights[0],
        "target weights, packed": logged.packed[0],
        "target KV cache": logged.caches[0],
        "recurrent state": logged.state,
        "target compute": logged.compute[0],
    }
    if files[1] is not None:
        found["drafter weights"] = logged.weights[1]
        found["drafter weights, packed"] = logged.packed[1]
        found["drafter KV cache"] = logged.caches[1]
        found["drafter compute"] = logged.compute[1]
    for name, size in found.items():
        expected = pytest.approx(size, rel=SHARE, abs=ROUNDING)
        assert planned.get(name, 0) == expected, (name, request)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def demo_like(root: Path) -> Files:
    target = write_random_target(root / "demo.gguf", "llama", DEMO_TARGET)
    checkpoint = DEMO_DRAFTER.write(root / "demo-draft")
    return target, convert(checkpoint, target, root, "bf16")["bf16"]


# Depths, slots, contexts, ubatches and cache types; each with every pair.
REQUESTS = {
    "defaults": {},
    "one draft": {"n_draft": 1},
    "two slots": {"n_parallel": 2, "n_ctx": 4096, "n_draft": 3},
    "three slots of an odd context": {"n_parallel": 3, "n_ctx": 3001, "n_draft": 5},
    "four slots": {"n_parallel": 4, "n_ctx": 8192, "n_ubatch": 256},
    "small ubatches": {"n_ubatch": 64, "n_ubatch_draft": 32, "n_ctx": 6000},
    "no flash attention": {"flash_attn": False, "n_ctx": 1024, "n_draft": 6},
    "F32 caches": dict.fromkeys(("type_k", "type_v", "type_k_draft", "type_v_draft"), "f32"),
    "a context below the ubatch": {"n_ctx": 256, "n_ubatch_draft": 512},
}


def _request(name: str) -> PlanRequest:
    return PlanRequest(**{**vars(SMALL), **REQUESTS[name]})


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("case", ["e2e_qwen3", "e2e_hybrid"])
def test_trained_pairs(case: str, name: str, workshop: Workshop, root: Path) -> None:
    _compare(workshop.e2e(case, "f32"), _request(name), root)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_pair_like_the_demo(name: str, demo_like: Files, root: Path) -> None:
    _compare(demo_like, _request(name), root)


@pytest.mark.parametrize("depth", [2, 8, 15])
@pytest.mark.parametrize("kinds", [("q8_0", "q8_0"), ("q8_0", "q4_0"), ("bf16", "f16")])
def test_depths_and_cache_types(
    depth: int, kinds: tuple[str, str], demo_like: Files, root: Path
) -> None:
    k, v = kinds
    request = PlanRequest(n_ctx=2304, n_draft=depth, type_k=k, type_v=v, type_k_draft=v)
    _compare(demo_like, request, root)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_K_M", "Q4_K_M", "Q8_0", "F16", "IQ4_NL"])
def test_types_of_the_target(kind: str, root: Path) -> None:
    """Some weights are kept a second time, depending on the CPU."""
    source = root / "wide.gguf"
    if not source.is_file():
        write_random_target(source, "llama", WIDE_TARGET)
    target = root / f"wide-{kind}.gguf"
    done = run_program("llama-quantize", "--allow-requantize", source, target, kind)
    assert done.returncode == 0, done.stderr
    _compare((target, None), PlanRequest(n_ctx=512), root)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_types_of_the_drafter(kind: str, root: Path) -> None:
    """The target's head stays as it is where a drafter gathers its rows."""
    target = write_random_target(root / "wide-for.gguf", "llama", WIDE_TARGET)
    narrow = root / "wide-for-Q8_0.gguf"
    run_program("llama-quantize", target, narrow, "Q8_0")
    draft = convert(WIDE_DRAFTER.write(root / "wide-draft"), narrow, root, kind)[kind]
    _compare((narrow, draft), PlanRequest(n_ctx=512), root)


@pytest.mark.parametrize(
    ("slots", "depth", "ubatch"), [(1, 7, None), (1, 1, None), (3, 5, None), (1, 7, 8), (2, 7, 16)]
)
def test_the_injection(
    slots: int, depth: int, ubatch: int | None, workshop: Workshop, root: Path
) -> None:
    request = replace(SMALL, n_ctx=4096, n_parallel=slots, n_draft=depth, n_ubatch_draft=ubatch)
    _compare(workshop.random(WIDE_INJECTION), request, root)


@pytest.mark.parametrize(
    ("slots", "depth", "ubatch"), [(1, 7, None), (1, 1, None), (1, 2, None), (3, 5, None)]
)
def test_a_folded_table(
    slots: int, depth: int, ubatch: int | None, workshop: Workshop, root: Path
) -> None:
    request = replace(SMALL, n_ctx=4096, n_parallel=slots, n_draft=depth, n_ubatch_draft=ubatch)
    _compare(workshop.random(WIDE_INJECTION, fold=True), request, root)


@pytest.mark.parametrize("swa_full", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_drafter_with_a_window(
    slots: int, swa_full: bool, workshop: Workshop, root: Path
) -> None:
    request = PlanRequest(n_ctx=4096 * slots, n_parallel=slots, swa_full=swa_full)
    _compare(workshop.random(SLIDING), request, root)


@pytest.mark.parametrize("case", ["e2e_qwen3", "e2e_hybrid"])
@pytest.mark.parametrize("slots", [1, 4])
def test_without_a_drafter(case: str, slots: int, workshop: Workshop, root: Path) -> None:
    request = PlanRequest(n_ctx=4096, n_parallel=slots, type_k="f16", type_v="f16")
    _compare((workshop.e2e_target(case), None), request, root)
