"""The memory plan: published contexts, each term by its formula, and what must always hold."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dspine import DspineError, InvalidError
from dspine._headers import Header, HeaderError, check_partner, open_header
from dspine._memory import CACHE_TYPES, Device, Plan, PlanRequest, make_plan
from dspine._shapes import draft_shape, target_shape
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import true_shapes
from support.drafters import RandomDrafter
from support.workshop import Workshop

MIB = 1 << 20
STEP = 4096
CARD = Device("RTX 3090", 24576 * MIB)
RAM = Device("RAM", 64 << 30, is_gpu=False)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Header]:
    """Headers of the published 27B pair: the target, and drafters by name."""
    root = tmp_path_factory.mktemp("27b")
    target = true_shapes.write_target(root / "target.gguf")
    files = true_shapes.write_drafters(root, target, "q4_k_m", "q8_0")
    files |= {"target": target, "dflash2": true_shapes.write_dflash2(root / "dflash2.gguf")}
    return {name: open_header(str(path)) for name, path in files.items()}


@pytest.fixture(scope="module")
def small(workshop: Workshop) -> dict[str, tuple[Header, Header]]:
    """Headers of the small pairs."""
    sliding = RandomDrafter(
        hidden=64, vocab=256, target_layers=4, layers=3, windows=(0,), window=300
    )
    files = {
        "e2e_qwen3": workshop.e2e("e2e_qwen3", "f32"),
        "e2e_hybrid": workshop.e2e("e2e_hybrid", "f32"),
        "sliding": workshop.random(sliding),
    }
    return {k: (open_header(str(t)), open_header(str(d))) for k, (t, d) in files.items()}


def _parts(plan: Plan) -> dict[str, float]:
    """MiB by component."""
    return {c.name: c.bytes / MIB for c in plan.components}


# The published largest contexts on the card, in steps of 4096, with a ubatch of 512 for both.
PUBLISHED = {
    "no drafter": (None, None, 176128),
    "DFlash2, 7 drafts": ("dflash2", 7, 102400),
    "DSpine Q4_K_M, 15 drafts": ("q4_k_m", 15, 65536),
    "DSpine Q4_K_M, 7 drafts": ("q4_k_m", 7, 98304),
    "DSpine Q8_0, 15 drafts": ("q8_0", 15, 40960),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_contexts(case: str, big: dict[str, Header]) -> None:
    draft, depth, published = PUBLISHED[case]
    request = PlanRequest(n_draft=depth, n_ubatch_draft=512 if draft else None)
    plan = make_plan(big["target"], big[draft] if draft else None, request, CARD)
    assert plan.fits
    assert plan.n_ctx == plan.largest_n_ctx
    assert abs(plan.n_ctx // STEP * STEP - published) <= STEP, plan.n_ctx


def test_terms_of_the_published_pair(big: dict[str, Header]) -> None:
    """Against the arithmetic: sizes of the files and rows of the caches."""
    target, draft = big["target"], big["q4_k_m"]
    request = PlanRequest(n_ctx=65536, n_draft=15, n_ubatch_draft=512)
    parts = _parts(make_plan(target, draft, request, CARD))
    by_name = {t.name: t.nbytes for t in target.tensors}
    skipped = by_name["token_embd.weight"] + sum(
        size for name, size in by_name.items() if name.startswith("blk.64.")
    )
    assert parts["target weights"] == pytest.approx((sum(by_name.values()) - skipped) / MIB, 1e-4)
    assert parts["token embeddings"] == by_name["token_embd.weight"] / MIB
    assert parts["target KV cache"] == 65536 * 34 / 1024
    assert parts["recurrent state"] == 16 * 149.625
    assert parts["taps"] == 5 * 10
    assert parts["drafter KV cache"] == pytest.approx(90.3, abs=0.05)
    assert 485 < parts["drafter compute"] < 530  # 485 are logits
    assert parts["drafter weights"] == pytest.approx(draft.file_bytes / MIB, 0.01)
    assert parts["CUDA context, pools, margin"] == 2005


def test_compute_grows_by_5_kib_a_token(big: dict[str, Header]) -> None:
    """The mask, and the copy that flash attention makes of one layer's quantized cache."""

    def compute(n_ctx: int) -> float:
        return _parts(make_plan(big["target"], None, PlanRequest(n_ctx=n_ctx), CARD))[
            "target compute"
        ]

    assert compute(131072) - compute(65536) == pytest.approx(65536 * 5 / 1024, abs=0.01)


def test_recurrent_rows(big: dict[str, Header]) -> None:
    for depth, slots in ((0, 1), (1, 1), (7, 1), (15, 2)):
        request = PlanRequest(n_ctx=8192, n_draft=depth, n_parallel=slots)
        parts = _parts(make_plan(big["target"], big["q4_k_m"], request, CARD))
        assert parts["recurrent state"] == 149.625 * (depth + 1) * slots


def test_a_depth_of_0_loads_no_drafter(big: dict[str, Header]) -> None:
    request = PlanRequest(n_ctx=8192, n_draft=0)
    without = make_plan(big["target"], None, request, CARD)
    assert make_plan(big["target"], big["q4_k_m"], request, CARD).components == without.components


def test_window_or_full_cache(big: dict[str, Header]) -> None:
    def cache(n_ctx: int, **settings: Any) -> float:
        request = PlanRequest(n_ctx=n_ctx, n_ubatch_draft=512, **settings)
        plan = make_plan(big["target"], big["q4_k_m"], request, CARD)
        return _parts(plan)["drafter KV cache"]

    assert cache(32768) == cache(131072) == pytest.approx(90.3, abs=0.05)
    assert cache(32768, swa_full=True) == pytest.approx(32768 * 10.625 / 1024)
    assert cache(4096) == pytest.approx(4096 * 10.625 / 1024)  # less than the window


def test_a_tied_head_is_on_the_device_as_well(tmp_path: Path) -> None:
    tied = open_header(str(true_shapes.write_small(tmp_path / "tied.gguf", tied=True)))
    own = open_header(str(true_shapes.write_small(tmp_path / "own.gguf", tied=False)))
    request = PlanRequest(n_ctx=256)
    on_card = [_parts(make_plan(h, None, request, CARD))["target weights"] for h in (tied, own)]
    assert on_card[0] == on_card[1]
    in_ram = [_parts(make_plan(h, None, request, RAM))["target weights"] for h in (tied, own)]
    head = next(t.nbytes for t in own.tensors if t.name == "output.weight") / MIB
    assert in_ram[1] - in_ram[0] == pytest.approx(head)


def test_levers(big: dict[str, Header]) -> None:
    request = PlanRequest(n_ctx=65536, n_parallel=2, n_ubatch_draft=512)
    plan = make_plan(big["target"], big["q8_0"], request, CARD)
    assert not plan.fits
    levers = {lever.name: lever for lever in plan.levers}
    assert levers["7 drafts a round"].saved_bytes / MIB > 2 * 8 * 149
    assert levers["one slot"].saved_bytes / MIB > 16 * 149
    expected = (big["q8_0"].file_bytes - big["q4_k_m"].file_bytes) / MIB
    assert levers["drafter as Q4_K_M"].saved_bytes / MIB == pytest.approx(expected, rel=0.02)
    assert levers["ubatch of 128"].flags == "-ub 128"
    assert all(lever.saved_bytes > 0 for lever in plan.levers)
    # what a lever promises is what a plan with it says
    again = make_plan(big["target"], big["q8_0"], replace(request, n_draft=7), CARD)
    assert levers["7 drafts a round"].largest_n_ctx == again.largest_n_ctx


def test_the_largest_context_is_the_largest(big: dict[str, Header]) -> None:
    for slots in (1, 3):
        request = PlanRequest(n_draft=7, n_parallel=slots)
        plan = make_plan(big["target"], big["q4_k_m"], request, CARD)
        largest = plan.largest_n_ctx
        assert largest is not None
        assert largest % (256 * slots) == 0
        assert make_plan(big["target"], big["q4_k_m"], replace(request, n_ctx=largest), CARD).fits
        more = replace(request, n_ctx=largest + 256 * slots)
        assert not make_plan(big["target"], big["q4_k_m"], more, CARD).fits
    tiny = make_plan(big["target"], None, PlanRequest(), Device("small", 8 << 30))
    assert (tiny.fits, tiny.largest_n_ctx) == (False, None)
    huge = make_plan(big["target"], None, PlanRequest(), Device("huge", 1 << 40))
    assert huge.n_ctx == 262144  # what it was trained for


def test_free_memory_counts_where_it_is_known(big: dict[str, Header]) -> None:
    busy = replace(CARD, free_bytes=CARD.total_bytes - 2048 * MIB)
    request = PlanRequest(n_draft=7)
    free = make_plan(big["target"], big["q4_k_m"], request, CARD).n_ctx
    assert make_plan(big["target"], big["q4_k_m"], request, busy).n_ctx < free - 10 * STEP


def test_a_decision_costs_less_than_reading_the_headers(big: dict[str, Header]) -> None:
    """Both are Python in this process, so their ratio holds on a slow or busy machine."""
    target, draft = big["target"], big["q4_k_m"]
    reading, deciding = [], []
    for i in range(5):
        start = time.process_time()
        pair = open_header(target.spec), open_header(draft.spec)
        read = time.process_time()
        make_plan(*pair, PlanRequest(n_ctx=40960 + 256 * i, n_draft=15), CARD)
        reading.append(read - start)
        deciding.append(time.process_time() - read)
    assert min(deciding) < 0.7 * min(reading)


def test_depths_and_ubatches_as_the_server_sets_them(small: dict[str, Any]) -> None:
    target, draft = small["e2e_hybrid"]
    plan = make_plan(target, draft, PlanRequest(n_ctx=4096), RAM)
    assert plan.request.n_draft == draft_shape(draft).block_size - 1
    assert plan.request.n_ubatch_draft == 128
    deep = make_plan(target, draft, PlanRequest(n_ctx=4096, n_draft=99), RAM)
    assert deep.components == plan.components
    assert any("block size" in note for note in deep.notes)
    slots = make_plan(target, draft, PlanRequest(n_ctx=4096, n_parallel=32), RAM)
    assert slots.request.n_ubatch_draft == 32 * 8
    narrow = make_plan(target, draft, PlanRequest(n_ctx=4096, n_ubatch=2), RAM)
    assert narrow.request.n_ubatch == 9
    assert any("verification" in note for note in narrow.notes)


def test_n_ctx_is_padded_and_split(small: dict[str, Any]) -> None:
    target, _ = small["e2e_qwen3"]
    for n_ctx, slots, unified, padded in (
        (1, 1, False, 256),
        (2049, 1, False, 2304),
        (3000, 3, False, 3072),
        (2048, 5, False, 2560),
        (2048, 5, True, 2048),
        (2049, 5, True, 2304),
    ):
        request = PlanRequest(n_ctx=n_ctx, n_parallel=slots, kv_unified=unified)
        assert make_plan(target, None, request, RAM).n_ctx == padded


# What must hold for every configuration.
_requests = st.builds(
    PlanRequest,
    n_ctx=st.integers(1, 1 << 17),
    n_draft=st.integers(1, 7),
    n_parallel=st.integers(1, 4),
    n_ubatch=st.integers(1, 1024),
    n_ubatch_draft=st.none() | st.integers(1, 512),
    type_k=st.sampled_from(["f32", "f16", "bf16", "q8_0"]),
    type_k_draft=st.sampled_from(["f16", "q8_0"]),
    type_v=st.sampled_from(["f16", "f32"]),
    type_v_draft=st.just("f16"),
    flash_attn=st.booleans(),
    kv_unified=st.booleans(),
    swa_full=st.booleans(),
)
_cases = st.sampled_from(["e2e_qwen3", "e2e_hybrid", "sliding"])
_devices = st.sampled_from([CARD, RAM])
SCRATCH = ("compute", "taps")


def _memory(plan: Plan) -> int:
    """Bytes of everything but scratch memory."""
    return sum(c.bytes for c in plan.components if not any(s in c.name for s in SCRATCH))


def _scratch(plan: Plan) -> int:
    return sum(c.bytes for c in plan.components if any(s in c.name for s in SCRATCH))


def _slack(plan: Plan, pair: tuple[Header, Header]) -> int:
    """Holes that best fit may leave or not: a few rows of the widest tensors of a ubatch."""
    shape = target_shape(pair[0])
    rows = plan.request.n_ubatch + (plan.request.n_ubatch_draft or 0)
    return 4 * (rows + 8) * 4 * max(shape.n_embd, *(layer.n_ff for layer in shape.layers))


@pytest.mark.parametrize("field", ["n_ctx", "n_draft", "n_parallel"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=_cases, device=_devices, request_=_requests, more=st.integers(1, 6))
def test_more_takes_more(
    field: str,
    case: str,
    device: Device,
    request_: PlanRequest,
    more: int,
    small: dict[str, tuple[Header, Header]],
) -> None:
    request = request_
    if field == "n_parallel" and not request.kv_unified:
        # a stream is padded by itself, so only contexts that split evenly can be compared
        request = replace(request, n_ctx=256 * 60, n_parallel=min(request.n_parallel, 3))
        more = 1 if request.n_parallel < 3 else 2
    step = 256 * more if field == "n_ctx" else more
    larger = replace(request, **{field: getattr(request, field) + step})
    pair = small[case]
    assume(larger.n_draft is not None and larger.n_draft < draft_shape(pair[1]).block_size)
    plans = [make_plan(*pair, r, device) for r in (request, larger)]
    assert _memory(plans[1]) >= _memory(plans[0])
    if field != "n_parallel" or request.kv_unified:
        # separate streams are shorter: the mask of a ubatch, tokens by cells, shrinks with them
        assert _scratch(plans[1]) >= _scratch(plans[0]) - _slack(plans[1], pair)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=_cases, device=_devices, request_=_requests)
def test_a_plan_is_pure(
    case: str, device: Device, request_: PlanRequest, small: dict[str, tuple[Header, Header]]
) -> None:
    first = make_plan(*small[case], request_, device)
    again = make_plan(*small[case], request_, device)
    assert first.components == again.components
    assert all(c.bytes > 0 and c.place in ("GPU", "RAM") for c in first.components)
    assert first.fits == (first.device_bytes <= device.room)
    # a plan of a plan's own request is the same plan
    assert make_plan(*small[case], first.request, device).components == first.components


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"n_ctx": 0}, "n_ctx is 0, expected 1 to"),
        ({"n_ctx": 1 << 40}, "n_ctx is"),
        ({"n_draft": -1}, "n_draft is -1, expected 0 to"),
        ({"n_parallel": 0}, "n_parallel is 0, expected 1 to 256"),
        ({"n_parallel": 257}, "n_parallel is 257, expected 1 to 256"),
        ({"n_ubatch": -5}, "n_ubatch is -5"),
        ({"n_ubatch_draft": 1 << 31}, "n_ubatch_draft is"),
        ({"type_k": "q3_k"}, "type_k is 'q3_k', expected one of f32, f16"),
        ({"type_v_draft": ""}, "type_v_draft is '', expected one of"),
        ({"flash_attn": False}, "a quantized V cache needs flash attention"),
    ],
)
def test_settings_out_of_range(
    settings_: dict[str, Any], said: str, big: dict[str, Header]
) -> None:
    with pytest.raises(InvalidError, match=said.replace("(", r"\(")):
        make_plan(big["target"], big["q4_k_m"], PlanRequest(**settings_), CARD)


def test_blocks_must_divide_the_heads(workshop: Workshop) -> None:
    drafter = RandomDrafter(hidden=64, vocab=256, target_layers=4, head_dim=40)
    target, draft = (open_header(str(path)) for path in workshop.random(drafter))
    with pytest.raises(InvalidError, match=r"type_k_draft .* do not divide the head width 40"):
        make_plan(target, draft, PlanRequest(n_ctx=256), RAM)
    plain = PlanRequest(n_ctx=256, type_k_draft="f16", type_v_draft="f16")
    assert make_plan(target, draft, plain, RAM).fits


def test_files_in_the_wrong_place(big: dict[str, Header]) -> None:
    with pytest.raises(HeaderError, match="this is a DSpine drafter; a target is expected"):
        make_plan(big["q4_k_m"], None, PlanRequest(), CARD)
    with pytest.raises(HeaderError, match="this is a language model; a DSpine drafter is expected"):
        make_plan(big["target"], big["target"], PlanRequest(), CARD)


def test_a_drafter_of_another_target(big: dict[str, Header], small: dict[str, Any]) -> None:
    other_target, other_draft = small["e2e_qwen3"]
    check_partner(big["target"], big["q4_k_m"])
    check_partner(other_target, other_draft)
    with pytest.raises(HeaderError, match="hidden size"):
        make_plan(big["target"], other_draft, PlanRequest(), CARD)
    with pytest.raises(HeaderError, match=r"converted for the target .* with architecture qwen3"):
        check_partner(big["target"], other_draft)


def test_an_unknown_architecture_is_estimated(tmp_path: Path) -> None:
    path = true_shapes.write_small(tmp_path / "other.gguf", arch="seed_oss")
    plan = make_plan(open_header(str(path)), None, PlanRequest(n_ctx=4096), CARD)
    assert plan.estimated
    assert _parts(plan)["target compute"] > 0


def test_sliding_targets(tmp_path: Path) -> None:
    """gemma3: five of six layers keep a window, padded with a ubatch."""
    path = true_shapes.write_small(tmp_path / "gemma.gguf", arch="gemma3", layers=6, window=1024)
    header = open_header(str(path))
    row = 2 * 2 * 1 * 64 * 2 // 2  # K and V of one head of 64, F16
    request = PlanRequest(n_ctx=32768, type_k="f16", type_v="f16")
    cells = 32768 + 5 * 1536
    assert _parts(make_plan(header, None, request, CARD))["target KV cache"] == cells * row / MIB
    full = replace(request, swa_full=True)
    assert _parts(make_plan(header, None, full, CARD))["target KV cache"] == 6 * 32768 * row / MIB


def test_cache_types_are_those_of_llama_cpp() -> None:
    from dspine._pair import CACHE_TYPES as NATIVE

    assert set(CACHE_TYPES) == set(NATIVE)


def test_errors_are_of_the_family() -> None:
    assert issubclass(HeaderError, DspineError)
