"""Shared by all tests: the path of tests/support, and what a missing native build means."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support.golden import GOLDEN, Recorded, load_rounds
from support.native_build import why_missing
from support.workshop import Workshop

NATIVE_TIERS = ("native", "e2e")

# A shell starts its background jobs with the interrupt ignored, and nohup its command with the
# hang-up ignored; programs that these start inherit that, and tests that send them would wait.
for name, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(name) == signal.SIG_IGN:
        signal.signal(name, default)

# The same examples everywhere, and no clock in the verdict: machines may be busy.
settings.register_profile(
    "bounded",
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("bounded")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a native build, skip what needs one with the reason; in CI let it fail."""
    needing = [i for i in items if any(i.get_closest_marker(m) for m in NATIVE_TIERS)]
    if not needing or os.environ.get("CI") == "true":
        return
    reason = why_missing()
    if reason:
        for item in needing:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def recorded() -> Recorded:
    """What the reference did with the trained Qwen3 pair."""
    return load_rounds(GOLDEN / "e2e_qwen3" / "rounds.json")


@pytest.fixture(scope="session")
def files(workshop: Workshop) -> tuple[Path, Path]:
    """The trained Qwen3 pair in F32: target, drafter."""
    return workshop.e2e("e2e_qwen3", "f32")


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Model files of this session."""
    return Workshop(tmp_path_factory.mktemp("models"))
