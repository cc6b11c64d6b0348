"""Parameters, gradients and optimizer state sharded over all chips that are left (ZeRO-3, FSDP).

`params` cuts them by owner and gathers them, `layer_scan` runs a stack of layers that is gathered one layer ahead, and
`step` is the train step.
"""

from meshmend.jax.train.fsdp.layer_scan import scan_layers
from meshmend.jax.train.fsdp.params import (
    ShardedParams,
    gather_params,
    init_sharded,
    shard_params,
    sharded_specs,
    unshard_params,
)
from meshmend.jax.train.fsdp.step import sharded_train_step

__all__ = [
    "ShardedParams",
    "gather_params",
    "init_sharded",
    "scan_layers",
    "shard_params",
    "sharded_specs",
    "sharded_train_step",
    "unshard_params",
]
