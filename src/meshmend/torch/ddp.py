"""torchft's DistributedDataParallel, made to survive an all-reduce that fails."""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and wants classes, not strings.

import torch
import torch.distributed as dist
import torchft

from meshmend.torch.payload import device_of
from meshmend.torch.private_torchft import HookedDataParallel


class DistributedDataParallel(HookedDataParallel):
    """Use as torchft's own: `DistributedDataParallel(manager, module)`.

    After an error torchft 0.2's own hook raises from inside the backward pass: it looks for a field that a failed
    all-reduce does not have. DDP then cannot run another. Here the backward pass ends; the manager has the error, so
    the step is not committed and the invalid gradients are not applied.
    """

    @staticmethod
    def reduce_bucket(manager: torchft.Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the members; after an error, end with what is there."""
        manager.allreduce(bucket.buffer()).wait()
        device = device_of([bucket.buffer()])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=None if device is None else [device])
        future.set_result(bucket.buffer())
        return future
