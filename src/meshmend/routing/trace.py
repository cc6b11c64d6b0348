"""The links that a set of flows crosses: dimension order where that way is live, a shortest live way elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend.topology import Mesh


@dataclass(frozen=True)
class Trace:
    """One row a hop: flow number, how many hops came before, and the link crossed."""

    flow: NDArray[np.int64]
    hop: NDArray[np.int64]
    link: NDArray[np.int64]


def trace(mesh: Mesh, src: ArrayLike, dst: ArrayLike) -> Trace:
    """Follow each flow src[i] → dst[i] (ranks). A flow whose ends are cut apart has no complete path.

    Dimension order corrects the last axis first (in 2-D: along the row, then along the column; figure 1 of the
    paper). A flow that would meet a failed chip or cable that way takes a shortest live path (figure 2).
    """
    src = np.atleast_1d(np.asarray(src, dtype=np.int64))
    dst = np.atleast_1d(np.asarray(dst, dtype=np.int64))
    at = src.copy()
    flows, hops, links = [], [], []
    blocked = np.zeros(len(src), dtype=np.bool_)
    hop = 0
    while len(moving := np.flatnonzero((at != dst) & ~blocked)):
        direction = _dimension_order(mesh, at[moving], dst[moving])
        beyond = mesh.neighbours[at[moving], direction]
        blocked[moving[beyond < 0]] = True
        going = beyond >= 0
        flows.append(moving[going])
        hops.append(np.full(int(going.sum()), hop))
        links.append(at[moving[going]] * mesh.n_directions + direction[going])
        at[moving[going]] = beyond[going]
        hop += 1
    empty = np.empty(0, dtype=np.int64)
    flow, number, link = (np.concatenate([empty, *parts]) for parts in (flows, hops, links))
    if blocked.any():
        keep = ~blocked[flow]
        detour = _shortest(mesh, np.flatnonzero(blocked), src, dst)
        flow = np.concatenate([flow[keep], detour.flow])
        number = np.concatenate([number[keep], detour.hop])
        link = np.concatenate([link[keep], detour.link])
    return Trace(flow, number, link)


def _dimension_order(mesh: Mesh, at: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the direction that corrects the last axis on which `at` and `dst` differ."""
    offset = mesh.coords[dst].astype(np.int64) - mesh.coords[at]
    direction = np.zeros(len(at), dtype=np.int64)
    for axis, (length, wrap) in enumerate(zip(mesh.shape, mesh.wrap, strict=True)):
        along = offset[:, axis]
        forward = along % length <= length // 2 if wrap else along > 0
        direction = np.where(along != 0, np.where(forward, 2 * axis, 2 * axis + 1), direction)
    return direction


def _shortest(mesh: Mesh, blocked: NDArray[np.int64], src: NDArray[np.int64], dst: NDArray[np.int64]) -> Trace:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order

    a, b = mesh.cables.T
    graph = coo_array((np.ones(len(a), np.int8), (a, b)), shape=(mesh.n_chips, mesh.n_chips)).tocsr()
    rows: list[tuple[int, int, int]] = []
    for target in np.unique(dst[blocked]):
        _, towards = breadth_first_order(graph, int(target), directed=False)
        for flow in blocked[dst[blocked] == target]:
            at, hop = int(src[flow]), 0
            while at != target and towards[at] >= 0:
                link = int(mesh.link(at, int(towards[at])))
                rows.append((int(flow), hop, link))
                at, hop = int(towards[at]), hop + 1
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Trace(table[:, 0], table[:, 1], table[:, 2])
