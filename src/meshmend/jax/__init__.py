"""The JAX engine: runs a schedule on the devices of a holed mesh, inside `jax.shard_map`.

>>> import jax, meshmend as mm, meshmend.jax as mmj
>>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
>>> program = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric)
"""

from meshmend.jax.collectives import Shards, all_gather, all_reduce, reduce_scatter, shard_of
from meshmend.jax.fabric import Fabric, discover
from meshmend.jax.program import Halves, Program, abstract_program, install, install_halves
from meshmend.jax.training import TrainStep, train_step

__all__ = [
    "Fabric",
    "Halves",
    "Program",
    "Shards",
    "TrainStep",
    "abstract_program",
    "all_gather",
    "all_reduce",
    "discover",
    "install",
    "install_halves",
    "reduce_scatter",
    "shard_of",
    "train_step",
]
