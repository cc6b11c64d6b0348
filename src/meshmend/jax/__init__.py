"""The JAX engine: runs a schedule on the devices of a holed mesh, inside `jax.shard_map`.

>>> import jax, meshmend as mm, meshmend.jax as mmj
>>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
>>> program = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric)
"""

from meshmend.extras import require

require("jax", "optax", needed_for="meshmend.jax", extra="jax")

from meshmend.jax.checks import Checks
from meshmend.jax.data.feed import Feed
from meshmend.jax.data.policy import KeepGlobal, KeepPerChip, Position
from meshmend.jax.engine.collectives import all_gather, all_reduce, reduce_scatter
from meshmend.jax.engine.fabric import Fabric, discover
from meshmend.jax.engine.measure import measure
from meshmend.jax.engine.program import Program, install
from meshmend.jax.engine.tiles import tile
from meshmend.jax.job import Job, JobStep
from meshmend.jax.train import fsdp as fsdp
from meshmend.jax.train.optimizers import add_decayed_weights, clip_by_global_norm, lamb, lars
from meshmend.jax.train.plan import plan
from meshmend.jax.train.step import train_step
from meshmend.jax.train.value_and_grad import value_and_grad

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
