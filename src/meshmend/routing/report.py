"""Report: statistics of a route table over all pairs of chips, compared with the shortest live paths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.routing.table import Routes
from meshmend.topology import Cable, Mesh


@dataclass(frozen=True)
class RouteReport:
    """Lengths and loads over all pairs of different chips."""

    pairs: int
    pairs_without_route: int
    mean_hops: float
    longest_hops: int
    mean_detour: float
    """Ratio of the mean route length to the mean length of the shortest live paths between the same chips."""
    longest_detour_hops: int
    """The most hops by which a route is longer than the shortest live path."""
    busiest_link: Cable | None
    """The link that carries the most flows when every chip sends to every other, from chip to chip."""
    busiest_link_flows: int


def report(routes: Routes) -> RouteReport:
    """Measure a route table.

    >>> from meshmend.routing import detour
    >>> found = report(detour(Mesh("8x8", failed=["2x2@2,2"])))
    >>> found.mean_detour, found.longest_hops, found.busiest_link_flows
    (1.0, 14, 192)
    """
    mesh = routes.mesh
    others = np.arange(mesh.n_chips)[:, None] != routes.destinations
    routed = others & (routes.hops >= 0)
    hops = routes.hops[routed].astype(np.int64)
    shortest = shortest_lengths(mesh)[:, routes.destinations][routed]
    load = routes.all_to_all_load()
    return RouteReport(
        pairs=int(others.sum()),
        pairs_without_route=int(others.sum()) - len(hops),
        mean_hops=float(hops.mean()) if len(hops) else 0.0,
        longest_hops=int(hops.max(initial=0)),
        mean_detour=float(hops.sum() / shortest.sum()) if len(hops) else 1.0,
        longest_detour_hops=int((hops - shortest).max(initial=0)),
        busiest_link=mesh.link_ends(int(load.argmax())) if load.any() else None,
        busiest_link_flows=int(load.max(initial=0)),
    )


def shortest_lengths(mesh: Mesh) -> NDArray[np.int64]:
    """Return the length of a shortest live path between all pairs of ranks; −1 where there is none."""
    from scipy.sparse.csgraph import shortest_path

    lengths = shortest_path(mesh.graph, directed=False, unweighted=True)
    return np.where(np.isfinite(lengths), lengths, -1).astype(np.int64)
