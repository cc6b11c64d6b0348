"""Votes of all processes: one small collective, beside the steps, finds the largest of what each of them wants."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.state.timetable import Outcome, Wishes
from meshmend.jax.state.waiting import fetch


class Ballot:
    """Lets the processes of a fabric vote. Each makes the same calls; `compiled` is what `compile_vote` has made."""

    def __init__(self, fabric: Fabric, compiled: jax.stages.Compiled | None = None) -> None:
        self.fabric = fabric
        self._count = compiled or compile_vote(fabric)

    def __call__(self, wishes: Wishes) -> Outcome:
        """Give this process's vote; return the outcome, which is there when the devices have come to it."""
        like, mine = like_votes(self.fabric), np.array([wishes], np.int32)
        largest: jax.Array = self._count(jax.make_array_from_callback(like.shape, like.sharding, lambda _: mine))
        return lambda: Wishes(*fetch(largest).tolist())


def compile_vote(fabric: Fabric) -> jax.stages.Compiled:
    """Compile the function from all votes, one row per device, to the largest number of each column."""

    def vote(votes: jax.Array) -> jax.Array:
        found: jax.Array = lax.pmax(votes[0], fabric.axes)
        return found

    split = PartitionSpec(fabric.axes)
    mapped = jax.shard_map(vote, mesh=fabric.jax_mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False)
    return fabric.jit(mapped).lower(like_votes(fabric)).compile()


def like_votes(fabric: Fabric) -> jax.ShapeDtypeStruct:
    """Return the shape of all votes: one row per device, that of its process."""
    shape = (fabric.jax_mesh.devices.size, len(Wishes()))
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=fabric.sharding(fabric.axes))
