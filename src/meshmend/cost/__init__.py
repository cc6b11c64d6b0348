"""Cost: how much a schedule moves over which links."""

from meshmend.cost.load import busiest_link_load, link_load

__all__ = ["busiest_link_load", "link_load"]
