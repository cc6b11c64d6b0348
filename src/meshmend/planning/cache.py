"""A plan cache on disk: plan ahead of time, and resume training without waiting for a plan.

An entry is a schedule's `.npz` file, named by a digest of the mesh, the planner, its parameters and whether the plan is
for hops between neighbours only. An entry is trusted no more than any other file: it is read as untrusted input, must
be for the requested mesh and by the requested planner, and is proven again. An entry that fails any of that is planned
again and replaced, with a `CacheWarning`. A plan that cannot be stored is a `CacheWarning` too: an unusable folder
costs time, not the plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshmend.cost import Hardware
from meshmend.errors import CacheWarning, MeshmendError, ScheduleFileError
from meshmend.files import cache_folder, write_whole
from meshmend.planning.auto import CHOICES, OTHERS, Auto
from meshmend.planning.base import Planner, is_between_neighbours
from meshmend.schedule import Schedule
from meshmend.schedule.serialize import FORMAT, load, save
from meshmend.schedule.verify import verify
from meshmend.topology import Mesh

RECIPE = 5
"""Raised whenever a planner's output changes, so that schedules of an older version are not taken for new ones."""
PREPARED_BUDGET_S = 60.0
"""CPU seconds for each plan that is made before anybody waits for it, as by `meshmend prepare`."""


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

    def __init__(self, folder: str | Path | None = None, *, is_complete: bool = False) -> None:
        self.folder = Path(folder) if folder is not None else cache_folder()
        self.is_complete = is_complete
        """Whether nothing is planned that it does not have: that is a `LookupError`."""
        self.used: set[Path] = set()
        """Entries that were returned or stored."""

    def path(self, mesh: Mesh, planner: Planner, *, neighbours_only: bool = False) -> Path:
        """Return the file that holds, or would hold, this planner's schedule for `mesh`."""
        key = {
            "format": FORMAT,
            "recipe": RECIPE,
            **mesh.to_dict(),
            "planner": planner.name,
            "collective": planner.collective,
            "parameters": _parameters(planner),
        }
        if neighbours_only:  # left out otherwise: plans that are kept already stay valid
            key["neighbours_only"] = True
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.npz"

    def get(self, mesh: Mesh, planner: Planner, *, neighbours_only: bool = False) -> Schedule | None:
        """Return the schedule, proven, if there is a valid entry; None otherwise, with a warning if it is invalid."""
        path = self.path(mesh, planner, neighbours_only=neighbours_only)
        if not os.path.lexists(path):
            return None
        try:
            schedule = load(path)
            problem = _mismatch(schedule, mesh, planner, neighbours_only=neighbours_only)
            if problem is None:
                verify(schedule)
                self.used.add(path)
                return schedule
        except MeshmendError as error:
            problem = str(error)
        warnings.warn(f"The cached plan {path} is not used, and planned again: {problem}", CacheWarning, stacklevel=3)
        return None

    def find(self, mesh: Mesh, planners: Iterable[Planner], *, neighbours_only: bool = False) -> Schedule | None:
        """Return the schedule of the first of these planners that has a valid entry; None if none has."""
        for planner in planners:
            schedule = self.get(mesh, planner, neighbours_only=neighbours_only)
            if schedule is not None:
                return schedule
        if self.is_complete:
            raise LookupError(f"{self.folder} has no plan for {mesh}")
        return None

    def put(self, mesh: Mesh, planner: Planner, schedule: Schedule, *, neighbours_only: bool = False) -> Path:
        """Store a schedule atomically. Raises `ScheduleFileError` if it cannot be written."""
        path = self.path(mesh, planner, neighbours_only=neighbours_only)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".npz")
            os.close(handle)
            try:
                save(schedule, name)
                Path(name).replace(path)
            finally:
                Path(name).unlink(missing_ok=True)
        except OSError as error:
            raise ScheduleFileError(f"{path} cannot be written: {error.strerror or error}.") from error
        self.used.add(path)
        return path

    def offer(self, mesh: Mesh, planner: Planner, schedule: Schedule, *, neighbours_only: bool = False) -> None:
        """Store a schedule if possible; warn otherwise."""
        try:
            self.put(mesh, planner, schedule, neighbours_only=neighbours_only)
        except ScheduleFileError as error:
            warnings.warn(f"The plan is not kept in the cache. {error}", CacheWarning, stacklevel=3)

    def pack(self) -> bytes:
        """Return the entries that were used, for `unpack` on another host."""
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for path in self.used:
                archive.write(path, path.name)
        return content.getvalue()

    def unpack(self, content: bytes) -> None:
        """Store what `pack` has returned. It is trusted no more than any other entry."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist():
                write_whole(self.folder / Path(name).name, archive.read(name))

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob("*.npz")) if self.folder.is_dir() else 0


def _mismatch(schedule: Schedule, mesh: Mesh, planner: Planner, *, neighbours_only: bool) -> str | None:
    """Return why a schedule, even if correct, is not the requested one."""
    if schedule.mesh != mesh:
        return f"it is for {schedule.mesh}, expected {mesh}."
    if schedule.collective is not planner.collective:
        return f"its collective is {schedule.collective}, expected {planner.collective}."
    if neighbours_only and not is_between_neighbours(schedule):
        return "it has transfers between chips that are not neighbours."
    ours = [kind.name for kind in (*CHOICES, *OTHERS)]
    makers = ours if isinstance(planner, Auto) else [planner.name]
    # Only our own planners are known to put their name on their schedules.
    if set(makers) <= set(ours) and schedule.planner not in makers:
        return f"{schedule.planner} made it, expected {' or '.join(makers)}."
    return None


def _parameters(planner: Planner) -> dict[str, Any]:
    """Return what a planner's plans depend on.

    That is the numbers of its hardware, not what it is called nor who is cited for them, so that a preset and a file
    with the same numbers share their plans.
    """
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(planner):  # type: ignore[arg-type]  # planners are dataclasses
        value = getattr(planner, entry.name)
        if isinstance(value, Planner):
            found[entry.name] = [value.name, _parameters(value)]
        elif isinstance(value, Hardware):
            found[entry.name] = value.priced
        else:
            found[entry.name] = value
    return found
