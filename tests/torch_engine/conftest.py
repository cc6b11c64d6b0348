"""Torch computes in one thread in these tests: the processes of a mesh are forked from this one.

A fork has none of the threads that torch has started before, and would wait for them for ever.
"""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def compiler() -> None:
    """Import what DDP, FSDP2 and optimizers import, which takes seconds: once, not once in every forked process."""
    importlib.import_module("torch._dynamo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of devices first: where a gradient was computed, forked processes can have no accelerator any more.

    Autograd counts the devices once in a process.
    """
    items.sort(key=lambda item: item.path.name != "test_devices.py")
