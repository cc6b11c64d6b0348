"""Load: what each link carries over a whole schedule, as a fraction of the payload."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshmend import routing
from meshmend.schedule import Schedule


def link_load(schedule: Schedule) -> NDArray[np.float64]:
    """Return the payload fraction that each link carries, indexed by link number.

    A transfer between neighbours loads one link; any other loads every link of its route.
    """
    mesh = schedule.mesh
    pairs = schedule.src.astype(np.int64) * mesh.n_chips + schedule.dst
    ends, pair = np.unique(pairs, return_inverse=True)
    chunks = np.bincount(pair, weights=schedule.n_chunks, minlength=len(ends))
    src, dst = np.divmod(ends, mesh.n_chips)
    link = mesh.link(src, dst)
    near = link >= 0
    load = np.bincount(link[near], weights=chunks[near], minlength=mesh.n_link_slots)
    if not near.all():
        walk = routing.trace(mesh, src[~near], dst[~near])
        load += np.bincount(walk.link, weights=chunks[~near][walk.flow], minlength=mesh.n_link_slots)
    return load / schedule.total_chunks


def busiest_link_load(schedule: Schedule) -> float:
    """Return what the busiest link carries, as a fraction of the payload."""
    return float(link_load(schedule).max(initial=0.0))
