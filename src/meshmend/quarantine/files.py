"""Files of the shared folder that several hosts change: one writer at a time."""

from __future__ import annotations

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
