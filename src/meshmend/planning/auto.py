"""Auto: predicts every planner that applies, over its own parameters, and takes the fastest.

`Tuned` does the same for one planner: it takes the fastest of its parameters.

Making a schedule takes longer than pricing it, so a planner gives a lower bound of its schedule's cost beforehand
(`Planner.floor`). Candidates are made in order of that floor, and as soon as one is as fast as the floor of the next,
the rest need not be made: none of them can be faster.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import ClassVar, Self, final

from meshmend.cost import Hardware, StepDemand, find_hardware
from meshmend.cost.hardware import MODES, Mode, Network
from meshmend.cost.predict import asynchronous_seconds
from meshmend.cost.step_demand import CORES_PER_MESSAGE
from meshmend.errors import ParameterError, PlanError
from meshmend.planning.base import Floor, Planner, Unsupported
from meshmend.planning.derived import Derived
from meshmend.planning.gather import Gather
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
FEWER_CHUNKS = 13
"""How often the number of chunks that would fill links is divided by the square root of two."""

OTHER_COSTS = (1 / 16, 1 / 4, 4.0, 16.0)
"""Where what a step costs depends on the plan, planners are also asked as if it cost so many times as much."""


@dataclass(frozen=True)
class Candidate:
    """A planner with its parameters, and what is known about its time.

    `seconds` is None where the schedule was not made because `floor_seconds` ruled it out, and both are None where
    the planner cannot serve the mesh, for the reason `unsupported_reason`.
    """

    planner: Planner
    floor_seconds: float | None
    seconds: float | None
    unsupported_reason: str | None = None


@dataclass(frozen=True)
class Choice:
    """The fastest schedule, and everything that was considered, fastest first."""

    schedule: Schedule
    planner: Planner
    seconds: float
    considered: tuple[Candidate, ...]


class AutoPlanner(Planner):
    """A planner that takes the fastest of several for a payload on hardware, as predicted for how its engine waits."""

    payload_bytes: float
    hardware: str | Hardware
    mode: Mode
    _known: ClassVar[Candidates | None] = None
    """The candidates for the mesh that this planner was admitted for; only what `admit` returns has any."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ParameterError(f"mode is {self.mode!r}, expected one of: {', '.join(MODES)}.")
        object.__setattr__(self, "hardware", find_hardware(self.hardware))
        is_number = isinstance(self.payload_bytes, Real) and not isinstance(self.payload_bytes, bool)
        if not is_number or not 0 < self.payload_bytes < float("inf"):
            raise ParameterError(f"payload_bytes is {self.payload_bytes!r}, expected a positive number of bytes.")
        object.__setattr__(self, "payload_bytes", float(self.payload_bytes))

    @abstractmethod
    def candidates_for(self, mesh: Mesh) -> Candidates:
        """Return the candidates for a mesh."""

    @final
    def choose(self, mesh: Mesh) -> Choice:
        """Return the fastest schedule together with what was considered."""
        return self._candidates(mesh).choose(self.payload_bytes, find_hardware(self.hardware), self.mode)

    @final
    def n_transfers(self, mesh: Mesh) -> int:
        """Return the size of the largest schedule that may be taken."""
        variants = self._candidates(mesh).variants(self.payload_bytes, find_hardware(self.hardware), self.mode)
        return max(variant.n_transfers(mesh) for variant in variants)

    @final
    def is_routed(self, mesh: Mesh, phase: str) -> bool:  # noqa: ARG002
        """Say so of every phase: the planner that is taken has held its schedule to what it claims already."""
        return True

    @final
    def _check(self, mesh: Mesh) -> None:
        reason = self._candidates(mesh).unsupported_reason
        if reason is not None:
            raise Unsupported(reason)

    @final
    def _plan(self, mesh: Mesh) -> Schedule:
        return self.choose(mesh).schedule

    @final
    def _ready_for(self, mesh: Mesh) -> Self:
        ready = copy.copy(self)
        object.__setattr__(ready, "_known", self._candidates(mesh))
        return ready

    def _candidates(self, mesh: Mesh) -> Candidates:
        known = self._known
        return known if known is not None and known.mesh == mesh else self.candidates_for(mesh)


@final
@dataclass(frozen=True)
class Auto(AutoPlanner):
    """The fastest of all planners for a payload on a piece of hardware.

    `owners` and `budget_s` are as for `Weave`, the only planner that has a choice of owners and takes long.
    A reduce-scatter or an all-gather is planned as such, or is half of an all-reduce, whichever is faster.

    `mode` is how the engine waits that will run the schedule. In "lock-step", as XLA's loops do, every step costs its
    latency. An "asynchronous" engine, as PyTorch's, waits only for its input data. Plans then leave slack between a
    chunk's arrival and its being sent on, and links stay busy while latency passes.

    Neither payload nor hardware has a default here: who forgets them would run a plan for somebody else's.

    >>> choice = Auto(payload_bytes=1e9, hardware="tpu-v3").choose(Mesh("8x8", failed=["2x2@2,2"]))
    >>> choice.planner.name, [c.planner.name for c in choice.considered if c.unsupported_reason]
    ('weave', ['two-color'])
    """

    name: ClassVar[str] = "auto"

    payload_bytes: float
    hardware: str | Hardware
    collective: Collective = Collective.ALL_REDUCE
    owners: Owners = "any"
    budget_s: float = DEFAULT_BUDGET_S
    mode: Mode = "lock-step"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "collective", Collective(self.collective))

    def candidates_for(self, mesh: Mesh) -> Candidates:
        """Return every planner."""
        return Candidates(mesh, candidates(self.collective, Weave(owners=self.owners, budget_s=self.budget_s)))


@final
@dataclass(frozen=True)
class Tuned(AutoPlanner):
    """One planner with its fastest parameters for a payload on a piece of hardware; those named in `fixed` stay.

    >>> [Tuned(Weave(), size, "tpu-v3").plan(Mesh("8x8")).total_chunks for size in (1e4, 1e6, 1e9)]
    [2, 23, 724]
    """

    planner: Planner
    payload_bytes: float
    hardware: str | Hardware
    fixed: tuple[str, ...] = ()
    mode: Mode = "lock-step"

    @property
    def name(self) -> str:  # type: ignore[override]  # other planners' names belong to the class
        """The name of its planner: tuning does not make it another planner."""
        return self.planner.name

    @property
    def collective(self) -> Collective:  # type: ignore[override]
        """The collective that its planner plans."""
        return self.planner.collective

    @property
    def is_splittable(self) -> bool:  # type: ignore[override]
        """Whether its planner is splittable."""
        return self.planner.is_splittable

    def with_even_owners(self) -> Tuned:
        """Return the same for its planner with even owners."""
        return replace(self, planner=self.planner.with_even_owners())

    def candidates_for(self, mesh: Mesh) -> Candidates:
        """Return the planner alone."""
        return Candidates(mesh, [self.planner], fixed=self.fixed)


def candidates(collective: Collective, weave: Weave | None = None) -> list[Planner]:
    """Return the planners that `auto` chooses from, with their default parameters; `weave` with those that it has."""
    whole = [weave or kind() if kind is Weave else kind() for kind in CHOICES]
    if collective is Collective.ALL_REDUCE:
        return whole
    derived: list[Planner] = [Derived(planner, collective) for planner in whole]
    return derived if collective.is_all_reduce else [Gather(collective=collective), *derived]


class Candidates:
    """All candidates for one mesh. Schedules are made when first needed and kept: many payloads cost little more.

    The parameters named in `fixed` stay.
    """

    def __init__(self, mesh: Mesh, planners: Sequence[Planner], *, fixed: Sequence[str] = ()) -> None:
        self.mesh = mesh
        self._fixed = fixed
        self._able: dict[Planner, Planner] = {}  # each with what is ready to make its schedule
        self._refused: list[Candidate] = []
        for planner in dict.fromkeys(planners):
            try:
                self._able[planner] = planner.admit(mesh)
            except Unsupported as refusal:
                self._refused.append(Candidate(planner, None, None, refusal.reason))
        self._made: dict[Planner, StepDemand] = {}
        self._asked: dict[tuple[float, Hardware, Mode], list[Planner]] = {}

    @property
    def unsupported_reason(self) -> str | None:
        """Why no candidate serves the mesh, or None if one does."""
        if self._able:
            return None
        if len({candidate.unsupported_reason for candidate in self._refused}) == 1:
            return self._refused[0].unsupported_reason
        return " ".join(f"{candidate.planner.name}: {candidate.unsupported_reason}" for candidate in self._refused)

    def variants(self, payload_bytes: float, hardware: Hardware, mode: Mode = "lock-step") -> list[Planner]:
        """Return the planners that can serve the mesh, each with every set of parameters that is worth trying."""
        asked = (payload_bytes, hardware, mode)
        if asked not in self._asked:
            ask = self._slack_variants if mode == "asynchronous" else self._step_variants
            found: list[Planner] = []
            for planner in self._able:
                tried = dict.fromkeys(ask(planner, payload_bytes, hardware))
                kept = [one for one in tried if all(getattr(one, n) == getattr(planner, n) for n in self._fixed)]
                found += kept or [planner]
            self._asked[asked] = found
        return self._asked[asked]

    def _step_variants(self, planner: Planner, payload_bytes: float, hardware: Hardware) -> list[Planner]:
        """Return those for an engine that waits for the end of each step."""
        messages: float = self.mesh.n_directions
        if hardware.shared_cores is not None:
            messages *= self.mesh.n_chips / hardware.shared_cores
        step_s = hardware.step_latency_s + hardware.hop_latency_s + hardware.message_s * messages
        step_cost = step_s * hardware.link_bytes_per_s / payload_bytes
        costs = [step_cost]
        if hardware.network is Network.CORES:
            # Chunks fill no links there: a few keep all cores busy, however long the payload is.
            costs = [step_cost * 2.0**i for i in range(FEWER_CHUNKS + 1)]
        elif hardware.message_s or hardware.network is Network.PAIRS:
            # How many messages a step has, and what they share, is the planner's own affair: ask for more and fewer.
            costs = [step_cost * factor for factor in (1.0, *OTHER_COSTS)]
        return [variant for cost in costs for variant in planner.variants(self.mesh, cost)]

    def _slack_variants(self, planner: Planner, payload_bytes: float, hardware: Hardware) -> Sequence[Planner]:
        """Return the same for an engine that waits for its data alone."""
        unit = payload_bytes / hardware.link_bytes_per_s
        message_s = hardware.message_s
        if hardware.shared_cores is not None:
            message_s *= self.mesh.n_chips / hardware.shared_cores
        latency_s = hardware.step_latency_s + hardware.hop_latency_s + 2 * hardware.message_s
        return planner.slack_variants(self.mesh, latency_s / unit, message_s / unit)

    def choose(self, payload_bytes: float, hardware: Hardware, mode: Mode = "lock-step") -> Choice:
        """Return the fastest of the candidates, by the prediction for `mode`."""
        if self.unsupported_reason is not None:
            raise PlanError(Auto.name, str(self.mesh), self.unsupported_reason)
        floors = {
            variant: _floor_seconds(variant.floor(self.mesh), payload_bytes, hardware, mode)
            for variant in self.variants(payload_bytes, hardware, mode)
        }
        times: dict[Planner, float] = {}
        fastest = float("inf")
        for variant in sorted(floors, key=lambda variant: floors[variant]):
            if floors[variant] >= fastest:
                break
            if variant not in self._made:
                ready = self._able.get(variant)
                self._made[variant] = StepDemand(variant.plan(self.mesh) if ready is None else ready.make(self.mesh))
            times[variant] = _time(self._made[variant], payload_bytes, hardware, mode)
            fastest = min(fastest, times[variant])
        made = sorted(times, key=lambda variant: times[variant])
        ruled_out = sorted((v for v in floors if v not in times), key=lambda variant: floors[variant])
        ranked = [Candidate(variant, floors[variant], times.get(variant)) for variant in (*made, *ruled_out)]
        return Choice(self._made[made[0]].schedule, made[0], fastest, (*ranked, *self._refused))


def _time(demand: StepDemand, payload_bytes: float, hardware: Hardware, mode: Mode) -> float:
    """Return how long a schedule takes."""
    if mode == "asynchronous":
        return asynchronous_seconds(demand, payload_bytes, hardware)
    return demand.seconds(payload_bytes, hardware)


def _floor_seconds(floor: Floor, payload_bytes: float, hardware: Hardware, mode: Mode) -> float:
    """Price a floor: every step has a transfer of at least one hop, and moves at least its share of the payload.

    Chips share no links unless those are the mesh's cables, and what a chip can drive at once is all that limits it.
    Where nobody waits for the end of a step, its latency passes while others move their data.
    """
    unit = payload_bytes / hardware.link_bytes_per_s
    moving = floor.link_load * unit if hardware.network is Network.CABLES else 0.0
    if hardware.links_at_once is not None:
        moving = max(moving, floor.chip_load * unit / hardware.links_at_once)
    if mode == "asynchronous":
        return hardware.start_s + moving
    moving += floor.steps * hardware.hop_latency_s
    # A step has a message at least.
    message_s = hardware.message_s / (1 if hardware.shared_cores is None else CORES_PER_MESSAGE)
    starting = hardware.start_s + floor.steps * (hardware.step_latency_s + message_s)
    return starting + moving
