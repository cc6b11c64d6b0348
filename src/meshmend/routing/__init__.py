"""Routing: the path of a transfer between chips that are not neighbours."""

from meshmend.routing.trace import Trace, trace

__all__ = ["Trace", "trace"]
