"""All that meshmend uses of torchft beyond its public API: two hooks of its classes, under names of our own.

torchft's classes are made to be subclassed, but the methods to override have private names. Whether they are there is
looked up when this is imported, and `tests/torch_engine/test_private.py` says what breaks when one of them moves.
"""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and wants classes, not strings.

import json
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torchft import process_group
from torchft.process_group import ProcessGroupWrapper

from meshmend.extras import require_names

require_names(
    "torchft",
    ["torchft.process_group:ProcessGroupWrapper._create_pg", "torchft:DistributedDataParallel._comm_hook"],
    needed_for="Training with torchft",
)


HAS_CONFIGURE = hasattr(ProcessGroupWrapper, "configure")
"""torchft 0.2 calls `configure` with a store's address, later ones call `reconfigure` with the members' handles."""


class ReconfiguredGroup(ProcessGroupWrapper):
    """A process group that torchft forms again for each quorum: all ways lead to `form`, inside of `forming`."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._timeout = timeout

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *more: Any, **named: Any) -> None:
        """Form the group over the members who come to a store, at an address that no group had before."""
        if HAS_CONFIGURE:
            with self.forming(store_addr):
                super().configure(store_addr, replica_id, rank, world_size, *more, **named)
        else:
            process_group.reconfigure_with_store(self, store_addr, rank, world_size, self._timeout)

    def reconfigure(self, opts: Any) -> dist.Work:
        """Form the group over the members whose handles these are, in the order of their ranks."""
        # All meet at the store of the first; what else a handle says is torchft's own affair.
        with self.forming(json.loads(opts.handles[0])["store"]):
            done: dist.Work = super().reconfigure(opts)
        return done

    def forming(self, store_addr: str) -> AbstractContextManager[None]:
        """Return what is to be done before the group is formed over those who come to a store, and after it."""
        raise NotImplementedError

    def form(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        """Return a new group over the members of a quorum, who all see the store."""
        raise NotImplementedError

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return self.form(store, rank, world_size)


class HookedDataParallel(torchft.DistributedDataParallel):
    """torchft's DistributedDataParallel with a hook of one's own: `reduce_bucket`."""

    @staticmethod
    def reduce_bucket(manager: torchft.Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the future of a bucket's mean over the members."""
        raise NotImplementedError

    @classmethod
    def _comm_hook(cls, state: torchft.Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return cls.reduce_bucket(state, bucket)
