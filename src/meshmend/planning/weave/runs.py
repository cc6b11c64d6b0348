"""Runs: the straight stretches that a tree is made of.

All cables of a tree that follow each other on one line of the mesh form a *run*. The chip of a run nearest the root is
its *top*: sums move along the run to the top, and copies from the top outwards. Every other run either hangs below this
one, its top being a chip of it, or does not touch it. A tree that is a comb has few and long runs, and a path from a
chip to the root changes from run to run only once or twice.

Chips have a position on their line, which is their coordinate along it; where a line wraps, the chip at position 0 is
also the one at the position after the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.weave.trees import Rooted
from meshmend.topology import Mesh

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TreeRun:
    """Chips at positions `low` … `high` of a line, joined by cables of one tree; `depth` is that of its top."""

    depth: int
    line: int
    low: int
    high: int
    top: int
    joints: tuple[int, ...]
    """Positions at which other runs have their tops."""


@dataclass(frozen=True)
class TreeRuns:
    """One tree as runs, in order of the depth of their tops.

    `depth[rank]` is a chip's depth, `below[rank]` that of the deepest chip at or below it, `bends` the most bends
    between a chip and the root.
    """

    root: int
    runs: tuple[TreeRun, ...]
    depth: list[int]
    below: list[int]
    bends: int


class MeshLines:
    """The lines of a mesh along all its axes, numbered; and the chips along each of them, by position."""

    def __init__(self, mesh: Mesh) -> None:
        self.n_chips, self.n_directions = mesh.n_chips, mesh.n_directions
        at = mesh.coords.astype(np.int64)
        a, b = mesh.cables.T.astype(np.int64)
        axis = np.argmax(at[a] != at[b], axis=1)
        # A cable leads from its first chip in the direction of growing positions.
        self.position = at[a, axis]
        line_of = np.empty_like(at)
        self.chips: list[list[int]] = []
        for along, length in enumerate(mesh.shape):
            others = [n for i, n in enumerate(mesh.shape) if i != along]
            rest = np.delete(at, along, axis=1)
            line_of[:, along] = len(self.chips) + (np.ravel_multi_index(tuple(rest.T), others) if others else 0)
            lines = np.moveaxis(mesh.rank_of, along, -1).reshape(-1, length)
            self.chips += [[*line, line[0]] for line in lines.tolist()]
        self.line = line_of[a, axis]
        self._ends = a, b

    def runs(self, cables: NDArray[np.int32], rooted: Rooted, tree: int) -> TreeRuns:
        """Return the runs of one tree, whose parents and depths are row `tree` of `rooted`."""
        parent, depth = rooted.parent[tree], rooted.depth[tree]
        order = cables[np.lexsort((self.position[cables], self.line[cables]))]
        line, low = self.line[order], self.position[order]
        a, b = (ends[order] for ends in self._ends)
        fresh = (np.diff(line, prepend=-1) != 0) | (np.diff(low, prepend=-2) != 1)
        run = np.cumsum(fresh) - 1
        first = np.flatnonzero(fresh)
        last = np.append(first[1:], len(order)) - 1
        upper_is_first = parent[b] == a
        upper = np.where(upper_is_first, a, b)
        lower = np.where(upper_is_first, b, a)
        nearest = np.lexsort((depth[upper], run))[first]
        top_chip, top = upper[nearest], low[nearest] + ~upper_is_first[nearest]
        # The cable from a run's top to its own parent belongs to the run that this one hangs below.
        cable_above = np.full(self.n_chips, -1)
        cable_above[lower] = np.arange(len(order))
        hangs = cable_above[top_chip]
        above = np.where(hangs >= 0, run[hangs], -1)
        at_above = low[hangs] + upper_is_first[hangs]
        joints: list[set[int]] = [set() for _ in first]
        for host, position in zip(above.tolist(), at_above.tolist(), strict=True):
            if host >= 0:
                joints[host].add(position)
        by_depth = np.argsort(depth[top_chip], kind="stable")
        bends = np.zeros(len(first), dtype=np.int64)
        for one in by_depth.tolist():
            if above[one] >= 0:
                bends[one] = bends[above[one]] + 1
        columns = (depth[top_chip], line[first], low[first], low[last] + 1, top)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        found = []
        for one in by_depth.tolist():
            top_depth, number, begin, end, where = rows[one]
            found.append(TreeRun(top_depth, number, begin, end, where, tuple(sorted(joints[one]))))
        below = _below(parent, depth)
        root = int(np.flatnonzero(parent < 0)[0])
        return TreeRuns(root, tuple(found), depth.tolist(), below.tolist(), int(bends.max(initial=0)))


def _below(parent: NDArray[np.int32], depth: NDArray[np.int32]) -> Ints:
    """Return for each chip the depth of the deepest one at or below it."""
    deepest = depth.astype(np.int64)
    outwards = np.argsort(-depth, kind="stable")
    for level in np.split(outwards, np.flatnonzero(np.diff(depth[outwards])) + 1)[:-1]:
        np.maximum.at(deepest, parent[level], deepest[level])
    return deepest
