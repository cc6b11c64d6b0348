"""A job's shared folder, which may be in a bucket, as in gs://bucket/job: then its hosts have no disk in common.

In a bucket, objects appear whole, are seen by all at once, and can be created by one process only. There are no locks.
So a small file that several processes change is a row of objects there: whoever changes it creates the next one, from
what the last one has, or begins again if somebody else was first. No change is lost, and all of them stay as a record.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from meshmend.errors import MeshmendError, ParameterError
from meshmend.extras import require
from meshmend.files import cache_folder, locked, write_whole

Folder = Any
"""A `Path` of this machine, or in a bucket a path of `etils`, which has the same methods."""


def is_bucket(folder: Any) -> bool:
    """Whether a folder is in a bucket.

    >>> is_bucket("gs://bucket/job"), is_bucket(Path("/shared"))
    (True, False)
    """
    return re.match(r"\w+://|(gs|s3|az|hf):/", str(folder)) is not None


def as_path(folder: Any) -> Folder:
    """Return a path of this machine, or of a bucket as in gs://bucket/job."""
    if not isinstance(folder, str | Path):
        return folder
    if not is_bucket(folder):
        return Path(folder).absolute()
    url = re.sub(r"^(\w+):/+", r"\1://", str(folder))  # pathlib makes one slash of two
    require("etils", "fsspec", *["gcsfs"] * url.startswith("gs://"), needed_for=url, extra="gcs")
    # By default a process would never see what others write into a folder that it has once listed.
    import_module("fsspec.config").conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return import_module("etils.epath").Path(url)


def writable_path(folder: Any) -> Folder:
    """Return the path of a folder that a job writes to; raise `ParameterError` where Orbax could not."""
    if is_bucket(folder) and not re.match("gs:/", str(folder)):
        raise ParameterError(
            f"{folder} cannot hold a job: expected a folder, or one in a bucket as in gs://bucket/job. Orbax takes any "
            "other URL for a relative path, and refuses it ('Checkpoint path should be absolute'). Name a folder on a "
            "disk that all hosts mount, or a bucket of Google Cloud Storage."
        )
    return as_path(folder)


def refuse_bucket(folder: Any, instead: str) -> None:
    """Raise `ParameterError` if a folder is in a bucket where only a folder will do."""
    if is_bucket(folder):
        raise ParameterError(f"{folder} is not a folder of this machine: {instead}.")


def own_folder(shared: Folder) -> Path:
    """Return where a host keeps what it has for itself of a job: in its shared folder, unless that is in a bucket.

    Then it is a folder in the user's cache, or where that cannot be written to, in the one for temporary files.
    """
    if not is_bucket(shared):
        return Path(shared)
    name = hashlib.sha256(str(shared).encode()).hexdigest()[:16]
    try:
        own = cache_folder() / name
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=own):
            return own
    except (OSError, RuntimeError):  # the latter where a user has no home
        return Path(tempfile.gettempdir()) / f"meshmend-{os.getuid()}" / name


def create(path: Folder, content: str) -> None:
    """Make a file, whole; raise `FileExistsError` if it is there already."""
    if not is_bucket(path):
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-") as draft:
            draft.write(content)
            draft.flush()
            os.link(draft.name, path)
        return
    try:
        import_module("fsspec").filesystem("gcs").pipe_file(str(path), content.encode(), mode="create")
    except FileExistsError:
        if path.read_text() != content:  # else this process has made it, and missed the answer
            raise


@contextmanager
def as_os_errors(folder: Folder) -> Iterator[None]:
    """Raise what the library of a bucket raises as `OSError`, as a disk does."""
    try:
        yield
    except (OSError, MeshmendError):
        raise
    except Exception as error:
        if not is_bucket(folder):
            raise
        raise OSError(f"{folder} cannot be reached: {type(error).__name__}: {str(error)[:500]}") from error


class SharedFile:
    """A small file that several processes change, on any of a job's hosts. Every call reads it anew."""

    def __init__(self, folder: Any, name: str) -> None:
        self.path = (as_path(folder) if is_bucket(folder) else Path(folder)) / name

    def read(self, most: int) -> tuple[bytes, int]:
        """Return its first bytes, at most so many, and how many it has."""
        with as_os_errors(self.path):
            path = self.path / str(self._last()) if is_bucket(self.path) else self.path
            with path.open("rb") as file:
                return file.read(most), file.seek(0, os.SEEK_END)

    def change(self, make: Callable[[], str | None]) -> None:
        """Replace the content by what `make` returns, unless that is None. It may read, and be called several times."""
        if not is_bucket(self.path):
            with locked(self.path):
                if (content := make()) is not None:
                    write_whole(self.path, content)
            return
        while True:
            with as_os_errors(self.path):
                following = self.path / str(self._last() + 1)
            if (content := make()) is None:
                return
            with as_os_errors(self.path), suppress(FileExistsError):  # another process was first
                create(following, content)
                return

    def _last(self) -> int:
        """Return the number of the last object in a bucket, 0 if there is none."""
        try:
            return max((int(one.name) for one in self.path.iterdir() if one.name.isdecimal()), default=0)
        except FileNotFoundError:
            return 0
