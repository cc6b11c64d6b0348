"""Answers: what the page is told about a state. Plain functions from a state to what becomes JSON.

Each runs in a process of its own (`workers`), so that one that nobody waits for any more can be stopped. `tell` sends
what is known already: rows of a table, the progress of a simulation.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.availability import Assumptions, Estimate, simulate
from meshmend.availability.rectangle import largest_box
from meshmend.availability.throughput import part_of
from meshmend.cost import Forecast, predict
from meshmend.cost.load import link_time
from meshmend.cost.units import format_bytes, name_seconds
from meshmend.drawing.film import film
from meshmend.drawing.geometry import FigureLayout, strokes
from meshmend.drawing.page import film_facts
from meshmend.errors import ParameterError, ScheduleFileError
from meshmend.machines import machine_of, parse_description
from meshmend.machines.machine import through_xla
from meshmend.planning import Auto, choose, plan
from meshmend.planning.auto import CHOICES, AutoPlanner
from meshmend.planning.compare import price
from meshmend.schedule import Schedule
from meshmend.schedule.serialize import load, save
from meshmend.schedule.verify import verify
from meshmend.studio.state import MAX_CHIPS, State, whole_machine
from meshmend.topology import Mesh, Region, name_cable, name_cable_rates, parse_shape

Facts = dict[str, Any]
Tell = Callable[[Facts], None]
MAX_FILM_STEPS = 600
"""Steps that are shown one by one: a longer schedule repeats itself in between."""
MAX_PLAN_BYTES = 2**28
"""Largest uploaded plan, unpacked: ten million transfers."""
DAYS, RUNS = 90.0, 4
"""A quick estimate of availability; `meshmend availability` simulates twenty years by default."""
BOARD = (2, 2)
"""Chips of a board, the default of `meshmend availability`; hosts that such boards do not tile have none."""


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


def answer(state: State, saved: UploadedPlan | None = None) -> Facts:
    """Return the plan of a state, its proof, its predicted time, the bound, and what each link carries."""
    started = time.process_time()
    schedule = _schedule(state, saved)
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
        "command": state.command(None if saved is None else saved.name),
        "cpu_seconds": time.process_time() - started,
    }


def alternatives(state: State, tell: Tell, saved: UploadedPlan | None = None) -> Facts:
    """Tell one row per alternative: every planner, the largest healthy rectangle, and the machine without failures.

    Every planner has the best of its parameters for this payload on this hardware, within the state's budget. The
    schedules are not proven here: nothing runs them.
    """
    mesh = state.mesh if saved is None else saved.load().mesh
    for row in _rows(state, mesh):
        tell(row)
    return {}


def steps(state: State, saved: UploadedPlan | None = None) -> Facts:
    """Return the steps of the plan, as the step-by-step page of `meshmend draw` has them."""
    schedule = _schedule(state, saved)
    verify(schedule)
    last = min(schedule.n_steps, MAX_FILM_STEPS) - 1
    return film_facts(film(schedule, (0, last) if last >= 0 else None))


def availability(state: State, tell: Tell, host: str = "4x2") -> Facts:
    """Return what each failure policy is worth on the whole machine: few runs, for a quick estimate.

    Slow cables stay, and the hardware is driven as in a job.
    """
    machine = state.mesh.whole
    shape, hardware = parse_shape(host), through_xla(state.hardware)
    board = BOARD if len(shape) == len(BOARD) and not any(n % b for n, b in zip(shape, BOARD, strict=True)) else None
    assumptions = Assumptions.of(machine, host=shape, board=board, payload_bytes=state.payload_bytes, hardware=hardware)
    tell({"run": 0, "runs": RUNS})
    study = simulate(
        assumptions, days=DAYS, runs=RUNS, checks=0, on_run=lambda run: tell({"run": run + 1, "runs": RUNS})
    )
    words = ["meshmend", "availability", *state.machine_words]
    for text in name_cable_rates(machine.cable_rates):
        words += ["--cable-rate", text]
    assumed = f"host={host},{'' if board is not None else 'board=none,'}payload_bytes={state.payload}"
    return {
        "days": study.days,
        "runs": study.runs,
        "hours_between_failures": 1 / assumptions.failures_per_h,
        "command": shlex.join([*words, "--assume", assumed, "--hardware", hardware]),
        "policies": [
            {"policy": outcome.name, "goodput": _estimate(outcome.goodput), "gain": _estimate(outcome.gain)}
            for outcome in study.outcomes
        ],
    }


def plan_file(state: State, saved: UploadedPlan | None = None) -> bytes:
    """Return the plan, proven, as the file that `meshmend plan --save` writes."""
    schedule = _schedule(state, saved)
    verify(schedule)
    with tempfile.TemporaryDirectory(prefix="meshmend-") as folder:
        path = Path(folder) / "plan.npz"
        save(schedule, path)
        return path.read_bytes()


class UploadedPlan:
    """An uploaded plan: where the server keeps it, and the name that it came with."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name

    def load(self) -> Schedule:
        """Return the schedule, which is untrusted and not proven yet."""
        try:
            schedule = load(self.path, max_bytes=MAX_PLAN_BYTES)
        except ScheduleFileError as error:
            raise ScheduleFileError(str(error).replace(str(self.path), self.name)) from None
        if schedule.mesh.size > MAX_CHIPS:
            raise ParameterError(
                f"{self.name} is a plan for {schedule.mesh.size:,} chips; the studio shows up to {MAX_CHIPS:,}. "
                f"Read it on a terminal: meshmend verify {self.name}"
            )
        return schedule


def read_plan(saved: UploadedPlan) -> Facts:
    """Return the state that shows an uploaded plan."""
    return {"state": _state_facts(State.of(saved.load().mesh)), "notes": []}


def read_machine(text: str, name: str) -> Facts:
    """Return the state of a machine as its own tools describe it, and what its reader has to say about it."""
    machine = machine_of(parse_description(text, name))
    mesh = machine.mesh
    if mesh.size > MAX_CHIPS:
        raise ParameterError(
            f"{name} describes {mesh.size:,} chips; the studio shows up to {MAX_CHIPS:,}. Plan it on a terminal: "
            f"meshmend plan --machine {name}"
        )
    known = {} if machine.hardware is None else {"hardware": machine.hardware}
    return {"state": _state_facts(State.of(mesh, **known)), "notes": [f"{machine.format}: {mesh}", *machine.notes]}


def _state_facts(state: State) -> Facts:
    return {
        "shape": state.shape,
        "wrap": state.wrap,
        "fail": list(state.fail),
        "fail_cable": list(state.fail_cable),
        "cable_rate": list(state.cable_rate),
        "hardware": state.hardware,
    }


def _schedule(state: State, saved: UploadedPlan | None) -> Schedule:
    """Return the state's plan, not yet proven. The same state gives the same plan: work is counted, not timed."""
    if saved is not None:
        return saved.load()
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


def _rows(state: State, mesh: Mesh) -> Iterator[Facts]:
    for kind in CHOICES:
        yield _row(state, mesh, kind.name, kind.name)
    if mesh.n_chips < mesh.size:
        part, box = _healthy_part(mesh)
        detail = f"{box}: {part.n_chips:,} chips, {part.n_chips / mesh.n_chips:.0%} of those that live"
        yield {**_row(state, part, "sub-mesh", Auto.name), "detail": detail}
    if not mesh.is_full or mesh.has_slow_cables:
        whole = Mesh(mesh.shape, wrap=mesh.wrap)
        yield {**_row(state, whole, "no failures", Auto.name), "detail": f"{whole.size:,} chips"}


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


def _estimate(estimate: Estimate) -> Facts:
    return {"mean": estimate.mean, "half_width": estimate.half_width}
