"""The laboratory's own errors, each a `meshmend.errors.MeshmendError`."""

from __future__ import annotations

from meshmend.errors import MeshmendError

__all__ = ["LabError", "SimgridError"]


class LabError(MeshmendError):
    """A mesh of network namespaces cannot be made or changed, or a measurement breaks a guarantee."""


class SimgridError(MeshmendError):
    """SimGrid ran and failed; the message has its output."""
