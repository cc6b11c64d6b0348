"""Choose: the best scheme that serves every pair, with its proof."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from meshmend.errors import ParameterError, RoutingError, name_chip
from meshmend.routing.deadlock import DeadlockProof, prove, require_deadlock_free
from meshmend.routing.detour import detour
from meshmend.routing.dimension_order import dimension_order
from meshmend.routing.table import Routes
from meshmend.routing.up_down import up_down
from meshmend.topology import Mesh

SCHEMES: dict[str, Callable[[Mesh], Routes]] = {
    "dimension-order": dimension_order,
    "detour": detour,
    "up-down": up_down,
}
"""Every scheme by its name on the command line, the best first."""

MAX_TABLE_CHIPS = 2**13
"""An all-pairs table has one byte per pair and class; beyond this, trace only the flows that are needed (`trace`)."""


@lru_cache(maxsize=4)
def choose(mesh: Mesh, *, max_channels: int | None = None) -> tuple[Routes, DeadlockProof]:
    """Return the first scheme with a route for every pair, at most `max_channels`, and a proof that holds.

    >>> routes, proof = choose(Mesh("8x8", failed=["2x2@2,2"]))
    >>> routes.scheme, proof.n_channels, proof.deadlock_free
    ('detour', 2, True)
    """
    _check(mesh)
    for build in SCHEMES.values():
        routes = build(mesh)
        if (max_channels is None or routes.n_channels <= max_channels) and routes.is_complete:
            proof = prove(routes)
            if proof.deadlock_free:
                return routes, proof
    raise RoutingError(f"No scheme serves all pairs of {mesh} with {max_channels} virtual channels.")


def route(mesh: Mesh, scheme: str) -> tuple[Routes, DeadlockProof]:
    """Return the routes of one scheme, by name, and their proof. A scheme may leave pairs without a route."""
    if scheme not in SCHEMES:
        raise ParameterError(f"There is no scheme {scheme!r}. Schemes: {', '.join(SCHEMES)}.")
    _check(mesh)
    routes = SCHEMES[scheme](mesh)
    return routes, require_deadlock_free(routes)


def _check(mesh: Mesh) -> None:
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
