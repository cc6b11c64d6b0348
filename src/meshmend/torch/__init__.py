"""The PyTorch engine: run a schedule over point-to-point sends, and survive a dead board in place with torchft.

`Engine`, `all_reduce` and `comm_hook` need torch; the rest needs torchft as well. The extra `torch` installs both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshmend.errors import require

require("torch", needed_for="meshmend.torch", extra="torch")

from meshmend.torch.collective import all_reduce, comm_hook
from meshmend.torch.engine import Engine

if TYPE_CHECKING:
    from meshmend.torch.ddp import DistributedDataParallel
    from meshmend.torch.manager import Manager
    from meshmend.torch.process_group import MeshProcessGroup
    from meshmend.torch.sampling import StepSampler

__all__ = [
    "DistributedDataParallel",
    "Engine",
    "Manager",
    "MeshProcessGroup",
    "StepSampler",
    "all_reduce",
    "comm_hook",
]


def __getattr__(name: str) -> Any:
    """Import torchft only for those who use it."""
    if name in ("DistributedDataParallel", "Manager", "MeshProcessGroup", "StepSampler"):
        require("torchft", needed_for=f"meshmend.torch.{name}", extra="torch")
    if name == "DistributedDataParallel":
        from meshmend.torch.ddp import DistributedDataParallel

        return DistributedDataParallel
    if name == "Manager":
        from meshmend.torch.manager import Manager

        return Manager
    if name == "MeshProcessGroup":
        from meshmend.torch.process_group import MeshProcessGroup

        return MeshProcessGroup
    if name == "StepSampler":
        from meshmend.torch.sampling import StepSampler

        return StepSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
