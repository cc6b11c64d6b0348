"""A ledger: which samples each committed step has used, so that anybody can check that none was lost or used twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.errors import LedgerError


@dataclass(frozen=True)
class Entry:
    """One committed step: its number, its epoch and the record numbers of its samples."""

    step: int
    epoch: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Account:
    """What `Ledger.check` found: all is in order, and how much there is of it."""

    steps: int
    epochs: int
    """Complete epochs."""
    left_over: int
    """Samples of the epoch that is not complete."""


class Ledger:
    """A file with one JSON object a line, appended to step by step by one process.

    Committing step k again (after a restart) undoes what stood there of step k and of all later ones: the job has
    gone back, and goes on from there. Nothing is overwritten in the file; `entries` says what counts.

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
        self._mended = False

    def record(self, step: int, *, epoch: int, samples: Iterable[int]) -> None:
        """Append a committed step; it is in the hands of the system when this returns."""
        if not self._mended:
            self._mend()
        entry = {"step": int(step), "epoch": int(epoch), "samples": [int(sample) for sample in samples]}
        # One write of a whole line: a writer that is killed leaves all of it, or a torn last line.
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")

    def entries(self) -> list[Entry]:
        """Return the steps that count, in order. A torn last line counts as not written."""
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        found: list[Entry] = []
        for number, line in enumerate(lines[:-1], start=1):
            entry = self._parse(line, number)
            while found and found[-1].step >= entry.step:
                found.pop()
            found.append(entry)
        return found

    def check(self, epoch_size: int, *, epochs: int | None = None) -> Account:
        """Raise a `LedgerError` unless the steps have no gap and use each sample exactly once an epoch.

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

    def _check_begin(self, before: Entry | None, entry: Entry, seen: dict[int, set[int]], epoch_size: int) -> None:
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

    def _check_samples(self, entry: Entry, seen: set[int], epoch_size: int) -> None:
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

    def _parse(self, line: bytes, number: int) -> Entry:
        try:
            fields: Any = json.loads(line)
            return Entry(int(fields["step"]), int(fields["epoch"]), tuple(map(int, fields["samples"])))
        except (ValueError, TypeError, KeyError):
            raise LedgerError(
                f"Line {number} of {self.path.name} is not a step of a ledger: expected an object with step, epoch "
                f"and samples, got {line[:60]!r}."
            ) from None

    def _mend(self) -> None:
        """Cut off a torn last line, so that the next one begins where a line begins."""
        self._mended = True
        if self.path.exists():
            content = self.path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                os.truncate(self.path, whole)


def _missing(seen: set[int], epoch_size: int) -> tuple[int, ...]:
    return tuple(sample for sample in range(epoch_size) if sample not in seen)


def _name(what: str, samples: Iterable[int]) -> str:
    """Write the first few samples out, and how many there are if there are more."""
    numbers = list(samples)
    if not numbers:
        return ""
    shown = ", ".join(map(str, numbers[:10]))
    return f"{what}: {shown}{f' and {len(numbers) - 10} more' if len(numbers) > 10 else ''}."
