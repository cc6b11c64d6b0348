"""The PyTorch engine: run a schedule over point-to-point sends, and survive a dead board in place with torchft.

`Engine`, `all_reduce` and `comm_hook` need torch; the rest needs torchft as well: `pip install 'meshmend[torch]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshmend.torch.collective import all_reduce, comm_hook
from meshmend.torch.engine import Engine

if TYPE_CHECKING:
    from meshmend.torch.ddp import DistributedDataParallel
    from meshmend.torch.process_group import MeshProcessGroup

__all__ = ["DistributedDataParallel", "Engine", "MeshProcessGroup", "all_reduce", "comm_hook"]


def __getattr__(name: str) -> Any:
    """Import torchft only for those who use it."""
    if name == "DistributedDataParallel":
        from meshmend.torch.ddp import DistributedDataParallel

        return DistributedDataParallel
    if name == "MeshProcessGroup":
        from meshmend.torch.process_group import MeshProcessGroup

        return MeshProcessGroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
