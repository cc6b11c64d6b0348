"""The folder that all hosts of a job share: plans, compiled programs, checkpoints, the timelines, and the job's name.

It may be in a bucket. Then what can be made again, and is read often, is in a folder that each host has for itself:
plans, JAX's compile cache, and without a store the timelines.

The name is drawn at random when the folder is first used, and stands in it. Copies in memory belong to a name, so a job
with a new folder starts over, and two jobs never find each other's copies.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from meshmend.buckets import Folder, as_os_errors, create, is_bucket, own_folder, writable_path
from meshmend.errors import RestartError
from meshmend.launch.timeline import timeline_of


@dataclass(frozen=True)
class SharedFolder:
    """One job's shared folder. Made by `open_shared`."""

    path: Folder
    name: str
    """Name of the job, the same on every host and after every restart."""

    @cached_property  # for a bucket, it tries whether the folder can be written to
    def own(self) -> Path:
        """What this host has for itself: the same folder, unless that is in a bucket."""
        return own_folder(self.path)

    @property
    def plans(self) -> Path:
        """Plans, which `meshmend prepare --cache` fills, too."""
        return self.own / "plans"

    @property
    def compiled(self) -> Path:
        """JAX's compile cache."""
        return self.own / "compiled"

    @property
    def programs(self) -> Folder:
        """Train steps that are compiled already, signed with the job's key."""
        return self.path / "programs"

    @property
    def disk(self) -> Folder:
        """Checkpoints."""
        return self.path / "disk"

    @property
    def hardware(self) -> Folder:
        """What was measured: a file per kind of device and shape of machine. All plan for the same."""
        return self.path / "hardware"

    def timeline(self, host: str) -> Path:
        """When everything happened on one host."""
        return timeline_of(self.own, host)


def open_shared(folder: str | Path) -> SharedFolder:
    """Return the folder, made and named if it is new; raise `RestartError` if it is missing or cannot be written to."""
    path = writable_path(folder)
    if not is_bucket(path) and not path.parent.is_dir():
        raise RestartError(
            f"The shared folder {path} cannot be made, because {path.parent} is missing on this host. Mount the disk "
            "that all hosts share, or name another folder: Job(shared=…)."
        )
    try:
        with as_os_errors(path):
            return SharedFolder(path, _name(path / "name"))
    except OSError as error:
        raise RestartError(
            f"The shared folder {path} cannot be written to by this process (user {os.getuid()}): {error}. Give that "
            "user the right to write there, or name another folder: Job(shared=…)."
        ) from error


def _name(path: Folder) -> str:
    """Return the name in a file, which the first process of the first start writes."""
    if not is_bucket(path):
        path.parent.mkdir(exist_ok=True)
    # A folder is tried in any case: that it has become read-only is found out here, and not at the first checkpoint.
    if not is_bucket(path) or not path.exists():
        with contextlib.suppress(FileExistsError):  # of all processes one names the job
            create(path, f"job-{secrets.token_hex(8)}\n")
    name = str(path.read_bytes(), errors="replace")
    if not re.fullmatch(r"job-[0-9a-f]{16}\n", name):
        raise RestartError(
            f"{path} is damaged: expected the job's name, as in job-0123456789abcdef, got {name[:60]!r}. Name "
            "another folder to start over."
        )
    return name.strip()


def check_shared(folder: SharedFolder, everybody: list[str]) -> None:
    """Raise `RestartError` unless all processes have the same folder, by the names that they found in theirs."""
    if len(set(everybody)) > 1:
        others = [str(process) for process, name in enumerate(everybody) if name != everybody[0]]
        raise RestartError(
            f"{folder.path} is not one folder: processes {', '.join(others)} see another one than process 0. Give "
            "Job(shared=…) a folder on a disk that all hosts mount, or one in a bucket, as in gs://bucket/job."
        )
