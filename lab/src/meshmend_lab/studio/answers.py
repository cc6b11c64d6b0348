"""Answers: what the page is told about a state. Plain functions from a state to what becomes JSON.

Each runs in a process of its own (`workers`), so that one that nobody waits for any more can be stopped. What becomes
known bit by bit, such as the rows of a table, is a generator.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.cost import Forecast, predict
from meshmend.cost.paths import link_time
from meshmend.cost.units import format_bytes, name_seconds
from meshmend.drawing.film import film
from meshmend.drawing.geometry import FigureLayout, strokes
from meshmend.drawing.page import film_facts
from meshmend.planning import Auto, choose, plan
from meshmend.planning.auto import CHOICES, AutoPlanner
from meshmend.planning.compare import price
from meshmend.schedule import Schedule
from meshmend.schedule.serialize import save
from meshmend.schedule.verify import verify
from meshmend.topology import Mesh, Region, name_cable
from meshmend_lab.availability.boxes import largest_box, part_of
from meshmend_lab.studio.state import State, whole_machine

Facts = dict[str, Any]
MAX_FILM_STEPS = 600
"""Steps that are shown one by one: a longer schedule repeats itself in between."""


@lru_cache(maxsize=16)
def layout(shape: str, wrap: str) -> Facts:
    """Return where the chips and the cables of a machine lie, as the mesh view draws them.

    >>> found = layout("2x2", "none")
    >>> found["chips"][3], found["cables"][0]
    ({'name': '1,1', 'at': [1, 1], 'x': 1.0, 'y': 1.0}, {'name': '0,0-1,0', 'lines': [[0.0, 0.0, 0.0, 1.0]]})
    """
    machine = whole_machine(shape, wrap)
    positions = FigureLayout(machine)
    chips = machine.coords.tolist()
    ends = np.sort(machine.cables, axis=1)
    lines = strokes(positions, *ends.T, chip=0.0)
    return {
        "shape": list(machine.shape),
        "wrap": list(machine.wrap),
        "box": positions.box,
        "chips": [
            {"name": ",".join(map(str, chip)), "at": chip, "x": x, "y": y}
            for chip, (x, y) in zip(chips, positions.live.tolist(), strict=True)
        ],
        "cables": [
            {
                "name": name_cable((machine.chip(line.src), machine.chip(line.dst))),
                "lines": [np.round(piece, 3).ravel().tolist() for piece in line.pieces],
            }
            for line in lines
        ],
    }


def answer(state: State) -> Facts:
    """Return the plan of a state, its proof, its predicted time, the bound, and what each link carries."""
    started = time.process_time()
    schedule = _schedule(state)
    proof = verify(schedule)
    forecast = predict(schedule, state.payload_bytes, state.chosen_hardware)
    mesh = schedule.mesh
    return {
        "mesh": str(mesh),
        "chips": mesh.n_chips,
        "size": mesh.size,
        "planner": schedule.planner,
        "collective": str(schedule.collective),
        "steps": schedule.n_steps,
        "chunks": schedule.total_chunks,
        "transfers": schedule.n_transfers,
        "verified": True,
        "proof": str(proof),
        "proof_method": proof.method,
        "false_pass_probability": proof.false_pass_probability,
        **_times(forecast),
        "payload": format_bytes(forecast.payload_bytes),
        "hardware": str(forecast.hardware),
        "bound_why": forecast.bound.why,
        "bound_is_exact": forecast.bound.is_exact,
        "bound_units": forecast.bound.units,
        "gap": [{"part": part, "seconds": seconds} for part, seconds in forecast.gap.parts.items()],
        "links": _links(schedule),
        "busiest": forecast.busiest_link_load,
        "command": state.command,
        "cpu_seconds": time.process_time() - started,
    }


def alternatives(state: State) -> Iterator[Facts]:
    """Yield one row per alternative: every planner, the largest healthy rectangle, and the machine without failures.

    Every planner has the best of its parameters for this payload on this hardware, within the state's budget. The
    schedules are not proven here: nothing runs them.
    """
    mesh = state.mesh
    for kind in CHOICES:
        yield _row(state, mesh, kind.name, kind.name)
    if mesh.n_chips < mesh.size:
        part, box = _healthy_part(mesh)
        detail = f"{box}: {part.n_chips:,} chips, {part.n_chips / mesh.n_chips:.0%} of those that live"
        yield {**_row(state, part, "sub-mesh", Auto.name), "detail": detail}
    if not mesh.is_full or mesh.has_slow_cables:
        whole = Mesh(mesh.shape, wrap=mesh.wrap)
        yield {**_row(state, whole, "no failures", Auto.name), "detail": f"{whole.size:,} chips"}


def steps(state: State) -> Facts:
    """Return the steps of the plan, as the step-by-step page of `meshmend draw` has them."""
    schedule = _schedule(state)
    verify(schedule)
    last = min(schedule.n_steps, MAX_FILM_STEPS) - 1
    return film_facts(film(schedule, (0, last) if last >= 0 else None))


def plan_file(state: State) -> bytes:
    """Return the plan, proven, as the file that `meshmend plan --save` writes."""
    schedule = _schedule(state)
    verify(schedule)
    with tempfile.TemporaryDirectory(prefix="meshmend-") as folder:
        path = Path(folder) / "plan.npz"
        save(schedule, path)
        return path.read_bytes()


def _schedule(state: State) -> Schedule:
    """Return the state's plan, not yet proven. The same state gives the same plan: work is counted, not timed."""
    planner = state.made_planner()
    if isinstance(planner, AutoPlanner):
        return choose(state.mesh, planner).schedule
    return plan(state.mesh, planner, verify=False)


def _times(forecast: Forecast) -> Facts:
    return {
        "seconds": forecast.seconds,
        "time": name_seconds(forecast.seconds),
        "bound_seconds": forecast.bound_seconds,
        "bound": name_seconds(forecast.bound_seconds),
        "least": name_seconds(forecast.least_seconds),
        "ratio": forecast.ratio_to_bound,
    }


def _links(schedule: Schedule) -> dict[str, list[float]]:
    """Return how long both links of each cable are busy, in units of M/b: away from its smaller end, and towards it."""
    mesh = schedule.mesh
    busy = np.round(link_time(schedule), 6)
    low, high = np.sort(mesh.cables, axis=1).T
    there, back = busy[mesh.link(low, high)].tolist(), busy[mesh.link(high, low)].tolist()
    names = [name_cable((mesh.chip(a), mesh.chip(b))) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    return {name: [a, b] for name, a, b in zip(names, there, back, strict=True)}


def _row(state: State, mesh: Mesh, name: str, planner: str) -> Facts:
    found = price(state.made_planner(planner), mesh, state.payload_bytes, state.chosen_hardware)
    if found.forecast is None:
        return {"name": name, "unsupported_reason": found.unsupported_reason}
    return {
        "name": name,
        "unsupported_reason": None,
        **_times(found.forecast),
        "steps": found.figures["steps"],
        "detail": "" if found.taken == name else found.taken,
    }


def _healthy_part(mesh: Mesh) -> tuple[Mesh, Region]:
    """Return the largest box of live chips as a mesh of its own, with the failed and slow cables inside it."""
    box = largest_box(mesh.live)
    assert box is not None  # noqa: S101  # a mesh has a live chip
    return part_of(mesh, box), box
