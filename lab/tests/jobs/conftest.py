"""These tests start JAX jobs under `meshmend run`."""

from __future__ import annotations

import pytest

from jax_restart.conftest import MISSING


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MISSING and "jobs" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=f"needs meshmend[launch]; missing: {', '.join(MISSING)}"))
