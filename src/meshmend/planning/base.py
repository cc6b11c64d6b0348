"""What every planner is: a frozen value with its parameters, that turns a mesh into a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from meshmend.schedule import Schedule
from meshmend.topology import Mesh


class Planner(ABC):
    """Turns a mesh into an all-reduce schedule. Its dataclass fields are its parameters."""

    name: ClassVar[str]
    """What the command line and `plan(planner=…)` call it."""

    @abstractmethod
    def why_not(self, mesh: Mesh) -> str | None:
        """Say in a sentence why this planner cannot serve `mesh`, whose survivors are connected, or None if it can."""

    @abstractmethod
    def plan(self, mesh: Mesh) -> Schedule:
        """Return the schedule. Only called where `why_not` is None."""
