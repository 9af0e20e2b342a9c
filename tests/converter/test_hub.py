"""The hub, played by a server on the loopback interface; nothing leaves this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from support.hub import COMMIT, Hub

REPO = "someone/Tiny-DSpine"
TARGET_REPO = "someone/Tiny-Target-GGUF"


@pytest.fixture
def hub(draft, target) -> Iterator[Hub]:
    stand_in = Hub()
    directory = draft.write_shards(2, index=True)
    (directory / "README.md").write_text("a card")
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    (directory / "optimizer").mkdir()
    (directory / "optimizer" / "state.safetensors").write_bytes(b"no")
    names = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()]
    stand_in.files[REPO] = {name: directory / name for name in names}
    stand_in.files[TARGET_REPO] = {"tiny.gguf": target}
    yield stand_in
    stand_in.close()


@pytest.fixture
def online(hub, spawn, tmp_path):
    """Run the command line with the stand-in as its hub and an empty cache."""

    def run(*arguments: object, **environment: str) -> tuple[int, str, str]:
        env = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            **environment,
        }
        process = spawn(*arguments, env=env)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    return run


def test_checkpoint_from_the_hub(hub, online, target, tmp_path):
    args = (REPO, "--target", target, "-t", "f32", "-q")
    code, out, err = online(*args, "-o", tmp_path / "o")
    assert code == 0, err
    path = Path(out.strip())
    assert path.name == "Tiny-DSpine-F32.gguf"
    assert hub.asked(REPO) == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    reader = gguf.GGUFReader(path)
    url = reader.get_field("general.source.url").contents()
    assert url == f"https://huggingface.co/{REPO}"
    assert reader.get_field("general.source.revision").contents() == COMMIT
    # Once cached, it works offline and asks for nothing.
    hub.log.clear()
    code, out, err = online(*args, "-o", tmp_path / "p", HF_HUB_OFFLINE="1")
    assert code == 0, err
    assert Path(out.strip()).read_bytes() == path.read_bytes()
    assert hub.log == []


def test_dry_run_of_a_hub_checkpoint_reads_headers(hub, online, target, tmp_path):
    code, out, err = online(REPO, "--target", target, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["files"][0]["bytes"] > 0
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_target_header_from_the_hub(hub, online, draft, kit, tmp_path):
    """Only the header is read: the file is larger than what was sent."""
    big = tmp_path / "tiny.gguf"
    big.write_bytes(hub.files[TARGET_REPO]["tiny.gguf"].read_bytes() + bytes(9 << 20))
    hub.files[TARGET_REPO]["tiny.gguf"] = big
    args = (draft.directory, "--target", f"{TARGET_REPO}:tiny.gguf", "-q")
    code, out, err = online(*args, "-o", tmp_path / "o", HF_TOKEN="hf_secret")
    assert code == 0, err
    assert hub.sent["tiny.gguf"] == 4 << 20
    assert hub.token_seen == "Bearer hf_secret"
    assert "hf_secret" not in out + err
    reader = gguf.GGUFReader(out.strip())
    assert reader.get_field("dspine.target.vocab_size").contents() == 96


def test_header_in_growing_pieces(hub, online, draft, kit, tmp_path):
    """A header larger than the first piece takes further ranges, each byte once."""
    path = kit.new_target(
        tmp_path / "large.gguf", change=lambda w: w.add_string("x.note", "n" * (10 << 20))
    )
    path.write_bytes(path.read_bytes() + bytes(9 << 20))
    hub.files[TARGET_REPO]["large.gguf"] = path
    args = (draft.directory, "--target", f"{TARGET_REPO}:large.gguf", "-q", "-o", tmp_path / "o")
    code, _, err = online(*args)
    assert code == 0, err
    ranges = [r for _, p, r in hub.log if p.endswith("large.gguf") and r]
    assert len(ranges) >= 2
    assert hub.sent["large.gguf"] < path.stat().st_size


@pytest.mark.parametrize("cut", [200, 20])
def test_truncated_target_on_the_hub(hub, online, draft, tmp_path, cut):
    file = hub.files[TARGET_REPO]["tiny.gguf"]
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:cut])
    hub.files[TARGET_REPO]["tiny.gguf"] = short
    args = (draft.directory, "--target", f"{TARGET_REPO}:tiny.gguf", "-o", tmp_path / "o")
    code, _, err = online(*args)
    assert code == 1
    assert "truncated GGUF" in err


def test_a_server_without_ranges(hub, online, draft, tmp_path):
    hub.ranges = False
    args = (draft.directory, "--target", f"{TARGET_REPO}:tiny.gguf", "-o", tmp_path / "o", "-q")
    code, _, err = online(*args)
    assert code == 0, err


def test_cached_target_is_used(hub, online, draft, tmp_path):
    folder = tmp_path / "hf" / "hub" / "models--someone--Tiny-Target-GGUF"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (snapshot / "tiny.gguf").write_bytes(hub.files[TARGET_REPO]["tiny.gguf"].read_bytes())
    hub.files.clear()
    args = (draft.directory, "--target", f"{TARGET_REPO}:tiny.gguf", "-o", tmp_path / "o", "-q")
    code, _, err = online(*args, HF_HUB_OFFLINE="1")
    assert code == 0, err
    assert hub.log == []


@pytest.mark.parametrize(
    ("source", "target_text", "message"),
    [
        ("someone/nothing", None, "hub repository 'someone/nothing'"),
        (None, f"{TARGET_REPO}:absent.gguf", "absent.gguf"),
        (None, "someone/nothing:x.gguf", "someone/nothing:x.gguf"),
    ],
)
def test_absent_on_the_hub(hub, online, draft, target, tmp_path, source, target_text, message):
    args = (source or draft.directory, "--target", target_text or target, "-o", tmp_path / "o")
    code, _, err = online(*args)
    assert code == 1
    assert message in err
    assert "Traceback" not in err
    assert err.count("\n") <= 3


def test_offline_without_a_cached_file(hub, online, draft, target, tmp_path):
    args = ("--target", f"{TARGET_REPO}:tiny.gguf", "-o", tmp_path / "o")
    code, _, err = online(draft.directory, *args, HF_HUB_OFFLINE="1")
    assert code == 1
    assert "HF_HUB_OFFLINE is set" in err
    code, _, err = online(REPO, "--target", target, "-o", tmp_path / "o", HF_HUB_OFFLINE="1")
    assert code == 1
    assert f"hub repository '{REPO}'" in err
    assert hub.log == []


def test_unreachable_hub(online, draft, tmp_path):
    args = (draft.directory, "--target", f"{TARGET_REPO}:tiny.gguf", "-o", tmp_path / "o")
    code, _, err = online(*args, HF_ENDPOINT="http://127.0.0.1:1")
    assert code == 1
    assert f"{TARGET_REPO}:tiny.gguf" in err
    assert "Traceback" not in err


def test_dry_run_of_a_cached_checkpoint_without_network(hub, online, target, tmp_path):
    """The hub cannot be reached: the cached snapshot is planned. A refusal is still one."""
    args = (REPO, "--target", target, "--dry-run", "--json")
    code, _, err = online(*args, HF_ENDPOINT="http://127.0.0.1:1")
    assert code == 1
    assert f"hub repository '{REPO}'" in err
    code, _, err = online(REPO, "--target", target, "-o", tmp_path / "o", "-q")
    assert code == 0, err
    code, out, err = online(*args, HF_ENDPOINT="http://127.0.0.1:1")
    assert code == 0, err
    assert json.loads(out)["files"][0]["path"] == "Tiny-DSpine-BF16.gguf"
    hub.files.clear()
    code, _, err = online(*args)
    assert code == 1
    assert f"hub repository '{REPO}'" in err
