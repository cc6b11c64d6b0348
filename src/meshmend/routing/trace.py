"""The default routes: the links that a set of flows uses on a mesh of any size, and a table for every two chips."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend.errors import RoutingError, name_chip
from meshmend.routing.deadlock import DeadlockProof, require_deadlock_free
from meshmend.routing.detour import detour
from meshmend.routing.dimension_order import dimension_order_port, survives
from meshmend.routing.table import Routes, Trace, walk
from meshmend.topology import Mesh

MAX_TABLE_CHIPS = 2**13
"""An all-pairs table has one byte per pair and class; beyond this, trace only the flows that are needed (`trace`)."""
MAX_TABLE_CELLS = 2**22
"""Cells of the tables that are built at a time for flows whose path is blocked."""
MAX_HOPS = 2**22
"""Hops of all flows together: with the deadlock proof they take half a gigabyte."""
MAX_DETOUR_WORK = 2**30
"""Cells of all such tables together, and 64 for each chip of each table: some ten minutes."""


def trace(mesh: Mesh, src: ArrayLike, dst: ArrayLike) -> Trace:
    """Follow each flow src[i] → dst[i] (ranks). A flow whose ends are not connected has no hops.

    Flows take dimension order where it is live (figure 1 of the paper) and the routes of `detour` elsewhere
    (figure 2): hop for hop and channel for channel what the all-pairs table of `detour` says. That table is never
    built: dimension order is arithmetic, and only the destinations of blocked flows get tables, so
    256×256 is no problem.

    Each call proves that its flows, all in flight at once, cannot deadlock, and otherwise raises a `DeadlockError`.
    (For all pairs at once there is `meshmend.routing.all_pairs`.) Flows that together have more than
    `MAX_HOPS` hops, or need larger tables than `MAX_DETOUR_WORK` allows, are refused with a `RoutingError`.
    """
    src, dst = (np.atleast_1d(np.asarray(ranks, dtype=np.int64)) for ranks in (src, dst))
    direct = survives(mesh, src, dst)
    n_hops = _n_direct_hops(mesh, src[direct], dst[direct])
    _check("hops", n_hops, MAX_HOPS)
    straight, ends = np.flatnonzero(direct), dst[direct]
    walked = walk(mesh, src[direct], ends, lambda moving, at: dimension_order_port(mesh, at, ends[moving]))
    traces = [Trace(straight[walked.flow], walked.hop, walked.link, walked.channel)]
    blocked = np.flatnonzero(~direct)
    if len(blocked):
        blocked = blocked[mesh.component_of[src[blocked]] == mesh.component_of[dst[blocked]]]
    targets = np.unique(dst[blocked])
    batch = max(1, MAX_TABLE_CELLS // mesh.n_chips)
    n_batches = -(-len(targets) // batch)
    _check("cells of route tables", (len(targets) + 64 * n_batches) * mesh.n_chips, MAX_DETOUR_WORK)
    for first in range(0, len(targets), batch):
        routes = detour(mesh, targets[first : first + batch])
        flows = blocked[routes.column_of[dst[blocked]] >= 0]
        found = routes.follow(src[flows], dst[flows], max_hops=MAX_HOPS - n_hops)
        n_hops += len(found.hop)
        traces.append(Trace(flows[found.flow], found.hop, found.link, found.channel))
    columns = zip(*((t.flow, t.hop, t.link, t.channel) for t in traces), strict=True)
    joined = Trace(*(np.concatenate(parts) for parts in columns))
    require_deadlock_free(joined, mesh)
    return joined


def _n_direct_hops(mesh: Mesh, src: NDArray[np.int64], dst: NDArray[np.int64]) -> int:
    """Count the hops of dimension order without following it: the distances along the axes."""
    hops = 0
    for axis, (length, wrap) in enumerate(zip(mesh.shape, mesh.wrap, strict=True)):
        apart = np.abs(mesh.coords[src, axis].astype(np.int64) - mesh.coords[dst, axis])
        hops += int((np.minimum(apart, length - apart) if wrap else apart).sum())
    return hops


def _check(what: str, needed: int, limit: int) -> None:
    if needed > limit:
        raise RoutingError(f"Routing these flows takes {needed:,} {what}; the limit is {limit:,}.")


@lru_cache(maxsize=4)
def all_pairs(mesh: Mesh) -> tuple[Routes, DeadlockProof]:
    """Return the routes between all pairs of chips, and the proof that packets on them cannot deadlock.

    >>> routes, proof = all_pairs(Mesh("8x8", failed=["2x2@2,2"]))
    >>> routes.path((2, 1), (2, 4))
    [(2, 1), (1, 1), (1, 2), (1, 3), (1, 4), (2, 4)]
    >>> proof.deadlock_free, proof.n_channels
    (True, 2)
    """
    if mesh.n_chips > MAX_TABLE_CHIPS:
        raise RoutingError(
            f"{mesh} has {mesh.n_chips:,} live chips; a table of all pairs is limited to {MAX_TABLE_CHIPS:,}. "
            f"Use meshmend.routing.trace for the flows that you need."
        )
    if not mesh.is_connected:
        ends = [mesh.chip(int((mesh.component_of == part).argmax())) for part in (0, 1)]
        raise RoutingError(
            f"The survivors of {mesh} are not connected: "
            f"no live path joins {name_chip(ends[0])} and {name_chip(ends[1])}.",
            src=ends[0],
            dst=ends[1],
        )
    routes = detour(mesh)
    return routes, require_deadlock_free(routes)
