"""All that meshmend uses of torchft beyond its public API: two hooks of its classes, under names of our own.

torchft's classes are made to be subclassed, but the methods to override have private names. Whether they are there is
looked up when this is imported, and `tests/torch_engine/test_private.py` says what breaks when one of them moves.
"""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and wants classes, not strings.

from datetime import timedelta

import torch
import torch.distributed as dist
import torchft
from torchft.process_group import ProcessGroupWrapper

from meshmend.extras import require_names

require_names(
    "torchft",
    ["torchft.process_group:ProcessGroupWrapper._create_pg", "torchft:DistributedDataParallel._comm_hook"],
    needed_for="Training with torchft",
)


class ReconfiguredGroup(ProcessGroupWrapper):
    """A process group that torchft forms again for each quorum: `configure` calls `form`."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._timeout = timeout

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
