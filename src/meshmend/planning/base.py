"""What every planner is: a frozen value with its parameters, that makes a mesh into a schedule.

The contract is kept here, once. `unsupported_reason`, `admit`, `make` and `plan` belong to this class and are final:
they refuse survivors that are not connected and schedules beyond any memory, and hold what was made to what it claims.
A planner adds what is its own: `_check`, which raises `Unsupported` with the reason where a mesh is not for it,
`n_transfers` and `_plan`.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, SupportsIndex, final

import numpy as np

from meshmend.errors import ParameterError, PlanError, name_chip
from meshmend.schedule import Collective, Schedule
from meshmend.topology import Mesh

MAX_TRANSFERS = 2**25
"""Transfers of the largest schedule that is made: planning takes about 100 bytes for each, 3 to 4 GB in all."""
CHECKED_AT_ONCE = 2**20


@dataclass(frozen=True)
class Floor:
    """What a schedule costs at least, known before it is made.

    `link_load` is the payload fraction that the busiest link carries, step by step and summed over the steps;
    `chip_load` is the fraction that some chip sends or takes in, likewise. All zero says nothing, and is never wrong.
    """

    steps: int = 0
    link_load: float = 0.0
    chip_load: float = 0.0


class Unsupported(Exception):  # noqa: N818  # no error: auto asks every planner and goes on with the others
    """Why a planner cannot serve a mesh, in a sentence. It stays inside planning: callers see `PlanError`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Planner(ABC):
    """Makes a schedule for a mesh, by default of an all-reduce. Its dataclass fields are its parameters."""

    name: ClassVar[str]
    """Its name on the command line and in `plan(planner=…)`."""
    collective: Collective = Collective.ALL_REDUCE
    """The collective that its schedules promise."""
    is_splittable: ClassVar[bool] = True
    """Whether the reductions and the copies of its all-reduce are a reduce-scatter and an all-gather, which mirror each
    other: each has half of the steps and of the load."""

    @final
    def unsupported_reason(self, mesh: Mesh) -> str | None:
        """Say in a sentence why this planner cannot serve `mesh`, or None if it can."""
        try:
            self.admit(mesh)
        except Unsupported as refusal:
            return refusal.reason
        return None

    @final
    def plan(self, mesh: Mesh) -> Schedule:
        """Return the schedule, or raise `PlanError` with the reason that `unsupported_reason` gives."""
        try:
            return self.admit(mesh).make(mesh)
        except Unsupported as refusal:
            raise PlanError(self.name, str(mesh), refusal.reason, alternatives=None) from None

    @final
    def admit(self, mesh: Mesh) -> Self:
        """Return this planner, ready to `make` the schedule of `mesh`; raise `Unsupported` if it cannot serve it.

        It checks the conditions of every planner, and then those of its own.
        """
        if not mesh.is_connected:
            raise Unsupported(
                f"the survivors form {mesh.n_components} disconnected groups. Plan for one of them, or repair a cable."
            )
        ready = self._ready_for(mesh)
        ready._check(mesh)
        size = ready.n_transfers(mesh)
        if size > MAX_TRANSFERS:
            raise Unsupported(
                f"its schedule would have {size:,} transfers, and the limit is {MAX_TRANSFERS:,}. {self._shrink(mesh)}"
            )
        return ready

    @final
    def make(self, mesh: Mesh) -> Schedule:
        """Return the schedule of a mesh. Only asked of what `admit` has returned for it."""
        schedule = self._plan(mesh)
        self._check_hops(schedule)
        return schedule

    def variants(self, mesh: Mesh, step_cost: float) -> Sequence[Planner]:  # noqa: ARG002  # most have nothing to vary
        """Return this planner with every set of parameters that is worth trying on `mesh`, this one included.

        `step_cost` is what a step costs besides moving data, in units of M/b: large for short payloads. One whose
        schedule is larger than it is worth to a caller who only tries it is left out.
        """
        return (self,)

    def slack_variants(self, mesh: Mesh, latency: float, message: float) -> Sequence[Planner]:
        """Return the same for engines that wait only for their input data, not for the end of each step.

        `latency` is the time between a transfer's last byte and its chunk being sent on. `message` is the cost of each
        message at its sender. Both are in units of M/b.
        """
        return self.variants(mesh, latency + message)

    def floor(self, mesh: Mesh) -> Floor:  # noqa: ARG002
        """Return what the schedule costs at least. Only called where `unsupported_reason` is None; must be quick."""
        return Floor()

    @abstractmethod
    def n_transfers(self, mesh: Mesh) -> int:
        """Return how many transfers the schedule has, without making it. Only called where `_check` passes."""

    def with_even_owners(self) -> Planner:
        """Return this planner with the same number of chunks for every owner, where it has a choice."""
        return self

    def is_routed(self, mesh: Mesh, phase: str) -> bool:  # noqa: ARG002
        """Say whether transfers of that phase may go over several cables; all others cross one live cable each."""
        return False

    @abstractmethod
    def _check(self, mesh: Mesh) -> None:
        """Raise `Unsupported` if this planner cannot serve `mesh`, whose survivors are connected."""

    @abstractmethod
    def _plan(self, mesh: Mesh) -> Schedule:
        """Return the schedule. Only called where `unsupported_reason` is None."""

    def _ready_for(self, mesh: Mesh) -> Self:  # noqa: ARG002  # most find nothing out that is worth keeping
        """Return this planner with what `_check`, `n_transfers` and `_plan` all need to know about `mesh`."""
        return self

    def _shrink(self, mesh: Mesh) -> str:  # noqa: ARG002
        """Say what to change where the schedule would be too large."""
        return "Plan with weave, whose number of chunks can be set."

    @final
    def _check_hops(self, schedule: Schedule) -> None:
        """Hold every transfer that claims to be one between neighbours to it: the routes would hide a dead cable."""
        mesh, schedule = schedule.mesh, schedule.template
        routed = np.array([self.is_routed(mesh, phase) for phase in schedule.phase_names])
        for first in range(0, schedule.n_transfers, CHECKED_AT_ONCE):
            rows = slice(first, first + CHECKED_AT_ONCE)
            src, dst = schedule.src[rows], schedule.dst[rows]
            near = (mesh.neighbours[src] == dst[:, None]).any(axis=1) | routed[schedule.phase[rows]]
            if not near.all():
                row = int(np.argmin(near))
                ends = " to ".join(name_chip(mesh.chip(int(end[row]))) for end in (src, dst))
                raise AssertionError(
                    f"{self.name} claims a neighbour hop from {ends} on {mesh}, where no live cable joins them: "
                    f"this is a bug in meshmend"
                )


def check_count(name: str, value: SupportsIndex) -> int:
    """Return a parameter that counts something; refuse all but whole numbers from 1 up."""
    count = operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else 0
    if count < 1:
        raise ParameterError(f"{name} is {value!r}, expected a whole number, 1 or more.")
    return count


def is_between_neighbours(schedule: Schedule) -> bool:
    """Say whether every transfer crosses one live cable."""
    rows = schedule.template  # repeats send between the chips that the template does
    return bool((schedule.mesh.link(rows.src, rows.dst) >= 0).all())
