"""Weave: spanning trees that share the load of every cable, and a step for each of their transfers.

`planner` is the planner. It asks `roots` where each tree stands, `trees` for the trees, and `slots` for the steps.
"""

from meshmend.planning.weave.planner import Weave

__all__ = ["Weave"]
