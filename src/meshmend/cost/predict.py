"""Predict: how long a schedule takes on given hardware, without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.cost.asynchronous import arrivals
from meshmend.cost.bound import Bound, bound
from meshmend.cost.hardware import DEFAULT_HARDWARE, MODES, Hardware, Mode, Network, find_hardware
from meshmend.cost.paths import TransferPaths
from meshmend.cost.step_demand import StepDemand
from meshmend.cost.units import format_bytes, name_seconds
from meshmend.errors import Coordinate, ParameterError, name_chip
from meshmend.schedule import Schedule

N_BUSIEST = 5
"""Links named in a forecast."""
MAX_FOLLOWED = 2**22
"""Transfers of a repeated schedule that are followed one by one in the asynchronous mode."""
ROUNDING = 1e-12
"""What a difference of two forecasts may be off by, relative to the longer one."""


@dataclass(frozen=True)
class Gap:
    """The seconds of a forecast, by what they are spent on, from the bound to the last microsecond.

    The parts are differences between forecasts of the same schedule on hardware that is made less ideal one limit at a
    time, so they add up to the forecast:

    1. *bandwidth*: the bound. No schedule needs less, however well it uses the cables.
    2. *uneven load*: the busiest link carries more than the bound requires.
    3. *filling and draining*: that link is idle at times, on ideal hardware. The first chunks are still on their way to
       it, the last have left it, or (in lock-step) it waits for busier links.
    4. *latency*: the hops.
    5. *engine limits*: what the start, each step and each message cost, and links that a chip cannot drive at once. On
       a switched network some of it is won back: there no transfers share a link.

    In lock-step, over the links of a mesh, no part is negative. In the asynchronous mode a queue may be served in
    another order on other hardware, so that a part can be a little below 0.
    """

    bandwidth: float
    uneven_load: float
    filling_and_draining: float
    latency: float
    engine_limits: float

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part, by its name in prose, in the order of the list above; rounding errors are 0."""
        parts = {field.name.replace("_", " "): getattr(self, field.name) for field in dataclasses.fields(self)}
        nothing = sum(parts.values()) * ROUNDING
        return {name: 0.0 if abs(seconds) <= nothing else seconds for name, seconds in parts.items()}


def decompose(
    seconds_on: Callable[[Hardware], float],
    hardware: Hardware,
    *,
    bound_seconds: float,
    busiest_seconds: float,
) -> Gap:
    """Return where `seconds_on(hardware)` goes.

    `bound_seconds` is the bound where chips drive all their links, and `busiest_seconds` how long the busiest link
    takes for all that it carries.
    """
    hops_only = Hardware(hardware.name, hardware.link_bytes_per_s, hop_latency_s=hardware.hop_latency_s)
    ideal = dataclasses.replace(hops_only, hop_latency_s=0.0)
    on_hardware = seconds_on(hardware)
    on_hops = on_hardware if hops_only.priced == hardware.priced else seconds_on(hops_only)
    on_ideal = on_hops if ideal.priced == hops_only.priced else seconds_on(ideal)
    return Gap(
        bandwidth=bound_seconds,
        uneven_load=busiest_seconds - bound_seconds,
        filling_and_draining=on_ideal - busiest_seconds,
        latency=on_hops - on_ideal,
        engine_limits=on_hardware - on_hops,
    )


@dataclass(frozen=True)
class BusyLink:
    """A link, the fraction of the payload that it carries, and its rate."""

    src: Coordinate
    dst: Coordinate
    load: float
    rate: float = 1.0

    @property
    def time(self) -> float:
        """How long it is busy, in units of M/b."""
        return self.load / self.rate

    def __str__(self) -> str:
        return f"{name_chip(self.src)}→{name_chip(self.dst)}"


@dataclass(frozen=True)
class Forecast:
    """The result of `predict`.

    `bound_seconds` is the least time that any schedule could take by bandwidth alone; for a reduce-scatter or an
    all-gather, any with the same owners. `bound` says what limits it, and `ratio_to_bound` how far this one is.
    `by_phase` sums to `seconds`. In lock-step, the time of a step is shared among the phases in it by the chunks that
    they move. Asynchronously phases overlap freely, so each is given the time from the end of the phase that ended
    before it to its own end. `least_seconds` is the least time with latency. `gap` sums to `seconds` as well, and says
    what keeps them from the bound.
    """

    seconds: float
    bound: Bound
    payload_bytes: float
    hardware: Hardware
    mode: Mode
    busiest_link_load: float
    busiest_links: tuple[BusyLink, ...]
    by_phase: dict[str, float]
    gap: Gap

    @property
    def bound_seconds(self) -> float:
        """The bound for this payload over these links."""
        return self.bound.seconds(self.payload_bytes, self.hardware.link_bytes_per_s)

    @property
    def least_seconds(self) -> float:
        """The least time of any schedule on this hardware, with what steps and hops cost at least."""
        return self.bound.least_seconds(self.payload_bytes, self.hardware.link_bytes_per_s)

    @property
    def ratio_to_bound(self) -> float:
        """Time over bound; 1 where there is nothing to do."""
        return self.seconds / self.bound_seconds if self.bound_seconds else 1.0

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {name_seconds(seconds)}" for name, seconds in self.by_phase.items())
        return (
            f"{name_seconds(self.seconds)} for {format_bytes(self.payload_bytes)} on {self.hardware.name} "
            f"({self.mode}), {self.ratio_to_bound:.3f}× the bound of {name_seconds(self.bound_seconds)}; {phases}"
        )


def predict(
    schedule: Schedule,
    payload_bytes: float,
    hardware: str | Hardware = DEFAULT_HARDWARE,
    *,
    mode: Mode = "lock-step",
) -> Forecast:
    """Predict how long `schedule` takes for `payload_bytes` per chip on `hardware` (a preset's name, or your own).

    Lock-step engines wait for each other after every step, so a step lasts as long as its busiest link.
    Asynchronous ones wait only for their data and their links. To price many payloads in lock-step, make the schedule's
    `StepDemand` once, and ask it for `seconds(payload_bytes, hardware)`.

    >>> from meshmend import Mesh, plan
    >>> print(predict(plan(Mesh("4x4"), "hamiltonian"), 1e9, "ideal"))
    937.5 ms for 1 GB on ideal (lock-step), 1.500× the bound of 625 ms; ring: reduce-scatter 468.8 ms, ...
    """
    if not 0 <= payload_bytes < float("inf"):
        raise ParameterError(f"payload_bytes is {payload_bytes}, expected a number of bytes, 0 or more.")
    if mode not in MODES:
        raise ParameterError(f"mode is {mode!r}, expected one of: {', '.join(MODES)}.")
    chosen = find_hardware(hardware)
    known = StepDemand(schedule)
    by_phase = _by_phase(known, payload_bytes, chosen, mode)
    seconds = sum(by_phase.values())
    busiest = _busiest(known)

    def seconds_on(other: Hardware) -> float:
        return seconds if other == chosen else sum(_by_phase(known, payload_bytes, other, mode).values())

    return Forecast(
        seconds=seconds,
        bound=bound_of(schedule, chosen, mode),
        payload_bytes=payload_bytes,
        hardware=chosen,
        mode=mode,
        busiest_link_load=busiest[0].time if busiest else 0.0,
        busiest_links=busiest,
        by_phase=by_phase,
        gap=decompose(
            seconds_on,
            chosen,
            bound_seconds=bound_of(schedule).seconds(payload_bytes, chosen.link_bytes_per_s),
            busiest_seconds=busiest[0].time * payload_bytes / chosen.link_bytes_per_s if busiest else 0.0,
        ),
    )


def bound_of(schedule: Schedule, hardware: Hardware | None = None, mode: Mode = "lock-step") -> Bound:
    """Return the bound of a schedule's collective; only that of an all-reduce does not depend on the owners' shares."""
    shares: tuple[int, ...] | None = None
    if not schedule.collective.is_all_reduce:
        owned = np.bincount(schedule.owners, minlength=schedule.mesh.n_chips)
        shares = None if (owned == owned[0]).all() else tuple((owned // np.gcd.reduce(owned)).tolist())
    return bound(schedule.mesh, collective=schedule.collective, shares=shares, hardware=hardware, mode=mode)


def _by_phase(demand: StepDemand, payload_bytes: float, hardware: Hardware, mode: Mode) -> dict[str, float]:
    """Return the seconds of the phases in order of first step, summed by name: nothing says that names differ."""
    if mode == "lock-step":
        took = demand.phase_seconds(payload_bytes, hardware)
    else:
        ends = _phase_ends(demand, payload_bytes, hardware)
        order, took = np.argsort(ends, kind="stable"), np.empty(len(ends))
        took[order] = np.diff(ends[order], prepend=0.0)
    total = dict.fromkeys((phase.name for phase in demand.schedule.phases), 0.0)
    for name, own in zip(demand.schedule.phase_names, took.tolist(), strict=True):
        if name in total:
            total[name] += own
    return total


def asynchronous_seconds(demand: StepDemand, payload_bytes: float, hardware: Hardware) -> float:
    """Return when the last transfer arrives, where chips wait only for their data and their links."""
    return float(_phase_ends(demand, payload_bytes, hardware).max(initial=0.0))


def _phase_ends(demand: StepDemand, payload_bytes: float, hardware: Hardware) -> NDArray[np.float64]:
    """Return when the last transfer of each phase arrives.

    Of a long repeated schedule two shorter ones are followed, and the rest is taken to go on at the pace between them.
    """
    schedule = demand.schedule
    if schedule.n_transfers <= MAX_FOLLOWED or schedule.repeats == 1:
        known = demand.paths if schedule.repeats == 1 and hardware.network is Network.CABLES else None
        return _ends(schedule, known, payload_bytes, hardware)
    template, period = schedule.template, schedule.period
    overlapping = -(-template.n_steps // period)
    follow = MAX_FOLLOWED // template.n_transfers
    # Where latency counts, the pace goes up and down for about four times as many repeats as overlap.
    long = min(schedule.repeats, max(2 * overlapping, min(4 * overlapping, 4 * follow), follow))
    short = max(1, long // 2)
    ends = []
    for repeats in (short, long):
        part = template.repeated(repeats, period)
        share = payload_bytes * repeats / schedule.repeats
        ends.append(_ends(part, None, share, hardware))
    pace = (ends[1] - ends[0]) / (long - short)
    return np.asarray(ends[1] + (schedule.repeats - long) * pace)


def _ends(
    schedule: Schedule, paths: TransferPaths | None, payload_bytes: float, hardware: Hardware
) -> NDArray[np.float64]:
    if paths is None:
        paths = (TransferPaths.of if hardware.network is Network.CABLES else TransferPaths.switched)(schedule)
    arrived = arrivals(schedule, paths, payload_bytes, hardware)
    ends = np.zeros(len(schedule.phase_names))
    np.maximum.at(ends, schedule.phase, arrived)
    return ends


def _busiest(demand: StepDemand) -> tuple[BusyLink, ...]:
    load, mesh = demand.link_load, demand.schedule.mesh
    top = np.argsort(-load / mesh.link_rates, kind="stable")[:N_BUSIEST]
    return tuple(
        BusyLink(*mesh.link_ends(int(link)), float(load[link]), float(mesh.link_rates[link]))
        for link in top
        if load[link] > 0
    )
