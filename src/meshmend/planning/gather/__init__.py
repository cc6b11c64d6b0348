"""Gather: reduce-scatters and all-gathers planned as such, near what the cables can carry.

`planner` is the planner; `spreading` decides who brings which chunk to whom.
"""

from meshmend.planning.gather.planner import Gather

__all__ = ["Gather"]
