"""Slots: which chunk crosses which link in which step.

Every chunk has a tree. Its transfers go up from the leaves to the root (adding) and down again (copying); one may
go once those before it in its tree have gone. A link carries one chunk per step, and a chip does not receive the same
chunk from two sides in one step. Steps are found by simulating the network step by step: each link takes, of the
transfers that may go, the one that is due first.

What is due when decides how well links stay busy. A chunk is due at its root when all chunks before it have had
their share of the busiest link, and each transfer as many steps before or after that as it is hops from the root.
("The earliest chunk first" starves links: it finishes old chunks before it feeds new ones.) That leaves a ragged
end. So the same is done once more backwards in time, where up and down change places, with what went last being
due first: the ragged end is packed, and the start was packed already. Where that is quick it is done a third time.

Over a slow link a chunk goes in pieces, over several steps (`pieces`): its link is closed meanwhile, nothing that waits
for it may go, and no sibling may meet it.

What follows does that with packed arrays, for millions of transfers. Read first the same rule in plain
Python, in sixty lines: `tests/planning/slots_reference.py`, which the tests hold it to, step by step.

A *cell* is a chunk at a chip, `chunk * n_chips + rank`, and stands for the cable to the chip's parent in the tree.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.build import bit_position
from meshmend.planning.weave.pieces import Pieces, SlowLinks, Spans
from meshmend.planning.weave.trees import Rooted
from meshmend.topology import Mesh

Ints = NDArray[np.int32]

MAX_POSITIONS = 2**29
"""Links × chunks that queues are made for: 2 GB."""
CELL_BITS = 28
"""Cells are numbered in 28 bits, ample for so many positions; the bits above say what a transfer is."""
DOWN, SHARED, MANY = (np.int32(1 << bit) for bit in (CELL_BITS + 2, CELL_BITS + 1, CELL_BITS))
"""It comes down; its cell has siblings; its cell has more than one child."""
CELL = np.int32((1 << CELL_BITS) - 1)
WORD = 64
QUICK_CELLS = 2**19
"""A third pass over no more cells than this takes no time to speak of."""


@dataclass(frozen=True)
class Slots:
    """Transfers: each crosses the cable of `cell`, down from the parent or up to it, in `step`.

    Where there are slow links, that is the first step, and `spans` says how each goes on. Else they are in order of
    step.
    """

    step: Ints
    cell: Ints
    down: NDArray[np.bool_]
    spans: Spans | None = None

    @property
    def n_steps(self) -> int:
        """Number of steps."""
        if self.spans is not None:
            return int(self.spans.end.max(initial=-1)) + 1
        return int(self.step[-1]) + 1 if len(self.step) else 0

    def reversed(self) -> Slots:
        """Return the same backwards in time, where what came down goes up."""
        if self.spans is not None:
            last, spans = self.n_steps - 1, self.spans
            reversed_spans = Spans(last - self.step, spans.tail, spans.head)
            return Slots(last - spans.end, self.cell, ~self.down, reversed_spans)
        return Slots((self.n_steps - 1) - self.step[::-1], self.cell[::-1], ~self.down[::-1])


def assign_steps(
    mesh: Mesh, rooted: Rooted, pace: float, *, thorough: bool = False, pieces: Pieces | None = None, lag: int = 0
) -> Slots:
    """Return a step for every transfer of every chunk; `pace` is the number of steps from one chunk to the next.

    `thorough` makes the third pass even where it takes a while. Where `pieces` are given, slow links take a chunk over
    several steps. A chunk that was sent in one step is sent on `lag` + 1 steps later at the earliest.
    """
    network = _Network(mesh, rooted, pieces, lag)
    at_root = (np.arange(len(rooted.depth)) * pace).astype(np.int32)[:, None]
    hops = rooted.depth * np.int32(1 + lag)
    run = best = network.run(*network.queue_by_due(at_root - hops, at_root + hops - np.int32(1 + lag)))
    # Short trains of chunks through deep trees are all start and end: packing one unpacks the other.
    passes = 2 if at_root.max(initial=0) > 2 * hops.max(initial=0) else 1
    if thorough or network.n_cells <= QUICK_CELLS:
        passes = 3
    if network.n_links * run.n_steps > MAX_POSITIONS:
        passes = 1
    for backwards in (True, False)[: passes - 1]:
        run = network.run(*network.queue_reversed(run), backwards=backwards)
        forth = run.reversed() if backwards else run
        if forth.n_steps < best.n_steps:
            best = forth
    return best


class _Network:
    """The links and, for every chunk, its tree."""

    def __init__(self, mesh: Mesh, rooted: Rooted, pieces: Pieces | None = None, lag: int = 0) -> None:
        self._lag = lag
        n_chunks, n_chips = rooted.parent.shape
        self.n_cells = n_chunks * n_chips
        self.n_links = mesh.n_link_slots
        parent = rooted.parent.ravel()
        self.cells = np.flatnonzero(parent >= 0).astype(np.int32)
        self.up_link, self.down_link = _links(mesh, rooted.parent, self.cells)
        first_cell = np.repeat(np.arange(n_chunks, dtype=np.int32) * np.int32(n_chips), n_chips)
        self.parent_cell = np.where(parent < 0, np.int32(-1), parent + first_cell)
        self._find_children()
        siblings = self.n_children[self.parent_cell[self.cells]] > 1
        many = self.n_children[self.cells] > 1
        self.up_code = self.cells | SHARED * siblings
        self.down_code = self.up_code | DOWN | MANY * many
        self._pieces = pieces
        if pieces is not None:
            self._per_link = pieces.per_link(mesh)
            self._link_of = np.zeros((2, self.n_cells), dtype=np.int32)
            self._link_of[:, self.cells] = self.up_link, self.down_link

    def _find_children(self) -> None:
        """Make the lists of children: the first of each cell, and the next after each child."""
        self.first_child = np.full(self.n_cells, -1, dtype=np.int32)
        self.next_child = np.full(self.n_cells, -1, dtype=np.int32)
        self.n_children = np.zeros(self.n_cells, dtype=np.uint8)
        chosen = np.empty(self.n_cells, dtype=np.int32)
        rest = self.cells
        while len(rest):
            parent = self.parent_cell[rest]
            chosen[parent] = rest
            now = chosen[parent] == rest
            child, parent = rest[now], parent[now]
            self.next_child[child] = self.first_child[parent]
            self.first_child[parent] = child
            self.n_children[parent] += 1
            rest = rest[~now]

    def queue_by_due(self, due_up: Ints, due_down: Ints) -> tuple[Ints, Ints, int]:
        """Return the place of each cell's way up and way down in its link's queue, and how long queues are."""
        link = np.concatenate([self.up_link, self.down_link])
        due = np.concatenate([due_up.ravel()[self.cells], due_down.ravel()[self.cells]])
        order = _sort_stably(due - due.min(initial=0))
        order = order[_sort_stably(link[order])]
        in_order = link[order]
        begin = np.searchsorted(in_order, np.arange(self.n_links + 1))
        rank = np.empty(len(link), dtype=np.int32)
        rank[order] = np.arange(len(link)) - begin[in_order]
        up, down = np.split(rank, 2)
        return up, down, int(np.diff(begin).max(initial=0))

    def queue_reversed(self, forth: Slots) -> tuple[Ints, Ints, int]:
        """Return the same for the way back in time: a link's steps, counted from the last, are places already."""
        back = forth.reversed()
        rank = np.empty((2, self.n_cells), dtype=np.int32)
        rank[back.down.astype(np.int8), back.cell] = back.step
        return rank[0, self.cells], rank[1, self.cells], back.n_steps

    def run(self, rank_up: Ints, rank_down: Ints, length: int, backwards: bool = False) -> Slots:
        """Follow the network step by step, each link taking what is first in its queue of all that may go.

        The same in plain Python is `Reference.run` of `tests/planning/slots_reference.py`.
        Backwards in time, what goes up here comes down in truth: it is the sums coming down that must not meet.
        """
        queues = _Queues(self, rank_up, rank_down, length)
        up_position = np.full(self.n_cells, -1, dtype=np.int32)
        up_position[self.cells] = queues.up_position
        down_position = np.full(self.n_cells, -1, dtype=np.int32)
        down_position[self.cells] = queues.down_position
        # Where the parent's way up waits, −1 at a root; where the first child's way down waits, −1 at a leaf.
        parent_position = np.where(self.parent_cell < 0, np.int32(-1), up_position[self.parent_cell])
        child_position = np.where(self.first_child < 0, np.int32(-1), down_position[self.first_child])
        waiting = self.n_children.copy()
        mark = np.full(self.n_cells, -1, dtype=np.int32)
        queues.admit(up_position[self.cells[waiting[self.cells] == 0]])
        gone: list[Ints] = []
        arriving = deque([np.empty(0, dtype=np.int32)] * self._lag)
        left = 2 * len(self.cells)
        way = DOWN if backwards else np.int32(0)
        slow = None if self._pieces is None else SlowLinks(self._pieces.per_chunk, self._per_link, self.n_cells)
        while left:
            going = queues.take(self.parent_cell, mark, way, slow)
            if not len(going) and not (slow and slow.is_busy) and not any(map(len, arriving)):
                raise AssertionError("no transfer can go although some are left: this is a bug in meshmend")
            gone.append(going)
            left -= len(going)
            if slow is not None:
                cell = going & CELL
                meets = np.where((going & (DOWN | SHARED)) == (way | SHARED), self.parent_cell[cell], np.int32(-1))
                going = slow.send(going, self._link_of[(going >= DOWN).astype(np.int8), cell], meets)
            up, down = _split(going, going < DOWN)
            # Up: an only child completes its parent; others complete it with the last of them.
            alone, others = _split(up, up < SHARED)
            others = others & CELL
            parent = self.parent_cell[others]
            np.subtract.at(waiting, parent, np.uint8(1))
            complete = np.flatnonzero(waiting[parent] == 0)
            others, parent = others[complete], parent[complete]
            if backwards:
                others = others[_first_of_each(parent, mark)]
            up = np.concatenate([alone, others])
            position = parent_position[up]
            on_the_way, at_root = _split(np.arange(len(up)), position >= 0)
            freed = [position[on_the_way]]
            # Down: nearly always to one child or none.
            cell = down & CELL
            position = child_position[cell]
            freed.append(position[np.flatnonzero(position >= 0)])
            child = self.next_child[self.first_child[cell[np.flatnonzero(down & MANY)]]]
            child = np.concatenate([child, self.first_child[self.parent_cell[up[at_root]]]])
            while len(child := child[child >= 0]):
                freed.append(down_position[child])
                child = self.next_child[child]
            arriving.append(np.concatenate(freed))
            queues.admit(arriving.popleft())
        none = np.empty(0, dtype=np.int32)
        transfers = np.concatenate([none, *gone])
        step = np.repeat(np.arange(len(gone), dtype=np.int32), [len(going) for going in gone])
        return Slots(step, transfers & CELL, transfers >= DOWN, None if slow is None else slow.spans())


class _Queues:
    """For every link the transfers that may go, as bits in the order of its queue. A *place* is a bit's number."""

    def __init__(self, network: _Network, rank_up: Ints, rank_down: Ints, length: int) -> None:
        n_words = max(1, -(-length // WORD))
        self.up_position = network.up_link * np.int32(n_words * WORD) + rank_up
        self.down_position = network.down_link * np.int32(n_words * WORD) + rank_down
        self._transfer_at = np.zeros(network.n_links * n_words * WORD, dtype=np.int32)
        self._transfer_at[self.up_position] = network.up_code
        self._transfer_at[self.down_position] = network.down_code
        self._words = np.zeros((network.n_links, n_words), dtype=np.uint64)
        self._flat = self._words.reshape(-1)
        self._rows = np.arange(network.n_links) * n_words
        self._width = n_words * WORD

    def admit(self, position: Ints) -> None:
        """Let more transfers go, each for the first time."""
        # Every bit is set once only, so adding sets it, and `add.at` has the faster loop.
        np.add.at(self._flat, (position >> 6).astype(np.int64), np.uint64(1) << (position & 63).astype(np.uint64))

    def take(self, parent_cell: Ints, mark: Ints, way: np.int32, slow: SlowLinks | None = None) -> Ints:
        """Take the first transfer of every open link, but one only of the siblings that go this `way` (0 is up).

        Of siblings the one nearest the front of its queue goes; the others' links take their next transfer
        instead, if there is one at hand. `mark` is −1 for every cell, before and after.
        """
        where = self._rows + (self._words != 0).argmax(axis=1)
        word = self._flat[where]
        if slow is not None:
            word[slow.closed] = 0
        busy = np.flatnonzero(word)
        where, word = where[busy], word[busy]
        bit = word & -word
        position = (where << 6) + bit_position(bit)
        going: Ints = self._transfer_at[position]
        rivals = np.flatnonzero((going & (DOWN | SHARED)) == (way | SHARED)).astype(np.int32)
        parent = parent_cell[going[rivals] & CELL]
        mark[parent] = rivals
        lost = mark[parent] != rivals
        held = np.False_ if slow is None else slow.holds(parent)
        if lost.any() or held.any():
            rank = position % self._width
            sooner = np.flatnonzero(lost)
            sooner = sooner[rank[rivals[sooner]] < rank[mark[parent[sooner]]]]
            mark[parent[sooner]] = rivals[sooner]
            late = rivals[(mark[parent] != rivals) | held]
            keep = np.ones(len(going), dtype=np.bool_)
            rest = word[late] ^ bit[late]
            keep[late[rest == 0]] = False
            late, rest = late[rest > 0], rest[rest > 0]
            bit[late] = rest & -rest
            going[late] = self._transfer_at[(where[late] << 6) + bit_position(bit[late])]
            # A second choice that has siblings of its own might meet them: that link stays idle.
            keep[late[(going[late] & (DOWN | SHARED)) == (way | SHARED)]] = False
            where, word, bit, going = where[keep], word[keep], bit[keep], going[keep]
        mark[parent] = -1
        self._flat[where] = word ^ bit
        return going


def _sort_stably(key: Ints) -> NDArray[np.int64]:
    """Return the stable order of whole numbers from 0 up, sixteen bits at a time: NumPy sorts those in linear time."""
    order = np.argsort(key.astype(np.uint16), kind="stable")
    if int(key.max(initial=0)) >> 16:
        order = order[np.argsort((key >> 16).astype(np.uint16)[order], kind="stable")]
    return order


def _links(mesh: Mesh, parent: Ints, cells: Ints) -> tuple[Ints, Ints]:
    """Return the links from each of `cells` to its parent and back."""
    direction = np.zeros(parent.shape, dtype=np.int32)
    for d in range(1, mesh.n_directions):
        direction += np.int32(d) * (parent == np.where(mesh.neighbours[:, d] < 0, -2, mesh.neighbours[:, d]))
    n_directions = np.int32(mesh.n_directions)
    up = np.arange(mesh.n_chips, dtype=np.int32) * n_directions + direction
    down = parent * n_directions + (direction ^ 1)
    return up.ravel()[cells], down.ravel()[cells]


def _split(values: NDArray[Any], where: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the values where it is so, and where it is not: numbers index several times faster than a mask."""
    return values[np.flatnonzero(where)], values[np.flatnonzero(~where)]


def _first_of_each(values: Ints, mark: Ints) -> NDArray[np.bool_]:
    """Say of each of `values` whether it stands for its equals; `mark` is −1 for every value, before and after."""
    number = np.arange(len(values), dtype=np.int32)
    mark[values] = number
    stands = mark[values] == number
    mark[values] = -1
    return np.asarray(stands)
