"""Latency: short payloads in few steps with routed partners.

`planner` is the planner; `sites` lays the grid of partners over the chips that survive.
"""

from meshmend.planning.latency.planner import Latency

__all__ = ["Latency"]
