"""Weave: spanning trees that share the load of every cable, and a step for each of their transfers.

`planner` is the planner. `roots` chooses the root of each tree, `trees` grows the trees, and `slots` assigns the steps.
"""

from meshmend.planning.weave.planner import Weave

__all__ = ["Weave"]
