"""Compare: every planner that can serve a mesh, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshmend.cost.bound import Bound, bound
from meshmend.cost.hardware import DEFAULT_HARDWARE, Hardware, Mode, find_hardware
from meshmend.cost.predict import Forecast, predict
from meshmend.planning import PLANNERS, Auto, Planner, make_planner
from meshmend.schedule import Collective, Schedule
from meshmend.topology import Mesh

__all__ = ["Comparison", "PlannerResult", "compare"]


@dataclass(frozen=True)
class Column:
    """A figure of a schedule: `key` names it in `--json`; with a `heading` it has a column in the table as well."""

    key: str
    of: Callable[[Schedule], float]
    heading: str | None = None
    write: Callable[[float], str] = "{:,}".format


COLUMNS = (
    Column("steps", lambda schedule: schedule.n_steps, heading="steps"),
    Column("chunks", lambda schedule: schedule.total_chunks),
    Column("transfers", lambda schedule: schedule.n_transfers),
)
"""What `meshmend compare` tells of every schedule beside its times. A new figure is one more line here."""


@dataclass(frozen=True)
class PlannerResult:
    """A planner on a mesh: its forecast, or a sentence that says why it cannot serve the mesh.

    `figures` holds what `COLUMNS` asks of its schedule, by key.
    """

    planner: str
    taken: str = ""
    """The planner whose schedule it is: for `auto`, the one that it chose."""
    unsupported_reason: str | None = None
    forecast: Forecast | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    plan_seconds: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """All planners on one mesh, and the bound that they are held against."""

    mesh: Mesh
    collective: Collective
    bound: Bound
    hardware: Hardware
    payload_bytes: float
    mode: Mode
    entries: tuple[PlannerResult, ...]

    @property
    def bound_seconds(self) -> float:
        """The least time of any schedule for this payload, by bandwidth alone."""
        return self.bound.seconds(self.payload_bytes, self.hardware.link_bytes_per_s)


def compare(
    mesh: Mesh,
    payload_bytes: float,
    hardware: str | Hardware = DEFAULT_HARDWARE,
    *,
    collective: Collective = Collective.ALL_REDUCE,
    mode: Mode = "lock-step",
    on_planner: Callable[[str], None] | None = None,
    saved: Schedule | None = None,
) -> Comparison:
    """Predict every planner of `meshmend.planning.PLANNERS` on `mesh`, each as `plan` would tune it for the payload.

    The schedules are not proven here: nothing runs them. `on_planner` is called before each. `saved` is a schedule of
    `mesh` that comes last, as "saved plan". For a `collective` that is no all-reduce, planners of all-reduces show the
    half that they make on the way.

    >>> found = compare(Mesh("4x4"), 1e6, "ideal")
    >>> [(e.planner, round(e.forecast.ratio_to_bound, 2)) for e in found.entries if e.forecast]
    [('hamiltonian', 1.5), ...]
    """
    chosen = find_hardware(hardware)
    if not mesh.is_connected:
        Auto(payload_bytes, chosen).plan(mesh)  # raises what planning does: there is nothing to compare
    entries = []
    for name in PLANNERS:
        if on_planner is not None:
            on_planner(name)
        planner = make_planner(name, collective=collective, payload_bytes=payload_bytes, hardware=chosen, mode=mode)
        entries.append(price(planner, mesh, payload_bytes, chosen, mode))
    if saved is not None:
        entries.append(_priced("saved plan", saved, 0.0, payload_bytes, chosen, mode))
    least = bound(mesh, links_at_once=chosen.links_at_once, collective=collective)
    return Comparison(mesh, collective, least, chosen, payload_bytes, mode, tuple(entries))


def price(
    planner: Planner, mesh: Mesh, payload_bytes: float, hardware: Hardware, mode: Mode = "lock-step"
) -> PlannerResult:
    """Return one planner's row of a comparison."""
    unsupported_reason = planner.unsupported_reason(mesh)
    if unsupported_reason is not None:
        return PlannerResult(planner.name, unsupported_reason=unsupported_reason)
    started = time.perf_counter()
    schedule = planner.plan(mesh)
    return _priced(planner.name, schedule, time.perf_counter() - started, payload_bytes, hardware, mode)


def _priced(
    name: str, schedule: Schedule, plan_seconds: float, payload_bytes: float, hardware: Hardware, mode: Mode
) -> PlannerResult:
    return PlannerResult(
        name,
        taken=schedule.planner,
        forecast=predict(schedule, payload_bytes, hardware, mode=mode),
        figures={column.key: column.of(schedule) for column in COLUMNS},
        plan_seconds=plan_seconds,
    )
