"""All pairs: the routes between every two chips, with their proof."""

from __future__ import annotations

from functools import lru_cache

from meshmend.errors import RoutingError, name_chip
from meshmend.routing.deadlock import DeadlockProof, require_deadlock_free
from meshmend.routing.detour import detour
from meshmend.routing.table import Routes
from meshmend.topology import Mesh

MAX_TABLE_CHIPS = 2**13
"""An all-pairs table has one byte per pair and class; beyond this, trace only the flows that are needed (`trace`)."""


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
