"""Fullness: how complete each chip's sums are after each step, which is what fills the chips of a page.

A chip is full when it holds every contribution to every chunk; of an all-gather, when it holds every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule import Collective, Op, Schedule

LEVELS = 16
"""A chip is filled in so many steps. The last is for chips whose sums are complete, and for no others."""
MAX_CELLS = 2**22
"""Chunks held by chips that are followed; of a larger schedule, as many chunks as that allows, evenly spread."""


def fullness(schedule: Schedule, first: int, last: int) -> NDArray[np.uint8]:
    """Return the level of each chip (column) after each step from `first` to `last` (row), from 0 to `LEVELS`."""
    n, total = schedule.mesh.n_chips, schedule.total_chunks
    followed = np.unique(np.linspace(0, total - 1, min(total, max(1, MAX_CELLS // n))).astype(np.int64))
    column = np.full(total, -1)
    column[followed] = np.arange(len(followed))
    held, most = _at_the_start(schedule, followed)
    sums = held.sum(axis=1)
    levels = np.empty((last - first + 1, n), dtype=np.uint8)
    for step in range(last + 1):
        rows = np.arange(schedule.step_starts[step], schedule.step_starts[step + 1])
        lengths = schedule.n_chunks[rows].astype(np.int64)
        row = np.repeat(rows, lengths)
        within = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = column[schedule.first_chunk[row] + within]
        row, at = row[at >= 0], at[at >= 0]
        dst = schedule.dst[row]
        # Reads see the state before the step. What is not a correct schedule may hold more than there is.
        now, got = held[dst, at], np.minimum(held[schedule.src[row], at], most)
        after = np.where(schedule.op[row] == Op.REDUCE, np.minimum(now + got, most), got)
        held[dst, at] = after
        np.add.at(sums, dst, after - now)
        if step >= first:
            levels[step - first] = np.clip(LEVELS * sums // (most * len(followed)), 0, LEVELS)
    return levels


def _at_the_start(schedule: Schedule, followed: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return how many contributions each chip (row) holds of each chunk followed (column), and how many there are."""
    n = schedule.mesh.n_chips
    if schedule.collective is not Collective.ALL_GATHER:
        return np.ones((n, len(followed)), dtype=np.int64), n
    held = np.zeros((n, len(followed)), dtype=np.int64)
    held[schedule.owners[followed], np.arange(len(followed))] = 1
    return held, 1


@dataclass(frozen=True)
class ChunkPath:
    """The transfers of one chunk, in order of step."""

    chunk: int
    owner: int
    step: NDArray[np.int64]
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    adds: NDArray[np.bool_]


def follow(schedule: Schedule, chunk: int) -> ChunkPath:
    """Return where a chunk goes."""
    first = schedule.first_chunk.astype(np.int64)
    rows = np.flatnonzero((first <= chunk) & (chunk < first + schedule.n_chunks))
    return ChunkPath(
        chunk,
        int(schedule.owners[chunk]),
        schedule.step[rows].astype(np.int64),
        schedule.src[rows].astype(np.int64),
        schedule.dst[rows].astype(np.int64),
        schedule.op[rows] == Op.REDUCE,
    )
