"""Hiding: what still shows of a schedule that runs inside a loop body, beside a given amount of computing.

Links move bytes while the core computes. What the core does itself for every step does not hide: it slices out what to
send, starts the permutes and adds what arrived, which is what a step and a message cost (`Hardware`). A compiler can
put computing only beside steps that are written out one by one, so that a schedule of many steps hides nothing.
"""

from __future__ import annotations

from numbers import Real

from meshmend.cost.hardware import Hardware, Mode
from meshmend.cost.predict import asynchronous_seconds
from meshmend.cost.step_demand import StepDemand
from meshmend.errors import ParameterError

MAX_UNROLLED = 96
"""Steps of a plan that are written out one by one inside a loop body, at most: the code grows with them."""


def exposed_seconds(
    demand: StepDemand, payload_bytes: float, hardware: Hardware, overlap_s: float, mode: Mode = "lock-step"
) -> float:
    """Return the time that a schedule adds to `overlap_s` of computing that lies beside it.

    >>> from meshmend import Mesh, plan
    >>> from meshmend.cost import find_hardware
    >>> demand = StepDemand(plan(Mesh("4x4"), "weave", chunks=4))
    >>> [round(1e6 * exposed_seconds(demand, 1e6, find_hardware("tpu-v3-xla"), hide)) for hide in (0, 1e-5, 1)]
    [115, 105, 20]
    """
    if mode == "asynchronous":
        seconds = asynchronous_seconds(demand, payload_bytes, hardware)
        return shown(hardware.start_s, seconds - hardware.start_s, overlap_s)
    seconds = demand.seconds(payload_bytes, hardware)
    if not overlap_s or demand.schedule.n_steps > MAX_UNROLLED:
        return seconds
    starting = demand.starting_seconds(hardware)
    return shown(starting, seconds - starting, overlap_s)


def shown(starting_s: float, moving_s: float, overlap_s: float) -> float:
    """Return what shows of a time that is spent on starting steps and on moving bytes."""
    return starting_s + max(0.0, moving_s - overlap_s)


def check_overlap(seconds: float) -> float:
    """Return the computing to hide behind as a number, or refuse what is none."""
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds < float("inf"):
        raise ParameterError(f"overlap_s is {seconds!r}, expected seconds of computing, 0 or more.")
    return float(seconds)
