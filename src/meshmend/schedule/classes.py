"""Classes of chunks that always travel together and have one owner: what happens to one happens to all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule.schedule import Schedule


class ChunkClasses:
    """The schedule's runs, in terms of classes of chunks that always travel together and have one owner."""

    def __init__(self, schedule: Schedule) -> None:
        first = schedule.first_chunk.astype(np.int64)
        changes = np.flatnonzero(np.diff(schedule.owners)) + 1
        edges = [np.array([0, schedule.total_chunks]), first, first + schedule.n_chunks, changes]
        is_edge = np.zeros(schedule.total_chunks + 1, dtype=np.bool_)
        for edge in edges:
            is_edge[edge] = True
        # How many edges lie before each chunk, which is the number of the class that begins at an edge.
        before: NDArray[np.int64] = np.cumsum(is_edge) - is_edge
        self.starts = np.flatnonzero(is_edge)[:-1]
        self.n = len(self.starts)
        self.owners = schedule.owners[self.starts].astype(np.int64)
        self.first: NDArray[np.int64] = before[first]
        self.last: NDArray[np.int64] = before[first + schedule.n_chunks]
        self.n_moves = int((self.last - self.first).sum())
        """How many classes all transfers move together."""

    def moves(self, rows: slice, first: int, last: int, cells: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (row, class) of everything that `rows` move within classes first … last−1, counted from `first`.

        Rows of one step that write more often than there are cells to write to collide. Then only as many of them are
        returned as it takes to collide for certain.
        """
        low = np.maximum(self.first[rows], first)
        length = np.maximum(np.minimum(self.last[rows], last) - low, 0)
        ends = np.cumsum(length)
        if len(ends) and ends[-1] > cells:
            enough = int(np.searchsorted(ends, cells, side="right")) + 1
            low, length, ends = low[:enough], length[:enough], ends[:enough]
        row = np.repeat(np.arange(rows.start, rows.start + len(length)), length)
        within = np.arange(len(row)) - np.repeat(ends - length, length)
        return row, np.repeat(low, length) + within - first
