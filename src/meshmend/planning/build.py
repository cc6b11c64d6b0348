"""What planners share: collecting transfers, and the order of chips along a ring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshmend.schedule import Collective, Op, Schedule
from meshmend.topology import Mesh

DIRECTIONS = (1, -1)
"""The two directions of a ring; each carries half of its data."""


class Transfers:
    """Collects blocks of transfers, then makes the schedule. Blocks may come in any order of step."""

    def __init__(self) -> None:
        self._blocks: list[list[NDArray[np.int32]]] = []
        self._phase_names: list[str] = []

    def add(
        self,
        phase: str,
        op: Op,
        *,
        step: ArrayLike,
        src: ArrayLike,
        dst: ArrayLike,
        first_chunk: ArrayLike,
        n_chunks: ArrayLike = 1,
    ) -> None:
        """Add a block of transfers; the arrays are broadcast as in NumPy."""
        if phase not in self._phase_names:
            self._phase_names.append(phase)
        columns = np.broadcast_arrays(step, src, dst, first_chunk, n_chunks, op, self._phase_names.index(phase))
        self._blocks.append([np.ravel(column).astype(np.int32) for column in columns])

    def schedule(self, mesh: Mesh, *, planner: str, total_chunks: int, owners: ArrayLike) -> Schedule:
        """Make the all-reduce; empty steps are removed."""
        if self._blocks:
            columns = [np.concatenate(parts) for parts in zip(*self._blocks, strict=True)]
        else:
            columns = [np.empty(0, dtype=np.int32)] * 7
        step, src, dst, first_chunk, n_chunks, op, phase = columns
        used = np.unique(step)
        return Schedule(
            mesh,
            total_chunks=total_chunks,
            step=np.searchsorted(used, step),
            src=src,
            dst=dst,
            first_chunk=first_chunk,
            n_chunks=n_chunks,
            op=op,
            phase=phase,
            phase_names=tuple(self._phase_names) or ("nothing to do",),
            owners=owners,
            collective=Collective.ALL_REDUCE,
            planner=planner,
        )


def line_ring(length: int, *, wrap: bool) -> NDArray[np.int64]:
    """Order the positions 0 … length−1 of a line into a ring.

    On an axis that wraps this is the natural order. On a plain one the ring goes out on the even positions and returns
    on the odd ones: no hop is longer than two, and each link is used by one hop in each direction of travel, where
    the natural order would have to return over the whole line in one hop.

    >>> line_ring(5, wrap=False).tolist()
    [0, 2, 4, 3, 1]
    """
    positions = np.arange(length)
    if wrap:
        return positions
    return np.concatenate([positions[::2], positions[1::2][::-1]])


def ring_reduce_scatter(n: int, direction: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (time, position, shard) of each send of a ring reduce-scatter over n positions.

    At time t, position i sends shard i − t (for direction +1; i + t for −1) to the next position that way.
    Position i ends as the owner of shard i + 1 (i − 1).
    """
    time, position = np.divmod(np.arange((n - 1) * n), n)
    return time, position, (position - direction * time) % n


def ring_all_gather(n: int, direction: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (time, position, shard) of each send of the ring all-gather that follows `ring_reduce_scatter`."""
    time, position = np.divmod(np.arange((n - 1) * n), n)
    return time, position, (position + direction * (1 - time)) % n


def ring_owners(n: int, direction: int) -> NDArray[np.int64]:
    """Return the position that owns each shard after `ring_reduce_scatter`."""
    return np.asarray((np.arange(n) - direction) % n)


def as_ranks(mesh: Mesh, chips: Sequence[Sequence[int]] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ranks of an array of coordinates (last axis)."""
    where = tuple(np.moveaxis(np.asarray(chips), -1, 0))
    return np.asarray(mesh.rank_of[where], dtype=np.int64)


def bit_position(bit: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the position of the one bit that is set: a power of two is exact as a float, and its exponent says so."""
    return (bit.astype(np.float64).view(np.int64) >> 52) - 1023
