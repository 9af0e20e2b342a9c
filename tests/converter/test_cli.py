"""Exit codes, output streams, dry run, JSON, progress, verification."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dspine_convert import __version__
from dspine_convert.errors import ExitCode
from dspine_convert.plan import OutputType


def test_exit_code_table():
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "FAILED": 1,
        "USAGE": 2,
        "BUG": 3,
        "INTERRUPTED": 130,
    }


def test_no_arguments_prints_help(cli):
    result = cli()
    assert result.code == 0
    assert "Usage: dspine-convert" in result.out
    for kind in OutputType:
        assert kind.value in result.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("src",),
        ("--target", "t"),
        ("src", "--target", "t", "-t", "q9"),
        ("src", "--target", "t", "--nonsense"),
        ("src", "--target", "t", "--threads", "0"),
        ("src", "other", "--target", "t"),
    ],
)
def test_usage_errors(cli, arguments):
    result = cli(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert "--help" in result.err
    assert "Traceback" not in result.err


def test_version(cli):
    result = cli("--version")
    assert (result.code, result.out.strip()) == (0, f"dspine-convert {__version__}")


def test_a_bug_is_three(draft, target, cli, tmp_path, monkeypatch):
    def broken(*args, **keywords):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("dspine_convert.convert.build_plan", broken)
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    assert result.code == 3
    assert "internal error: ZeroDivisionError: oops" in result.err
    assert "Traceback" not in result.err
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o", "--debug")
    assert result.code == 3
    assert "Traceback" in result.err


def test_debug_shows_a_traceback_of_a_refusal(draft, target, cli, tmp_path):
    draft.config["hidden_act"] = "gelu"
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o", "--debug")
    assert result.code == 1
    assert "Traceback" in result.err


def test_interrupted_is_130(draft, target, cli, tmp_path, monkeypatch):
    def interrupted(*args, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("dspine_convert.convert.stream", interrupted)
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    assert result.code == 130
    assert not (tmp_path / "o").exists()


def test_paths_on_stdout_the_rest_on_stderr(draft, target, cli, tmp_path):
    out = tmp_path / "o"
    result = cli(draft.write(), "--target", target, "-t", "f32", "-t", "bf16", "-o", out)
    assert result.code == 0
    assert result.out.splitlines() == [
        str(out / "tiny-dspine-F32.gguf"),
        str(out / "tiny-dspine-BF16.gguf"),
    ]
    lines = [line for line in result.err.splitlines() if line.startswith("converting")]
    assert lines[-1].startswith("converting 100%")
    assert 1 < len(lines) <= 10


def test_quiet(draft, target, cli, tmp_path):
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o", "-q")
    assert result.code == 0
    assert result.err == ""


def test_repeated_type_is_one_file(draft, target, cli, tmp_path):
    result = cli(draft.write(), "--target", target, "-t", "f32", "-t", "f32", "-o", tmp_path / "o")
    assert len(result.out.split()) == 1


def test_name(draft, target, cli, tmp_path):
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o", "--name", "a b/c")
    assert Path(result.out.strip()).name == "a-b-c-BF16.gguf"


def test_dry_run_writes_nothing(draft, target, cli, tmp_path, monkeypatch):
    """From headers alone: the data may even be missing from the disk."""
    monkeypatch.setattr("os.preadv", None)
    monkeypatch.setenv("DSPINE_LIB_DIR", str(tmp_path / "nowhere"))
    out = tmp_path / "o"
    args = ("--target", target, "-t", "bf16", "-t", "q4_k_m", "-o", out, "--dry-run")
    result = cli(draft.write(), *args)
    assert result.code == 0
    assert not out.exists()
    for text in (
        "tiny-dspine-BF16.gguf",
        "tiny-dspine-Q4_K_M.gguf",
        "dflash.target_layers = [1, 3, 5]",
        "blk.1.inject_write.weight  [12 x 32]  BF16 → BF16",
        "tokenizer.ggml.tokens = [96 x string]",
    ):
        assert text in result.out


def test_dry_run_sizes_are_the_sizes(draft, target, cli, tmp_path):
    args = (draft.write(), "--target", target, "-t", "f32", "-t", "bf16", "-o", tmp_path / "o")
    planned = json.loads(cli(*args, "--dry-run", "--json").out)
    written = json.loads(cli(*args, "--json").out)
    assert planned["dry_run"] is True
    assert written["dry_run"] is False
    for plan, file in zip(planned["files"], written["files"], strict=True):
        assert plan["path"] == file["path"]
        assert plan["bytes"] == file["bytes"] == Path(file["path"]).stat().st_size
        assert plan["metadata"]["dflash.block_size"] == 8
        assert sum(t["bytes"] for t in plan["tensors"]) < plan["bytes"]


def test_verify(draft, target, cli, tmp_path):
    args = (draft.write(), "--target", target, "-t", "f32", "-t", "bf16", "-o", tmp_path / "o")
    result = cli(*args, "--verify", "--json")
    assert result.code == 0, result.err
    for file in json.loads(result.out)["files"]:
        assert file["verified"]["F32"]["worst_relative_error"] == 0.0
    result = cli(*args, "--verify", "--force")
    assert "tiny-dspine-BF16.gguf: BF16 worst relative error 0.00e+00" in result.err


def test_verify_reports_quantisation(wide_draft, wide_target, cli, tmp_path, native_library):
    types = ("-t", "q8_0", "-t", "q4_k_m")
    args = (wide_draft.write(), "--target", wide_target, *types, "-o", tmp_path / "o")
    result = cli(*args, "--verify", "--json")
    assert result.code == 0, result.err
    first, second = (f["verified"] for f in json.loads(result.out)["files"])
    assert 0.002 < first["Q8_0"]["worst_relative_error"] < 0.01
    assert 0.03 < second["Q4_K"]["worst_relative_error"] < 0.12
    assert 0.005 < second["Q6_K"]["worst_relative_error"] < 0.03


@pytest.mark.parametrize("what", ["data", "metadata", "names"])
def test_verify_finds_damage(draft, target, cli, tmp_path, monkeypatch, what):
    """Bytes that differ from the plan or the source fail, and leave nothing."""
    import dspine_convert.convert as convert_module

    real = convert_module.stream

    def damaging(plan, fds, *rest):
        import os

        real(plan, fds, *rest)
        file = plan.files[0]
        place = file.header.index(b"Tiny Target") if what == "metadata" else file.nbytes - 64
        place = file.header.index(b"fc.weight") if what == "names" else place
        os.pwrite(fds[0], b"AAAA", place)

    monkeypatch.setattr(convert_module, "stream", damaging)
    result = cli(draft.write(), "--target", target, "-t", "f32", "-o", tmp_path / "o", "--verify")
    assert result.code == 1
    message = {"data": "differs by", "metadata": "metadata differ", "names": "tensor list differs"}
    assert f"verification failed: {'' if what == 'data' else message[what]}" in result.err
    assert message[what] in result.err
    assert not (tmp_path / "o").exists()


def test_missing_library_names_the_paths(draft, target, cli, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPINE_LIB_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr("dspine_convert.quantize.package_dir", lambda name: tmp_path / "pkg")
    result = cli(draft.write(), "--target", target, "-t", "q8_0", "-o", tmp_path / "o")
    assert result.code == 1
    assert str(tmp_path / "nowhere" / "libggml-base") in result.err
    assert str(tmp_path / "pkg" / "native" / "lib" / "libggml-base") in result.err
    assert not (tmp_path / "o").exists()


def test_a_library_that_is_none(draft, target, cli, tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    for name in ("libggml-base.so", "libggml-base.dylib"):
        (tmp_path / "lib" / name).write_text("not a library")
    monkeypatch.setenv("DSPINE_LIB_DIR", str(tmp_path / "lib"))
    result = cli(draft.write(), "--target", target, "-t", "q8_0", "-o", tmp_path / "o")
    assert result.code == 1
    assert "cannot be used as ggml's library" in result.err


def test_floats_need_no_library(draft, target, cli, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPINE_LIB_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr("dspine_convert.quantize.package_dir", lambda name: None)
    args = ("--target", target, "-t", "f32", "-t", "bf16", "-o", tmp_path / "o")
    assert cli(draft.write(), *args).code == 0


def test_as_a_module(spawn, draft, target, tmp_path):
    process = spawn(draft.write(), "--target", target, "-o", tmp_path / "o", "-q")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert Path(out.strip()).is_file()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("src",), "Missing option '--target'"),
        (("src", "--target", "t", "-t", "q9"), "'--type'"),
        (("src", "--target", "t", "--nonsense"), "--nonsense"),
        (("src", "--target", "t", "--threads", "0"), "'--threads'"),
        (("", "--target", "t"), "'SRC'"),
        (("src", "--target", ""), "'--target'"),
        (("src", "--target", "t", "--name", " "), "'--name'"),
    ],
)
def test_usage_errors_name_the_option(cli, arguments, named):
    result = cli(*arguments, "--debug")
    assert result.code == 2
    assert named in result.err
    assert "Traceback" not in result.err


def test_a_revision_of_a_local_path(draft, target, cli, tmp_path):
    for option in ("--revision", "--target-revision"):
        result = cli(draft.write(), "--target", target, "-o", tmp_path / "o", option, "main")
        assert result.code == 2
        assert f"'{option}'" in result.err
        assert "is a local path" in result.err


def test_type_in_any_case(draft, target, cli, tmp_path):
    args = ("--target", target, "-t", "BF16", "-t", "Q4_K_M", "-t", "bf16", "--dry-run")
    result = cli(draft.write(), *args, "--json")
    assert result.code == 0, result.err
    assert [f["type"] for f in json.loads(result.out)["files"]] == ["bf16", "q4_k_m"]


def test_json_of_a_failure(draft, target, cli, tmp_path):
    draft.config["hidden_act"] = "gelu"
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o", "--json")
    shown = json.loads(result.out)
    assert (shown["schema_version"], shown["exit_code"], result.code) == (1, 1, 1)
    assert "hidden_act is 'gelu'" in shown["error"]
    assert "hidden_act is 'gelu'" in result.err
    assert json.loads(cli("src", "--json").out)["exit_code"] == 2


def test_quiet_verify_reports(draft, target, cli, tmp_path):
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o", "-q", "--verify")
    assert result.code == 0
    lines = result.err.splitlines()
    assert lines
    assert all("worst relative error" in line for line in lines)


def test_quiet_dry_run_has_no_notes(draft, target, cli):
    del draft.tensors["transfer_ready"]
    args = (draft.write(), "--target", target, "--dry-run")
    assert "note: no transfer_ready flag" in cli(*args).err
    assert cli(*args, "-q").err == ""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("can't start new thread"), "can't start new thread; fewer --threads"),
        (MemoryError(), "out of memory"),
    ],
)
def test_the_system_gives_no_more(draft, target, cli, tmp_path, monkeypatch, error, message):
    def start(self):
        raise error

    monkeypatch.setattr("threading.Thread.start", start)
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o", "-q")
    assert result.code == 1
    assert message in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_names_that_the_terminal_cannot_show(spawn, draft, target, tmp_path):
    out = tmp_path / os.fsdecode(b"o\xff")
    args = (draft.write(), "--target", target, "-o", out)
    process = spawn(*args, env={"PYTHONIOENCODING": "utf-8:strict"})
    shown, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert shown.strip().endswith("/o\\udcff/tiny-dspine-BF16.gguf")
    assert (out / "tiny-dspine-BF16.gguf").is_file()


def test_a_library_directory_without_the_library(draft, target, cli, tmp_path, monkeypatch):
    """What was asked for is not replaced by something else in silence."""
    inside = tmp_path / "pkg" / "native" / "lib"
    inside.mkdir(parents=True)
    for name in ("libggml-base.so", "libggml-base.dylib"):
        (inside / name).write_text("another library")
    monkeypatch.setenv("DSPINE_LIB_DIR", str(tmp_path))
    monkeypatch.setattr("dspine_convert.quantize.package_dir", lambda name: tmp_path / "pkg")
    result = cli(draft.write(), "--target", target, "-t", "q8_0", "-o", tmp_path / "o")
    assert result.code == 1
    assert f"DSPINE_LIB_DIR is {tmp_path}, which holds no libggml-base" in result.err
    assert str(inside) in result.err


def test_early_interrupt(tmp_path):
    """A signal during the imports ends the command like any other, without a traceback."""
    script = tmp_path / "early.py"
    script.write_text(
        "import os, signal, sys\n"
        "from dspine_convert.cli import main\n"
        "assert 'typer' not in sys.modules and 'numpy' not in sys.modules\n"
        "class Early:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Early())\n"
        "sys.exit(main(['src', '--target', 't']))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "dspine-convert: interrupted; nothing was left behind\n"


def test_long_names_are_cut(draft, target, cli, tmp_path):
    for name in ("x" * 5000, "\x01" * 5000):
        draft.tensors["norm.weight" + name] = draft.tensors["norm.weight"]
        result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
        assert result.code == 1
        assert len(result.err) < 800
        del draft.tensors["norm.weight" + name]
