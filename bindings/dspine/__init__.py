"""DSpine block drafters for llama.cpp.

    from dspine import Engine

    with Engine("target.gguf", "drafter.gguf") as engine:
        print(engine.generate("Once upon a time", max_tokens=64).text)

Importing the package loads no native library; the first object that needs it does, and raises
AbiError where library and package come from different builds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dspine._engine import Engine, Piece, Result, Stream
from dspine._errors import AbiError, DecodeError, DspineError, InvalidError, LoadError
from dspine._pair import Generation, Pair, PairInfo, PairOptions, Round, Stats, Step, set_log_level
from dspine._sampling import DraftPolicy, FixedDepth, Settings

if TYPE_CHECKING:
    from dspine._address import ServerError
    from dspine._client import Completion, RequestError
    from dspine._draft_model import DraftModel
    from dspine._process import ServerExitError, ServerTimeoutError
    from dspine._server import Server

__all__ = [
    "AbiError",
    "Completion",
    "DecodeError",
    "DraftModel",
    "DraftPolicy",
    "DspineError",
    "Engine",
    "FixedDepth",
    "Generation",
    "InvalidError",
    "LoadError",
    "Pair",
    "PairInfo",
    "PairOptions",
    "Piece",
    "RequestError",
    "Result",
    "Round",
    "Server",
    "ServerError",
    "ServerExitError",
    "ServerTimeoutError",
    "Settings",
    "Stats",
    "Step",
    "Stream",
    "__version__",
    "set_log_level",
]

__version__ = "0.1.0"


# Loaded when they are asked for: the server needs an HTTP client, and the draft model's base class
# is in llama-cpp-python, which not everyone has.
_LATER = {
    "Completion": "dspine._client",
    "DraftModel": "dspine._draft_model",
    "RequestError": "dspine._client",
    "Server": "dspine._server",
    "ServerError": "dspine._address",
    "ServerExitError": "dspine._process",
    "ServerTimeoutError": "dspine._process",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
