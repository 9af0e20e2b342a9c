"""Text of a growing answer: whole characters, cut where a stop text begins."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of tokens into text that can be shown at once and never has to be recalled.

    Held back are the bytes of a character that is not complete, and a tail that may be the
    beginning of a stop text. Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self.stopped: str | None = None  # the stop text that was found

    def feed(self, data: bytes) -> str:
        """Add the bytes of a token; returns text that is final, without a stop text."""
        return self._take(self._decoder.decode(data), final=False)

    def finish(self) -> str:
        """The rest, when no more tokens come; "" after a stop text.

        A character that never became complete is dropped, as llama-server does.
        """
        return self._take("", final=True)

    def _take(self, text: str, *, final: bool) -> str:
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        self._pending += text
        found = [(at, s) for s in self._stops if (at := self._pending.find(s)) >= 0]
        if found:
            end, self.stopped = min(found)
            ready, self._pending = self._pending[:end], ""
            return ready
        end = len(self._pending) - (0 if final else self._tail())
        ready, self._pending = self._pending[:end], self._pending[end:]
        return ready

    def _tail(self) -> int:
        """Length of the longest end of the pending text that begins a stop text."""
        longest = max(map(len, self._stops), default=0)
        for n in range(min(longest - 1, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-n:]) for stop in self._stops):
                return n
        return 0
