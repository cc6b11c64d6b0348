"""Output files: whether they can be written is checked before the work, not after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshmend.errors import ParameterError

SCHEDULES = (".npz", ".txt")


def check_output(option: str, path: Path | None, endings: Sequence[str] = ()) -> None:
    """Raise `ParameterError` if a result cannot be written to `path`; called before the work that makes it."""
    if path is None:
        return
    if endings and path.suffix.lower() not in endings:
        known = f"{', '.join(endings[:-1])} or {endings[-1]}" if len(endings) > 1 else endings[0]
        raise ParameterError(f"{option} {path}: the name ends in {path.suffix!r}, expected {known}.")
    if path.is_dir():
        raise ParameterError(f"{option} {path}: this is a folder; name a file in it.")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise ParameterError(f"{option} {path}: this file is not writable.")
        return
    check_folder(option, path.parent, make=False)


def check_folder(option: str, folder: Path, *, make: bool) -> None:
    """Raise `ParameterError` if no file can be made in a folder; with `make`, a missing folder is created."""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        # Try it, since permissions are not enough: the disk may be read-only or full.
        with tempfile.TemporaryFile(dir=folder, prefix=".meshmend-"):
            pass
    except OSError as error:
        why = "there is no such folder" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise ParameterError(f"{option}: nothing can be written in {folder}: {why}.") from error
