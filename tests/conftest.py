"""Settings for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles import load_profile

load_profile()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the modules of this folder first: they run pages and a notebook in long pieces; one that came last would
    leave the other worker idle."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
