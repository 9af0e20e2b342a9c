"""Shared by all tests: the path of tests/support, and what a missing native build means."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support.native_build import why_missing
from support.workshop import Workshop

NATIVE_TIERS = ("native", "e2e")


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
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Model files of this session."""
    return Workshop(tmp_path_factory.mktemp("models"))
