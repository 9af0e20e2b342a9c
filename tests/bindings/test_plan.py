"""`dspine plan` and `--gpu`: table, verdict, exit codes, errors of one line."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dspine import DspineError, InvalidError, _devices
from dspine._devices import Device, select
from dspine.cli import main
from support import true_shapes

MIB = 1 << 20
Cli = Callable[..., "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What a run of the command line showed."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line in this process."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        shown = capsys.readouterr()
        return Outcome(code, shown.out, shown.err)

    return run


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Headers of the published 27B pair."""
    root = tmp_path_factory.mktemp("27b")
    target = true_shapes.write_target(root / "target.gguf")
    return {"target": target, **true_shapes.write_drafters(root, target, "q4_k_m", "q8_0")}


def _table(out: str) -> dict[str, tuple[float, str]]:
    """MiB and place by component."""
    rows: dict[str, tuple[float, str]] = {}
    for line in out.splitlines():
        words = line.split()
        if len(words) >= 3 and words[-1] in ("GPU", "RAM"):
            rows[" ".join(words[:-2])] = (float(words[-2]), words[-1])
    return rows


def test_it_fits(cli: Cli, big: dict[str, Path]) -> None:
    done = cli("plan", big["target"], big["q4_k_m"], "--gpu", "24G", "-c", 65536)
    assert (done.code, done.err) == (0, "")
    table = _table(done.out)
    assert table["target KV cache"] == (2176.0, "GPU")
    assert table["recurrent state"] == (2394.0, "GPU")
    assert table["token embeddings"][1] == "RAM"
    total = sum(size for size, place in table.values() if place == "GPU")
    said = next(line for line in done.out.splitlines() if line.startswith("total, GPU"))
    assert float(said.split()[-1]) == pytest.approx(total, abs=0.5)
    assert "fits: -c 65536," in done.out
    assert "7 drafts a round" in done.out
    assert "(--spec-draft-n-max 7)" in done.out


def test_it_does_not_fit(cli: Cli, big: dict[str, Path]) -> None:
    done = cli("plan", big["target"], big["q8_0"], "--gpu", "24G", "-c", 131072)
    assert done.code == 1
    assert done.err == ""
    verdict = next(line for line in done.out.splitlines() if line.startswith("does not fit"))
    assert "-c 131072 lacks" in verdict
    assert "largest -c that fits: " in verdict
    none = cli("plan", big["target"], "--gpu", "12G")
    assert none.code == 1
    assert "no context fits" in none.out


def test_a_context_beyond_the_trained_one(cli: Cli, big: dict[str, Path]) -> None:
    """What was asked for fits; the largest that is proposed is the trained one, and it says so."""
    done = cli("plan", big["target"], "--gpu", "200G", "-c", 300000)
    assert done.code == 0
    assert "note: -c 300000 is rounded up to 300032" in done.out
    assert "note: -c 300032 is more than the 262144 that the target was trained for" in done.out
    assert "all of the 262144 that the target was trained for fit" in done.out
    within = cli("plan", big["target"], "--gpu", "24G", "-c", 4096)
    assert "note: -c" not in within.out and "largest -c that fits: " in within.out


def test_json(cli: Cli, big: dict[str, Path]) -> None:
    words = ("--gpu", "24576M", "--n-draft", 7, "-np", 2, "-ub", 256, "--cache-type", "q8_0")
    done = cli("plan", big["target"], big["q4_k_m"], *words, "--json")
    document = json.loads(done.out)
    assert document["schema_version"] == 1
    assert document["fits"] is True
    assert document["n_ctx"] == document["largest_n_ctx"]
    assert document["request"]["n_draft"] == 7
    assert document["request"]["n_ubatch"] == 256
    assert document["device"]["room_bytes"] == 24576 * MIB
    on_device = [c["bytes"] for c in document["components"] if c["place"] == "GPU"]
    assert sum(on_device) == document["device_bytes"] <= 24576 * MIB
    assert {"name", "flags", "saved_bytes", "largest_n_ctx"} == set(document["levers"][0])


def test_without_a_gpu_it_plans_for_ram(
    cli: Cli, big: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_devices, "detect_gpus", list)
    done = cli("plan", big["target"], "-c", 4096)
    assert done.out.startswith("no GPU: planned for this machine's memory")
    assert all(place == "RAM" for _, place in _table(done.out).values())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--cache-type", "q9_0"], 1, "type_k is 'q9_0', expected one of f32, f16"),
        (["--gpu", "0G"], 1, "--gpu 0G: expected a size above 0"),
        (["--gpu", "99999999G"], 1, "expected a size above 0 and up to"),
        (["--gpu", "24G", "-c", "-1"], 1, "n_ctx is -1, expected 1 to 2147483647"),
        (["--gpu", "24G", "-c", str(1 << 62)], 1, "n_ctx is 4611686018427387904"),
        (["--gpu", "24G", "-np", "0"], 1, "n_parallel is 0"),
        (["--gpu", "24G", "--n-draft", "-3"], 1, "n_draft is -3"),
        (["-c", "many"], 2, "valid integer"),
        (["--no-such-flag"], 2, "No such option"),
    ],
)
def test_bad_settings(
    words: list[str], code: int, said: str, cli: Cli, big: dict[str, Path]
) -> None:
    done = cli("plan", big["target"], big["q4_k_m"], *words)
    assert done.code == code
    assert done.out == ""
    assert said in done.err
    assert done.err.count("\n") == 1


def _start_of(path: Path, count: int) -> bytes:
    """The first bytes of a file that is 17 GB long."""
    with path.open("rb") as file:
        return file.read(count)


def test_bad_files(cli: Cli, big: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(_start_of(big["target"], 5000))
    other = true_shapes.write_small(tmp_path / "other.gguf")
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    cases: list[tuple[list[object], str]] = [
        ([text], "not a GGUF file"),
        ([cut], "truncated GGUF"),
        ([empty], "empty file"),
        ([tmp_path], str(tmp_path)),
        ([tmp_path / "absent.gguf"], "no such file"),
        ([big["q4_k_m"], big["q4_k_m"]], "this is a DSpine drafter; a target is expected"),
        ([big["target"], big["target"]], "a DSpine drafter is expected here"),
        ([other, big["q4_k_m"]], "hidden size 5120"),
    ]
    for files, said in cases:
        done = cli("plan", *files, "--gpu", "24G")
        assert (done.code, done.out) == (1, ""), files
        assert said in done.err
        assert done.err.count("\n") == 1, done.err


def test_the_wrong_partner_is_refused_by_its_fingerprint(
    cli: Cli, big: dict[str, Path], tmp_path: Path
) -> None:
    """The same shape with one token changed."""
    data = _start_of(big["target"], 64 << 20)
    target = tmp_path / "renamed.gguf"
    target.write_bytes(data.replace(b"<1000>", b"<100O>", 1))
    os.truncate(target, big["target"].stat().st_size)
    done = cli("plan", target, big["q4_k_m"], "--gpu", "24G")
    assert (done.code, done.out) == (1, "")
    assert "with token list hash" in done.err


def test_sizes_of_cards() -> None:
    assert select("24G") == Device("a GPU with 24G", 24 << 30)
    assert select("24576M").total_bytes == select("24GiB").total_bytes == 24 << 30
    assert select("7.5g").total_bytes == int(7.5 * (1 << 30))


FAKE = """#!/bin/sh
echo "NVIDIA GeForce RTX 3090, 24576, 23869"
echo "NVIDIA RTX A2000, 12282, 11000"
"""


def _program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_detected_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path, "nvidia-smi", FAKE)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    first = Device("NVIDIA GeForce RTX 3090", 24576 * MIB, 23869 * MIB)
    second = Device("NVIDIA RTX A2000", 12282 * MIB, 11000 * MIB)
    assert _devices.detect() == [first, second]
    assert select(None) == select("detected") == select("0") == select("3090") == first
    assert select("1") == select("a2000") == second
    for spec in ("2", "4090"):
        with pytest.raises(InvalidError, match="0: NVIDIA GeForce RTX 3090, 1: NVIDIA RTX A2000"):
            select(spec)


def test_detected_by_llama_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "Available devices:\n  Vulkan0: AMD Radeon RX 7900 (24560 MiB, 24000 MiB free)"
    _program(tmp_path, "llama-server", f"#!/bin/sh\necho '{listed}'\n")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("DSPINE_BIN_DIR", str(tmp_path))
    monkeypatch.setattr(_devices.shutil, "which", lambda name: None)
    _program(tmp_path, "llama-server", f"#!/bin/sh\nprintf '%s\\n' '{listed}'\n")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert _devices.detect() == [Device("AMD Radeon RX 7900", 24560 * MIB, 24000 * MIB)]


def test_nothing_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_devices.shutil, "which", lambda name: None)
    monkeypatch.setenv("DSPINE_BIN_DIR", str(tmp_path))
    memory = _devices.detect()
    assert [d.is_gpu for d in memory] == [False]
    assert memory[0].total_bytes > 0
    with pytest.raises(DspineError, match="--gpu 24Q: this is no size such as 24G"):
        select("24Q")
    with pytest.raises(DspineError, match="--gpu detected: no GPU was detected here"):
        select("detected")
    _program(tmp_path, "llama-server", "#!/bin/sh\nexit 3\n")
    assert not _devices.detect_gpus()


def test_garbage_of_a_driver_is_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: Any = "NVIDIA-SMI has failed because it could not communicate, [N/A], [N/A]"
    _program(tmp_path, "nvidia-smi", f"#!/bin/sh\necho '{said}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DSPINE_BIN_DIR", str(tmp_path))
    assert not _devices.detect_gpus()
