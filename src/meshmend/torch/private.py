"""All that meshmend uses of torch beyond its public API. No other module does (`tests/test_architecture.py`).

torch may move any of this in a minor release: whether it is all there is looked up when this is imported, and
`tests/torch_engine/test_private.py` has a test for each that says what breaks. What is used of torchft is in
`private_torchft`, which needs torchft.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist

from meshmend.extras import require_names

require_names(
    "torch",
    [
        "torch.distributed:ProcessGroupGloo._Options",
        "torch.distributed:ProcessGroup._set_default_backend",
        "torch.distributed:ProcessGroup._register_backend",
        "torch.distributed:ProcessGroup._get_backend",
        "torch.distributed:ProcessGroup._set_group_name",
    ],
    needed_for="meshmend.torch",
)

Work: TypeAlias = dist.Work
"""What torch expects a started collective to be."""

CPU = torch.device("cpu")


class Transport(Protocol):
    """What the engine needs of a group: messages that are matched by member and tag, and works whose `wait` blocks."""

    def rank(self) -> int:
        """Return this process's number in the group."""

    def size(self) -> int:
        """Return the number of members."""

    def send(self, tensors: list[torch.Tensor], member: int, tag: int, /) -> Work:
        """Start to send."""

    def recv(self, tensors: list[torch.Tensor], member: int, tag: int, /) -> Work:
        """Start to receive."""


def gloo_backend(
    store: dist.Store, rank: int, world_size: int, *, timeout: timedelta, interface: str | None = None
) -> Any:
    """Return Gloo over one network interface (by default the host's own), with all connections made.

    `torch.distributed.new_group` needs a default process group, of which a process has only one. torch's annotations
    leave out all of Gloo's collectives.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's annotations
    options._timeout = timeout
    if interface:
        device = dist.ProcessGroupGloo.create_device(interface=interface)
    else:
        device = dist.ProcessGroupGloo.create_default_device()
    options._devices = [device]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def gloo_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    *,
    connect_timeout: timedelta,
    timeout: timedelta,
    interface: str | None,
) -> dist.ProcessGroup:
    """Return a process group whose CPU backend is a Gloo of its own; it connects within one timeout, then has another.

    (Where torch cannot change a timeout, as 2.7 cannot, it has the second one from the start.) Gloo could also connect
    when a pair is first used, but it ends the process if such a connection fails while the group is being closed.
    """
    changes = hasattr(dist.ProcessGroupGloo, "set_timeout")
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    first = connect_timeout if changes else timeout
    backend = gloo_backend(store, rank, world_size, timeout=first, interface=interface)
    if changes:
        backend.set_timeout(timeout)
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def cpu_backend(group: dist.ProcessGroup) -> Transport:
    """Return what moves messages between CPUs for a group; `RuntimeError` if it has no such backend."""
    return cast(Transport, group._get_backend(CPU))


def name_group(group: dist.ProcessGroup, name: str) -> None:
    """Name a group that torch has not made itself."""
    named: Any = dist.GroupName(name) if hasattr(dist, "GroupName") else name
    group._set_group_name(named)


class GlooBased(dist.ProcessGroup):
    """A process group with collectives of its own, and Gloo's for all that it does not define.

    torch's C++ code (DDP's reducer, functional collectives) finds the methods of a Python group by these names:
    `allreduce`, `allreduce_coalesced`, `allgather`, `all_gather_single_coalesced`, `reduce_scatter`,
    `reduce_scatter_single_coalesced`, `all_to_all_single`, `broadcast`, `barrier`, `send` and `recv`. Everything else
    that it calls goes to the backend that is registered here, which is Gloo. Python code finds every method.
    """

    def __init__(self, gloo: dist.ProcessGroup, store: dist.Store) -> None:
        # The constructor that takes a store makes groups whose methods C++ does not find.
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]  # torch annotates only the other one
        self.gloo = gloo
        self._store = store
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend: Any = cpu_backend(gloo)
        self._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)

    def get_group_store(self) -> dist.Store:
        """Return where this group's members write to each other."""
        return self._store

    def _allgather_base(self, output: torch.Tensor, shard: torch.Tensor, opts: Any = None) -> dist.Work:
        """Call `all_gather_single` under the name that it has before torch 2.13."""
        return self.all_gather_single(output, shard, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, shards: torch.Tensor, opts: Any = None) -> dist.Work:
        """Call `reduce_scatter_single` under the name that it has before torch 2.13."""
        return self.reduce_scatter_single(output, shards, opts)


def future_for_cpp(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """Return a future that ends with an error for torch's C++ code, too, where this one has an exception.

    `set_exception` sets the exception as the result, and only Python's `wait` and `value` raise it. C++ takes it for
    tensors: DDP's reducer reads memory that is none of theirs, and the process ends with SIGSEGV. What a callback
    raises, however, is an error for both; torch makes it a `RuntimeError` with the text of the exception.
    """
    return future.then(lambda done: done.wait())


def fail_future(future: torch.futures.Future[Any], error: Exception) -> None:
    """End a future with an error, which torch annotates as a result."""
    future.set_exception(error)
