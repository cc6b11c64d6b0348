"""Which plan a process group runs: the best planner there is for the survivors, cut to suit the payload."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from meshmend.errors import PlanError
from meshmend.planning import PLANNERS, make_planner, plan
from meshmend.schedule import Schedule
from meshmend.topology import Mesh, Region

PREFERENCE = ("weave", "row-pairs", "hamiltonian", "two-color")
"""Tried in this order, where they exist."""

BYTES_OF_ONE_CHUNK = 512
"""Up to about twice this a payload is not cut. More chunks follow each other more closely, which saves time in
proportion to payload / chunks; each costs a fixed time for its messages. The sum is least where the number of chunks
grows with the square root of the payload: 32 MB are cut into 256, of 125 kB each."""

MAX_CHUNKS = 1024

MAX_KEPT_BYTES = 2**29
"""Plans are kept up to this, the least recently used go first. A plan for 256 chips and 32 MB takes about 10 MB."""


class Plans:
    """Schedules for the survivors of one machine, each made once and proven, and kept while there is room.

    `cache` is a plan cache on disk, in which plans made ahead of time are found.

    >>> plans = Plans()
    >>> plans.get(Mesh("4x4", failed=["2x2@0,0"]), payload_bytes=1000).mesh.n_chips
    12
    """

    def __init__(
        self, planner: str | None = None, parameters: Mapping[str, Any] | None = None, *, cache: Any = None
    ) -> None:
        self._names = PREFERENCE if planner is None else (planner,)
        self._parameters = dict(parameters or {})
        self._kept = {} if cache is None else {"cache": cache}
        self._made: OrderedDict[tuple[Mesh, int], Schedule] = OrderedDict()
        self._kept_bytes = 0
        # Held for moments, never while a plan is made: planning ahead holds nobody up.
        self._guard = threading.Lock()

    def __str__(self) -> str:
        given = "".join(f" {name}={value}" for name, value in sorted(self._parameters.items()))
        return ">".join(self._names) + given

    def get(self, mesh: Mesh, payload_bytes: int) -> Schedule:
        """Return the plan for a payload; raise `PlanError` where no planner serves the mesh."""
        key = (mesh, self.chunks(payload_bytes))
        with self._guard:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        schedule = self._plan(*key)
        with self._guard:
            if key not in self._made:
                self._made[key] = schedule
                self._kept_bytes += _bytes_of(schedule)
            while self._kept_bytes > MAX_KEPT_BYTES and len(self._made) > 1:
                self._kept_bytes -= _bytes_of(self._made.popitem(last=False)[1])
        return schedule

    def prepare(self, mesh: Mesh, holes: Iterable[Region | str], payload_bytes: int) -> None:
        """Plan ahead for the loss of each of `holes`, one at a time; holes that cut the survivors apart are left."""
        for hole in holes:
            survivors = mesh.fail(hole)
            if survivors.is_connected:
                self.get(survivors, payload_bytes)

    @staticmethod
    def chunks(payload_bytes: int) -> int:
        """Return how many chunks a payload is worth: a power of two, so that few plans serve all payloads."""
        exponent = round(math.log2(max(payload_bytes / BYTES_OF_ONE_CHUNK, 1)) / 2)
        return min(1 << exponent, MAX_CHUNKS)

    def _plan(self, mesh: Mesh, chunks: int) -> Schedule:
        refused: PlanError | None = None
        for name in self._names:
            if name not in PLANNERS and len(self._names) > 1:
                continue
            parameters = dict(self._parameters)
            kind = PLANNERS.get(name)
            if kind is not None and "chunks" in {field.name for field in dataclasses.fields(kind)}:  # type: ignore[arg-type]
                parameters.setdefault("chunks", chunks)
            try:
                return plan(mesh, make_planner(name, **parameters), **self._kept)
            except PlanError as error:
                refused = refused or error
        if refused is None:
            raise PlanError(">".join(self._names), str(mesh), "none of these planners is known here.")
        raise refused


def _bytes_of(schedule: Schedule) -> int:
    """Return how much memory a plan takes."""
    columns = (schedule.step, schedule.src, schedule.dst, schedule.first_chunk, schedule.n_chunks, schedule.op)
    return sum(column.nbytes for column in (*columns, schedule.phase, schedule.owners))
