"""The layout of row pairs: which pairs of rows close into rings, and how the blocks beside holes reach one.

What the pictures of figures 9 and 10 show: *blue* rings, and *yellow* 2×2 blocks with their paths to them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import name_chip
from meshmend.planning.base import Unsupported
from meshmend.topology import Mesh

Block = tuple[int, int]
Cell = tuple[int, int]

SIDES: dict[str, Block] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
EXITS: dict[str, tuple[Cell, Cell]] = {
    "up": ((0, 0), (0, 1)),
    "down": ((1, 0), (1, 1)),
    "left": ((0, 0), (1, 0)),
    "right": ((0, 1), (1, 1)),
}
"""Chips of a block, as (row, column) within it, at each side: one per direction of the rings."""


@dataclass(frozen=True)
class Yellow:
    """A yellow block: where it forwards its sums, and how long before the blue ring needs them it must start.

    `lead` counts steps from the start of a slice inside this block to the moment when a blue ring needs it.
    """

    block: Block
    exits: tuple[str, ...]
    parent: Block | None
    lead: int
    depth: int


@dataclass(frozen=True)
class Layout:
    """The mesh as row pairs. Where columns are paired, `ranks` is the transposed mesh and nothing else differs."""

    mesh: Mesh
    orientation: Literal["rows", "columns"]
    ranks: NDArray[np.int64]
    blue: NDArray[np.int64]
    yellow: tuple[Yellow, ...]
    wrap_pairs: bool

    @property
    def ring_length(self) -> int:
        """Chips of a blue ring."""
        return 2 * int(self.ranks.shape[1])

    @property
    def chunks(self) -> int:
        """Chunks of a segment: for each direction, one slice per ring position, one chunk per blue ring."""
        return 2 * self.ring_length * len(self.blue)

    @property
    def rings(self) -> NDArray[np.int64]:
        """Ranks of the blue rings in ring order, one row per ring: out along the upper row, back along the lower."""
        upper, lower = self.ranks[2 * self.blue], self.ranks[2 * self.blue + 1]
        return np.concatenate([upper, lower[:, ::-1]], axis=1)

    def slice_start(self, way: int, shard: NDArray[np.int64]) -> NDArray[np.int64]:
        """First chunk (within the segment) of a shard of the half that goes DIRECTIONS[way]."""
        return np.asarray((way * self.ring_length + shard) * len(self.blue))

    def chip(self, block: Block, cell: Cell) -> int:
        """Return the rank of a chip of a block."""
        return int(self.ranks[2 * block[0] + cell[0], 2 * block[1] + cell[1]])


def lay_out(mesh: Mesh, orientation: Literal["rows", "columns"]) -> Layout:
    """Find blue rings and yellow blocks, or raise `Unsupported` with what is missing."""
    ranks = (mesh.rank_of if orientation == "rows" else mesh.rank_of.T).astype(np.int64)
    word = orientation[:-1]
    rows, columns = ranks.shape
    if rows % 2 or columns < 2:
        raise Unsupported(f"{rows} {orientation} of {columns} chips do not form pairs that close into rings.")
    upper, lower = ranks[::2], ranks[1::2]
    rings = np.concatenate([upper, lower[:, ::-1]], axis=1)
    closed = mesh.link(np.maximum(rings, 0), np.maximum(np.roll(rings, -1, axis=1), 0)) >= 0
    is_blue = np.asarray((rings >= 0).all(axis=1) & closed.all(axis=1))
    if not is_blue.any():
        raise Unsupported(f"every {word} pair has a failure, so no ring is left for the others to forward to.")
    yellow = _find_yellow(mesh, ranks, is_blue, word)
    wrap = mesh.wrap[0 if orientation == "rows" else 1]
    return Layout(mesh, orientation, ranks, np.flatnonzero(is_blue), yellow, wrap)


def _find_yellow(mesh: Mesh, ranks: NDArray[np.int64], is_blue: NDArray[np.bool_], word: str) -> tuple[Yellow, ...]:
    """Cut the pairs that are not blue into blocks and find each a way to a blue ring, shortest first."""
    pairs = np.flatnonzero(~is_blue)
    if not len(pairs):
        return ()
    if ranks.shape[1] % 2:
        raise Unsupported(
            f"a {word} pair with a failure must fall into 2×2 blocks, and it is {ranks.shape[1]} chips long."
        )
    blocks: set[Block] = set()
    for pair in pairs:
        for column in range(ranks.shape[1] // 2):
            cells = ranks[2 * pair : 2 * pair + 2, 2 * column : 2 * column + 2]
            if (cells < 0).all():
                continue
            square = cells.ravel()[[0, 1, 3, 2]]
            whole = (cells >= 0).all()
            if not whole or (mesh.link(square, np.roll(square, -1)) < 0).any():
                lost = "a chip" if not whole else "a cable"
                live = name_chip(mesh.chip(int(cells[cells >= 0][0])))
                raise Unsupported(f"{lost} of the 2×2 block of chip {live} has failed, but not the whole block.")
            blocks.add((int(pair), column))

    def joined(block: Block, side: str, other: Block) -> bool:
        """Whether both cables from `block` across `side` into `other` are live."""
        here = [ranks[2 * block[0] + r, 2 * block[1] + c] for r, c in EXITS[side]]
        there = [ranks[2 * other[0] + r, 2 * other[1] + c] for r, c in EXITS[opposite(side)]]
        return bool((mesh.link(here, there) >= 0).all())

    found: dict[Block, Yellow] = {}
    queue: deque[Block] = deque()
    for block in sorted(blocks):
        exits = tuple(
            side
            for side in ("up", "down")
            if 0 <= block[0] + SIDES[side][0] < len(is_blue)
            and is_blue[block[0] + SIDES[side][0]]
            and joined(block, side, (block[0] + SIDES[side][0], block[1]))
        )
        if exits:
            # A slice spends two steps inside the block and one on its way to the blue chip, which must have it
            # a step before its ring adds to the same shard.
            found[block] = Yellow(block, exits, parent=None, lead=4, depth=0)
            queue.append(block)
    while queue:
        parent = queue.popleft()
        for number, (side, (down, right)) in enumerate(SIDES.items()):
            block = (parent[0] + down, parent[1] + right)
            if block in blocks and block not in found and joined(parent, side, block):
                # Into its parent before the parent starts on the slice; children of one parent each at their
                # own step, because two of them may meet in one chip.
                lead = found[parent].lead + 3 + number
                found[block] = Yellow(block, (opposite(side),), parent, lead, found[parent].depth + 1)
                queue.append(block)
    stranded = sorted(blocks - found.keys())
    if stranded:
        chip = name_chip(mesh.chip(int(ranks[2 * stranded[0][0], 2 * stranded[0][1]])))
        raise Unsupported(f"the block of chip {chip} has no way through whole blocks to a whole {word} pair.")
    return tuple(found.values())


def opposite(side: str) -> str:
    """Return the side that faces a side."""
    return {"up": "down", "down": "up", "left": "right", "right": "left"}[side]
