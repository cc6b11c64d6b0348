"""A plan cache on disk: plan ahead of time, and be training again a second after the failure.

An entry is a schedule's `.npz` file, named by a digest of the mesh, the planner and its parameters. What comes out
of the cache is trusted no more than any other file: it is read as untrusted input, must be for the mesh that was asked
for, and is proven again. An entry that fails any of that is planned anew and replaced.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path

from meshmend.errors import ScheduleFileError, VerificationError
from meshmend.files import FORMAT, load, save
from meshmend.planning.base import Planner
from meshmend.schedule import Schedule
from meshmend.topology import Mesh, name_cable
from meshmend.verify import verify

RECIPE = 1
"""Raised whenever a planner's output changes, so that schedules of an older version are not taken for new ones."""


def default_folder() -> Path:
    """Return where plans are kept by default: `$XDG_CACHE_HOME/meshmend`, or `~/.cache/meshmend`."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "meshmend"


class PlanCache:
    """Schedules on disk, one file each. Several processes may share a folder.

    >>> import tempfile
    >>> from meshmend import plan
    >>> cache = PlanCache(tempfile.mkdtemp())
    >>> mesh = Mesh("8x8", failed=["2x2@2,2"])
    >>> plan(mesh, "row-pairs", cache=cache) == plan(mesh, "row-pairs", cache=cache)
    True
    >>> len(cache)
    1
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else default_folder()

    def path(self, mesh: Mesh, planner: Planner) -> Path:
        """Return the file that holds, or would hold, this planner's schedule for `mesh`."""
        key = {
            "format": FORMAT,
            "recipe": RECIPE,
            "shape": mesh.shape,
            "wrap": mesh.wrap,
            "failed": [str(hole) for hole in mesh.holes],
            "failed_cables": [name_cable(cable) for cable in mesh.failed_cables],
            "planner": planner.name,
            "parameters": dataclasses.asdict(planner),  # type: ignore[call-overload]
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.npz"

    def get(self, mesh: Mesh, planner: Planner) -> Schedule | None:
        """Return the schedule if it is there and holds, proven; None otherwise."""
        path = self.path(mesh, planner)
        if not path.exists():
            return None
        try:
            schedule = load(path)
            if schedule.mesh != mesh:
                return None
            verify(schedule)
        except (ScheduleFileError, VerificationError):
            return None
        return schedule

    def put(self, mesh: Mesh, planner: Planner, schedule: Schedule) -> Path:
        """Keep a schedule; readers see the whole file or none."""
        path = self.path(mesh, planner)
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".npz")
        os.close(handle)
        try:
            save(schedule, name)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
        return path

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob("*.npz")) if self.folder.is_dir() else 0
