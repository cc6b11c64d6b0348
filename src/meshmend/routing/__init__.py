"""Routing: the routes of transfers between chips that are not neighbours, proven free of deadlock.

`detour` makes them: dimension order where it is live, and a way round the holes elsewhere. `deadlock` makes the proof,
`all_pairs` has both for every two chips, and `trace` follows the flows of a schedule.
"""

from meshmend.routing.deadlock import DeadlockProof, prove, require_deadlock_free
from meshmend.routing.detour import detour
from meshmend.routing.table import Routes, Trace
from meshmend.routing.trace import all_pairs, trace

__all__ = [
    "DeadlockProof",
    "Routes",
    "Trace",
    "all_pairs",
    "detour",
    "prove",
    "require_deadlock_free",
    "trace",
]
