"""Hamiltonian: one ring through all live chips, every hop between neighbours (figures 3 and 8 of the paper).

The live 2×2 blocks are joined by a spanning tree, and the ring is the walk round the outside of that tree: inside
a block it follows the square, and where the tree joins two blocks it crosses over on one cable and comes back on
the one beside it. So any number of holes works, as long as they are made of whole blocks and leave the blocks
connected; the paper asks for one contiguous hole.

Both directions of the ring carry half the payload, so the busiest link carries (P−1)/P of the payload in all and
the time is close to M/b for long payloads. The number of steps is 2(P−1): for short payloads that is slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import Coordinate, name_chip
from meshmend.planning.base import Floor, Planner, Unsupported
from meshmend.planning.build import DIRECTIONS, Transfers, as_ranks, ring_all_gather, ring_owners, ring_reduce_scatter
from meshmend.schedule import Op, Schedule
from meshmend.topology import Cable, Mesh, name_shape

Join = tuple[tuple[int, int], bool]
"""The upper or left one of two blocks, and whether the other lies below it."""


@final
@dataclass(frozen=True)
class Hamiltonian(Planner):
    """One ring through all live chips, half the payload in each direction (figures 3 and 8)."""

    name: ClassVar[str] = "hamiltonian"

    def floor(self, mesh: Mesh) -> Floor:
        """Return what a ring costs: 2(P−1) steps, in each of which a link carries one of 2P chunks."""
        n = mesh.n_chips
        return Floor(steps=2 * (n - 1), link_load=(n - 1) / n, chip_load=2 * (n - 1) / n)

    def n_transfers(self, mesh: Mesh) -> int:
        """Return what a ring has: in each of 2(P−1) steps every chip sends in both directions."""
        return 4 * mesh.n_chips * (mesh.n_chips - 1)

    def _check(self, mesh: Mesh) -> None:
        """Refuse a mesh on which no such ring is found."""
        find_ring(mesh)

    def _plan(self, mesh: Mesh) -> Schedule:
        """Return a reduce-scatter round the ring followed by an all-gather, in both directions at once."""
        ring = find_ring(mesh)
        n = len(ring)
        transfers = Transfers()
        owners = np.empty(2 * n, dtype=np.int64)
        for direction, first_chunk in zip(DIRECTIONS, (0, n), strict=True):
            owners[first_chunk : first_chunk + n] = ring[ring_owners(n, direction)]
            for phase, op, sends, start in (
                ("ring: reduce-scatter", Op.REDUCE, ring_reduce_scatter, 0),
                ("ring: all-gather", Op.COPY, ring_all_gather, n - 1),
            ):
                time, position, shard = sends(n, direction)
                transfers.add(
                    phase,
                    op,
                    step=start + time,
                    src=ring[position],
                    dst=ring[(position + direction) % n],
                    first_chunk=first_chunk + shard,
                )
        return transfers.schedule(mesh, planner=self.name, total_chunks=2 * n, owners=owners)


def find_ring(mesh: Mesh) -> NDArray[np.int64]:
    """Return the ranks in ring order, or raise `Unsupported`."""
    if mesh.n_axes == 2 and mesh.is_full and min(mesh.shape) > 1 and sum(n % 2 for n in mesh.shape) == 1:
        return as_ranks(mesh, _snake(*mesh.shape))
    _check_blocks(mesh)
    return _ring_round_tree(mesh)


def _snake(rows: int, columns: int) -> list[Coordinate]:
    """Order a full mesh with one even side: out along one edge, and back and forth across the rest."""
    if rows % 2:
        return [(r, c) for c, r in _snake(columns, rows)]
    ring: list[Coordinate] = [(r, 0) for r in reversed(range(rows))]
    for r in range(rows):
        across = range(1, columns)
        ring += [(r, c) for c in (across if r % 2 == 0 else reversed(across))]
    return ring


def _check_blocks(mesh: Mesh) -> None:
    """Refuse a mesh that does not fall into 2×2 blocks that are wholly live or wholly failed."""
    if mesh.n_axes != 2:
        raise Unsupported(f"it needs a mesh of two axes, and {name_shape(mesh.shape)} has {mesh.n_axes}.")
    if any(n % 2 for n in mesh.shape):
        raise Unsupported(f"it pairs chips into 2×2 blocks, and {name_shape(mesh.shape)} has an odd side.")
    rows, columns = mesh.shape
    counts = mesh.live.reshape(rows // 2, 2, columns // 2, 2).sum(axis=(1, 3))
    broken = np.argwhere((counts > 0) & (counts < 4))
    if len(broken):
        row, column = (2 * int(x) for x in broken[0])
        cells = [(r, c) for r in (row, row + 1) for c in (column, column + 1)]
        dead = next(cell for cell in cells if not mesh.live[cell])
        live = next(cell for cell in cells if mesh.live[cell])
        raise Unsupported(
            f"it needs holes made of whole 2×2 blocks at even rows and columns, and in the block at "
            f"{name_chip((row, column))} chip {name_chip(dead)} has failed while {name_chip(live)} lives."
        )


def _ring_round_tree(mesh: Mesh) -> NDArray[np.int64]:
    blocks = mesh.live[::2, ::2]  # each is wholly live or wholly failed
    joins = _spanning_tree(mesh, blocks)
    # next_of[chip] along the ring, for chips numbered in the full mesh. Each block alone is a clockwise square.
    columns = mesh.shape[1]
    corner = np.arange(mesh.size).reshape(mesh.shape)[::2, ::2]
    north_west, north_east, south_west, south_east = (corner + d for d in (0, 1, columns, columns + 1))
    next_of = np.empty(mesh.size, dtype=np.int64)
    clockwise = (north_west, north_east, south_east, south_west)
    for here, there in zip(clockwise, (*clockwise[1:], north_west), strict=True):
        next_of[here] = there
    # A join replaces the two facing sides of its squares by the two cables between them.
    for (row, column), vertical in joins:
        if vertical:
            next_of[south_east[row, column]] = north_east[row + 1, column]
            next_of[north_west[row + 1, column]] = south_west[row, column]
        else:
            next_of[north_east[row, column]] = north_west[row, column + 1]
            next_of[south_west[row, column + 1]] = south_east[row, column]
    start = int(corner[blocks][0])
    ring, at = [start], int(next_of[start])
    while at != start:
        ring.append(at)
        at = int(next_of[at])
    return mesh.rank_of.ravel()[ring].astype(np.int64)


def _spanning_tree(mesh: Mesh, blocks: NDArray[np.bool_]) -> list[Join]:
    """Return joins that connect all live blocks, or raise `Unsupported`.

    A failed cable between two blocks forbids their join. A failed cable inside a block forces the join across
    that side of the square, because only a join takes the cable out of the ring.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import minimum_spanning_tree

    number = np.full(blocks.shape, -1)
    number[blocks] = np.arange(int(blocks.sum()))
    # Rows are joined before columns are: long horizontal runs, as figure 3 draws them.
    weight: dict[Join, int] = {}
    for vertical, there in ((False, np.s_[:, 1:]), (True, np.s_[1:, :])):
        here = np.s_[:-1, :] if vertical else np.s_[:, :-1]
        for row, column in np.argwhere(blocks[here] & blocks[there]):
            weight[(int(row), int(column)), vertical] = 3 if vertical else 2
    sides: list[tuple[Cable, Join]] = []
    for cable in mesh.failed_cables:
        (row, column), (row_b, column_b) = cable
        lies_vertical = row != row_b
        block = (row // 2, column // 2)
        if max(abs(row - row_b), abs(column - column_b)) > 1:
            continue  # a wrap cable, which the ring never uses
        if block != (row_b // 2, column_b // 2):
            weight.pop((block, lies_vertical), None)
        elif lies_vertical:
            sides.append((cable, ((block[0], block[1] - (column % 2 == 0)), False)))
        else:
            sides.append((cable, ((block[0] - (row % 2 == 0), block[1]), True)))
    # Only now is it known which joins are left, and a side may need one that another failed cable forbids.
    for cable, join in sides:
        if join not in weight:
            raise Unsupported(
                f"the failed cable {name_chip(cable[0])}-{name_chip(cable[1])} is a side of a 2×2 block. The ring "
                f"leaves a side out only where two live cables join the block to a live one beyond it."
            )
        weight[join] = 1
    keys = list(weight)
    a = [number[row, column] for (row, column), _ in keys]
    b = [number[row + vertical, column + (not vertical)] for (row, column), vertical in keys]
    n = int(blocks.sum())
    graph = coo_array((list(weight.values()), (a, b)), shape=(n, n)).tocsr()
    tree = minimum_spanning_tree(graph).tocoo()
    if tree.nnz < n - 1:
        raise Unsupported("its failed cables leave 2×2 blocks that cannot be joined into one ring.")
    key_of = {(int(x), int(y)): key for x, y, key in zip(a, b, keys, strict=True)}
    joins = [key_of[int(x), int(y)] for x, y in zip(tree.row, tree.col, strict=True)]
    if sum(w == 1 for w in weight.values()) > sum(weight[join] == 1 for join in joins):
        raise Unsupported("its failed cables force the ring round a closed loop of blocks.")
    return joins
