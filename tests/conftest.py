"""Settings for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every run, however slow the machine; HYPOTHESIS_PROFILE=explore looks for new ones. A test that
# says how many examples it wants gets that many, so exploring means to run it again and again.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, derandomize=False, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the modules of this folder first: they run pages and a notebook in long pieces; one that came last would
    leave the other worker idle."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
