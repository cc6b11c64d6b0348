"""Auto: predicts every planner that applies, over its own parameters, and takes the fastest.

Making a schedule takes longer than pricing it, so a planner says beforehand what its schedule costs at least
(`Planner.floor`). Candidates are made in order of that floor, and as soon as one is as fast as the floor of the next,
the rest need not be made: none of them can be faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from meshmend.cost import Hardware, StepProfile, find_hardware
from meshmend.errors import ParameterError
from meshmend.planning.base import Floor, Planner
from meshmend.planning.hamiltonian import Hamiltonian
from meshmend.planning.row_pairs import RowPairs
from meshmend.planning.two_color import TwoColor
from meshmend.planning.weave import Weave
from meshmend.schedule import Schedule
from meshmend.topology import Mesh

CHOICES: tuple[type[Planner], ...] = (Hamiltonian, TwoColor, RowPairs, Weave)
"""The planners to choose from."""


@dataclass(frozen=True)
class Candidate:
    """A planner with its parameters, and what is known of its time.

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


@final
@dataclass(frozen=True)
class Auto(Planner):
    """The fastest of all planners for a payload on a piece of hardware, by the lock-step prediction."""

    name: ClassVar[str] = "auto"

    payload_bytes: float = 1e8
    hardware: str | Hardware = "tpu-v3"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hardware", find_hardware(self.hardware))
        if not 0 < self.payload_bytes < float("inf"):
            raise ParameterError(f"payload_bytes is {self.payload_bytes}, expected a positive number of bytes.")

    def why_not(self, mesh: Mesh) -> str | None:
        """Say why no planner serves the mesh, or None."""
        reasons = {kind.name: kind().why_not(mesh) for kind in CHOICES}
        if None in reasons.values():
            return None
        return " ".join(f"{name}: {why}" for name, why in reasons.items())

    def plan(self, mesh: Mesh) -> Schedule:
        """Return the fastest schedule."""
        return self.choose(mesh).schedule

    def choose(self, mesh: Mesh) -> Choice:
        """Return the fastest schedule together with what was considered.

        >>> choice = Auto(payload_bytes=1e9).choose(Mesh("8x8", failed=["2x2@2,2"]))
        >>> choice.planner.name, [c.planner.name for c in choice.considered if c.why_not]
        ('weave', ['two-color'])
        """
        return Field(mesh).choose(self.payload_bytes, find_hardware(self.hardware))


class Field:
    """All candidates for one mesh. Schedules are made when first needed and kept: many payloads cost little more."""

    def __init__(self, mesh: Mesh) -> None:
        reasons = {kind(): kind().why_not(mesh) for kind in CHOICES}
        self._mesh = mesh
        self._refused = [Candidate(planner, None, None, why) for planner, why in reasons.items() if why is not None]
        self._able = [planner for planner, why in reasons.items() if why is None]
        self._made: dict[Planner, StepProfile] = {}

    def choose(self, payload_bytes: float, hardware: Hardware) -> Choice:
        """Return the fastest of the candidates, by the lock-step prediction."""
        if not self._able:
            raise ValueError(f"No planner serves {self._mesh}.")
        step_s = hardware.step_latency_s + hardware.hop_latency_s
        step_cost = step_s * hardware.link_bytes_per_s / payload_bytes
        variants = [variant for planner in self._able for variant in planner.variants(self._mesh, step_cost)]
        floors = {variant: _seconds(variant.floor(self._mesh), payload_bytes, hardware) for variant in variants}
        times: dict[Planner, float] = {}
        fastest = float("inf")
        for variant in sorted(floors, key=lambda variant: floors[variant]):
            if floors[variant] >= fastest:
                break
            if variant not in self._made:
                self._made[variant] = StepProfile(variant.plan(self._mesh))
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
