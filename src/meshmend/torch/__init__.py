"""PyTorch: a backend of torch.distributed, the engine behind it, and training that survives a dead board with torchft.

Importing this registers the backend "meshmend". `MeshProcessGroup`, `Manager`, `StepSampler` and
`DistributedDataParallel` need torchft, the rest only torch. The extra `torch` installs both.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshmend.extras import require

require("torch", needed_for="meshmend.torch", extra="torch")

from meshmend.torch.backend import MeshBackend, tile_ranks
from meshmend.torch.collective import all_reduce
from meshmend.torch.engine import Engine
from meshmend.torch.measuring import measure
from meshmend.torch.options import MeshOptions

if TYPE_CHECKING:
    from meshmend.torch.ddp import DistributedDataParallel
    from meshmend.torch.manager import Manager
    from meshmend.torch.process_group import MeshProcessGroup
    from meshmend.torch.sampling import StepSampler

__all__ = [
    "DistributedDataParallel",
    "Engine",
    "Manager",
    "MeshBackend",
    "MeshOptions",
    "MeshProcessGroup",
    "StepSampler",
    "all_reduce",
    "measure",
    "tile_ranks",
]


_WITH_TORCHFT = {
    "DistributedDataParallel": "ddp",
    "Manager": "manager",
    "MeshProcessGroup": "process_group",
    "StepSampler": "sampling",
}


def __getattr__(name: str) -> Any:
    """Import torchft only for those who use it."""
    if name not in _WITH_TORCHFT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("torchft", needed_for=f"meshmend.torch.{name}", extra="torch")
    return getattr(import_module(f"meshmend.torch.{_WITH_TORCHFT[name]}"), name)
