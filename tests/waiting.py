"""Wait until something is so, for tests that watch threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], what: str = "the condition", timeout_s: float = 120.0) -> Any:
    """Wait until a condition holds, and return what it returned; fail after the timeout."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.02)
    return found
