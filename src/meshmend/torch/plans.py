"""Which plan a process group runs: the best planner there is for the survivors, cut to suit the payload."""

from __future__ import annotations

import dataclasses
import math
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


class Plans:
    """Schedules for the survivors of one machine, each made once and proven.

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
        self._made: dict[tuple[Mesh, int], Schedule] = {}

    def __str__(self) -> str:
        given = "".join(f" {name}={value}" for name, value in sorted(self._parameters.items()))
        return ">".join(self._names) + given

    def get(self, mesh: Mesh, payload_bytes: int) -> Schedule:
        """Return the plan for a payload; raise `PlanError` where no planner serves the mesh."""
        key = (mesh, self.chunks(payload_bytes))
        if key not in self._made:
            self._made[key] = self._plan(mesh, key[1])
        return self._made[key]

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
