"""Exceptions of the package, and the one place where a native status becomes one."""

from __future__ import annotations

__all__ = ["AbiError", "DecodeError", "DspineError", "InvalidError", "LoadError", "error_of"]


class DspineError(Exception):
    """Base of all errors of this package; on its own, an unexpected native failure."""


class LoadError(DspineError):
    """The library or a model file cannot be loaded, or a drafter does not fit its target."""


class DecodeError(DspineError):
    """llama.cpp could not evaluate a batch, for instance because the context is full."""


class InvalidError(DspineError, ValueError):
    """An argument is out of range, or the call does not fit the state."""


class AbiError(DspineError):
    """The library and this package were built from different versions of the interface."""


# Values of the status codes in dspine.h.
OK = 0
_ERRORS: dict[int, type[DspineError]] = {
    1: InvalidError,
    2: LoadError,
    3: DecodeError,
    4: DspineError,
}


def error_of(status: int, reason: str, call: str) -> DspineError:
    """The exception for a failed native call.

    Args:
        status: what the function returned, not 0.
        reason: the text of dspine_last_error().
        call: the function with its arguments, as the user should see it.
    """
    kind = _ERRORS.get(status)
    if kind is None:
        return DspineError(f"{call}: unknown status {status}: {reason}")
    return kind(f"{call}: {reason or f'failed with status {status}'}")
