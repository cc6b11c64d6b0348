"""Weave: spanning trees that share the load of every cable, and a step for each of their transfers.

`planner` is the planner. It asks `roots` where each tree stands, `trees` for the trees, and `slots` for the steps.
Where a few trees are repeated, `periodic` asks `packing` for them, `runs` for the straight stretches they are made of,
and `lanes` for the steps.
"""

from meshmend.planning.weave.planner import DEFAULT_BUDGET_S, Owners, Weave

__all__ = ["DEFAULT_BUDGET_S", "Owners", "Weave"]
