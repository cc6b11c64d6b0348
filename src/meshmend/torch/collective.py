"""What people call: all-reduce a tensor or a tree of tensors, or let DDP do so for its buckets."""

# No `from __future__ import annotations` here: DDP looks at the hook's annotations and wants classes, not strings.

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from meshmend.torch.engine import Engine


def all_reduce(tree: Any, engine: Engine, *, mean: bool = False) -> None:
    """Sum (or average) the tensors of a tree over all chips, in place.

    A single contiguous tensor is reduced where it is. Other tensors are packed, by dtype, into one payload each:
    one long message is faster than many short ones.
    """
    op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for tensor in pytree.tree_leaves(tree):
        if isinstance(tensor, torch.Tensor):
            by_dtype[tensor.dtype].append(tensor.detach())
    for tensors in by_dtype.values():
        reduce_tensors(tensors, engine, op)


def reduce_tensors(tensors: list[torch.Tensor], engine: Engine, op: Any) -> None:
    """Reduce tensors of one dtype in place, as one payload."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        engine.all_reduce(tensors[0], op)
        return
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    engine.all_reduce(packed, op)
    for tensor, part in zip(tensors, packed.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def comm_hook(engine: Engine, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a DDP bucket over the mesh: `ddp_model.register_comm_hook(engine, comm_hook)`.

    Buckets are reduced one after the other, in the background, while DDP goes on with the backward pass.
    """
    return engine.start(bucket.buffer(), dist.ReduceOp.AVG)
