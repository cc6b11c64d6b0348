"""Load: what each link carries over a whole schedule, as a fraction of the payload."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshmend.cost.paths import TransferPaths
from meshmend.schedule import Schedule


def link_load(schedule: Schedule, paths: TransferPaths | None = None) -> NDArray[np.float64]:
    """Return the payload fraction that each link carries, indexed by link number.

    A transfer between neighbours loads one link; any other loads every link of its route. Pass `paths`, of the
    schedule's template, where they are known already.
    """
    # Every repeat loads the links as the template does.
    schedule = schedule.template
    found = paths or TransferPaths.of(schedule)
    slots = schedule.mesh.n_link_slots
    near, chunks = found.link, schedule.n_chunks
    if len(found.far):
        is_near = near >= 0
        near, chunks = near[is_near], chunks[is_near]
    load = np.bincount(near, weights=chunks, minlength=slots)
    if len(found.far):
        load = load + np.bincount(found.far_link, weights=schedule.n_chunks[found.far_row], minlength=slots)
    return load / schedule.total_chunks


def link_time(schedule: Schedule) -> NDArray[np.float64]:
    """Return how long each link is busy, in units of M/b: its load over its rate."""
    return link_load(schedule) / schedule.mesh.link_rates


def busiest_link_load(schedule: Schedule) -> float:
    """Return what the busiest link carries, as a fraction of the payload; a slow link's load counts over its rate."""
    return float(link_time(schedule).max(initial=0.0))
