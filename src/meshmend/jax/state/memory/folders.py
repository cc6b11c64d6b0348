"""Where a host keeps its copies: one folder per job and host, one writer at a time, and no copy forever.

A folder is deleted

- by `Keeper.delete_copies`, and by `Keeper.close` once the last step that was kept is on disk as well;
- when any later job of this user starts on this host, and nothing was written to it for `STALE_AFTER_DAYS`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
import weakref
from pathlib import Path
from typing import ClassVar

from meshmend.errors import RestartError
from meshmend.files import who_else_writes

STALE_AFTER_DAYS = 7.0
"""Days without a write after which copies belong to a job that will not restart."""
LOCK_TIMEOUT_S = 10.0
"""How long the next process waits for the one before it to end."""


def default_folder(job: str, host: int) -> Path:
    """Return where a host keeps its copies: a folder per job and host in $MESHMEND_MEMORY, or in /dev/shm.

    >>> default_folder("train", 3).parts[-2:]
    ('train', 'host-3')
    """
    named = os.environ.get("MESHMEND_MEMORY")
    base = Path(named) if named else Path(f"/dev/shm/meshmend-{os.getuid()}")  # noqa: S108  # it is memory
    safe = re.sub(r"[^\w.-]", "_", job, flags=re.ASCII)[:100]
    if safe != job or not safe.strip("."):
        # Two names that differ only in characters that a file name cannot have are still two jobs.
        safe = f"{safe.strip('.')}-{hashlib.sha256(job.encode()).hexdigest()[:8]}"
    return base / safe / f"host-{host}"


def delete_stale(folder: Path, *, days: float = STALE_AFTER_DAYS) -> list[Path]:
    """Remove other jobs' and hosts' folders beside this one that nobody has written to for so long; return them.

    `folder` is one that `default_folder` returned. A folder that a running process has locked stays, however old.
    """
    forgotten = []
    for other in sorted(folder.parent.parent.glob("*/host-*")):
        with contextlib.suppress(OSError, RestartError):
            if other == folder or other.is_symlink() or other.stat().st_uid != os.getuid():
                continue
            newest = max([other.stat().st_mtime, *(path.lstat().st_mtime for path in other.iterdir())])
            if time.time() - newest < days * 86400:
                continue
            lock = FolderLock(other)
            lock.take(timeout_s=0.0)
            shutil.rmtree(other)
            lock.release()
            forgotten.append(other)
            other.parent.rmdir()
    return forgotten


def check_owned(folder: Path) -> None:
    """Raise `RestartError` unless this user owns a folder and nobody else can write to it.

    A job trains on what is there, and checksums find copies that were damaged, not those that somebody has made.
    """
    who = who_else_writes(folder)
    if who:
        raise RestartError(
            f"{folder} {who}, and a job would train on the copies that it finds there. Remove it, or name another "
            "folder by MESHMEND_MEMORY."
        )


class FolderLock:
    """A lock that one process holds on a folder, until it lets go or ends, however it ends."""

    NAME = "lock"
    _held: ClassVar[set[Path]] = set()
    """The system's lock is one per process: this distinguishes two keepers of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._finalizer: weakref.finalize[..., FolderLock] | None = None

    def take(self, *, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        """Make the folder and take its lock; raise `RestartError` that names the process that has it."""
        if self._finalizer is not None:
            return
        until = time.monotonic() + timeout_s
        while True:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_owned(self.folder)
            path = self.folder.resolve() / self.NAME
            if path in self._held:
                raise self._in_use(os.getpid())
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                # Not `flock`: a data loader's children would inherit it, and hold it after this process has ended.
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous holder may have removed the file: then this locks nothing.
                if path.exists() and os.path.samestat(path.stat(), os.fstat(handle)):
                    break
            except (BlockingIOError, PermissionError) as error:
                if time.monotonic() >= until:
                    holder = os.read(handle, 20).decode(errors="replace").strip()
                    os.close(handle)
                    raise self._in_use(holder) from error
                time.sleep(0.05)
            os.close(handle)
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._held.add(path)
        # Also when nobody has this object any more: a keeper that failed to start must not be in its successor's way.
        self._finalizer = weakref.finalize(self, _release, handle, path, self._held)

    def release(self) -> None:
        """Release the lock."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None

    def remove(self) -> None:
        """Release the lock and remove its file."""
        (self.folder / self.NAME).unlink(missing_ok=True)
        self.release()

    def _in_use(self, holder: int | str) -> RestartError:
        return RestartError(
            f"{self.folder} is in use by process {holder}, which keeps its copies there. Two processes must not write "
            "to one folder: end that one, give this host its own MESHMEND_HOST, or this job its own MESHMEND_JOB."
        )


def _release(handle: int, path: Path, held: set[Path]) -> None:
    os.close(handle)
    held.discard(path)
