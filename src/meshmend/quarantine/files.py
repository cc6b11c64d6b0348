"""Files of the shared folder that several hosts change: one writer at a time, and a reader sees all of a change."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshmend.locks import lock_beside, unlock


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep all other processes that change this file out, until the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_beside(path)
    try:
        yield
    finally:
        unlock(lock)


def write_whole(path: Path, text: str) -> None:
    """Replace a file, so that whoever reads it sees the text before or after, however this process ends."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).chmod(0o644)  # a temporary file is for its owner only
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
