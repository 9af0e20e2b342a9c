"""What ends a benchmark early, in one line."""

from __future__ import annotations

from dspine import DspineError


class BenchError(DspineError):
    """A file, a flag or a server is not what it should be."""
