"""Plans for a process group: made once for each hole and size of payload, for the hardware that the group runs on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshmend.cost import Hardware, find_hardware
from meshmend.cost.hardware import Mode
from meshmend.planning import PlanFunction, plan, plan_broadcast, plan_shards, round_payload
from meshmend.schedule import Collective, Schedule
from meshmend.topology import Mesh, Region

SHARED = ("budget_s", "cache")
"""What is bound to a plan function and concerns the plans of all collectives, besides the hardware."""

MESSAGE_S = find_hardware("gloo-loopback").message_s / 2
"""What the engine pays for a message at each of its ends, as measured where both are on one machine."""
MAX_KEPT_BYTES = 2**29
"""Plans are kept up to this, the least recently used go first. A plan for 256 chips and 32 MB takes about 10 MB."""


class Plans:
    """Schedules for the survivors of one machine, each made once and proven, and kept while there is room.

    `plan` is called with a mesh, `payload_bytes`, `hardware` and `mode`, and makes the plans of all-reduces. What is
    bound to it and concerns other collectives too reaches them: hardware, which comes before what is given, a cache, a
    budget.

    >>> plans = Plans(hardware="gloo-loopback")
    >>> plans.get(Mesh("4x4", failed=["2x2@0,0"]), payload_bytes=1000).mesh.n_chips
    12
    """

    def __init__(self, plan: PlanFunction = plan, *, hardware: str | Hardware) -> None:
        bound = bound_keywords(plan)
        self.hardware: Hardware = find_hardware(bound.get("hardware", hardware))
        self.mode: Mode = bound.get("mode", mode_for(self.hardware))
        self._plan = plan
        self._shared = {name: bound[name] for name in SHARED if name in bound}
        self._made: OrderedDict[tuple[object, ...], Schedule] = OrderedDict()
        self._kept_bytes = 0
        # Held briefly, never while a plan is made, so planning ahead blocks no caller.
        self._guard = threading.Lock()

    def __str__(self) -> str:
        priced = hashlib.sha256(repr(self.hardware.priced).encode()).hexdigest()[:12]
        return f"{_describe(self._plan)} for {self.hardware.name} [{priced}]"

    def get(self, mesh: Mesh, payload_bytes: int) -> Schedule:
        """Return the plan for a payload; raise `PlanError` where no planner serves the mesh."""
        target = self._target(payload_bytes) | {"mode": self.mode}
        # A function of the caller's own may know its hardware already.
        own = {name: value for name, value in target.items() if name == "payload_bytes" or _takes(self._plan, name)}
        return self._kept((mesh, *target.values()), lambda: self._plan(mesh, **own))

    def shards(self, mesh: Mesh, collective: Collective, order: tuple[int, ...], payload_bytes: int) -> Schedule:
        """Return the plan for a reduce-scatter or an all-gather in which rank r has shard `order[r]`."""
        target = self._target(payload_bytes) | {"mode": self.mode}
        key = (mesh, *target.values(), collective, order)
        return self._kept(key, lambda: plan_shards(mesh, collective, order=order, **target, **self._shared))

    def broadcast(self, mesh: Mesh, root: int, payload_bytes: int) -> Schedule:
        """Return the plan for a broadcast from a rank."""
        target = self._target(payload_bytes)
        key = (mesh, *target.values(), root)
        return self._kept(key, lambda: plan_broadcast(mesh, root, **target, **self._shared))

    def _target(self, payload_bytes: int) -> dict[str, Any]:
        """Return what a plan is made for."""
        return {"payload_bytes": self.size(payload_bytes), "hardware": as_driven(self.hardware)}

    def _kept(self, key: tuple[object, ...], make: Callable[[], Schedule]) -> Schedule:
        """Return the plan that is kept under this key, and make it if there is none."""
        with self._guard:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        schedule = make()
        with self._guard:
            if key not in self._made:
                self._made[key] = schedule
                self._kept_bytes += _bytes_of(schedule)
            while self._kept_bytes > MAX_KEPT_BYTES and len(self._made) > 1:
                self._kept_bytes -= _bytes_of(self._made.popitem(last=False)[1])
        return schedule

    def prepare(self, mesh: Mesh, holes: Iterable[Region | str], payload_bytes: int) -> None:
        """Plan ahead for the loss of each of `holes` in turn; those that disconnect the survivors are skipped."""
        for hole in holes:
            survivors = mesh.fail(hole)
            if survivors.is_connected:
                self.get(survivors, payload_bytes)

    @staticmethod
    def size(payload_bytes: int) -> int:
        """Return the size that payloads of about so many bytes are planned for."""
        return round_payload(payload_bytes)


def mode_for(hardware: Hardware) -> Mode:
    """Return how the engine waits: for its data alone, over links; on a switch, cores are busy while latency passes."""
    return "lock-step" if hardware.is_switched else "asynchronous"


def as_driven(hardware: Hardware) -> Hardware:
    """Return the hardware as the engine drives it: to handle a message costs it time, whatever the links take."""
    return hardware if hardware.message_s else dataclasses.replace(hardware, message_s=MESSAGE_S)


def bound_keywords(plan: PlanFunction) -> Mapping[str, Any]:
    """Return what is bound to a function that plans, as in `functools.partial(meshmend.plan, hardware="tpu-v4")`."""
    bound: dict[str, Any] = {}
    while isinstance(plan, functools.partial):
        bound = plan.keywords | bound
        plan = plan.func
    return bound


def _takes(plan: PlanFunction, keyword: str) -> bool:
    """Return whether a function takes that keyword."""
    parameters = inspect.signature(plan).parameters
    return keyword in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _describe(plan: PlanFunction) -> str:
    """Describe which function plans, with what is bound to it: the same text in processes that plan alike.

    Where plans are kept is no part of it, nor hardware, which is said apart, and a bound object says its type only: no
    addresses in memory.
    """
    bound: list[str] = []
    while isinstance(plan, functools.partial):
        words = {name: value for name, value in plan.keywords.items() if name not in ("cache", "hardware")}
        bound = [*map(_word, plan.args), *(f"{name}={_word(words[name])}" for name in sorted(words)), *bound]
        plan = plan.func
    name = getattr(plan, "__qualname__", type(plan).__qualname__)
    return " ".join([f"{getattr(plan, '__module__', '')}.{name}", *bound])


def _word(value: object) -> str:
    return str(value) if isinstance(value, str | int | float | bool | None) else type(value).__qualname__


def _bytes_of(schedule: Schedule) -> int:
    """Return how much memory a plan takes."""
    schedule = schedule.template
    columns = (schedule.step, schedule.src, schedule.dst, schedule.first_chunk, schedule.n_chunks, schedule.op)
    return sum(column.nbytes for column in (*columns, schedule.phase, schedule.owners))
