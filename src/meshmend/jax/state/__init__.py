"""Keeping a job's state: in another host's memory after every step, on disk at intervals, and restoring it.

`Keeper` is what a job uses. Needs the `restart` extra for checkpoints on disk.
"""

from meshmend.jax.state.keeper import Keeper, Resumed
from meshmend.jax.state.layout.state_layout import StateLayout, put
from meshmend.jax.state.waiting import fetch

__all__ = ["Keeper", "Resumed", "StateLayout", "fetch", "put"]
