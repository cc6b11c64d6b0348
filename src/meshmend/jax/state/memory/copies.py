"""Copies of the state in a host's memory that outlive the process: files in a folder of `/dev/shm`, one per step.

A file is written atomically, has its step, the identity of the state and checksums, and is trusted only if
all of them hold: that of the header when copies are listed, that of a slice of a part when it is read. Where
the job has a secret, the header is signed, too: what another job has left here is refused. The newest two are kept, and
those of pinned steps: the last verified one, and the next that may be. A power cut loses them; other hosts' copies
cover that.

A file has MAGIC, a line with length, digest and signature of the header, the header, and one part after the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import RestartError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.state.candidates import UNCHECKED
from meshmend.jax.state.layout.flat import Outline
from meshmend.jax.state.layout.tree_signature import Identity
from meshmend.jax.state.memory.folders import FolderLock
from meshmend.launch.hosts import ranges_of
from meshmend.launch.signing import file_key, is_signed, signature

MAGIC = b"meshmend state 8\n"
KEPT = 2
"""Copies that are kept. No host has the data of a copy before every host has written the one before (`peer_copy`): the
one before that can go, and its memory is used again."""
BLOCK_BYTES = 1 << 20
"""Bytes that are summed and written at a time: they stay in the cache."""
WRITERS = 2
"""Threads that write a copy: one alone is slower than memory."""
SHARED_FROM_BYTES = 8 << 20
"""Bytes of a copy from which they share the work: a smaller one is written before they have begun."""
LONGEST_HEADER = 256 << 20
"""Bytes; a longer header is damage, and not worth reading."""
KIND = "copy in memory"
ASIDE = ".aside"
"""Ends the name of a copy that a restart went back behind: it goes when all hosts have written a newer one."""
UNSIGNED = "-"
LAYOUT = 1
"""Version of the order of elements in a part; a header without one is of version 1. In that, a shard's rows follow one
another and each chunk is flat, however a device stores it: (R, n) and a TPU's (R, n/128, 128) are the same bytes."""


@dataclass(frozen=True)
class Copy:
    """What one host keeps of one step: parts of the state, as its outline numbers them.

    `data` has the arrays of each part, one per dtype; it is empty where only the header was read. `run` is a random
    name that all hosts of one attempt share: copies are of one state only if it is the same, whatever attempt and step
    they claim.
    """

    attempt: int
    step: int
    outline: Outline
    parts: tuple[int, ...]
    data: list[list[NDArray[Any]]]
    extra: Tree
    identity: Identity
    run: str
    verified: int = UNCHECKED
    """The last step that was verified when this was kept, 0 if none was; `UNCHECKED` if nothing checks the job."""
    checksums: tuple[int, ...] = ()
    """CRC-32 of each slice of each part, if it was read."""
    hosts: tuple[int, ...] = ()
    """Numbers of all hosts of the attempt: between them they had all parts."""
    path: Path = Path()
    first_byte: int = 0
    """Where the parts begin in its file."""

    @property
    def name(self) -> str:
        """The copy's file name."""
        return f"{self.attempt:06d}-{self.step:012d}"

    @cached_property
    def starts(self) -> dict[int, int]:
        """First byte of each part, from the first part's on."""
        sizes = [self.outline.part_bytes(part) for part in self.parts]
        return dict(zip(self.parts, itertools.accumulate(sizes, initial=0), strict=False))

    @cached_property
    def first_checksums(self) -> dict[int, int]:
        """For each part the place of its first slice among all checksums."""
        numbers = [len(self.outline.slices(part)) for part in self.parts]
        return dict(zip(self.parts, itertools.accumulate(numbers, initial=0), strict=False))

    @cached_property
    def n_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.outline.part_bytes(part) for part in self.parts)

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
            "slices": [len(self.outline.slices(part)) for part in (0, self.outline.n_parts - 1)],
            "n_shares": self.outline.n_all_shares,
            "n_parts": self.outline.n_parts,
            "parts": list(self.parts),
            "verified": self.verified,
            "run": self.run,
            "hosts": ranges_of(self.hosts),  # each of them tells all others
        }


class HostMemory:
    """The copies in one folder. A lock allows one writer at a time; the next process on this host reads."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.lock = FolderLock(self.folder)
        self.pinned: frozenset[int] = frozenset()
        """Steps whose copies stay, however many newer ones are written."""
        self.hosts: tuple[int, ...] = ()
        """Numbers of the hosts that keep copies together."""
        self._n_written = 0
        self._has_room = True
        """Whether there has been room for all that should stay."""

    def write(self, copy: Copy) -> int:
        """Keep a copy, drop those that it supersedes, and return its bytes."""
        try:
            self.lock.take()
            try:
                n_bytes = self._write(copy)
            except OSError:
                self._has_room = False
                self._drop_aside()
                n_bytes = self._write(copy)  # there may be room now
        except OSError as error:
            raise RestartError(
                f"{self.folder} cannot keep a copy of step {copy.step}: {error.strerror}. It holds "
                f"{KEPT + len(self.pinned)} copies of {copy.n_bytes} bytes: "
                "make room, name another folder by MESHMEND_MEMORY, or keep no copies by memory_every=0.",
                step=copy.step,
            ) from error
        self._n_written += 1
        if self._n_written == 2:  # no host has the data of a second copy before every host has written the first
            self._drop_aside()
        return n_bytes

    def _write(self, copy: Copy) -> int:
        facts = {
            "attempt": copy.attempt,
            "step": copy.step,
            "run": copy.run,
            "identity": copy.identity.as_json(),
            "outline": copy.outline.as_json(),
            "layout": LAYOUT,
            "parts": copy.parts,
            "extra": copy.extra,
            "verified": copy.verified,
            "hosts": self.hosts,
        }
        slices = [(number, part, ends) for number, part in enumerate(copy.parts) for ends in copy.outline.slices(part)]
        begin = len(_header(facts, [0] * len(slices)))
        unfinished = self.folder / "unfinished"
        spare = self._superseded(sorted({*self._files(), self.folder / copy.name}))
        # The memory of a superseded copy is reused: fresh pages would have to be cleared first.
        with contextlib.suppress(FileNotFoundError):
            if spare and stat.S_ISREG(spare[0].lstat().st_mode):
                spare[0].replace(unfinished)
        if not _is_regular(unfinished):
            _remove(unfinished)
        for old in spare[1:]:
            _remove(old)
        with unfinished.open("r+b" if unfinished.exists() else "wb", buffering=0) as file:

            def write_slice(one: tuple[int, int, tuple[int, int]]) -> int:
                number, part, ends = one
                return _write_slice(file.fileno(), begin + copy.starts[part], copy.data[number], *ends)

            if copy.n_bytes < SHARED_FROM_BYTES:
                checksums = list(map(write_slice, slices))
            else:
                with ThreadPoolExecutor(WRITERS, "meshmend-copy") as threads:
                    checksums = list(threads.map(write_slice, slices))
            file.write(_header(facts, checksums))
            file.truncate(begin + copy.n_bytes)
        unfinished.replace(self.folder / copy.name)
        return begin + copy.n_bytes

    def read(self) -> tuple[list[Copy], list[RestartError]]:
        """Return all copies whose headers are whole, oldest first, and what is wrong with the others."""
        found, damaged = [], []
        try:
            paths = sorted([*self._files(), *self._files(ASIDE)], key=_attempt_and_step)
        except OSError as error:
            return [], [RestartError(f"{self.folder} cannot be read: {error.strerror}.")]
        for path in paths:
            try:
                found.append(read_copy(path))
            except RestartError as error:
                damaged.append(error)
        return found, damaged

    def go_back_to(self, attempt: int, step: int, trusts: Callable[[int, int], bool] = lambda *_: True) -> None:
        """Set aside copies of steps later than the restored one, of attempts later than its own, or not trusted.

        They go when all hosts have written a newer copy. Until then, hosts that come back may make them whole.
        """
        for path in [*self._files(), *self._files(ASIDE)]:
            its_attempt, its_step = _attempt_and_step(path)
            is_later = its_step > step or (its_attempt, its_step) > (attempt, step)
            name = path.name.removesuffix(ASIDE) + ASIDE * (is_later or not trusts(its_attempt, its_step))
            if name != path.name:
                path.replace(self.folder / name)

    def _drop_aside(self) -> bool:
        """Drop what was set aside; return whether there was anything."""
        aside = self._files(ASIDE)
        for path in aside:
            _remove(path)
        return bool(aside)

    def clear(self) -> None:
        """Drop all copies, and the folder."""
        for path in [*self._files(), *self._files(ASIDE), self.folder / "unfinished"]:
            _remove(path)
        self.lock.remove()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _superseded(self, files: list[Path]) -> list[Path]:
        """Return which of these files may go, oldest first.

        All hosts have written the oldest. After a restart nobody knows that of the others, not even of the one that the
        job has resumed from: two more stay until all have written one since, if there is room.

        A pinned step may have copies of two attempts: the older one goes when the newer one is no longer among the
        newest few, since then all hosts have written it.
        """
        is_first = self._has_room and not self._n_written
        older, pinned = files[: -KEPT - is_first], self.pinned
        stay = {step: path for path in older if (step := _attempt_and_step(path)[1]) in pinned}
        others = [path for path in older if path not in stay.values()]
        return others[is_first:]

    def _files(self, ending: str = "") -> list[Path]:
        if not self.folder.is_dir():
            return []
        name = re.compile(r"\d{6,}-\d{12,}" + re.escape(ending))
        return sorted(path for path in self.folder.iterdir() if name.fullmatch(path.name))


def _header(facts: dict[str, Any], checksums: list[int]) -> bytes:
    """Return the first lines and the header of a file: of the same length, whatever the checksums are."""
    header = json.dumps(facts | {"checksums": [f"{checksum:08x}" for checksum in checksums]}).encode()
    signed = signature(file_key(), KIND, header) or UNSIGNED
    return MAGIC + f"{len(header)} {hashlib.sha256(header).hexdigest()} {signed}\n".encode() + header


def _write_slice(file: int, begin: int, parts: list[NDArray[Any]], start: int, stop: int) -> int:
    """Write bytes `start` to `stop` of arrays that follow one another from byte `begin` on; return their CRC-32."""
    checksum, before = 0, 0
    for part in parts:
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        for at in range(max(start, before), min(stop, before + len(data)), BLOCK_BYTES):
            block = data[at - before : min(stop - before, at - before + BLOCK_BYTES)]
            checksum = zlib.crc32(block, checksum)
            written = 0
            while written < len(block):
                written += os.pwrite(file, block[written:], begin + at + written)
        before += len(data)
    return checksum


class PartReader:
    """Reads parts from a copy's file, and nothing else of it."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self._file = os.open(copy.path, OPEN_FLAGS)

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, part: int, start: int, stop: int) -> bytes:
        """Return bytes of a part; fewer at its end."""
        at, n_bytes = self.copy.first_byte + self.copy.starts[part], self.copy.outline.part_bytes(part)
        return os.pread(self._file, max(0, min(stop, n_bytes) - start), at + start)

    def blocks(self, part: int, which: int) -> Iterator[tuple[int, bytes]]:
        """Return a slice of a part in blocks, each with its first byte.

        Raises `RestartError` at the end if it is not as it was written: then nothing of it may be used.
        """
        checksum, (start, stop) = 0, self.copy.outline.slices(part)[which]
        n_bytes = 0
        for at in range(start, stop, BLOCK_BYTES):
            block = self.read(part, at, min(stop, at + BLOCK_BYTES))
            checksum, n_bytes = zlib.crc32(block, checksum), n_bytes + len(block)
            yield at, block
        expected = self.copy.checksums[self.copy.first_checksums[part] + which]
        if checksum != expected or n_bytes != stop - start:
            raise RestartError(
                f"{self.copy.path} is damaged: state checksum mismatch: expected {expected:08x}, got {checksum:08x}.",
                step=self.copy.step,
            )


OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""What is not a plain file may never end (a device, a pipe) or be anywhere (a link): it is not opened for real."""


def read_copy(path: Path) -> Copy:
    """Read a copy's header; raise `RestartError` if anything about it is not as it was written, or its file's size."""
    try:
        handle = os.open(path, OPEN_FLAGS)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise RestartError(f"{path} is damaged: expected a plain file.")
            return _read(path, file, os.fstat(handle).st_size)
    except OSError as error:
        raise RestartError(f"{path} cannot be read: {error.strerror}.") from error


def _read(path: Path, file: BinaryIO, size: int) -> Copy:
    line = file.readline(len(MAGIC))
    match = re.fullmatch(rb"(\d{1,12}) ([0-9a-f]{64}) (-|[0-9a-f]{64})\n", file.readline(200))
    if match is None or line != MAGIC:
        raise RestartError(f"{path} is damaged: its first lines are not those of a copy of a job's state.")
    length = int(match[1])
    if length > min(size, LONGEST_HEADER):
        raise RestartError(f"{path} is damaged: expected a header of {length} bytes, got a file of {size}.")
    header = file.read(length)
    digest = hashlib.sha256(header).hexdigest()
    if digest != match[2].decode():
        raise RestartError(f"{path} is damaged: header checksum mismatch: expected {match[2].decode()}, got {digest}.")
    if not is_signed(file_key(), KIND, header, match[3].decode()):
        raise RestartError(f"{path} is not signed with this job's secret: another job has written it. Remove it.")
    try:
        facts = json.loads(header)
        outline = Outline.from_json(facts["outline"])
        identity = Identity.from_json(facts["identity"])
        attempt, step, run = int(facts["attempt"]), int(facts["step"]), str(facts["run"])
        parts = tuple(int(part) for part in facts["parts"])
        outline.check()
        checksums = tuple(int(checksum, 16) for checksum in facts["checksums"])
        extra = facts["extra"]
        layout, verified = int(facts.get("layout", 1)), int(facts["verified"])
        hosts = tuple(int(host) for host in facts["hosts"])
        if not UNCHECKED <= verified <= step:
            raise RestartError(f"expected a verified step up to {step}, got {verified}")
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RestartError, TypeError, ValueError) as error:
        raise RestartError(f"{path} is damaged: its header does not describe a copy ({error}).") from error
    if not 1 <= layout <= LAYOUT:
        raise RestartError(
            f"{path} has elements in the order of version {layout}, expected at most {LAYOUT}: a newer meshmend has "
            "written it. Go on with that one, or remove the file.",
            step=step,
        )
    first_byte = file.tell()
    copy = Copy(
        attempt,
        step,
        outline,
        parts,
        [],
        extra,
        identity,
        run,
        verified,
        checksums,
        hosts,
        path=path,
        first_byte=first_byte,
    )
    if copy.name != path.name.removesuffix(ASIDE):
        raise RestartError(f"{path} is damaged: its header says {copy.name}; it is another copy's file.", step=step)
    if len(set(parts)) != len(parts) or not all(0 <= part < outline.n_parts for part in parts):
        raise RestartError(f"{path} is damaged: its parts are not those of its state.", step=step)
    if len(checksums) != sum(len(outline.slices(part)) for part in parts):
        raise RestartError(f"{path} is damaged: it has {len(checksums)} checksums, not one for each slice.", step=step)
    if size - first_byte != copy.n_bytes:
        got = size - first_byte
        raise RestartError(f"{path} is damaged: expected {copy.n_bytes} bytes of state, got {got}.", step=step)
    return copy


def _attempt_and_step(path: Path) -> tuple[int, int]:
    """Return what a copy's file name says."""
    attempt, step = path.name.removesuffix(ASIDE).split("-")
    return int(attempt), int(step)


def _is_regular(path: Path) -> bool:
    return not path.is_symlink() and path.is_file()


def _remove(path: Path) -> None:
    """Remove whatever is in a copy's place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
