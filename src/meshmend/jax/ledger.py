"""A ledger: which samples each committed step has used, so that a job can be checked for samples lost or used twice.

A record is one line of JSON whose last field is a checksum of the line and of the checksum before it. So a record that
was changed, left out, moved or repeated is detected wherever it is; only a truncated file looks like an earlier
ledger, and the next step then leaves a gap.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.errors import LedgerError


@dataclass(frozen=True)
class LedgerEntry:
    """One committed step: its number, its epoch and the record numbers of its samples."""

    step: int
    epoch: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Account:
    """The result of `Ledger.check`: the ledger is in order, and this is how much it has."""

    steps: int
    epochs: int
    """Complete epochs."""
    left_over: int
    """Samples of the epoch that is not complete."""


CHECKSUM_BYTES = 8
"""Of BLAKE2b: a damaged record passes with probability 2^-64."""
RECORD = re.compile(rb'(\{.*),"checksum":"([0-9a-f]{%d})"\}\n' % (2 * CHECKSUM_BYTES), re.DOTALL)


class Ledger:
    """A file with one JSON object per line, appended to step by step by one process.

    Committing step k again (after a restart) supersedes the entries of step k and of all later ones: the job has
    gone back, and continues from there. Nothing is overwritten in the file; `entries` says what counts.

    A writer that dies in the middle of a record leaves a torn one at the end, which counts as not written; the next
    writer truncates it, with a warning. Any other damage is refused with the offset where it begins. A record survives
    the death of the process as soon as `record` returns.

    >>> import tempfile, pathlib
    >>> ledger = Ledger(pathlib.Path(tempfile.mkdtemp()) / "ledger.jsonl")
    >>> ledger.record(0, epoch=0, samples=[3, 1])
    >>> ledger.record(1, epoch=0, samples=[2, 0])
    >>> ledger.record(1, epoch=0, samples=[0, 2])
    >>> ledger.check(epoch_size=4)
    Account(steps=2, epochs=1, left_over=0)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._end: _End | None = None

    def record(self, step: int, *, epoch: int, samples: Iterable[int]) -> None:
        """Append a committed step. If it cannot be written, the file is left as it was and a `LedgerError` says why."""
        fields = {"step": int(step), "epoch": int(epoch), "samples": [int(sample) for sample in samples]}
        body = json.dumps(fields, separators=(",", ":")).encode()[:-1]
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._unwritten(step, error) from error
        try:
            if self._end is None or self._end.offset != os.fstat(handle).st_size:
                self._end = self._find_end(handle)
            before, self._end = self._end, None
            checksum = _checksum(before.checksum, body)
            line = b'%s,"checksum":"%s"}\n' % (body, checksum)
            try:
                _write_all(handle, line)
            except OSError as error:
                os.ftruncate(handle, before.offset)
                raise self._unwritten(step, error) from error
            self._end = _End(before.offset + len(line), checksum)
        finally:
            os.close(handle)

    def entries(self) -> list[LedgerEntry]:
        """Return the steps that count, in order. A torn last record counts as not written."""
        found: list[LedgerEntry] = []
        for number, (line, end) in enumerate(self._lines(), start=1):
            entry = self._parse(line, number, end.offset - len(line))
            while found and found[-1].step >= entry.step:
                found.pop()
            found.append(entry)
        return found

    def check(self, epoch_size: int, *, epochs: int | None = None) -> Account:
        """Raise a `LedgerError` unless the steps have no gap and use each sample exactly once per epoch.

        The last epoch may be under way; with `epochs` there must be exactly so many, all complete.
        """
        entries = self.entries()
        seen: dict[int, set[int]] = {}
        for before, entry in zip([None, *entries], entries, strict=False):
            if before is not None and entry.step != before.step + 1:
                raise LedgerError(
                    f"Step {before.step} is followed by step {entry.step}, expected {before.step + 1}: "
                    "steps in between are missing from the ledger.",
                    step=before.step + 1,
                )
            if before is None or entry.epoch != before.epoch:
                self._check_begin(before, entry, seen, epoch_size)
            self._check_samples(entry, seen.setdefault(entry.epoch, set()), epoch_size)
        complete = sum(len(samples) == epoch_size for samples in seen.values())
        left_over = len(seen[entries[-1].epoch]) % epoch_size if entries else 0
        if epochs is not None and (complete, left_over) != (epochs, 0):
            missing = _missing(seen[entries[-1].epoch], epoch_size) if left_over else ()
            raise LedgerError(
                f"The ledger has {complete} complete epochs and {left_over} samples of one more, expected {epochs} "
                f"complete epochs. {_name('Not used', missing)}",
                step=entries[-1].step if entries else None,
                samples=missing,
            )
        return Account(len(entries), complete, left_over)

    def _check_begin(
        self, before: LedgerEntry | None, entry: LedgerEntry, seen: dict[int, set[int]], epoch_size: int
    ) -> None:
        """See that the epoch that begins is the next one, and that the one before is complete."""
        expected = 0 if before is None else before.epoch + 1
        missing = () if before is None else _missing(seen[before.epoch], epoch_size)
        if entry.epoch != expected or missing:
            raise LedgerError(
                f"Step {entry.step} begins epoch {entry.epoch}, expected epoch {expected} after all {epoch_size} "
                f"samples of the one before. {_name('Not used', missing)}",
                step=entry.step,
                epoch=entry.epoch,
                samples=missing,
            )

    def _check_samples(self, entry: LedgerEntry, seen: set[int], epoch_size: int) -> None:
        numbers, counts = np.unique(np.array(entry.samples, dtype=np.int64), return_counts=True)
        wrong = [int(n) for n in numbers[(numbers < 0) | (numbers >= epoch_size)]]
        if wrong:
            raise LedgerError(
                f"Step {entry.step} used samples that an epoch of {epoch_size} does not have. {_name('Namely', wrong)}",
                step=entry.step,
                epoch=entry.epoch,
                samples=wrong,
            )
        again = sorted({*numbers[counts > 1].tolist(), *(seen & set(entry.samples))})
        if again:
            raise LedgerError(
                f"Step {entry.step} used samples that epoch {entry.epoch} had used already. {_name('Namely', again)}",
                step=entry.step,
                epoch=entry.epoch,
                samples=again,
            )
        seen.update(entry.samples)

    def _lines(self) -> Iterator[tuple[bytes, _End]]:
        """Read the file's whole lines, each with where it ends; raise a `LedgerError` at the first damaged one."""
        end = _End(0, b"")
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                match = RECORD.fullmatch(line)
                if match is None or match[2] != _checksum(end.checksum, match[1]):
                    raise self._damaged(number, end.offset, "a record whose checksum is right", line)
                end = _End(end.offset + len(line), match[2])
                yield line, end

    def _parse(self, line: bytes, number: int, offset: int) -> LedgerEntry:
        expected = "an object with step, epoch and samples, all whole numbers"
        try:
            fields: Any = json.loads(line)
            numbers = [fields["step"], fields["epoch"], *fields["samples"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self._damaged(number, offset, expected, line) from None
        if any(type(n) is not int for n in numbers):
            raise self._damaged(number, offset, expected, line)
        return LedgerEntry(numbers[0], numbers[1], tuple(numbers[2:]))

    def _damaged(self, number: int, offset: int, expected: str, line: bytes) -> LedgerError:
        old = (
            ""
            if b"checksum" in line
            else " (Ledgers of meshmend 0.1 have no checksums: give them a name of their own.)"
        )
        return LedgerError(
            f"{self.path.name} is damaged at byte {offset} (line {number}): expected {expected}, got {line[:60]!r}. "
            "Everything before that byte is intact. Restore a copy of the file, or keep it for inspection and start "
            f"a new ledger.{old}",
            offset=offset,
        )

    def _unwritten(self, step: int, error: OSError) -> LedgerError:
        return LedgerError(
            f"Step {step} is not in {self.path.name}: {error}. The ledger is as it was before; make room for it and "
            "record the step again.",
            step=step,
        )

    def _find_end(self, handle: int) -> _End:
        """Check what there is, and cut off a torn last record, so that the next one begins where a line begins."""
        end = _End(0, b"")
        for _, end in self._lines():  # noqa: B007  # only the last one counts
            pass
        torn = os.fstat(handle).st_size - end.offset
        if torn:
            os.ftruncate(handle, end.offset)
            warnings.warn(
                f"{self.path.name} ended with {torn} bytes of a record that was never finished, from byte "
                f"{end.offset} on: they are cut off. A writer that was killed leaves that.",
                stacklevel=3,
            )
        return end


@dataclass(frozen=True)
class _End:
    """Where a ledger's whole records end, and the checksum of the last one."""

    offset: int
    checksum: bytes


def _checksum(before: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(before + body, digest_size=CHECKSUM_BYTES).hexdigest().encode()


def _write_all(handle: int, line: bytes) -> None:
    """Write all of a line: where a disk is nearly full the first write may be short, and the next one says why."""
    left = memoryview(line)
    while left:
        left = left[os.write(handle, left) :]


def _missing(seen: set[int], epoch_size: int) -> tuple[int, ...]:
    return tuple(sample for sample in range(epoch_size) if sample not in seen)


def _name(what: str, samples: Iterable[int]) -> str:
    """Write the first few samples out, and how many there are if there are more."""
    numbers = list(samples)
    if not numbers:
        return ""
    shown = ", ".join(map(str, numbers[:10]))
    return f"{what}: {shown}{f' and {len(numbers) - 10} more' if len(numbers) > 10 else ''}."
