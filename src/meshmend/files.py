"""Files that several processes read and change: never half a file, one writer at a time, no wait for a dead disk."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOCK_S = 60.0
"""How long another process may keep a file locked: far longer than any change takes, unless its disk hangs."""


def cache_folder() -> Path:
    """Return where this user keeps what can be made again: `$XDG_CACHE_HOME/meshmend`, or `~/.cache/meshmend`."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "meshmend"


def write_whole(path: Any, content: str | bytes) -> None:
    """Replace a file, so that whoever reads it sees what it had before or after, however this process ends."""
    if not isinstance(path, Path):  # in a bucket, objects appear whole
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).chmod(0o644)  # a temporary file is for its owner only
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def who_else_writes(folder: Path) -> str:
    """Return why a folder is not one that this user alone can write to, as in "belongs to user 7"; "" if it is."""
    found = folder.stat()
    if found.st_uid != os.getuid():
        return f"belongs to user {found.st_uid}"
    return "can be written to by other users" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


@contextmanager
def locked(path: Path, *, timeout_s: float = LOCK_S) -> Iterator[None]:
    """Keep all other processes that change this file out, on any of a job's hosts, until the block ends.

    Raises `TimeoutError` if another one does not let go of it. On a file system without locks it keeps nobody out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside, until = path.with_name(path.name + ".lock"), time.monotonic() + timeout_s
    handle = os.open(beside, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    why = f"another process has kept its lock for {timeout_s:g} s; end that one, and try again"
                    raise TimeoutError(errno.ETIMEDOUT, why, str(path)) from None
                time.sleep(0.01)
                continue
            except OSError:
                pass  # a file system without locks
            break
        yield
    finally:
        os.close(handle)


def with_timeout(seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `call` returns or raise what it raises; raise `TimeoutError` if that takes longer than `seconds`.

    A call into a dead network disk cannot be ended from outside: it stays behind in a daemon thread.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call(*arguments))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="meshmend-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
