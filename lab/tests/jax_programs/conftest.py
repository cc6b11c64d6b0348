"""64 virtual CPU devices, as in the tests of the engine: JAX reads its device count once, when it is imported."""

from __future__ import annotations

import os

import pytest

from jax_engine.conftest import CHIPS, flags


def pytest_configure() -> None:
    """Set the flags before a module of tests is imported."""
    os.environ["XLA_FLAGS"] = flags()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let JAX read its flags now: libtpu refuses those that are for CPUs, and processes that tests start have none."""
    if any("jax_programs" in item.path.parts for item in items):
        import jax

        os.environ["XLA_FLAGS"] = flags()
        jax.devices()
    os.environ["XLA_FLAGS"] = CHIPS
