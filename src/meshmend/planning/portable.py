"""Plans that travel: what one process of a job has planned, or finds in its own cache, becomes the plan of all.

A step's plan is made of a few schedules, each an entry of a cache. `PortablePlans` stands in for the cache while a plan
is made: it notes which entries are used, so that they can be sent, and gives another process the ones that were sent to
it. That process proves them as it proves those of a file.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from pathlib import Path

from meshmend.planning.base import Planner
from meshmend.planning.cache import PlanCache
from meshmend.schedule import Schedule
from meshmend.schedule.serialize import MAX_BYTES, read_npz, write_npz
from meshmend.topology import Mesh


class PortablePlans(PlanCache):
    """The cache in a folder, and the entries of it that a plan uses.

    Unless it `makes` plans, a missing entry is a `LookupError`, and nothing is planned. With `content`, as `pack` has
    returned it on another process, entries come from there, and are kept in the folder.
    """

    def __init__(self, folder: Path, *, makes: bool = False, content: bytes | None = None) -> None:
        super().__init__(folder)
        self.makes = makes
        self.used: dict[str, Schedule] = {}
        """Schedules that were found or made, by the names of their files."""
        self._sent = None if content is None else zipfile.ZipFile(io.BytesIO(content))

    def find(self, mesh: Mesh, planners: Iterable[Planner], *, neighbours_only: bool = False) -> Schedule | None:
        """Return the schedule of the first of these planners that has a valid entry."""
        schedule = super().find(mesh, planners, neighbours_only=neighbours_only)
        if schedule is None and not self.makes:
            raise LookupError(f"no plan for {mesh} is kept")
        return schedule

    def get(self, mesh: Mesh, planner: Planner, *, neighbours_only: bool = False) -> Schedule | None:
        """Return the schedule, proven, if there is a valid entry, and note that it is used."""
        schedule = super().get(mesh, planner, neighbours_only=neighbours_only)
        if schedule is not None and self._sent is not None:
            self.offer(mesh, planner, schedule, neighbours_only=neighbours_only)
        elif schedule is not None:
            self._note(mesh, planner, schedule, neighbours_only=neighbours_only)
        return schedule

    def offer(self, mesh: Mesh, planner: Planner, schedule: Schedule, *, neighbours_only: bool = False) -> None:
        """Store a schedule if possible, warn otherwise, and note that it is used."""
        super().offer(mesh, planner, schedule, neighbours_only=neighbours_only)
        self._note(mesh, planner, schedule, neighbours_only=neighbours_only)

    def pack(self) -> bytes:
        """Return all entries that were used, for `content` on another process."""
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for name, schedule in self.used.items():
                with archive.open(name, "w") as file:
                    write_npz(schedule, file)
        return content.getvalue()

    def _note(self, mesh: Mesh, planner: Planner, schedule: Schedule, *, neighbours_only: bool) -> None:
        self.used[self.path(mesh, planner, neighbours_only=neighbours_only).name] = schedule

    def _read(self, path: Path) -> Schedule | None:
        if self._sent is None:
            return super()._read(path)
        if path.name not in self._sent.namelist():
            return None
        return read_npz(io.BytesIO(self._sent.read(path.name)), MAX_BYTES)
