"""The links that a set of flows uses under the default routes, on a mesh of any size."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend.errors import RoutingError
from meshmend.routing.deadlock import require_deadlock_free
from meshmend.routing.detour import detour
from meshmend.routing.dimension_order import dimension_order_port, survives
from meshmend.routing.table import Trace, walk
from meshmend.topology import Mesh

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
    traces = [_direct(mesh, src, dst, np.flatnonzero(direct))]
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


def _direct(mesh: Mesh, src: NDArray[np.int64], dst: NDArray[np.int64], flows: NDArray[np.int64]) -> Trace:
    """Follow flows whose dimension-order path is live."""
    ends = dst[flows]
    found = walk(mesh, src[flows], ends, lambda moving, at: dimension_order_port(mesh, at, ends[moving]))
    return Trace(flows[found.flow], found.hop, found.link, found.channel)
