"""Paths: which links each transfer of a schedule uses, and what each link carries over the whole of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend import routing
from meshmend.schedule import Schedule
from meshmend.topology import Mesh

MAX_TABLE_CHIPS = 4096
"""Up to here a table of all pairs of ranks fits in 64 MB, and looking a link up is one read."""

AT_ONCE = 2**20
"""Transfers looked up at a time on larger meshes: `Mesh.link` works in 64 bits."""


@dataclass(frozen=True)
class TransferPaths:
    """The links of a schedule's transfers.

    `link[i]` is the link of transfer i between neighbours, −1 where its ends are further apart. For those, one row
    per hop in order of step: `far_row` (the transfer), `far_hop` (hops before this one), `far_link`. `far_hops[i]`
    counts the hops of transfer `far[i]`. Links are numbered from 0 to `n_links` − 1.
    """

    link: NDArray[np.int32]
    far: NDArray[np.int64]
    far_hops: NDArray[np.int64]
    far_row: NDArray[np.int64]
    far_hop: NDArray[np.int64]
    far_link: NDArray[np.int64]
    n_links: int

    @classmethod
    def switched(cls, schedule: Schedule) -> TransferPaths:
        """Return the paths where every pair of chips has a link of its own."""
        codes = schedule.src.astype(np.int64) * schedule.mesh.n_chips + schedule.dst
        pairs, link = np.unique(codes, return_inverse=True)
        empty = np.empty(0, dtype=np.int64)
        return cls(link.astype(np.int32), empty, empty, empty, empty, empty, len(pairs))

    @classmethod
    def of(cls, schedule: Schedule) -> TransferPaths:
        """Look up the links between neighbours; trace the others' routes, once per pair of chips."""
        link = _links(schedule.mesh, schedule.src, schedule.dst)
        far = np.flatnonzero(link < 0)
        if not len(far):
            empty = np.empty(0, dtype=np.int64)
            return cls(link, far, empty, empty, empty, empty, schedule.mesh.n_link_slots)
        n = schedule.mesh.n_chips
        pairs, which = np.unique(schedule.src[far].astype(np.int64) * n + schedule.dst[far], return_inverse=True)
        walk = routing.trace(schedule.mesh, *np.divmod(pairs, n))
        hops = np.bincount(walk.flow, minlength=len(pairs))
        starts = np.cumsum(hops) - hops
        # Every transfer gets a copy of its pair's path.
        far_hops = hops[which]
        far_hop = np.arange(far_hops.sum()) - np.repeat(np.cumsum(far_hops) - far_hops, far_hops)
        far_link = walk.in_order.link[np.repeat(starts[which], far_hops) + far_hop].astype(np.int64)
        return cls(link, far, far_hops, np.repeat(far, far_hops), far_hop, far_link, schedule.mesh.n_link_slots)


def _links(mesh: Mesh, src: NDArray[np.int32], dst: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return what `mesh.link` does, fast enough for tens of millions of transfers."""
    n = mesh.n_chips
    if n > MAX_TABLE_CHIPS:
        links = np.empty(len(src), dtype=np.int32)
        for first in range(0, len(src), AT_ONCE):
            rows = slice(first, first + AT_ONCE)
            links[rows] = mesh.link(src[rows], dst[rows])
        return links
    table = np.full(n * n, -1, dtype=np.int32)
    rank, direction = np.nonzero(mesh.neighbours >= 0)
    table[rank * n + mesh.neighbours[rank, direction]] = rank * mesh.n_directions + direction
    return np.asarray(table[src * np.int32(n) + dst])


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
