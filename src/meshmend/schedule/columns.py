"""Columns: the arrays of a schedule, checked for being whole numbers, kept read-only, and repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend.errors import ScheduleError
from meshmend.topology.mesh import read_only

MAX_CHUNKS = 2**31 - 1


def as_int_array(values: ArrayLike, name: str, length: int | None = None) -> NDArray[Any]:
    """Return a 1-D integer array, stretched to `length` if it is a single number."""
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ScheduleError(f"{name} holds {array.dtype}, expected whole numbers.")
    if array.ndim == 0 and length is not None:
        array = np.broadcast_to(array, (length,))
    if array.ndim != 1 or (length is not None and len(array) != length):
        wanted = "one number per transfer" if length is None else f"{length} numbers"
        raise ScheduleError(f"{name} has shape {array.shape}, expected {wanted}.")
    if array.dtype.kind == "u":
        if array.size and array.max() > MAX_CHUNKS:
            raise ScheduleError(f"{name} holds {array.max()}, beyond any rank, step or chunk.")
        return array.astype(np.int64)
    return array.astype(np.promote_types(array.dtype, np.int32), copy=False)


def frozen_copy(array: NDArray[Any], dtype: type[Any]) -> NDArray[Any]:
    """Return a private read-only copy, so that the schedule cannot change under its readers."""
    return read_only(np.array(array, dtype=dtype))


class BusySteps:
    """Which steps of a repeated schedule have a transfer, from the template's steps in ascending order.

    Between filling and draining what a step holds depends on its number modulo the period alone, so as many repeats are
    looked at as it takes to see one such period. Steps without a transfer do not count.
    """

    def __init__(self, step: NDArray[Any], repeats: int, period: int) -> None:
        length = int(step[-1]) + 1
        is_busy = np.zeros(length, dtype=np.bool_)
        is_busy[step] = True
        seen = min(repeats, -(-length // period) + 2)
        self._last_repeat = (seen - 1) * period
        self._seen = np.zeros(self._last_repeat + length, dtype=np.bool_)
        for first in range(0, seen * period, period):
            self._seen[first : first + length] |= is_busy
        steady = int(self._seen[length - 1 : length - 1 + period].sum())
        self.count = int(self._seen.sum()) + (repeats - seen) * steady

    def in_first_repeat(self, step: int) -> int:
        """Return the number among all steps that count of a step of the first repeat."""
        return int(self._seen[:step].sum())

    def in_last_repeat(self, step: int) -> int:
        """Return the number among all steps that count of a step of the last repeat."""
        return self.count - int(self._seen[self._last_repeat + step :].sum())


def expand(columns: dict[str, NDArray[Any]], n_chunks: int, repeats: int, period: int) -> dict[str, NDArray[Any]]:
    """Return the rows of a template of `n_chunks` chunks so many times, each `period` steps after the one before."""
    repeat = np.repeat(np.arange(repeats, dtype=np.int32), len(columns["step"]))
    rows = {name: np.tile(column, repeats) for name, column in columns.items()}
    rows["step"] += repeat * np.int32(period)
    rows["first_chunk"] += repeat * np.int32(n_chunks)
    order = np.argsort(rows["step"], kind="stable")
    return {name: read_only(column[order]) for name, column in rows.items()}
