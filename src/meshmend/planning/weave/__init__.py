"""Weave: spanning trees that share the load of every cable, and a step for each of their transfers.

`planner` is the planner. `roots` chooses the root of each tree, `trees` grows the trees, and `slots` assigns the steps.
Where a few trees are repeated, `periodic` asks `packing` for them, `runs` for the straight stretches they are made of,
and `tracks` for the steps.
"""

from meshmend.planning.weave.planner import DEFAULT_BUDGET_S, Owners, Weave

__all__ = ["DEFAULT_BUDGET_S", "Owners", "Weave"]
