"""Gather: reduce-scatters and all-gathers planned directly, near the limit that the cables set.

`planner` is the planner; `spreading` decides who sends which chunk to whom.
"""

from meshmend.planning.gather.planner import Gather, gather_from

__all__ = ["Gather", "gather_from"]
