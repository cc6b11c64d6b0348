"""Up*/down*: routes for any connected survivors, on one virtual channel.

The chips are numbered outwards from a root, breadth first. A link towards a smaller number goes *up*, and every
route goes up first and then only down. Every cycle of links has a turn from down to up, so packets cannot
deadlock, whatever the shape of the hole. (Schroeder et al., Autonet, 1991.)

A router sees only the destination, not where the packet came from, so the rule must be the same for all packets:
where the destination can be reached by going down only, go down by a shortest such route; elsewhere go up, to the
neighbour from which the whole route is shortest. A packet that goes down then stays on chips with a route down.

Routes crowd near the root, and some are longer than necessary: this scheme is the fallback.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshmend.routing.table import NO_PORT, Ports
from meshmend.topology import Mesh

FAR = np.int32(2**29)
"""Longer than any route; a sum of two of them still fits."""


def up_down_ports(mesh: Mesh, destinations: NDArray[np.integer]) -> Ports:
    """Return the ports to `destinations` (ranks), on channel 0. Unconnected pairs have none."""
    number = np.empty(mesh.n_chips, dtype=np.int64)
    order = outward_order(mesh)
    number[order] = np.arange(mesh.n_chips)
    ports = np.full((mesh.n_chips, len(destinations)), NO_PORT, dtype=np.int8)
    length = np.full((mesh.n_chips, len(destinations)), FAR, dtype=np.int32)
    length[destinations, np.arange(len(destinations))] = 0
    neighbours = mesh.neighbours.tolist()
    # Going down leads to larger numbers only, so the largest number is finished first ...
    for at in reversed(order.tolist()):
        for direction, there in enumerate(neighbours[at]):
            if there >= 0 and number[there] > number[at]:
                _relax(length, ports, at, there, direction)
    goes_down = length < FAR
    # ... and a chip without a route down takes it from its upper neighbours, the root first.
    for at in order.tolist():
        for direction, there in enumerate(neighbours[at]):
            if there >= 0 and number[there] < number[at]:
                _relax(length, ports, at, there, direction, where=~goes_down[at])
    return ports


def outward_order(mesh: Mesh) -> NDArray[np.int64]:
    """Return the ranks in breadth-first order from a root in the middle of each connected component."""
    from scipy.sparse.csgraph import breadth_first_order

    parts = []
    for part in range(mesh.n_components):
        ranks = np.flatnonzero(mesh.component_of == part)
        off_centre = np.abs(mesh.coords[ranks] - mesh.coords[ranks].mean(axis=0)).sum(axis=1)
        root = int(ranks[off_centre.argmin()])
        parts.append(breadth_first_order(mesh.graph, root, directed=False, return_predecessors=False))
    return np.concatenate(parts).astype(np.int64)


def _relax(
    length: NDArray[np.int32],
    ports: Ports,
    at: int,
    there: int,
    direction: int,
    where: NDArray[np.bool_] | None = None,
) -> None:
    """Route through a neighbour where that is shorter."""
    through = length[there] + np.int32(1)
    shorter = through < length[at]
    if where is not None:
        shorter &= where
    np.copyto(length[at], through, where=shorter)
    np.copyto(ports[at], np.int8(direction), where=shorter)
