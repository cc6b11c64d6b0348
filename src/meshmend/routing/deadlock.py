"""Deadlock: the proof that packets under a route table cannot deadlock.

A *channel* is a virtual channel of a link. A packet that holds channel a and requests channel b next makes a depend
on b. If the graph of all dependencies that packets can cause has no cycle, there is always a packet that can move, so a
network with these routes cannot deadlock (Dally and Seitz, 1987).

The proof is a certificate: a level for every channel, such that packets only ever request a channel of a higher
level than the one they hold. It can be checked one dependency at a time. If there is no such numbering there is a
cycle, and one is named link by link.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import Coordinate, DeadlockError, name_chip
from meshmend.routing.table import Routes, Trace
from meshmend.topology import Mesh

Channel = tuple[Coordinate, Coordinate, int]
"""A virtual channel of a link: the chip it leaves, the chip it reaches, the number of the channel."""

BLOCK_CELLS = 2**20
"""Cells of a route table that are followed at a time; this bounds the memory of a proof."""


@dataclass(frozen=True)
class Dependencies:
    """The channel dependency graph: edge i goes from channel `held[i]` to channel `wanted[i]`.

    A channel's number is `link * n_channels + virtual channel`.
    """

    mesh: Mesh
    n_channels: int
    held: NDArray[np.int64]
    wanted: NDArray[np.int64]

    @property
    def n_nodes(self) -> int:
        """Length of an array indexed by channel."""
        return self.mesh.n_link_slots * self.n_channels

    def name(self, channel: int) -> Channel:
        """Return the chips and the number of a channel."""
        link, number = divmod(int(channel), self.n_channels)
        src, dst = self.mesh.link_ends(link)
        return src, dst, number


@dataclass(frozen=True)
class DeadlockProof:
    """Whether routes are free of deadlock, with the certificate or the cycle."""

    scheme: str
    deadlock_free: bool
    n_channels: int
    """Virtual channels per link."""
    n_dependencies: int
    level: NDArray[np.int32] = field(repr=False)
    """For each channel (`link * n_channels + virtual channel`) its level; −1 where it lies on or after a cycle."""
    cycle: tuple[Channel, ...] = ()
    """A cycle of channels, each waiting for the next and the last for the first; empty if there is none."""

    def __str__(self) -> str:
        channels = f"{self.n_channels} virtual channel{'s' * (self.n_channels != 1)}"
        if self.deadlock_free:
            return (
                f"free of deadlock: {self.n_dependencies:,} dependencies between the channels of {self.scheme} "
                f"form no cycle ({channels})"
            )
        return f"can deadlock: {self.scheme} lets {len(self.cycle)} channels wait in a cycle: {name_cycle(self.cycle)}"


def prove(routes: Routes | Trace, mesh: Mesh | None = None) -> DeadlockProof:
    """Search for a cycle among the channels of a route table, or of the flows of a trace (which needs its `mesh`).

    For a table this covers every packet of every class at every chip, which includes the routes in use.

    >>> from meshmend.routing import detour
    >>> print(prove(detour(Mesh("4x4"))))
    free of deadlock: 68 dependencies between the channels of detour form no cycle (1 virtual channel)
    """
    if isinstance(routes, Routes):
        scheme, graph = routes.scheme, dependencies(routes)
    elif mesh is None:
        raise TypeError("prove(trace) needs the mesh that the trace runs on")
    else:
        scheme, graph = "these flows", trace_dependencies(mesh, routes)
    level = find_levels(graph)
    cycle: tuple[Channel, ...] = ()
    if (level[graph.held] < 0).any():
        cycle = tuple(graph.name(channel) for channel in _find_cycle(graph, level))
    return DeadlockProof(
        scheme=scheme,
        deadlock_free=not cycle,
        n_channels=graph.n_channels,
        n_dependencies=len(graph.held),
        level=level,
        cycle=cycle,
    )


def require_deadlock_free(routes: Routes | Trace, mesh: Mesh | None = None) -> DeadlockProof:
    """Return the proof, or raise a `DeadlockError` that names the cycle."""
    proof = prove(routes, mesh)
    if not proof.deadlock_free:
        raise DeadlockError(
            f"{proof.scheme} can deadlock: {len(proof.cycle)} channels wait for each other in a cycle, "
            f"{name_cycle(proof.cycle)}. Use a scheme whose proof holds, or more virtual channels.",
            scheme=proof.scheme,
            cycle=proof.cycle,
        )
    return proof


def name_cycle(cycle: tuple[Channel, ...]) -> str:
    """Write a cycle link by link, with its virtual channels."""
    return ", ".join(f"{name_chip(src)}→{name_chip(dst)} on channel {number}" for src, dst, number in cycle)


def dependencies(routes: Routes) -> Dependencies:
    """Return the channel dependency graph of a whole table."""
    mesh, n_ports, n_directions = routes.mesh, routes.n_ports, routes.mesh.n_directions
    # One flag per (chip, port it sends on, port that the next chip sends on): every dependency that is possible.
    seen = np.zeros(mesh.n_chips * n_ports * n_ports, dtype=np.bool_)
    beyond = np.tile(mesh.neighbours, routes.n_channels)
    rows = max(1, BLOCK_CELLS // max(1, len(routes.destinations)))
    for table in routes.port:
        for first in range(0, mesh.n_chips, rows):
            held = table[first : first + rows]
            at, column = np.nonzero(held >= 0)
            port = held[at, column].astype(np.int64)
            at += first
            wanted = table[beyond[at, port], column].astype(np.int64)
            going = wanted >= 0
            seen[(at[going] * n_ports + port[going]) * n_ports + wanted[going]] = True
    holding, wanted = np.divmod(np.flatnonzero(seen), n_ports)
    at, held = np.divmod(holding, n_ports)
    return Dependencies(
        mesh,
        routes.n_channels,
        held=_channel(at, held, n_directions, routes.n_channels),
        wanted=_channel(beyond[at, held].astype(np.int64), wanted, n_directions, routes.n_channels),
    )


def trace_dependencies(mesh: Mesh, trace: Trace) -> Dependencies:
    """Return the channel dependency graph of the flows of a trace, taken together."""
    n_channels = int(trace.channel.max(initial=0)) + 1
    hops = trace.in_order
    flow, channel = hops.flow, hops.link * n_channels + hops.channel
    goes_on = flow[1:] == flow[:-1]
    n_nodes = mesh.n_link_slots * n_channels
    arrows = np.unique(channel[:-1][goes_on] * n_nodes + channel[1:][goes_on])
    held, wanted = np.divmod(arrows, n_nodes)
    return Dependencies(mesh, n_channels, held, wanted)


def find_levels(graph: Dependencies) -> NDArray[np.int32]:
    """Assign levels to the channels such that every edge leads to a higher one; −1 for those on or after a cycle.

    Channels without incoming edges are removed, level by level, until none is left, or only cycles
    and what depends on them.
    """
    n = graph.n_nodes
    order = np.argsort(graph.held, kind="stable")
    wanted = graph.wanted[order]
    starts = np.searchsorted(graph.held[order], np.arange(n + 1))
    waiting = np.bincount(wanted, minlength=n)
    level = np.full(n, -1, dtype=np.int32)
    ready = np.flatnonzero(waiting == 0)
    number = 0
    while len(ready):
        level[ready] = number
        count = starts[ready + 1] - starts[ready]
        arrows = np.repeat(starts[ready] - np.cumsum(count) + count, count) + np.arange(count.sum())
        targets, lifted = np.unique(wanted[arrows], return_counts=True)
        waiting[targets] -= lifted
        ready = targets[waiting[targets] == 0]
        number += 1
    return level


def _find_cycle(graph: Dependencies, level: NDArray[np.int32]) -> list[int]:
    """Return a cycle: a channel without a level has one before it, so going backwards leads into a cycle."""
    stuck = level[graph.held] < 0
    before = dict(zip(graph.wanted[stuck].tolist(), graph.held[stuck].tolist(), strict=True))
    at, seen = next(iter(before)), dict[int, int]()
    while at not in seen:
        seen[at] = len(seen)
        at = before[at]
    return list(seen)[seen[at] :][::-1]


def _channel(rank: NDArray[np.int64], port: NDArray[np.int64], n_directions: int, n_channels: int) -> NDArray[np.int64]:
    number, direction = np.divmod(port, n_directions)
    return (rank * n_directions + direction) * n_channels + number
