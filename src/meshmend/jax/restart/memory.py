"""Copies of the state in a host's memory that outlive the process: files in a folder of `/dev/shm`, one a step.

A file appears whole or not at all, carries its step and a checksum, and is trusted only if both hold. The newest few
are kept. A machine that loses power loses them: that is what other hosts' copies are for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import RestartError
from meshmend.jax.restart.elements import Outline

MAGIC = b"meshmend state 1\n"
KEPT = 3
"""Copies that are kept. When a host has the data of step n, every host has begun step n, and so has written n − 2: the
one before that can go."""


@dataclass(frozen=True)
class Copy:
    """What one host keeps of one step: the parts of its own devices, and those of another host's.

    `parts` has for each dtype one row a device, in the order of `devices`.
    """

    attempt: int
    step: int
    outline: Outline
    devices: tuple[int, ...]
    parts: dict[str, NDArray[Any]]
    extra: Any

    @property
    def name(self) -> str:
        """The copy's file name."""
        return f"{self.attempt:06d}-{self.step:012d}"


class HostMemory:
    """The copies in one folder. One process at a time writes; the next one on this host reads."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def write(self, copy: Copy) -> int:
        """Keep a copy, drop those that it makes needless, and return its bytes."""
        try:
            return self._write(copy)
        except OSError as error:
            raise RestartError(
                f"{self.folder} cannot keep a copy of step {copy.step}: {error.strerror}. It holds {KEPT + 1} copies "
                f"of {sum(rows.nbytes for rows in copy.parts.values())} bytes: make room, name another folder by "
                "MESHMEND_MEMORY, or keep no copies by memory_every=0.",
                step=copy.step,
            ) from error

    def _write(self, copy: Copy) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        arrays = [(dtype, np.ascontiguousarray(rows)) for dtype, rows in copy.parts.items()]
        checksum = 0
        for _, rows in arrays:
            checksum = zlib.crc32(rows.view(np.uint8).data, checksum)
        header = json.dumps(
            {
                "attempt": copy.attempt,
                "step": copy.step,
                "outline": copy.outline.as_json(),
                "devices": copy.devices,
                "arrays": [(dtype, rows.shape) for dtype, rows in arrays],
                "extra": copy.extra,
                "checksum": checksum,
            }
        ).encode()
        unfinished = self.folder / "unfinished"
        known = self._files()
        # The memory of a copy that is not needed any more is used again: fresh pages would have to be cleared first.
        with contextlib.suppress(FileNotFoundError):
            if len(known) >= KEPT:
                known[0].replace(unfinished)
        with unfinished.open("r+b" if unfinished.exists() else "wb") as file:
            file.write(MAGIC + f"{len(header)} {zlib.crc32(header)}\n".encode() + header)
            for _, rows in arrays:
                file.write(rows.view(np.uint8).data)
            file.truncate()
        unfinished.replace(self.folder / copy.name)
        for old in self._files()[:-KEPT]:
            old.unlink(missing_ok=True)
        return (self.folder / copy.name).stat().st_size

    def read(self) -> list[Copy]:
        """Return all copies that are whole, oldest first."""
        found = []
        for path in self._files():
            with contextlib.suppress(RestartError):
                found.append(read_copy(path))
        return found

    def keep_only(self, attempt: int, step: int) -> None:
        """Drop what was written of steps that the job has gone back behind."""
        for path in self._files():
            its_attempt, its_step = map(int, path.name.split("-"))
            if its_step > step or (its_attempt, its_step) > (attempt, step):
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Drop all copies, and the folder."""
        for path in [*self._files(), self.folder / "unfinished"]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _files(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if re.fullmatch(r"\d{6}-\d{12}", path.name))


def read_copy(path: Path) -> Copy:
    """Read a copy; raise `RestartError` if anything about it is not as it was written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RestartError(f"{path} cannot be read: {error.strerror}.") from error
    match = re.match(re.escape(MAGIC) + rb"(\d+) (\d+)\n", data)
    if match is None:
        raise RestartError(f"{path} is no copy of a job's state.")
    start = match.end() + int(match[1])
    header = data[match.end() : start]
    if zlib.crc32(header) != int(match[2]):
        raise RestartError(f"{path} is damaged: its header does not have its checksum.")
    facts = json.loads(header)
    parts, at = {}, start
    for dtype, shape in facts["arrays"]:
        rows = (
            np.frombuffer(data, np.dtype(dtype), int(np.prod(shape)), at).reshape(shape)
            if _fits(data, at, dtype, shape)
            else None
        )
        if rows is None:
            raise RestartError(f"{path} is damaged: it ends early.", step=facts["step"])
        parts[dtype] = rows
        at += rows.nbytes
    if zlib.crc32(memoryview(data)[start:at]) != facts["checksum"] or at != len(data):
        raise RestartError(f"{path} is damaged: its content does not have its checksum.", step=facts["step"])
    return Copy(
        attempt=facts["attempt"],
        step=facts["step"],
        outline=Outline.from_json(facts["outline"]),
        devices=tuple(facts["devices"]),
        parts=parts,
        extra=facts["extra"],
    )


def _fits(data: bytes, at: int, dtype: str, shape: Sequence[int]) -> bool:
    return at + int(np.prod(shape)) * np.dtype(dtype).itemsize <= len(data)


@dataclass(frozen=True)
class Choice:
    """The newest step that all hosts' copies together have whole, and which process brings which device's part."""

    attempt: int
    step: int
    providers: dict[int, int]
    """For each device of the mesh that wrote the copies, the process that has its part."""


def choose(held: Sequence[Sequence[Mapping[str, Any]]], outline: Outline) -> Choice | None:
    """Return the newest step that is whole, from what every process holds; None if none is.

    A copy of a later attempt is always newer: that attempt went on from what was whole before it. Copies of another
    state (other parameters, say) do not count.
    """
    offers: dict[tuple[int, int, str], dict[int, int]] = {}
    sizes: dict[tuple[int, int, str], int] = {}
    for process, copies in enumerate(held):
        for copy in copies:
            key = (int(copy["attempt"]), int(copy["step"]), str(copy["digest"]))
            if copy["state"] == outline.state:
                sizes[key] = int(copy["n_devices"])
                for device in copy["devices"]:
                    offers.setdefault(key, {}).setdefault(int(device), process)
    for key in sorted(offers, reverse=True):
        if len(offers[key]) == sizes[key]:
            return Choice(key[0], key[1], offers[key])
    return None


def offer(copy: Copy) -> dict[str, Any]:
    """Return what other processes need to know of a copy."""
    return {
        "attempt": copy.attempt,
        "step": copy.step,
        "digest": copy.outline.digest,
        "state": copy.outline.state,
        "n_devices": copy.outline.n_devices,
        "devices": list(copy.devices),
    }


def default_folder(job: str, host: int) -> Path:
    """Return where a host keeps its copies: $MESHMEND_MEMORY, or a folder of this user's and this job's in /dev/shm."""
    named = os.environ.get("MESHMEND_MEMORY")
    safe = re.sub(r"[^\w.-]", "_", job)
    return Path(named) if named else Path(f"/dev/shm/meshmend-{os.getuid()}-{safe}/host-{host}")  # noqa: S108  # memory
