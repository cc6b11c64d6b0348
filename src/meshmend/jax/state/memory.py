"""Copies of the state in a host's memory that outlive the process: files in a folder of `/dev/shm`, one per step.

A file is written atomically, has its step, the identity of the state and checksums, and is trusted only if
all of them hold. The newest few are kept, and those of pinned steps: the last verified one, and the next that
may be. A power cut loses them; other hosts' copies cover that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import RestartError
from meshmend.jax.collectives import Tree
from meshmend.jax.state.folders import FolderLock
from meshmend.jax.state.identity import Identity
from meshmend.jax.state.outline import Outline, dtype_named
from meshmend.jax.state.sources import UNCHECKED

MAGIC = b"meshmend state 4\n"
KEPT = 3
"""Copies that are kept. When a host has the data of step n, every host has begun step n, and so has written n − 2: the
one before that can go."""
LONGEST_HEADER = 256 << 20
"""Bytes; a longer header is damage, and not worth reading."""


@dataclass(frozen=True)
class Copy:
    """What one host keeps of one step: the parts of its own devices, and those of another host's.

    `parts` has for each dtype one row per device, in the order of `devices`. `run` is a random name that all hosts of
    one attempt share: copies are of one state only if it is the same, whatever attempt and step they claim.
    """

    attempt: int
    step: int
    outline: Outline
    devices: tuple[int, ...]
    parts: dict[str, NDArray[Any]]
    extra: Tree
    identity: Identity
    run: str
    verified: int = UNCHECKED
    """The last step that was verified when this was kept, 0 if none was; `UNCHECKED` if nothing checks the job."""

    @property
    def name(self) -> str:
        """The copy's file name."""
        return f"{self.attempt:06d}-{self.step:012d}"

    @cached_property
    def generation(self) -> str:
        """A name for the state that this is a part of: parts of two generations are never put together."""
        facts = [self.run, self.attempt, self.step, self.identity.digest, self.outline.digest]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def offer(self, identity: Identity) -> dict[str, Any]:
        """Return what other processes need to know of it, and how it differs from copies of this job's state."""
        return {
            "attempt": self.attempt,
            "step": self.step,
            "kind": "memory",
            "generation": self.generation,
            "differs": identity.difference(self.identity),
            "n_devices": self.outline.n_devices,
            "devices": list(self.devices),
            "verified": self.verified,
            "run": self.run,
        }


class HostMemory:
    """The copies in one folder. A lock allows one writer at a time; the next process on this host reads."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.lock = FolderLock(self.folder)
        self.pinned: frozenset[int] = frozenset()
        """Steps whose copies stay, however many newer ones are written."""

    def write(self, copy: Copy) -> int:
        """Keep a copy, drop those that it supersedes, and return its bytes."""
        try:
            self.lock.take()
            return self._write(copy)
        except OSError as error:
            raise RestartError(
                f"{self.folder} cannot keep a copy of step {copy.step}: {error.strerror}. It holds "
                f"{KEPT + 1 + len(self.pinned)} copies of {sum(rows.nbytes for rows in copy.parts.values())} bytes: "
                "make room, name another folder by MESHMEND_MEMORY, or keep no copies by memory_every=0.",
                step=copy.step,
            ) from error

    def _write(self, copy: Copy) -> int:
        arrays = [(dtype, np.ascontiguousarray(rows)) for dtype, rows in copy.parts.items()]
        checksum = 0
        for _, rows in arrays:
            checksum = zlib.crc32(rows.view(np.uint8).data, checksum)
        header = json.dumps(
            {
                "attempt": copy.attempt,
                "step": copy.step,
                "run": copy.run,
                "identity": copy.identity.as_json(),
                "outline": copy.outline.as_json(),
                "devices": copy.devices,
                "arrays": [(dtype, rows.shape) for dtype, rows in arrays],
                "extra": copy.extra,
                "verified": copy.verified,
                "checksum": checksum,
            }
        ).encode()
        unfinished = self.folder / "unfinished"
        spare = self._superseded(sorted({*self._files(), self.folder / copy.name}))
        # The memory of a superseded copy is reused: fresh pages would have to be cleared first.
        with contextlib.suppress(FileNotFoundError):
            if spare and stat.S_ISREG(spare[0].lstat().st_mode):
                spare[0].replace(unfinished)
        if not _is_regular(unfinished):
            _remove(unfinished)
        with unfinished.open("r+b" if unfinished.exists() else "wb") as file:
            file.write(MAGIC + f"{len(header)} {hashlib.sha256(header).hexdigest()}\n".encode() + header)
            for _, rows in arrays:
                file.write(rows.view(np.uint8).data)
            file.truncate()
        unfinished.replace(self.folder / copy.name)
        for old in self._superseded(self._files()):
            _remove(old)
        return (self.folder / copy.name).stat().st_size

    def read(self) -> tuple[list[Copy], list[RestartError]]:
        """Return all copies that are whole, oldest first, and what is wrong with the others."""
        found, damaged = [], []
        try:
            paths = self._files()
        except OSError as error:
            return [], [RestartError(f"{self.folder} cannot be read: {error.strerror}.")]
        for path in paths:
            try:
                found.append(read_copy(path))
            except RestartError as error:
                damaged.append(error)
        return found, damaged

    def keep_only(self, attempt: int, step: int, trusts: Callable[[int, int], bool] = lambda *_: True) -> None:
        """Drop copies of steps later than the restored one, of attempts later than its own, and what is not trusted."""
        for path in self._files():
            its_attempt, its_step = _attempt_and_step(path)
            if its_step > step or (its_attempt, its_step) > (attempt, step) or not trusts(its_attempt, its_step):
                _remove(path)

    def clear(self) -> None:
        """Drop all copies, and the folder."""
        for path in [*self._files(), self.folder / "unfinished"]:
            _remove(path)
        self.lock.remove()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _superseded(self, files: list[Path]) -> list[Path]:
        """Return which of these files may go, oldest first.

        A pinned step may have copies of two attempts: the older one goes when the newer one is no longer among the
        newest few, since then all hosts have written it.
        """
        older, pinned = files[:-KEPT], self.pinned
        stay = {step: path for path in older if (step := _attempt_and_step(path)[1]) in pinned}
        return [path for path in older if path not in stay.values()]

    def _files(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if re.fullmatch(r"\d{6,}-\d{12,}", path.name))


def read_copy(path: Path) -> Copy:
    """Read a copy; raise `RestartError` if anything about it is not as it was written."""
    try:
        # What is not a plain file may never end (a device, a pipe) or be anywhere (a link): it is not opened for real.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise RestartError(f"{path} is damaged: expected a plain file.")
            return _read(path, file, os.fstat(handle).st_size)
    except OSError as error:
        raise RestartError(f"{path} cannot be read: {error.strerror}.") from error


def _read(path: Path, file: BinaryIO, size: int) -> Copy:
    line = file.readline(len(MAGIC))
    if line != MAGIC and re.fullmatch(rb"meshmend state \d\n", line):
        raise RestartError(
            f"{path} was written by an older meshmend, in another form. Remove it, or finish the job with the version "
            "that began it."
        )
    match = re.fullmatch(rb"(\d{1,12}) ([0-9a-f]{64})\n", file.readline(100)) if line == MAGIC else None
    if match is None:
        raise RestartError(f"{path} is damaged: its first lines are not those of a copy of a job's state.")
    length = int(match[1])
    if length > min(size, LONGEST_HEADER):
        raise RestartError(f"{path} is damaged: expected a header of {length} bytes, got a file of {size}.")
    header = file.read(length)
    digest = hashlib.sha256(header).hexdigest()
    if digest != match[2].decode():
        raise RestartError(f"{path} is damaged: header checksum mismatch: expected {match[2].decode()}, got {digest}.")
    try:
        facts = json.loads(header)
        outline = Outline.from_json(facts["outline"])
        identity = Identity.from_json(facts["identity"])
        attempt, step, run = int(facts["attempt"]), int(facts["step"]), str(facts["run"])
        devices = tuple(int(device) for device in facts["devices"])
        arrays = {str(dtype): tuple(int(n) for n in shape) for dtype, shape in facts["arrays"]}
        outline.check()
        expected = {dtype: (len(devices), outline.part_size(dtype)) for dtype in outline.dtypes}
        n_bytes = sum(dtype_named(dtype).itemsize * rows * columns for dtype, (rows, columns) in expected.items())
        checksum = int(facts["checksum"])
        extra = facts["extra"]
        verified = int(facts["verified"])
        if not UNCHECKED <= verified <= step:
            raise RestartError(f"expected a verified step up to {step}, got {verified}")
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RestartError, TypeError, ValueError) as error:
        raise RestartError(f"{path} is damaged: its header does not describe a copy ({error}).") from error
    copy = Copy(attempt, step, outline, devices, {}, extra, identity, run, verified)
    if copy.name != path.name:
        raise RestartError(f"{path} is damaged: its header says {copy.name}; it is another copy's file.", step=step)
    if arrays != expected or len(set(devices)) != len(devices) or not all(0 <= d < outline.n_devices for d in devices):
        raise RestartError(f"{path} is damaged: its arrays are not those of its devices.", step=step)
    at = file.tell()
    if size - at != n_bytes:
        raise RestartError(f"{path} is damaged: expected {n_bytes} bytes of state, got {size - at}.", step=step)
    data = file.read(n_bytes)
    if len(data) != n_bytes or zlib.crc32(data) != checksum:
        raise RestartError(
            f"{path} is damaged: state checksum mismatch: expected {checksum:08x}, got {zlib.crc32(data):08x}.",
            step=step,
        )
    at = 0
    for dtype, shape in arrays.items():
        rows = np.frombuffer(data, dtype_named(dtype), shape[0] * shape[1], at).reshape(shape)
        copy.parts[dtype] = rows
        at += rows.nbytes
    return copy


def _attempt_and_step(path: Path) -> tuple[int, int]:
    """Return what a copy's file name says."""
    attempt, step = path.name.split("-")
    return int(attempt), int(step)


def _is_regular(path: Path) -> bool:
    return not path.is_symlink() and path.is_file()


def _remove(path: Path) -> None:
    """Remove whatever is in a copy's place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
