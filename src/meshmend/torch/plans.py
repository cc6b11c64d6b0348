"""Plans for a process group: made once for each hole and size of payload, by the `plan` that the caller gives."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from meshmend.planning import PlanFunction, plan, plan_broadcast, plan_shards, round_payload
from meshmend.schedule import Collective, Schedule
from meshmend.topology import Mesh, Region

HARDWARE = "gloo-loopback"
DEFAULT_PLAN: PlanFunction = functools.partial(plan, hardware=HARDWARE)

MAX_KEPT_BYTES = 2**29
"""Plans are kept up to this, the least recently used go first. A plan for 256 chips and 32 MB takes about 10 MB."""


class Plans:
    """Schedules for the survivors of one machine, each made once and proven, and kept while there is room.

    `plan` is called with a mesh and `payload_bytes`; by default it is the library's, for what Gloo does on one machine.

    >>> plans = Plans()
    >>> plans.get(Mesh("4x4", failed=["2x2@0,0"]), payload_bytes=1000).mesh.n_chips
    12
    """

    def __init__(self, plan: PlanFunction = DEFAULT_PLAN) -> None:
        self._plan = plan
        self._made: OrderedDict[tuple[object, ...], Schedule] = OrderedDict()
        self._kept_bytes = 0
        # Held briefly, never while a plan is made, so planning ahead blocks no caller.
        self._guard = threading.Lock()

    def __str__(self) -> str:
        return _describe(self._plan)

    def get(self, mesh: Mesh, payload_bytes: int) -> Schedule:
        """Return the plan for a payload; raise `PlanError` where no planner serves the mesh."""
        size = self.size(payload_bytes)
        return self._kept((mesh, size), lambda: self._plan(mesh, payload_bytes=size))

    def shards(self, mesh: Mesh, collective: Collective, order: tuple[int, ...], payload_bytes: int) -> Schedule:
        """Return the plan for a reduce-scatter or an all-gather in which rank r has shard `order[r]`."""
        target: dict[str, Any] = {"payload_bytes": self.size(payload_bytes), "hardware": HARDWARE}
        key = (mesh, target["payload_bytes"], collective, order)
        return self._kept(key, lambda: plan_shards(mesh, collective, order=order, **target))

    def broadcast(self, mesh: Mesh, root: int, payload_bytes: int) -> Schedule:
        """Return the plan for a broadcast from a rank."""
        target: dict[str, Any] = {"payload_bytes": self.size(payload_bytes), "hardware": HARDWARE}
        return self._kept((mesh, target["payload_bytes"], root), lambda: plan_broadcast(mesh, root, **target))

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


def _describe(plan: PlanFunction) -> str:
    """Describe which function plans, with what is bound to it: the same text in processes that plan alike.

    Where plans are kept is no part of it, and a bound object says its type only: no addresses in memory.
    """
    bound: list[str] = []
    while isinstance(plan, functools.partial):
        words = {name: value for name, value in plan.keywords.items() if name != "cache"}
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
