"""The route table: for every destination, the next hop from every chip, and its virtual channel.

A packet belongs to a *class*, chosen at its source and kept. A router looks up (class, destination) and finds a
*port*: `channel * n_directions + direction`. Routing depends on nothing else, so a table is one byte per
(class, chip, destination), never a list of paths: 64×64 chips take 17 MB per class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend.errors import Coordinate, MeshError, RoutingError, name_chip
from meshmend.topology import IntArray, Mesh

Ports = NDArray[np.int8]

NO_PORT = -1
"""Marks cells where a packet has arrived, or where the class has no route."""


@dataclass(frozen=True)
class Trace:
    """One row per hop: flow number, how many hops came before, the link crossed and its virtual channel."""

    flow: NDArray[np.int64]
    hop: NDArray[np.int64]
    link: NDArray[np.int64]
    channel: NDArray[np.int64]

    @cached_property
    def in_order(self) -> Trace:
        """The same hops, flow by flow, each in the order in which it makes them."""
        order = np.lexsort((self.hop, self.flow))
        return Trace(self.flow[order], self.hop[order], self.link[order], self.channel[order])

    def paths(self, mesh: Mesh, src: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the ranks that each flow visits from its `src` on, as far as it comes."""
        hops = self.in_order
        rank, direction = np.divmod(hops.link, mesh.n_directions)
        reached = mesh.neighbours[rank, direction].astype(np.int64)
        ends = pairwise(np.searchsorted(hops.flow, np.arange(len(src) + 1)).tolist())
        return [np.append(start, reached[first:last]) for start, (first, last) in zip(src, ends, strict=True)]


@dataclass(frozen=True, eq=False)
class Routes:
    """A route table for all flows to `destinations` (ranks), from every chip.

    `port[k, at, i]` is the port at rank `at` for a packet of class k to `destinations[i]`; `class_of[src, i]` is
    the class of packets that start at `src`. `n_channels` is the number of virtual channels that the scheme needs.

    >>> from meshmend.routing import detour
    >>> routes = detour(Mesh("8x8", failed=["2x2@2,2"]))
    >>> routes.path((2, 1), (2, 4))
    [(2, 1), (1, 1), (1, 2), (1, 3), (1, 4), (2, 4)]
    """

    mesh: Mesh
    scheme: str
    n_channels: int
    destinations: IntArray
    port: Ports
    class_of: NDArray[np.uint8]

    @property
    def n_ports(self) -> int:
        """Ports of a chip: directions times virtual channels."""
        return self.n_channels * self.mesh.n_directions

    @cached_property
    def column_of(self) -> IntArray:
        """For each rank its column in the table, −1 where it is not among the destinations."""
        columns = np.full(self.mesh.n_chips, -1, dtype=np.int32)
        columns[self.destinations] = np.arange(len(self.destinations), dtype=np.int32)
        return columns

    def follow(self, src: ArrayLike, dst: ArrayLike, *, max_hops: int | None = None) -> Trace:
        """Follow each flow src[i] → dst[i] (ranks). A flow without a route has no hops.

        Flows with more than `max_hops` hops together are refused with a `RoutingError`.

        In a table with a routing loop, following stops once a packet has visited more chips than there are.
        """
        src, dst = (np.atleast_1d(np.asarray(ranks, dtype=np.int64)) for ranks in (src, dst))
        column = self.column_of[dst].astype(np.int64)
        if (column < 0).any():
            lost = self.mesh.chip(int(dst[np.flatnonzero(column < 0)[0]]))
            raise RoutingError(
                f"Chip {name_chip(lost)} is not among the destinations of this table.", scheme=self.scheme, dst=lost
            )
        kind = self.class_of[src, column].astype(np.int64)
        return walk(self.mesh, src, dst, lambda moving, at: self.port[kind[moving], at, column[moving]], max_hops)

    def path(self, src: Sequence[int], dst: Sequence[int]) -> list[Coordinate]:
        """Return the chips that a packet visits from chip `src` to chip `dst`, both included."""
        start, end = self.mesh.rank(src), self.mesh.rank(dst)
        trace = self.follow(start, end)
        chips = [self.mesh.chip(start), *(self.mesh.link_ends(int(link))[1] for link in trace.link)]
        if chips[-1] != self.mesh.chip(end):
            raise RoutingError(
                f"{self.scheme} has no route from {name_chip(src)} to {name_chip(dst)} on {self.mesh}.",
                scheme=self.scheme,
                src=tuple(src),
                dst=tuple(dst),
            )
        return chips


def all_destinations(mesh: Mesh, destinations: ArrayLike | None) -> IntArray:
    """Return `destinations` as distinct ranks, all of them if None."""
    if destinations is None:
        return np.arange(mesh.n_chips, dtype=np.int32)
    ranks = np.unique(np.asarray(destinations, dtype=np.int64))
    if len(ranks) and not (ranks[0] >= 0 and ranks[-1] < mesh.n_chips):
        raise MeshError(f"Destinations are ranks from 0 to {mesh.n_chips - 1}.")
    return ranks.astype(np.int32)


def on_channel(channel: int, ports: Ports, mesh: Mesh) -> Ports:
    """Return a table of channel 0 on another virtual channel."""
    return np.where(ports >= 0, ports + np.int8(channel * mesh.n_directions), ports)


def walk(
    mesh: Mesh,
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    port_of: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.integer[Any]]],
    max_hops: int | None = None,
) -> Trace:
    """Follow flows hop by hop, all at once; `port_of(flows, at)` is the port of those flows at their current chips."""
    at = src.copy()
    columns: list[tuple[NDArray[np.int64], ...]] = []
    n_hops = 0
    moving = np.flatnonzero(at != dst)
    for hop in range(mesh.n_chips):
        port = port_of(moving, at[moving]).astype(np.int64)
        going = port >= 0
        moving, port = moving[going], port[going]
        if not len(moving):
            break
        n_hops += len(moving)
        if max_hops is not None and n_hops > max_hops:
            raise RoutingError(f"Routing these flows takes {n_hops:,} hops or more; the limit is {max_hops:,}.")
        channel, direction = np.divmod(port, mesh.n_directions)
        columns.append((moving, np.full(len(moving), hop), at[moving] * mesh.n_directions + direction, channel))
        at[moving] = mesh.neighbours[at[moving], direction]
        moving = moving[(at[moving] != dst[moving]) & (at[moving] >= 0)]
    empty = (np.empty(0, dtype=np.int64),) * 4
    return Trace(*(np.concatenate(parts) for parts in zip(empty, *columns, strict=True)))
