"""These tests start JAX jobs under torchrun, so they need both in one environment."""

from __future__ import annotations

import importlib.util

import pytest

MISSING = [name for name in ("torch", "jax", "orbax", "grain") if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MISSING and "jax_restart" in str(item.path):
            item.add_marker(
                pytest.mark.skip(reason=f"needs torch and meshmend[restart]; missing: {', '.join(MISSING)}")
            )
