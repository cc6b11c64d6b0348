"""What every planner is: a frozen value with its parameters, that turns a mesh into a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from meshmend.schedule import Schedule
from meshmend.topology import Mesh


@dataclass(frozen=True)
class Floor:
    """What a schedule costs at least, known before it is made.

    `link_load` is the payload fraction that the busiest link carries, step by step and summed over the steps;
    `chip_load` is the fraction that some chip sends or takes in, likewise. All zero says nothing, and is never wrong.
    """

    steps: int = 0
    link_load: float = 0.0
    chip_load: float = 0.0


class Planner(ABC):
    """Turns a mesh into an all-reduce schedule. Its dataclass fields are its parameters."""

    name: ClassVar[str]
    """What the command line and `plan(planner=…)` call it."""

    @abstractmethod
    def why_not(self, mesh: Mesh) -> str | None:
        """Say in a sentence why this planner cannot serve `mesh`, whose survivors are connected, or None if it can."""

    def variants(self, mesh: Mesh, step_cost: float) -> Sequence[Planner]:  # noqa: ARG002  # most have nothing to vary
        """Return this planner with every set of parameters that is worth trying on `mesh`, this one included.

        `step_cost` is what a step costs besides moving data, in units of M/b: large for short payloads.
        """
        return (self,)

    def floor(self, mesh: Mesh) -> Floor:  # noqa: ARG002
        """Return what the schedule costs at least. Only called where `why_not` is None; must be quick."""
        return Floor()

    @abstractmethod
    def plan(self, mesh: Mesh) -> Schedule:
        """Return the schedule. Only called where `why_not` is None."""
