"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from dspine_bench.schema import ServerReport
from support.bench import FakeServer, report_of, sample


@pytest.fixture
def report() -> ServerReport:
    """Two categories, five repeats; drafting takes half the time."""
    samples = [
        sample(mode, prompt, repeat, ms + repeat)
        for repeat in range(5)
        for mode, ms in (("plain", 1000.0), ("draft", 500.0))
        for prompt in ("chat-1", "code-1", "code-2")
    ]
    return report_of(samples)


@pytest.fixture
def fakes() -> Iterator[Callable[[], FakeServer]]:
    """Makes servers that are closed at the end."""
    made: list[FakeServer] = []

    def make() -> FakeServer:
        made.append(FakeServer())
        return made[-1]

    yield make
    for server in made:
        server.close()
