"""DSpine block drafters for llama.cpp."""

from __future__ import annotations

from dspine._errors import AbiError, DecodeError, DspineError, InvalidError, LoadError
from dspine._pair import Generation, Pair, PairInfo, PairOptions, Round, Stats, set_log_level

__all__ = [
    "AbiError",
    "DecodeError",
    "DspineError",
    "Generation",
    "InvalidError",
    "LoadError",
    "Pair",
    "PairInfo",
    "PairOptions",
    "Round",
    "Stats",
    "__version__",
    "set_log_level",
]

__version__ = "0.1.0"
