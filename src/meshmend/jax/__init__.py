"""The JAX engine: runs a schedule on the devices of a holed mesh, inside `jax.shard_map`.

>>> import jax, meshmend as mm, meshmend.jax as mmj
>>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
>>> program = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric)
"""

import importlib
import warnings
from functools import partial

from meshmend.extras import require

require("jax", "optax", needed_for="meshmend.jax", extra="jax")

from meshmend.jax import checks as checks
from meshmend.jax import fsdp as fsdp
from meshmend.jax.batching import KeepGlobal, KeepPerChip, Position
from meshmend.jax.collectives import all_gather, all_reduce, reduce_scatter
from meshmend.jax.differentiate import value_and_grad
from meshmend.jax.fabric import Fabric, discover
from meshmend.jax.feed import Feed
from meshmend.jax.layerwise import add_decayed_weights, clip_by_global_norm, lamb, lars
from meshmend.jax.managed import Checks, Job, JobStep
from meshmend.jax.measuring import measure
from meshmend.jax.program import Program, install
from meshmend.jax.tiles import tile
from meshmend.jax.training import TrainStep as _TrainStep
from meshmend.jax.training import train_step
from meshmend.jax.training_plan import plan

__all__ = [
    "Checks",
    "Fabric",
    "Feed",
    "Job",
    "JobStep",
    "KeepGlobal",
    "KeepPerChip",
    "Position",
    "Program",
    "add_decayed_weights",
    "all_gather",
    "all_reduce",
    "clip_by_global_norm",
    "discover",
    "install",
    "lamb",
    "lars",
    "measure",
    "plan",
    "reduce_scatter",
    "tile",
    "train_step",
    "value_and_grad",
]

_MOVED = {
    "checks": ("Disagreement", "Part", "Recompute", "compare_replicas", "replica_digests"),
    "collectives": ("Shards", "shard_of"),
    "feed": ("Batch",),
    "fsdp": (
        *("ShardedParams", "gather_params", "init_sharded", "reshard_params", "scan_layers"),
        *("shard_params", "sharded_specs", "sharded_train_step", "unshard_params"),
    ),
    "layerwise": ("scale_by_trust_ratio",),
    "program": ("abstract_program",),
    "tiles": ("TiledFabric",),
    "training_plan": ("TrainingPlan",),
    "training": ("TrainStep",),
}

_REPLACED = {
    "ProgramPair": ("Program", Program),
    "ProgramWithTurn": ("Program", Program),
    "ShardedTrainStep": ("training.TrainStep", _TrainStep),
    "install_pair": ("install(…, update='two-phase')", partial(install, update="two-phase")),
    "install_turn": ("install(…, update='fused')", partial(install, update="fused")),
}


def __getattr__(name: str) -> object:
    """Return what was here before it moved or was replaced, with a warning that says what to use now."""
    if name in _REPLACED:
        now, found = _REPLACED[name]
        warnings.warn(f"{__name__}.{name} is {__name__}.{now} now.", DeprecationWarning, stacklevel=2)
        return found
    for module, names in _MOVED.items():
        if name in names:
            home = f"{__name__}.{module}"
            warnings.warn(f"{__name__}.{name} is {home}.{name} now.", DeprecationWarning, stacklevel=2)
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
