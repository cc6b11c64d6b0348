"""A lock beside a file: one process at a time changes it, whichever of a job's hosts that process is on."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_beside(path: Path) -> int:
    """Return a handle that only one process has at a time, until `unlock`; -1 on a file system without locks."""
    handle = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        os.close(handle)
        return -1
    return handle


def unlock(handle: int) -> None:
    """Give back what `lock_beside` returned."""
    if handle >= 0:
        os.close(handle)
