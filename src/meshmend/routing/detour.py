"""Detour: dimension order wherever it survives, and a near-minimal route round the holes elsewhere (figure 2).

On a plain 2-D mesh there are three classes of packets on two virtual channels:

- class 0, on channel 0: pairs whose dimension-order path survives;
- class 1, on channel 0: *west-first* turns, all moves west before the first turn, then any of east, north, south;
- class 2, on channel 1: *east-first* turns, the mirror image.

A cycle of waiting packets that turn west-first would need a move west after a move north or south, which the rule
forbids. Dimension order makes west-first turns only, so classes 0 and 1 share a channel. East-first packets have a
channel of their own. A pair that lost its dimension-order path takes the shorter of classes 1 and 2.

The table of class 1: a chip that can reach the destination without going west does so by a shortest such route; any
other chip sends west. That rule does not depend on where a packet came from. Among equally short routes the one that
turns into the destination's row first is taken, so that detours spread over the mesh instead of hugging the hole.

One more class goes up*/down* on one more channel, for pairs that neither class serves (odd shapes, several holes). On
other meshes (axes that wrap, 1-D, 3-D and up) it has all that lost their dimension-order path.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend.routing.dimension_order import dimension_order_channels, surviving_ports
from meshmend.routing.table import NO_PORT, Ports, Routes, all_destinations, on_channel
from meshmend.routing.up_down import FAR, up_down_ports
from meshmend.topology import Mesh

SOUTH, NORTH, EAST, WEST = range(4)


def detour(mesh: Mesh, destinations: ArrayLike | None = None) -> Routes:
    """Return routes round the holes to `destinations` (ranks; all by default). Unconnected pairs get no route."""
    columns = all_destinations(mesh, destinations)
    direct = surviving_ports(mesh, columns)
    tables, n_channels = [direct], dimension_order_channels(mesh)
    class_of = np.zeros(direct.shape, dtype=np.uint8)
    joined = mesh.component_of[:, None] == mesh.component_of[columns]
    blocked = (direct < 0) & joined & (np.arange(mesh.n_chips)[:, None] != columns)
    if mesh.n_axes == 2 and not any(mesh.wrap) and blocked.any():
        west_first, west_length = _first_table(mesh, columns, first=WEST)
        east_first, east_length = _first_table(mesh, columns, first=EAST)
        tables += [west_first, on_channel(1, east_first, mesh)]
        n_channels = 2
        np.copyto(class_of, np.where(east_length < west_length, np.uint8(2), np.uint8(1)), where=blocked)
        blocked &= np.minimum(east_length, west_length) >= FAR
    if blocked.any():
        class_of[blocked] = len(tables)
        tables.append(on_channel(n_channels, up_down_ports(mesh, columns), mesh))
        n_channels += 1
    return Routes(
        mesh=mesh,
        scheme="detour",
        n_channels=n_channels,
        destinations=columns,
        port=np.stack(tables),
        class_of=class_of,
    )


def _first_table(mesh: Mesh, destinations: NDArray[np.integer], *, first: int) -> tuple[Ports, NDArray[np.int32]]:
    """Return ports and route lengths of the class whose moves in direction `first` come before all others.

    West-first fills its columns from the east: a chip's route without a move west leads east out of its column,
    or along the column to a chip that leads east. The chips without one are then filled from the west, moving west.
    """
    onward = EAST if first == WEST else WEST
    eastward = range(mesh.shape[1]) if first == WEST else range(mesh.shape[1] - 1, -1, -1)
    open_to = np.zeros((4, *mesh.shape), dtype=np.bool_)
    open_to[:, mesh.live] = (mesh.neighbours >= 0).T
    length = np.full((*mesh.shape, len(destinations)), FAR, dtype=np.int32)
    rows, columns = mesh.coords[destinations].T
    length[rows, columns, np.arange(len(destinations))] = 0
    length[:, eastward[-1]] = _along_column(length[:, eastward[-1]], open_to[SOUTH][:, eastward[-1]])
    for before, column in pairwise(reversed(eastward)):
        _look(length, column, before, where=open_to[onward][:, column, None])
        length[:, column] = _along_column(length[:, column], open_to[SOUTH][:, column])
    stuck = length >= FAR
    free = length[mesh.live]
    # A chip that has a route without moves in `first` must use it: packets that pass may not turn back.
    for before, column in pairwise(eastward):
        _look(length, column, before, where=open_to[first][:, column, None] & stuck[:, column])
    ports = np.where(length[mesh.live] < FAR, np.int8(first), np.int8(NO_PORT))
    for direction in (onward, NORTH, SOUTH):
        beyond = mesh.neighbours[:, direction]
        leads_there = (free[beyond] + 1 == free) & (beyond >= 0)[:, None] & (free < FAR)
        np.copyto(ports, np.int8(direction), where=leads_there)
    ports[destinations, np.arange(len(destinations))] = NO_PORT
    return ports, length[mesh.live]


def _look(length: NDArray[np.int32], column: int, beyond: int, *, where: NDArray[np.bool_]) -> None:
    """Route the chips of a column through the column beside it, where there is a cable and that is shorter."""
    through = length[:, beyond] + 1
    np.copyto(length[:, column], through, where=where & (through < length[:, column]))


def _along_column(length: NDArray[np.int32], open_south: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return lengths when packets may also move north and south: the least of (distance + length there).

    Chips get positions on the column such that a missing cable is a gap too wide to cross, so that one running
    minimum in each direction finds all lengths.
    """
    position = np.concatenate([[0], np.cumsum(np.where(open_south[:-1], 1, 2 * int(FAR)))])[:, None]
    north = np.minimum.accumulate(length - position, axis=0) + position
    south = np.minimum.accumulate((length + position)[::-1], axis=0)[::-1] - position
    nearest: NDArray[np.int64] = np.minimum(np.minimum(north, south), FAR)
    return nearest.astype(np.int32)
