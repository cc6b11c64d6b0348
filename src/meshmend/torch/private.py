"""All that meshmend uses of torch beyond its public API. No other module does (`tests/test_architecture.py`).

torch may move any of this in a minor release, so the `torch` extra has an upper bound, and
`tests/torch_engine/test_private.py` has a test for each that says what breaks. Before the bound is raised, run those
against the new version. What is used of torchft is in `private_torchft`, which needs torchft.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree

Work = dist._Work
"""What torch expects a started collective to be."""

CPU = torch.device("cpu")


def gloo_backend(
    store: Any, rank: int, world_size: int, *, timeout: timedelta, interface: str | None = None
) -> dist.ProcessGroupGloo:
    """Return Gloo over one network interface (by default the host's own), with all connections made.

    `torch.distributed.new_group` needs a default process group, of which a process has only one.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    if interface:
        device = dist.ProcessGroupGloo.create_device(interface=interface)
    else:
        device = dist.ProcessGroupGloo.create_default_device()
    options._devices = [device]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def gloo_group(
    store: Any, rank: int, world_size: int, *, connect_timeout: timedelta, timeout: timedelta, interface: str | None
) -> dist.ProcessGroup:
    """Return a process group whose CPU backend is a Gloo of its own; it connects within one timeout, then has another.

    Gloo could also connect when a pair is first used, but it ends the process if such a connection fails while the
    group is being closed.
    """
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = gloo_backend(store, rank, world_size, timeout=connect_timeout, interface=interface)
    backend._set_default_timeout(timeout)
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def cpu_backend(group: dist.ProcessGroup) -> Any:
    """Return what moves messages between CPUs for a group; `RuntimeError` if it has no such backend."""
    return group._get_backend(CPU)


def leaves_with_paths(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the leaves of a tree of lists, tuples and dictionaries, each with the keys that lead to it."""
    found: list[tuple[tuple[Any, ...], Any]] = _pytree.tree_flatten_with_path(tree)[0]
    return found
