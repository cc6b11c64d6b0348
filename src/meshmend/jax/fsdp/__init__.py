"""Parameters, gradients and optimizer state sharded over all chips that are left (ZeRO-3, FSDP).

`params` cuts them by owner and gathers them, `layer_scan` runs a stack of layers that is gathered one layer ahead, and
`training` is the train step.
"""

import warnings

from meshmend.jax.fsdp.layer_scan import scan_layers
from meshmend.jax.fsdp.params import (
    ShardedParams,
    gather_params,
    init_sharded,
    reshard_params,
    shard_params,
    sharded_specs,
    unshard_params,
)
from meshmend.jax.fsdp.training import sharded_train_step
from meshmend.jax.training import TrainStep

__all__ = [
    "ShardedParams",
    "gather_params",
    "init_sharded",
    "reshard_params",
    "scan_layers",
    "shard_params",
    "sharded_specs",
    "sharded_train_step",
    "unshard_params",
]


def __getattr__(name: str) -> object:
    """Return what was replaced, with a warning that says what to use now."""
    if name == "ShardedTrainStep":
        now = "meshmend.jax.training.TrainStep"
        warnings.warn(f"{__name__}.{name} is {now} now.", DeprecationWarning, stacklevel=2)
        return TrainStep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
