"""Predict: how long a schedule takes on given hardware, before anybody runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshmend.cost.asynchronous import arrivals
from meshmend.cost.bound import bound
from meshmend.cost.hardware import DEFAULT_HARDWARE, Hardware, find_hardware
from meshmend.cost.profile import StepProfile
from meshmend.cost.units import name_bytes, name_seconds
from meshmend.errors import Coordinate, ParameterError, name_chip
from meshmend.schedule import Schedule

Mode = Literal["lock-step", "asynchronous"]
MODES: tuple[Mode, ...] = ("lock-step", "asynchronous")

N_BUSIEST = 5
"""Links named in a forecast."""


@dataclass(frozen=True)
class BusyLink:
    """A link and the fraction of the payload that it carries."""

    src: Coordinate
    dst: Coordinate
    load: float

    def __str__(self) -> str:
        return f"{name_chip(self.src)}→{name_chip(self.dst)}"


@dataclass(frozen=True)
class Forecast:
    """What `predict` foresees.

    `bound_seconds` is the least time that any schedule could take by bandwidth alone, `ratio_to_bound` how far
    this one is from it. `by_phase` sums to `seconds`. In lock-step, the time of a step is shared among the phases
    in it by the chunks that they move. Asynchronously phases overlap freely, so each is given the time from the
    end of the phase that ended before it to its own end.
    """

    seconds: float
    bound_seconds: float
    payload_bytes: float
    hardware: Hardware
    mode: Mode
    busiest_link_load: float
    busiest_links: tuple[BusyLink, ...]
    by_phase: dict[str, float]

    @property
    def ratio_to_bound(self) -> float:
        """Time over bound; 1 where there is nothing to do."""
        return self.seconds / self.bound_seconds if self.bound_seconds else 1.0

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {name_seconds(seconds)}" for name, seconds in self.by_phase.items())
        return (
            f"{name_seconds(self.seconds)} for {name_bytes(self.payload_bytes)} on {self.hardware.name} ({self.mode}), "
            f"{self.ratio_to_bound:.3f}× the bound of {name_seconds(self.bound_seconds)}; {phases}"
        )


def predict(
    schedule: Schedule,
    payload_bytes: float,
    hardware: str | Hardware = DEFAULT_HARDWARE,
    *,
    mode: Mode = "lock-step",
    profile: StepProfile | None = None,
) -> Forecast:
    """Say how long `schedule` takes for `payload_bytes` a chip on `hardware` (a preset's name, or your own).

    Lock-step engines wait for each other after every step, so a step lasts as long as its busiest link.
    Asynchronous ones wait for nothing but their data and their links. To predict many payloads, make the
    schedule's profile once and pass it, or ask it for `profile.seconds(payload_bytes, hardware)` alone.

    >>> from meshmend import Mesh, plan
    >>> print(predict(plan(Mesh("4x4"), "hamiltonian"), 1e9, "ideal"))
    937.5 ms for 1 GB on ideal (lock-step), 1.500× the bound of 625 ms; ring: reduce-scatter 468.8 ms, ...
    """
    if not 0 <= payload_bytes < float("inf"):
        raise ParameterError(f"payload_bytes is {payload_bytes}, expected a number of bytes, 0 or more.")
    if mode not in MODES:
        raise ParameterError(f"mode is {mode!r}, expected one of: {', '.join(MODES)}.")
    chosen = find_hardware(hardware)
    if profile is not None and profile.schedule is not schedule and profile.schedule != schedule:
        raise ParameterError(
            f"The profile is of another schedule, {profile.schedule!r}, expected one of {schedule!r}. "
            f"Make it with StepProfile(schedule), or leave it out."
        )
    known = profile or StepProfile(schedule)
    if mode == "lock-step":
        by_phase = _lock_step_phases(known, payload_bytes, chosen)
    else:
        by_phase = _asynchronous_phases(known, payload_bytes, chosen)
    least = bound(schedule.mesh, links_at_once=chosen.links_at_once, collective=schedule.collective)
    busiest = _busiest(known)
    return Forecast(
        seconds=sum(by_phase.values()),
        bound_seconds=least.seconds(payload_bytes, chosen.link_bytes_per_s),
        payload_bytes=payload_bytes,
        hardware=chosen,
        mode=mode,
        busiest_link_load=busiest[0].load if busiest else 0.0,
        busiest_links=busiest,
        by_phase=by_phase,
    )


def _lock_step_phases(profile: StepProfile, payload_bytes: float, hardware: Hardware) -> dict[str, float]:
    shares = profile.step_seconds(payload_bytes, hardware) @ profile.phase_shares
    return _by_name(profile.schedule, shares)


def _asynchronous_phases(profile: StepProfile, payload_bytes: float, hardware: Hardware) -> dict[str, float]:
    schedule = profile.schedule
    arrived = arrivals(schedule, profile.crossings, payload_bytes, hardware)
    ends = np.zeros(len(schedule.phase_names))
    np.maximum.at(ends, schedule.phase, arrived)
    order = np.argsort(ends, kind="stable")
    took = np.empty(len(ends))
    took[order] = np.diff(ends[order], prepend=0.0)
    return _by_name(schedule, took)


def _by_name(schedule: Schedule, seconds: NDArray[np.float64]) -> dict[str, float]:
    """Sum the seconds of each phase by its name, in order of first step: nothing says that names differ."""
    total = dict.fromkeys((phase.name for phase in schedule.phases), 0.0)
    for name, own in zip(schedule.phase_names, seconds.tolist(), strict=True):
        if name in total:
            total[name] += own
    return total


def _busiest(profile: StepProfile) -> tuple[BusyLink, ...]:
    load = profile.link_load
    top = np.argsort(-load, kind="stable")[:N_BUSIEST]
    mesh = profile.schedule.mesh
    return tuple(BusyLink(*mesh.link_ends(int(link)), float(load[link])) for link in top if load[link] > 0)
