"""The binding against dspine.h, and what happens where the library is absent or another one."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import dspine
import numpy as np
import pytest
from dspine import DecodeError, DspineError, InvalidError, LoadError, Pair, PairOptions, Round
from dspine import _library as native
from dspine._errors import error_of
from support.golden import load_case
from support.workshop import EXACT, Workshop

HEADER = Path(__file__).resolve().parents[2] / "native" / "capi" / "dspine.h"
C_TYPES = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "bool": ctypes.c_bool,
    "const int32_t *": native.int32_p,
    "const char *": ctypes.c_char_p,
}


def _header() -> str:
    return re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)


def _functions() -> dict[str, int]:
    """Every function of the header, with its number of parameters."""
    found = re.findall(r"DSPINE_API\s+[\w *]+?\b(dspine_\w+)\(([^)]*)\);", _header())
    return {name: 0 if text == "void" else text.count(",") + 1 for name, text in found}


def test_declared_functions_are_those_of_the_header() -> None:
    declared = {name: len(p.argtypes) for name, p in native.PROTOTYPES.items()}
    assert declared == _functions()


@pytest.mark.parametrize("name", native.SIZES)
def test_structures_are_those_of_the_header(name: str) -> None:
    body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", _header(), re.DOTALL)
    assert body
    fields = re.findall(r"^\s*(.+?)\s*\b(\w+)(\[\w+\])?;", body[1], re.MULTILINE)
    scalars = [(field, C_TYPES[" ".join(kind.split())], size) for kind, field, size in fields]
    expected = [
        (field, kind * native.MAX_POSITIONS if size == "[DSPINE_MAX_POSITIONS]" else kind)
        for field, kind, size in scalars
    ]
    assert list(native.SIZES[name]._fields_) == expected


def test_version_is_that_of_the_header() -> None:
    header = HEADER.read_text()
    assert f"#define DSPINE_ABI_VERSION {native.ABI_VERSION}\n" in header
    assert f"#define DSPINE_MAX_POSITIONS {native.MAX_POSITIONS}\n" in header


@pytest.mark.native
def test_every_symbol_resolves() -> None:
    library = native.library()
    for name in _functions():
        assert getattr(library, name)
    assert native.dspine_abi_version() == native.ABI_VERSION


def _fake(version: int = native.ABI_VERSION, **sizes: int) -> SimpleNamespace:
    """A library whose functions do nothing but answer for themselves."""
    fake = SimpleNamespace(**{name: lambda: None for name in native.PROTOTYPES})
    fake.dspine_abi_version = lambda: version
    for name, structure in native.SIZES.items():
        size = sizes.get(name, ctypes.sizeof(structure))
        setattr(fake, f"{name}_size", lambda size=size: size)
    return fake


def test_a_matching_library_is_taken() -> None:
    native.bind(_fake(), Path("libdspine.so"))


def test_another_version_names_both() -> None:
    with pytest.raises(dspine.AbiError, match="interface version 99, this package expects 2"):
        native.bind(_fake(99), Path("libdspine.so"))


def test_the_version_is_compared_before_anything_else() -> None:
    """An older library lacks functions as well; its version is what one has to know."""
    with pytest.raises(dspine.AbiError, match="interface version 1, this package expects 2"):
        native.bind(SimpleNamespace(dspine_abi_version=lambda: 1), Path("libdspine.so"))
    with pytest.raises(dspine.AbiError, match="no library of dspine"):
        native.bind(SimpleNamespace(), Path("libother.so"))


def test_importing_loads_nothing(tmp_path: Path) -> None:
    """What needs no library works without one; the first object that does names the reason."""
    script = (
        "import dspine\nfrom dspine import _library\n"
        "assert _library.library.cache_info().currsize == 0\n"
        "try:\n    dspine.Engine('target.gguf')\n"
        "except dspine.LoadError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, native.LIB_DIR_ENV: str(tmp_path)},
        check=True,
    )
    assert "no such file" in done.stdout and done.stderr == ""


def test_another_size_names_both() -> None:
    expected = ctypes.sizeof(native.Info)
    match = f"dspine_info has 4096 bytes in the library and {expected}"
    with pytest.raises(dspine.AbiError, match=match):
        native.bind(_fake(dspine_info=4096), Path("libdspine.so"))


def test_a_missing_function_is_named() -> None:
    fake = _fake()
    del fake.dspine_draft_many
    with pytest.raises(dspine.AbiError, match="no function dspine_draft_many"):
        native.bind(fake, Path("libdspine.so"))


def test_a_missing_library_lists_the_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.LIB_DIR_ENV, str(tmp_path))
    with pytest.raises(LoadError, match=re.escape(str(tmp_path))) as caught:
        native.open_library()
    assert "no such file" in str(caught.value)
    native.library_candidates()[0].write_text("no library")
    with pytest.raises(LoadError, match=r"libdspine.*(invalid|short)"):
        native.open_library()
    monkeypatch.delenv(native.LIB_DIR_ENV)
    assert native.library_candidates()[0].parent.parts[-3:] == ("dspine", "native", "lib")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(1, InvalidError), (2, LoadError), (3, DecodeError), (4, DspineError), (77, DspineError)],
)
def test_status_becomes_an_exception(status: int, kind: type[DspineError]) -> None:
    error = error_of(status, "the reason", "draft(seq=3)")
    assert type(error) is kind
    assert "draft(seq=3)" in str(error) and "the reason" in str(error)
    assert issubclass(InvalidError, ValueError)


@pytest.fixture
def pair(workshop: Workshop) -> Pair:
    target, draft = workshop.e2e("e2e_qwen3", "f32")
    with Pair(target, draft, dataclasses.replace(EXACT, n_batch=64)) as opened:
        yield opened


@pytest.mark.native
def test_close_is_idempotent_and_final(workshop: Workshop) -> None:
    pair = Pair(*workshop.e2e("e2e_qwen3", "f32"), EXACT)
    pair.close()
    pair.close()
    assert pair.info.block_size == 8
    with pytest.raises(InvalidError, match="closed"):
        pair.draft(0, 1, 0)


@pytest.mark.native
def test_a_forgotten_pair_warns(workshop: Workshop) -> None:
    pair = Pair(workshop.e2e_target("e2e_qwen3"), None, EXACT)
    with pytest.warns(ResourceWarning, match="never closed"):
        del pair
        gc.collect()


@pytest.mark.native
def test_one_thread_at_a_time(pair: Pair) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(_: Round) -> None:
        inside.set()
        go_on.wait(30)

    worker = threading.Thread(target=lambda: pair.generate([1, 2, 3], 4, on_round=wait))
    worker.start()
    try:
        assert inside.wait(30)
        for call in (lambda: pair.draft(0, 1, 0), pair.close, pair.target_logits):
            with pytest.raises(InvalidError, match="in use"):
                call()
    finally:
        go_on.set()
        worker.join()
    assert len(pair.generate([1, 2, 3], 4).tokens) == 4


@pytest.mark.native
def test_a_callback_cannot_call_back(pair: Pair) -> None:
    with pytest.raises(InvalidError, match="in use"):
        pair.generate([1, 2], 8, on_round=lambda _: pair.truncate(0, 0))


@pytest.mark.native
def test_exceptions_of_a_callback_come_out(pair: Pair) -> None:
    def fail(_: Round) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pair.generate([1, 2], 8, on_round=fail)
    assert len(pair.generate([1, 2], 8).tokens) == 8


@pytest.mark.native
def test_a_callback_can_stop(pair: Pair) -> None:
    seen: list[Round] = []
    done = pair.generate([1, 2], 64, on_round=lambda r: len(seen.append(r) or seen) < 2)
    assert done.rounds == seen and len(seen) == 2
    assert len(done.tokens) == 1 + sum(len(r.emitted) for r in seen)
    assert done.stats.rounds == 2
    assert done.stats.accepted == sum(r.accepted for r in seen)


@pytest.mark.native
def test_generations_repeat(pair: Pair) -> None:
    first, second = (pair.generate([5, 6, 7], 40) for _ in range(2))
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.rounds == second.rounds
    assert first.stats.mean_accepted_length >= 1.0


@pytest.mark.native
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda p: p.draft(1, 5, 0), "sequence 1 is outside"),
        (lambda p: p.draft(-1, 5, 0), "sequence -1"),
        (lambda p: p.draft(0, 1024, 0), "token 1024 is outside the vocabulary"),
        (lambda p: p.draft(0, -1, 0), "token -1"),
        (lambda p: p.draft(0, 5, -1), "positions -1"),
        (lambda p: p.draft(0, 2**40, 0), "does not fit 32 bits"),
        (lambda p: p.draft_many([], [], []), "no sequence"),
        (lambda p: p.draft_many([0, 0], [1, 2], [0, 0]), "each once"),
        (lambda p: p.draft_many([0], [1, 2], [0]), "equal lengths"),
        (lambda p: p.draft_feed(0, np.zeros((2, 7)), 0), r"shape \[n, 384\]"),
        (lambda p: p.draft_feed(0, np.zeros((0, 384)), 0), "at least 1"),
        (lambda p: p.draft_feed(0, np.zeros((1, 384)), -2), "pos0"),
        (lambda p: p.draft_feed(9, np.zeros((1, 384)), 0), "sequence 9"),
        (lambda p: p.target_decode(0, [], 0), "0 tokens"),
        (lambda p: p.target_decode(0, [1] * 65, 0), "65 tokens"),
        (lambda p: p.target_decode(0, [4096], 0), "token 4096"),
        (lambda p: p.target_decode(0, [0.5], 0), "integers"),
        (lambda p: p.target_logits(), "logits"),
        (lambda p: p.target_taps(), "values"),
        (lambda p: p.candidates(), "was not drafted"),
        (lambda p: p.tensor("result_norm"), "capture"),
        (lambda p: p.truncate(0, -1), "negative"),
        (lambda p: p.truncate(3, 0), "sequence 3"),
        (lambda p: p.generate([], 4), "empty"),
        (lambda p: p.generate([1], 0), "n_predict"),
        (lambda p: p.generate([1], -5), "n_predict"),
        (lambda p: p.generate([1], 1.5), "expected an integer"),
        (lambda p: Pair("target\0.gguf"), "NUL"),
        (lambda p: p.generate([1, -7], 4), "token -7"),
        (lambda p: p.generate([1] * 5000, 4), "does not fit a context"),
    ],
)
def test_bad_arguments(call: object, match: str, pair: Pair) -> None:
    with pytest.raises(InvalidError, match=match):
        call(pair)
    assert len(pair.generate([1], 2).tokens) == 2  # and the pair still works


@pytest.mark.native
def test_without_a_drafter(workshop: Workshop) -> None:
    target, draft = workshop.e2e("e2e_qwen3", "f32")
    with Pair(target, None, EXACT) as plain, Pair(target, draft, EXACT) as pair:
        assert plain.info.n_draft == plain.info.block_size == 0
        for call in (
            lambda: plain.draft(0, 1, 0),
            lambda: plain.draft_feed(0, np.zeros((1, 384)), 0),
            lambda: plain.candidates(),
            lambda: plain.target_taps(),
        ):
            with pytest.raises(InvalidError, match=r"without a drafter|no drafter"):
                call()
        stock, drafted = plain.generate([9, 8, 7], 50), pair.generate([9, 8, 7], 50)
    assert stock.tokens.tolist() == drafted.tokens.tolist()
    assert stock.stats.drafted == 0 and stock.stats.mean_accepted_length == 1.0
    assert stock.stats.rounds == 49


@pytest.mark.native
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n_batch": 0}, "at least 1"),
        ({"n_seq": 0}, "at least 1"),
        ({"n_seq": -3}, "at least 1"),
        ({"n_seq": 2**30}, "n_seq 1073741824 exceeds"),
        ({"p_min": float("nan")}, "p_min"),
        ({"n_draft": -1}, "negative"),
        ({"type_k": "q3_x"}, "type_k is 'q3_x'"),
        ({"flash_attn": "maybe"}, "flash_attn is 'maybe'"),
        ({"n_ctx": 2**33}, "does not fit 32 bits"),
    ],
)
def test_bad_options(changes: dict[str, object], match: str, workshop: Workshop) -> None:
    with pytest.raises(InvalidError, match=match):
        Pair(*workshop.e2e("e2e_qwen3", "f32"), dataclasses.replace(PairOptions(), **changes))


@pytest.mark.native
def test_null_pointers_are_refused() -> None:
    """The C functions themselves, past the checks of Pair."""
    calls = (
        (native.dspine_open, (None, None, None, None)),
        (native.dspine_get_info, (None, None)),
        (native.dspine_attach, (None, None, None, None)),
        (native.dspine_truncate, (None, 0, 0)),
        (native.dspine_draft_truncate, (None, 0, 0)),
        (native.dspine_sampling_default, (None, None)),
        (native.dspine_begin, (None, None, 1, 1, 0, None)),
        (native.dspine_step, (None, -1, None)),
        (native.dspine_get_stats, (None, None)),
        (native.dspine_end, (None,)),
        (native.dspine_tokenize, (None, None, 0, True, True, None, 0, None)),
        (native.dspine_token_to_piece, (None, 0, False, None, 0, None)),
        (native.dspine_detokenize, (None, None, 0, False, None, 0, None)),
        (native.dspine_token_is_eog, (None, 0, None)),
        (native.dspine_apply_template, (None, None, 0, True, -1, None, 0, None)),
        (native.dspine_model_meta, (None, False, None, None, 0, None)),
        (native.dspine_get_device, (0, None)),
        (native.dspine_target_decode, (None, 0, None, 1, 0)),
        (native.dspine_set_taps, (None, None, 1)),
        (native.dspine_target_logits, (None, None, 1)),
        (native.dspine_target_taps, (None, None, 1)),
        (native.dspine_draft_feed, (None, 0, None, 1, 0)),
        (native.dspine_draft, (None, 0, 1, 0, None, None)),
        (native.dspine_draft_many, (None, None, None, None, 1, None, None)),
        (native.dspine_draft_candidates, (None, 0, None, None)),
        (native.dspine_draft_tensor, (None, None, 0, None, 1)),
        (
            native.dspine_generate,
            (None, None, 1, 1, False, None, None, None, native.RoundFn(), None),
        ),
    )
    for function, arguments in calls:
        assert function(*arguments) == 1, function.__name__
        assert b"NULL" in (native.dspine_last_error() or b""), function.__name__
    native.dspine_close(None)


@pytest.mark.native
def test_wrong_lengths_are_refused(workshop: Workshop) -> None:
    case = load_case("full_attn")
    target, draft = workshop.unit("full_attn", "f32")
    with Pair(target, draft, dataclasses.replace(EXACT, capture=True)) as pair:
        pair.draft_feed(0, case.features, 0)
        pair.draft(0, case.anchor, len(case.features))
        pair.truncate(0, 0)
        pair.target_decode(0, [1, 2], 0)
        room = np.zeros(7, np.float32).ctypes.data_as(native.float_p)
        handle = pair._handle
        assert native.dspine_target_logits(handle, room, 7) == 1
        assert native.dspine_target_taps(handle, room, 7) == 1
        assert native.dspine_draft_tensor(handle, b"result_norm", -1, room, 7) == 1
        assert native.dspine_draft_tensor(handle, b"no_such", -1, room, 7) == 1
        with pytest.raises(InvalidError, match="block 1 was not drafted"):
            pair.candidates(1)


@pytest.mark.native
def test_a_full_context_is_an_error_not_a_crash(workshop: Workshop) -> None:
    target, draft = workshop.e2e("e2e_qwen3", "f32")
    options = dataclasses.replace(EXACT, n_ctx=256)
    with Pair(target, draft, options) as pair:
        limit = pair.info.n_ctx
        with pytest.raises(InvalidError, match="outside a context of 256"):
            for start in range(0, limit + 64, 32):
                pair.target_decode(0, [1] * 32, start)
        with pytest.raises(InvalidError, match="1 to 256"):
            pair.target_decode(0, [1] * 300, 0)
        with pytest.raises(InvalidError, match="outside a context"):
            pair.target_decode(0, [1] * 3, 2**31 - 2)
        # generation ends where the context does, as in llama-server: prompt and answer fill it
        assert len(pair.generate([1] * (limit - 20), 100, ignore_eog=True).tokens) == 20
        assert len(pair.generate([1] * (limit - 20), 20).tokens) == 20


@pytest.mark.native
def test_step_by_step(pair: Pair) -> None:
    whole = pair.generate([5, 6, 7], 40)
    for bad in (lambda: pair.step(), lambda: pair.begin([], 4), lambda: pair.begin([1], 0)):
        with pytest.raises(InvalidError, match=r"no generation|empty|at least 1"):
            bad()
    prompt = [*range(100), 5]  # the pair takes 64 tokens at once
    expected = pair.generate(prompt, 30).tokens.tolist()
    pair.begin(prompt, 30, reuse_prompt=False)
    first, second = pair.step(), pair.step()
    assert (first.n_prompt, first.emitted, first.round) == (64, (), None)
    assert (second.n_prompt, list(second.emitted)) == (101, expected[:1])
    found = [*second.emitted]
    while not (step := pair.step()).stop:
        assert step.round is not None and step.round.anchor == found[-1]
        found += step.emitted
    assert [*found, *step.emitted] == expected and step.stop == "limit"
    with pytest.raises(InvalidError, match="no generation is in progress"):
        pair.step()
    # ended half-way, twice, and replaced
    pair.begin([5, 6, 7], 40)
    pair.step()
    pair.end()
    pair.end()
    assert pair.stats().prompt_tokens == 3
    pair.begin([1, 2], 40)
    pair.begin([5, 6, 7], 40)
    pair.step()
    assert pair.generate([5, 6, 7], 40).tokens.tolist() == whole.tokens.tolist()


@pytest.mark.native
@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.truncate(0, 2),
        lambda p: p.draft_truncate(0, 2),
        lambda p: p.target_decode(0, [1, 2], 20),
        lambda p: p.draft_feed(0, np.zeros((1, 384)), 30),
    ],
)
def test_writing_to_a_cache_ends_the_generation(write: object, pair: Pair) -> None:
    """And what it left there is not taken for a known prompt."""
    prompt = list(range(20))
    expected = pair.generate(prompt, 10).tokens.tolist()
    pair.begin(prompt, 10)
    pair.step()
    if write.__code__.co_names[0] in ("target_decode", "draft_feed"):  # type: ignore[attr-defined]
        pair.end()
    with contextlib.suppress(DecodeError):
        write(pair)  # type: ignore[operator]
    with pytest.raises(InvalidError, match="no generation"):
        pair.step()
    pair.begin(prompt, 10)
    assert pair.stats().prompt_reused == 0
    found: list[int] = []
    while len(found) < 10:
        found += pair.step().emitted
    assert found == expected


@pytest.mark.native
def test_without_room_for_all_logits(workshop: Workshop) -> None:
    options = dataclasses.replace(EXACT, n_batch=64, logits_all=False)
    target, draft = workshop.e2e("e2e_qwen3", "f32")
    with Pair(target, draft, options) as small, Pair(target, draft, EXACT) as pair:
        small.target_decode(0, [1] * 8, 0)
        assert small.target_logits().shape == (8, 1024)
        with pytest.raises(InvalidError, match="9 tokens, the batch takes 1 to 8"):
            small.target_decode(0, [1] * 9, 8)
        prompt = list(range(200))
        expected = pair.generate(prompt, 40).tokens.tolist()
        assert small.generate(prompt, 40).tokens.tolist() == expected
    with Pair(target, None, options) as plain:
        assert plain.generate(prompt, 40).tokens.tolist() == expected


@pytest.mark.native
def test_devices_are_listed() -> None:
    """Machine facts from llama.cpp; there is always a CPU."""
    assert b"0c1e57098" in native.dspine_llama_build()
    assert native.dspine_system_info()
    devices = []
    for index in range(native.dspine_device_count()):
        device = native.Device()
        assert native.dspine_get_device(index, ctypes.byref(device)) == 0
        devices.append(device)
    assert any(d.type == 0 and d.total_bytes > 2**20 for d in devices)
    assert all(d.name and d.description and d.backend for d in devices)
    assert native.dspine_get_device(len(devices), ctypes.byref(device)) == 1


@pytest.mark.native
def test_taps_without_a_drafter(workshop: Workshop) -> None:
    """The rows that a drafter would get, for training and for measuring."""
    target, draft = workshop.e2e("e2e_qwen3", "f32")
    prompt = list(range(30, 60))
    with Pair(target, draft, EXACT) as pair, Pair(target, None, EXACT) as plain:
        pair.target_decode(0, prompt, 0)
        plain.set_taps([2, 4, 5])  # of target_layer_ids 1, 3, 4
        with pytest.raises(InvalidError):
            plain.target_taps()  # nothing was evaluated with these taps
        plain.target_decode(0, prompt, 0)
        taps = plain.target_taps()
        assert (taps == pair.target_taps()).all()
        plain.truncate(0, 0)
        plain.set_taps([4])
        plain.target_decode(0, prompt, 0)
        assert (plain.target_taps() == taps[:, 128:256]).all()
        for layers in ([], [0], [7], [99], [-1]):
            with pytest.raises(InvalidError):
                plain.set_taps(layers)
        with pytest.raises(InvalidError, match="drafter"):
            pair.set_taps([2])


@pytest.mark.native
@pytest.mark.parametrize("level", ["silent", "info"])
def test_log_level(level: str, workshop: Workshop) -> None:
    """What was chosen before the first pair holds; silent is the default."""
    target, draft = workshop.e2e("e2e_qwen3", "f32")
    lines = [
        "import dspine",
        f"dspine.set_log_level({level!r})" if level != "silent" else "",
        f"with dspine.Pair({str(target)!r}, {str(draft)!r}) as pair:",
        "    pair.generate([1, 2, 3], 4)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert ("DSpine block = 8" in done.stderr) == (level == "info")
    assert level == "info" or done.stderr == ""


def test_log_level_by_an_unknown_name() -> None:
    with pytest.raises(InvalidError, match="loud"):
        dspine.set_log_level("loud")
