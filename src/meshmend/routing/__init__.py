"""Routing: the routes of transfers between chips that are not neighbours, proven free of deadlock.

One scheme per file; `deadlock` makes the proof, `choose` takes the best scheme that is proven, and `trace` follows
the flows of a schedule.
"""

from meshmend.routing.choose import SCHEMES, choose, route
from meshmend.routing.deadlock import DeadlockProof, prove, require_deadlock_free
from meshmend.routing.detour import detour
from meshmend.routing.dimension_order import dimension_order
from meshmend.routing.report import RouteReport, report
from meshmend.routing.table import Routes, Trace
from meshmend.routing.trace import trace
from meshmend.routing.up_down import up_down

__all__ = [
    "SCHEMES",
    "DeadlockProof",
    "RouteReport",
    "Routes",
    "Trace",
    "choose",
    "detour",
    "dimension_order",
    "prove",
    "report",
    "require_deadlock_free",
    "route",
    "trace",
    "up_down",
]
