"""Text that grows token by token: whole characters, and no part of a stop text."""

from __future__ import annotations

import codecs
import itertools

from dspine._text import TextStream
from hypothesis import assume, given
from hypothesis import strategies as st

# Few letters, so that stop texts are found and half found; two of them have several bytes.
LETTERS = "ab€😀"
TEXTS = st.text(alphabet=LETTERS, max_size=30)
STOPS = st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=4), max_size=3)


def _cut(text: str, stops: list[str]) -> str:
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


def _chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(TEXTS, STOPS, st.lists(st.integers(0, 200), max_size=20))
def test_any_cutting_gives_the_same_text(text: str, stops: list[str], cuts: list[int]) -> None:
    # Of two that contain each other, as in llama-server, the one that a token completes first.
    assume(not any(a != b and a in b for a in stops for b in stops))
    stream = TextStream(stops)
    pieces = [stream.feed(chunk) for chunk in _chunks(text.encode(), cuts)]
    pieces.append(stream.finish())
    assert "".join(pieces) == _cut(text, stops)
    assert (stream.stopped is not None) == any(s in text for s in stops)


@given(st.binary(max_size=30), st.lists(st.integers(0, 200), max_size=20))
def test_any_bytes_become_text(data: bytes, cuts: list[int]) -> None:
    stream = TextStream()
    pieces = [stream.feed(chunk) for chunk in _chunks(data, cuts)]
    complete = codecs.utf_8_decode(data, "replace", False)[0]  # all but an incomplete end
    assert "".join([*pieces, stream.finish()]) == complete


def test_what_is_held_back() -> None:
    stream = TextStream(["STOP", "]]"])
    assert stream.feed(b"abc S") == "abc "
    assert stream.feed(b"T") == ""
    assert stream.feed(b"ART \xe2\x82") == "START "
    assert stream.feed(b"\xac]") == "€"
    assert stream.feed(b"]x") == "" and stream.stopped == "]]"
    assert stream.feed(b"more") == stream.finish() == ""


def test_a_half_found_stop_text_is_part_of_the_answer() -> None:
    stream = TextStream(["STOP"])
    assert stream.feed(b"STO") == ""
    assert stream.finish() == "STO" and stream.stopped is None
