"""Routes for kernels: following the tables hop by hop is following the way that routing gives."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given

from meshmend import Mesh, routing
from meshmend_lab.mesh.routes import next_hops, route_commands
from strategies import meshes


def follow(hops: tuple[dict[Any, int], dict[Any, int]], source: int, destination: int) -> list[int]:
    by_destination, exceptions = hops
    at, visited = source, [source]
    while at != destination:
        at = exceptions.get((at, source, destination), by_destination[at, destination])
        visited.append(at)
        assert len(visited) < 100
    return visited


@given(meshes(max_axes=2, max_side=4, connected=True))
def test_the_tables_follow_the_trace(mesh: Mesh) -> None:
    n, hops = mesh.n_chips, next_hops(mesh)
    for source in range(min(n, 4)):
        for destination in range(n):
            if source == destination:
                continue
            trace = routing.trace(mesh, source, destination)
            order = np.argsort(trace.hop)
            wanted = [source] + [
                int(mesh.neighbours[link // mesh.n_directions, link % mesh.n_directions]) for link in trace.link[order]
            ]
            assert follow(hops, source, destination) == wanted


def test_commands_name_neighbours_and_interfaces() -> None:
    mesh = Mesh("2x2")
    commands = route_commands(mesh, [f"10.77.0.{r + 1}" for r in range(4)], ["south", "north", "east", "west"])
    assert sorted(commands[0]) == [
        "route replace 10.77.0.2/32 via 10.77.0.2 dev east onlink src 10.77.0.1",
        "route replace 10.77.0.3/32 via 10.77.0.3 dev south onlink src 10.77.0.1",
        "route replace 10.77.0.4/32 via 10.77.0.2 dev east onlink src 10.77.0.1",
    ]
