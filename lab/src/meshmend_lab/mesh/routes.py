"""Routes for the lab's kernels: the route of every pair of chips, for `ip route` and `ip rule`.

A kernel routes by destination. Where the route of a pair differs from the one that its destination alone would
give (detours may), the chip also gets a routing table for that source.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from meshmend import routing
from meshmend.topology import Mesh

FIRST_TABLE = 1000
"""Per-source tables are numbered from here, clear of the kernel's own (253 to 255)."""


def next_hops(mesh: Mesh) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int, int], int]]:
    """Return the next hop from each rank: by (at, destination), and exceptions by (at, source, destination).

    >>> by_destination, exceptions = next_hops(Mesh("1x3"))
    >>> by_destination[0, 2], by_destination[2, 0], exceptions
    (1, 1, {})
    """
    src, dst = np.divmod(np.arange(mesh.n_chips**2), mesh.n_chips)
    apart = src != dst
    src, dst = src[apart], dst[apart]
    trace = routing.trace(mesh, src, dst)
    at = trace.link // mesh.n_directions
    on = mesh.neighbours[at, trace.link % mesh.n_directions]
    by_destination: dict[tuple[int, int], int] = {}
    ways = list(zip(src[trace.flow].tolist(), dst[trace.flow].tolist(), at.tolist(), on.tolist(), strict=True))
    for source, destination, here, beyond in ways:
        if here == source:
            by_destination[here, destination] = beyond
    exceptions = {
        (here, source, destination): beyond
        for source, destination, here, beyond in ways
        if by_destination[here, destination] != beyond
    }
    return by_destination, exceptions


def route_commands(mesh: Mesh, address_of: list[str], interface_of: list[str]) -> dict[int, list[str]]:
    """Return, for each rank, the `ip -batch` lines that set its routes; `interface_of[direction]` names its ends."""
    by_destination, exceptions = next_hops(mesh)

    def way(here: int, destination: int, beyond: int) -> str:
        direction = int(mesh.link(here, beyond)) % mesh.n_directions
        return (
            f"{address_of[destination]}/32 via {address_of[beyond]} dev {interface_of[direction]} onlink "
            f"src {address_of[here]}"
        )

    commands: dict[int, list[str]] = defaultdict(list)
    for (here, destination), beyond in by_destination.items():
        commands[here].append(f"route replace {way(here, destination, beyond)}")
    for here, source in sorted({(here, source) for here, source, _ in exceptions}):
        commands[here].append(f"rule add from {address_of[source]} lookup {FIRST_TABLE + source}")
    for (here, source, destination), beyond in exceptions.items():
        commands[here].append(f"route replace {way(here, destination, beyond)} table {FIRST_TABLE + source}")
    return commands
