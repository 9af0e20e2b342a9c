"""The published servers for those who outgrow one card: SGLang and vLLM.

They take the Hugging Face checkpoints of target and drafter, not GGUF files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dspine._address import Address, ServerError
from dspine._errors import InvalidError


class Engine(str, Enum):
    """What `dspine serve --engine` starts."""

    LLAMA_CPP = "llama.cpp"
    SGLANG = "sglang"
    VLLM = "vllm"


SGLANG_VERSION = "0.5.22"  # the flags below were published for it
BLOCK_SIZE = 16  # of the published drafters

# The published configuration for Qwen3.8-27B and its drafter. Spellings, as documented in
# sgl-project/sglang:
#   docs_new/docs/advanced_features/speculative_decoding.mdx: --speculative-*
#   docs_new/docs/advanced_features/dspark.mdx: --attention-backend and
#     --speculative-draft-attention-backend fa3, --cuda-graph-max-bs-decode (without the suffix
#     until 0.5.19); --speculative-num-draft-tokens counts the anchor
#   docs_new/docs/advanced_features/server_arguments.mdx: --dtype, --mem-fraction-static,
#     --context-length, --max-running-requests, --sampling-backend, --reasoning-parser,
#     --tool-call-parser, --max-mamba-cache-size, --mamba-ssm-dtype, --mamba-scheduler-strategy
#   python/sglang/srt/server_args.py: --linear-attn-backend, --enable-linear-replayssm-spec (replay
#     state), --mamba-radix-cache-strategy (--mamba-scheduler-strategy is its old name)
# The algorithm's name is the one of the published command; SGLang's pages do not list it yet.
_SGLANG_DRAFT = (
    ("--speculative-algorithm", "DSPINE"),
    ("--speculative-num-draft-tokens", str(BLOCK_SIZE)),
    ("--speculative-draft-attention-backend", "fa3"),
    ("--enable-linear-replayssm-spec", None),
)
_SGLANG_TARGET = (
    ("--attention-backend", "fa3"),
    ("--linear-attn-backend", "triton"),
    ("--dtype", "bfloat16"),
    ("--mamba-ssm-dtype", "float32"),
    ("--mamba-radix-cache-strategy", "extra_buffer"),
    ("--max-mamba-cache-size", "64"),
    ("--mem-fraction-static", "0.80"),
    ("--context-length", "131072"),
    ("--max-running-requests", "8"),
    ("--cuda-graph-max-bs-decode", "8"),
    ("--sampling-backend", "flashinfer"),
    ("--reasoning-parser", "qwen3"),
    ("--tool-call-parser", "qwen3_coder"),
)
# Other spellings of flags above, and flags that decide the same; a user's replaces ours.
_SAME = {
    "--model": "--model-path",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--speculative-draft-model": "--speculative-draft-model-path",
}
PORTS = {Engine.SGLANG: 30000, Engine.VLLM: 8000}
HINTS = {
    Engine.SGLANG: f'pip install "sglang=={SGLANG_VERSION}"',
    Engine.VLLM: "pip install vllm",
}

Pair = tuple[str, "str | None"]


@dataclass(frozen=True)
class EngineChoices:
    """What is asked of an engine; None leaves a setting to the published flags.

    Attributes:
        n_ctx: longest context of a request in tokens.
        n_draft: tokens drafted a round.
        n_parallel: requests that run at the same time.
        host, port: where it listens.
        extra: further words of the engine's command line.
    """

    n_ctx: int | None = None
    n_draft: int | None = None
    n_parallel: int | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineLaunch:
    """A command for an engine, where it will listen, and what the user should know."""

    command: tuple[str, ...]
    address: Address
    notes: tuple[str, ...]


def check_checkpoint(what: str, name: str) -> None:
    """Refuse what is no Hugging Face checkpoint; InvalidError says what was expected."""
    from dspine_convert.hub import REPO_ID

    path = Path(name)
    if name.endswith(".gguf") or path.is_file():
        raise InvalidError(
            f"{what} {name}: expected a Hugging Face checkpoint (OWNER/REPO or its directory); "
            "SGLang and vLLM do not run these GGUF files"
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidError(f"{what} {name}: no config.json; not a Hugging Face checkpoint")
    elif not re.fullmatch(REPO_ID, name):
        raise InvalidError(f"{what} {name}: neither a directory nor a hub repository (OWNER/REPO)")


def _merged(
    chosen: Iterable[tuple[str, str | None]], extra: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The chosen flags that `extra` does not set, then `extra`; and the flags left out."""
    given = {word.partition("=")[0] for word in extra if word.startswith("--")}
    given |= {_SAME[word] for word in given if word in _SAME}
    words, dropped = list[str](), list[str]()
    for flag, value in chosen:
        if flag in given:
            dropped.append(flag)
        else:
            words += [flag] if value is None else [flag, value]
    return [*words, *extra], dropped


def _value(words: Sequence[str], flag: str) -> str | None:
    """The last value of a flag, in either of argparse's two forms."""
    found = None
    for at, word in enumerate(words):
        if word == flag and at + 1 < len(words):
            found = words[at + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _address(words: Sequence[str], port: int) -> Address:
    given = _value(words, "--port")
    if given is not None and not given.isdecimal():
        raise InvalidError(f"--port {given}: expected an integer")
    return Address(_value(words, "--host") or "127.0.0.1", int(given or port))


def _launcher(engine: Engine, module: str, *, must_exist: bool) -> list[str]:
    """How the engine is started: its own program, else its module in this Python."""
    if shutil.which(engine.value) is not None:
        return [engine.value, "serve"]
    if importlib.util.find_spec(engine.value) is not None:
        return [sys.executable, "-m", module]
    if must_exist:
        raise ServerError(
            f"--engine {engine.value}: {engine.value} is neither on PATH nor importable; "
            f"install it: {HINTS[engine]}"
        )
    return [engine.value, "serve"]


def _version_note(engine: Engine) -> list[str]:
    try:
        found = importlib.metadata.version(engine.value)
    except importlib.metadata.PackageNotFoundError:
        return []
    if found == SGLANG_VERSION:
        return []
    return [f"the flags are those published for sglang {SGLANG_VERSION}; {found} is installed"]


def _sglang(pair: Pair, choices: EngineChoices, must_exist: bool) -> EngineLaunch:
    target, draft = pair
    port = choices.port or PORTS[Engine.SGLANG]
    asked: dict[str, str | None] = {
        "--context-length": None if choices.n_ctx is None else str(choices.n_ctx),
        "--max-running-requests": None if choices.n_parallel is None else str(choices.n_parallel),
        # The anchor is counted here, as in a block size.
        "--speculative-num-draft-tokens": (
            None if choices.n_draft is None else str(choices.n_draft + 1)
        ),
    }
    flags: list[tuple[str, str | None]] = [("--model-path", target)]
    if draft is not None:
        flags += [("--speculative-draft-model-path", draft), *_SGLANG_DRAFT]
    flags += [*_SGLANG_TARGET, ("--host", choices.host), ("--port", str(port))]
    flags = [(flag, asked.get(flag) or value) for flag, value in flags]
    words, dropped = _merged(flags, choices.extra)
    start = _launcher(Engine.SGLANG, "sglang.launch_server", must_exist=must_exist)
    notes = [*_version_note(Engine.SGLANG), *_dropped_notes(dropped)]
    return EngineLaunch((*start, *words), _address(words, port), tuple(notes))


def _vllm(pair: Pair, choices: EngineChoices, must_exist: bool) -> EngineLaunch:
    """vLLM's flags: docs/features/speculative_decoding/README.md of vllm-project/vllm.

    Its methods (`SpeculativeMethod` in vllm/config/speculative.py) include dflash and dspark, but
    no dspine, and a DSpine drafter under another method's name would draft wrong tokens.
    """
    target, draft = pair
    port = choices.port or PORTS[Engine.VLLM]
    if draft is not None and _value(choices.extra, "--speculative-config") is None:
        raise InvalidError(
            "--engine vllm: vLLM publishes no method for DSpine drafters; use --engine sglang, "
            "leave out -md, or give your own -- --speculative-config '{\"method\": …}'"
        )
    if choices.n_draft is not None:
        raise InvalidError("--n-draft: with --engine vllm the depth is in --speculative-config")
    flags: list[tuple[str, str | None]] = [("--host", choices.host), ("--port", str(port))]
    if choices.n_ctx is not None:
        flags.append(("--max-model-len", str(choices.n_ctx)))
    if choices.n_parallel is not None:
        flags.append(("--max-num-seqs", str(choices.n_parallel)))
    words, dropped = _merged(flags, choices.extra)
    start = _launcher(Engine.VLLM, "vllm.entrypoints.cli.main", must_exist=must_exist)
    if start[0] == sys.executable:
        start.append("serve")
    notes = _dropped_notes(dropped)
    if draft is not None:
        notes.append(f"-md {draft} is not passed on: --speculative-config names the drafter")
    return EngineLaunch((*start, target, *words), _address(words, port), tuple(notes))


def _dropped_notes(dropped: Iterable[str]) -> list[str]:
    return [f"{flag} as given after --" for flag in dropped]


def prepare_engine(
    engine: Engine, pair: Pair, choices: EngineChoices, *, must_exist: bool = True
) -> EngineLaunch:
    """The command that serves target and drafter with an engine.

    Args:
        pair: checkpoints of target and drafter, the latter may be None.
        must_exist: refuse, with the way to install it, where the engine is absent.

    Raises InvalidError for what is no checkpoint, ServerError where the engine is absent.
    """
    check_checkpoint("-m", pair[0])
    if pair[1] is not None:
        check_checkpoint("-md", pair[1])
    make = _sglang if engine is Engine.SGLANG else _vllm
    return make(pair, choices, must_exist)
