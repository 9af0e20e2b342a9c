"""The drafter inside llama_cpp.Llama: same ids, same acceptance as the engine's."""

from __future__ import annotations

import copy
import ctypes
import gc
import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dspine import AbiError, DspineError, Engine, InvalidError, LoadError, Round
from dspine_bench.golden_target import text_of
from support.golden import Recorded
from support.native_build import why_missing
from support.server import Files
from support.workshop import Workshop

pytestmark = pytest.mark.native

# DraftModel loads both when it is imported; in CI a missing one is an error.
if os.environ.get("CI") != "true":
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed", allow_module_level=True)
    if why_missing():
        pytest.skip(str(why_missing()), allow_module_level=True)

_draft_model: Any = importlib.import_module("dspine._draft_model")
DraftModel: Any = _draft_model.DraftModel
llama_cpp: Any = _draft_model.llama_cpp

N_PREDICT = 64
F32 = 0
LLAMA: dict[str, Any] = {
    "n_ctx": 1024,
    "n_threads": 1,
    "n_threads_batch": 1,
    "type_k": F32,
    "type_v": F32,
    "verbose": False,
}
ENGINE: dict[str, Any] = {
    "n_ctx": 1024,
    "threads": 1,
    "flash_attn": "off",
    "type_k": "f32",
    "type_v": "f32",
    "draft_type_k": "f32",
    "draft_type_v": "f32",
}


@pytest.fixture
def llama(files: Files) -> Iterator[Any]:
    model = DraftModel(files[1], type_k="f32", type_v="f32")
    opened = llama_cpp.Llama(model_path=str(files[0]), draft_model=model, n_batch=64, **LLAMA)
    yield opened
    opened.close()


def _greedy(llama: Any, prompt: list[int], n: int = N_PREDICT) -> list[int]:
    return list(islice(llama.generate(prompt, temp=0.0), n))


class Recorder:
    """Rounds of the engine."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []

    def next_depth(self) -> int:
        return 7

    def observe(self, round_: Round, draft_ms: float, verify_ms: float) -> None:
        self.rounds.append(round_)


def test_same_ids_and_acceptance(llama: Any, files: Files, recorded: Recorded) -> None:
    """Round by round the same; the last one of a generation is not counted by the DraftModel."""
    ours: list[int] = []
    with Engine(*files, **ENGINE) as engine:
        for run in recorded.runs:
            policy = Recorder()
            done = engine.generate(run.prompt, max_tokens=150, temperature=0, n_draft=policy)
            assert _greedy(llama, run.prompt, 150) == done.tokens
            assert done.tokens[:N_PREDICT] == run.plain
            ours += [r.accepted for r in policy.rounds[:-1]]
    stats = llama.draft_model.stats
    assert stats.drafted == 7 * stats.rounds
    # The issue allows 2 %; in float32 nothing differs.
    assert (stats.rounds, stats.accepted) == (len(ours), sum(ours))
    assert stats.mean_accepted_length > 3


def test_the_usual_calls(llama: Any, recorded: Recorded) -> None:
    run = recorded.runs[0]
    done = llama(text_of(run.prompt), max_tokens=20, temperature=0)
    assert done["choices"][0]["text"] == text_of(run.plain[:20])
    chunks = llama(text_of(run.prompt), max_tokens=20, temperature=0, stream=True)
    assert "".join(c["choices"][0]["text"] for c in chunks) == text_of(run.plain[:20])
    assert llama.draft_model.stats.accepted > 0


def test_sampled_ids_do_not_depend_on_the_drafter(llama: Any, files: Files) -> None:
    with_drafter = llama("[1][2]", max_tokens=40, temperature=0.9, seed=5)
    plain = llama_cpp.Llama(model_path=str(files[0]), **LLAMA)
    without = plain("[1][2]", max_tokens=40, temperature=0.9, seed=5)
    plain.close()
    assert with_drafter["choices"][0]["text"] == without["choices"][0]["text"]


def test_a_long_prompt_in_many_batches(llama: Any, files: Files) -> None:
    """Past n_batch tokens llama-cpp-python needs logits_all, which the drafter's Llama has."""
    prompt = np.random.default_rng(3).integers(0, 1000, 600).tolist()
    with Engine(*files, **ENGINE) as engine:
        expected = engine.generate(prompt, max_tokens=N_PREDICT, temperature=0)
    assert _greedy(llama, prompt) == expected.tokens
    assert llama.draft_model.stats.drafted > 0


def test_a_dropped_generator_and_another_prompt(llama: Any, recorded: Recorded) -> None:
    for run in recorded.runs * 3:
        _greedy(llama, run.prompt, 5)
    for run in recorded.runs:
        assert _greedy(llama, run.prompt) == run.plain


def test_a_restored_state_drafts_again_later(llama: Any, files: Files, recorded: Recorded) -> None:
    """The drafter did not see the restored tokens: it begins with what comes after them."""
    run = recorded.runs[0]
    _greedy(llama, run.prompt, 10)
    state = llama.save_state()
    _greedy(llama, [9, 8, 7], 10)
    llama.load_state(state)
    before = llama.draft_model.stats.drafted
    assert _greedy(llama, run.prompt + run.plain[:9], 40) == run.plain[9:49]
    assert llama.draft_model.stats.drafted > before


def test_a_drafter_alone(files: Files) -> None:
    model = DraftModel(files[1])
    with pytest.raises(InvalidError, match=r"a drafter alone.*dspine\.Engine"):
        model(np.array([1, 2, 3], np.intc))
    with pytest.raises(InvalidError, match="no target"):
        _ = model.info
    model.close()
    with pytest.raises(InvalidError, match="closed"):
        model(np.array([1, 2, 3], np.intc))


def test_wrong_partners(files: Files, workshop: Workshop) -> None:
    hybrid = workshop.e2e("e2e_hybrid", "f32")
    for target, draft, match in (
        (files[0], files[0], "no DSpine drafter"),
        (files[0], hybrid[1], "does not fit"),
        (files[0], Path("absent.gguf"), "absent.gguf"),
        (*hybrid, "recurrent or hybrid"),
    ):
        with pytest.raises(LoadError, match=match):
            llama_cpp.Llama(model_path=str(target), draft_model=DraftModel(draft), **LLAMA)
    gc.collect()


def test_misuse(llama: Any, files: Files) -> None:
    model = llama.draft_model
    with pytest.raises(InvalidError, match="serves another Llama"):
        llama_cpp.Llama(model_path=str(files[0]), draft_model=model, **LLAMA)
    with pytest.raises(DspineError, match="8 rows"):
        llama_cpp.Llama(
            model_path=str(files[0]), draft_model=DraftModel(files[1]), n_batch=4, **LLAMA
        )
    with pytest.raises(InvalidError, match="n_draft is 0"):
        DraftModel(files[1], n_draft=0)
    used = llama_cpp.Llama(model_path=str(files[0]), logits_all=True, **LLAMA)
    _greedy(used, [1, 2], 3)
    with pytest.raises(InvalidError, match="did not see"):
        DraftModel(files[1]).bind(used)
    used.close()
    assert _greedy(llama, [1, 2], 5)


def test_bound_by_hand(files: Files, recorded: Recorded) -> None:
    run = recorded.runs[0]
    opened = llama_cpp.Llama(model_path=str(files[0]), logits_all=True, **LLAMA)
    model = DraftModel(files[1], n_draft=3)
    model.bind(opened)
    opened._logits_all = True
    opened.draft_model = model
    assert _greedy(opened, run.prompt) == run.plain
    assert model.info.n_draft == 3 and model.stats.accepted > 0
    opened.close()


def test_closing_in_any_order(files: Files, recorded: Recorded) -> None:
    run = recorded.runs[0]

    def both() -> tuple[Any, Any]:
        model = DraftModel(files[1])
        return llama_cpp.Llama(model_path=str(files[0]), draft_model=model, **LLAMA), model

    llama, model = both()
    _greedy(llama, run.prompt, 9)
    llama.close()
    with pytest.raises(InvalidError, match="closed"):
        model(np.array([1, 2], np.intc))

    llama, model = both()
    model.close()
    with pytest.raises(InvalidError, match="set draft_model to None"):
        _greedy(llama, run.prompt, 9)
    llama.draft_model = None
    assert _greedy(llama, run.prompt, 9) == run.plain[:9]
    llama.close()

    llama, model = both()
    generator = llama.generate(run.prompt, temp=0.0)
    next(generator)
    del llama, generator
    gc.collect()
    with pytest.raises(InvalidError, match="closed"):
        model(np.array([1, 2], np.intc))

    llama, model = both()
    del model
    gc.collect()
    assert _greedy(llama, run.prompt, 9) == run.plain[:9]


def test_others_are_left_alone(files: Files, recorded: Recorded) -> None:
    """The constructor passes draft models of others, and none, unchanged."""
    run = recorded.runs[0]
    lookup = llama_cpp.llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=3)
    for model in (None, lookup):
        opened = llama_cpp.Llama(model_path=str(files[0]), draft_model=model, **LLAMA)
        assert opened.draft_model is model and "decode" not in vars(opened._ctx)
        assert _greedy(opened, run.prompt, 20) == run.plain[:20]
        opened.close()


def test_a_copy_has_the_settings(files: Files) -> None:
    model = DraftModel(files[1], n_draft=3, type_k="f16")
    for made in (copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert made._settings == model._settings and made._path == files[1]


def _python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "LLAMA_CPP_LIB_PATH"}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=kept,
        timeout=120,
        check=False,
    )


def test_it_finds_the_library_for_llama_cpp() -> None:
    done = _python("from dspine import DraftModel; import llama_cpp; print('fine')")
    assert done.stdout == "fine\n", done.stderr


def test_another_llama_cpp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy of llama.cpp in the process would read our pointers as its own."""
    other = SimpleNamespace(llama_decode=ctypes.CDLL(None).abs, _name="/elsewhere/libllama.so")
    fake = SimpleNamespace(llama_cpp=SimpleNamespace(_lib=other))
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    with pytest.raises(AbiError, match=r"runs /elsewhere/libllama\.so.*import DraftModel before"):
        _draft_model._import_llama_cpp()


def test_without_llama_cpp_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(LoadError, match=r"pip install 'dspine\[engine\]'"):
        _draft_model._import_llama_cpp()


EXIT = """
import sys
from dspine import DraftModel
import llama_cpp

model = DraftModel(sys.argv[2])
llama = llama_cpp.Llama(model_path=sys.argv[1], draft_model=model, n_ctx=256, verbose=False)
llama.cycle = {"llama": llama, "model": model}
print(len(llama("[1][2]", max_tokens=5, temperature=0)["choices"][0]["text"]) > 0)
"""


@pytest.mark.parametrize("end", ["", "del llama, model", "model.cycle = llama; del llama"])
def test_the_interpreter_may_end_at_any_moment(end: str, files: Files) -> None:
    done = _python(EXIT + end, *map(str, files))
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
