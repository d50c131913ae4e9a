"""What every test has to leave behind as it found it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread of zbuffer running."""
    before = set(threading.enumerate())

    yield

    left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("zbuffer")]
    assert not left, f"threads left running: {left}"
