"""Keep a job's state and restore it: in the memory of hosts every few steps, and on disk at intervals.

`Keeper` is what a job uses; it keeps copies in `memory` and checkpoints on `disk`, and `layout` says where each element
lies. Needs the `restart` extra for checkpoints on disk.
"""

from meshmend.jax.state.keeper import Keeper, Resumed
from meshmend.jax.state.layout.state_layout import StateLayout, put
from meshmend.jax.state.waiting import fetch

__all__ = ["Keeper", "Resumed", "StateLayout", "fetch", "put"]
