"""Auto: predicts every planner that applies, over its own parameters, and takes the fastest.

`Tuned` does the same for one planner: it takes the fastest of its parameters.

Making a schedule takes longer than pricing it, so a planner gives a lower bound of its schedule's cost beforehand
(`Planner.floor`). Candidates are made in order of that floor, and as soon as one is as fast as the floor of the next,
the rest need not be made: none of them can be faster.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, final

from meshmend.cost import DEFAULT_HARDWARE, Hardware, StepDemand, find_hardware
from meshmend.errors import ParameterError, PlanError
from meshmend.planning.base import CannotServe, Floor, Planner
from meshmend.planning.gather import Gather
from meshmend.planning.half import Half
from meshmend.planning.hamiltonian import Hamiltonian
from meshmend.planning.latency import Latency
from meshmend.planning.row_pairs import RowPairs
from meshmend.planning.two_color import TwoColor
from meshmend.planning.weave import DEFAULT_BUDGET_S, Owners, Weave
from meshmend.schedule import Collective, Schedule
from meshmend.topology import Mesh

CHOICES: tuple[type[Planner], ...] = (Hamiltonian, TwoColor, RowPairs, Weave, Latency)
"""The planners of all-reduces to choose from."""
OTHERS: tuple[type[Planner], ...] = (Gather,)
"""The planners of reduce-scatters and all-gathers."""
DEFAULT_PAYLOAD_BYTES = 1e8


@dataclass(frozen=True)
class Candidate:
    """A planner with its parameters, and what is known about its time.

    `seconds` is None where the schedule was not made because `floor_seconds` ruled it out, and both are None where
    the planner cannot serve the mesh, for the reason `why_not`.
    """

    planner: Planner
    floor_seconds: float | None
    seconds: float | None
    why_not: str | None = None


@dataclass(frozen=True)
class Choice:
    """The fastest schedule, and everything that was considered, fastest first."""

    schedule: Schedule
    planner: Planner
    seconds: float
    considered: tuple[Candidate, ...]


class Chooser(Planner):
    """A planner that takes the fastest of several for a payload on a piece of hardware, by the lock-step prediction."""

    payload_bytes: float
    hardware: str | Hardware

    def __post_init__(self) -> None:
        object.__setattr__(self, "hardware", find_hardware(self.hardware))
        is_number = isinstance(self.payload_bytes, Real) and not isinstance(self.payload_bytes, bool)
        if not is_number or not 0 < self.payload_bytes < float("inf"):
            raise ParameterError(f"payload_bytes is {self.payload_bytes!r}, expected a positive number of bytes.")
        object.__setattr__(self, "payload_bytes", float(self.payload_bytes))

    @abstractmethod
    def field(self, mesh: Mesh) -> Field:
        """Return the candidates for a mesh."""

    @final
    def choose(self, mesh: Mesh) -> Choice:
        """Return the fastest schedule together with what was considered."""
        return self.field(mesh).choose(self.payload_bytes, find_hardware(self.hardware))

    @final
    def n_transfers(self, mesh: Mesh) -> int:
        """Return the size of the largest schedule that may be taken."""
        variants = self.field(mesh).variants(self.payload_bytes, find_hardware(self.hardware))
        return max(variant.n_transfers(mesh) for variant in variants)

    @final
    def is_routed(self, mesh: Mesh, phase: str) -> bool:  # noqa: ARG002
        """Say so of every phase: the planner that is taken has held its schedule to what it claims already."""
        return True

    @final
    def _check(self, mesh: Mesh) -> None:
        reason = self.field(mesh).why_not
        if reason is not None:
            raise CannotServe(reason)

    @final
    def _plan(self, mesh: Mesh) -> Schedule:
        return self.choose(mesh).schedule


@final
@dataclass(frozen=True)
class Auto(Chooser):
    """The fastest of all planners for a payload on a piece of hardware.

    `owners` and `budget_s` are as for `Weave`, the only planner that has a choice of owners and takes long.
    A reduce-scatter or an all-gather is planned as such, or is half of an all-reduce, whichever is faster.

    >>> choice = Auto(payload_bytes=1e9).choose(Mesh("8x8", failed=["2x2@2,2"]))
    >>> choice.planner.name, [c.planner.name for c in choice.considered if c.why_not]
    ('weave', ['two-color'])
    """

    name: ClassVar[str] = "auto"

    payload_bytes: float = DEFAULT_PAYLOAD_BYTES
    hardware: str | Hardware = DEFAULT_HARDWARE
    collective: Collective = Collective.ALL_REDUCE
    owners: Owners = "any"
    budget_s: float = DEFAULT_BUDGET_S

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "collective", Collective(self.collective))

    def field(self, mesh: Mesh) -> Field:
        """Return every planner."""
        return Field(mesh, candidates(self.collective, Weave(owners=self.owners, budget_s=self.budget_s)))


@final
@dataclass(frozen=True)
class Tuned(Chooser):
    """One planner with its fastest parameters for a payload on a piece of hardware; those named in `fixed` stay.

    >>> [Tuned(Weave(), payload_bytes=size).plan(Mesh("8x8")).total_chunks for size in (1e4, 1e6, 1e9)]
    [2, 32, 512]
    """

    planner: Planner
    fixed: tuple[str, ...] = ()
    payload_bytes: float = DEFAULT_PAYLOAD_BYTES
    hardware: str | Hardware = DEFAULT_HARDWARE

    @property
    def name(self) -> str:  # type: ignore[override]  # other planners' names belong to the class
        """The name of its planner: tuning does not make it another planner."""
        return self.planner.name

    @property
    def collective(self) -> Collective:  # type: ignore[override]
        """What its planner plans."""
        return self.planner.collective

    @property
    def is_splittable(self) -> bool:  # type: ignore[override]
        """What its planner says."""
        return self.planner.is_splittable

    def field(self, mesh: Mesh) -> Field:
        """Return the planner alone."""
        return Field(mesh, [self.planner], fixed=self.fixed)


def candidates(collective: Collective, weave: Weave | None = None) -> list[Planner]:
    """Return the planners that `auto` chooses from, with their default parameters; `weave` with those that it has."""
    whole = [weave or kind() if kind is Weave else kind() for kind in CHOICES]
    if collective is Collective.ALL_REDUCE:
        return whole
    return [Gather(collective=collective), *(Half(planner, collective) for planner in whole)]


class Field:
    """All candidates for one mesh. Schedules are made when first needed and kept: many payloads cost little more.

    By default the candidates are all planners of all-reduces; of those that are given, the parameters named in `fixed`
    stay.
    """

    def __init__(self, mesh: Mesh, planners: Sequence[Planner] | None = None, *, fixed: Sequence[str] = ()) -> None:
        entered = candidates(Collective.ALL_REDUCE) if planners is None else planners
        reasons = {planner: planner.why_not(mesh) for planner in entered}
        self._mesh = mesh
        self._fixed = fixed
        self._refused = [Candidate(planner, None, None, why) for planner, why in reasons.items() if why is not None]
        self._able = [planner for planner, why in reasons.items() if why is None]
        self._made: dict[Planner, StepDemand] = {}

    @property
    def why_not(self) -> str | None:
        """Why no candidate serves the mesh, or None if one does."""
        if self._able:
            return None
        if len({candidate.why_not for candidate in self._refused}) == 1:
            return self._refused[0].why_not
        return " ".join(f"{candidate.planner.name}: {candidate.why_not}" for candidate in self._refused)

    def variants(self, payload_bytes: float, hardware: Hardware) -> list[Planner]:
        """Return the planners that can serve the mesh, each with every set of parameters that is worth trying."""
        step_s = hardware.step_latency_s + hardware.hop_latency_s
        step_cost = step_s * hardware.link_bytes_per_s / payload_bytes
        found: list[Planner] = []
        for planner in self._able:
            kept = [v for v in planner.variants(self._mesh, step_cost) if self._keeps(v, planner)]
            found += kept or [planner]
        return found

    def _keeps(self, variant: Planner, planner: Planner) -> bool:
        return all(getattr(variant, name) == getattr(planner, name) for name in self._fixed)

    def choose(self, payload_bytes: float, hardware: Hardware) -> Choice:
        """Return the fastest of the candidates, by the lock-step prediction."""
        if self.why_not is not None:
            raise PlanError(Auto.name, str(self._mesh), self.why_not)
        variants = self.variants(payload_bytes, hardware)
        floors = {variant: _seconds(variant.floor(self._mesh), payload_bytes, hardware) for variant in variants}
        times: dict[Planner, float] = {}
        fastest = float("inf")
        for variant in sorted(floors, key=lambda variant: floors[variant]):
            if floors[variant] >= fastest:
                break
            if variant not in self._made:
                self._made[variant] = StepDemand(variant.plan(self._mesh))
            times[variant] = self._made[variant].seconds(payload_bytes, hardware)
            fastest = min(fastest, times[variant])
        made = sorted(times, key=lambda variant: times[variant])
        ruled_out = sorted((v for v in floors if v not in times), key=lambda variant: floors[variant])
        ranked = [Candidate(variant, floors[variant], times.get(variant)) for variant in (*made, *ruled_out)]
        return Choice(self._made[made[0]].schedule, made[0], fastest, (*ranked, *self._refused))


def _seconds(floor: Floor, payload_bytes: float, hardware: Hardware) -> float:
    """Price a floor: every step has a transfer of at least one hop, and moves at least its share of the payload."""
    unit = payload_bytes / hardware.link_bytes_per_s
    moving = floor.link_load * unit
    if hardware.links_at_once is not None:
        moving = max(moving, floor.chip_load * unit / hardware.links_at_once)
    return floor.steps * (hardware.step_latency_s + hardware.hop_latency_s) + moving
