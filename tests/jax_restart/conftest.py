"""These tests start JAX jobs under `meshmend run`."""

from __future__ import annotations

import importlib.util

import pytest

MISSING = [name for name in ("jax", "orbax") if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MISSING and "jax_restart" in str(item.path):
            item.add_marker(pytest.mark.skip(reason=f"needs meshmend[launch]; missing: {', '.join(MISSING)}"))
