"""Pieces: how slow links take their chunks.

A lock-step engine waits for the slowest transfer of every step, so a whole chunk over a link of rate 1/2 would make the
step twice as long for all. Therefore every chunk is cut into q pieces. A link of full rate sends all q of them in one
step, as one transfer; a link of rate p/q sends p pieces a step, so that no step lasts longer than any other. A chunk is
then on a slow link for several steps, and goes on when its last piece has arrived; what is left of that step's p
pieces belongs to the next chunk. An asynchronous engine, which needs none of this, is not slowed down by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.topology import Mesh

Ints = NDArray[np.int32]

MAX_PIECES = 8
"""Pieces of a chunk: a rate is rounded down to a multiple of the best 1/q up to this."""
ROUNDING = 1e-9


@dataclass(frozen=True)
class Pieces:
    """A chunk is cut into `per_chunk` pieces, and cable i takes `per_step[i]` of them in a step; 0 is never used."""

    per_chunk: int
    per_step: NDArray[np.int64]

    @classmethod
    def of(cls, mesh: Mesh) -> Pieces:
        """Cut chunks so that as little as possible of the cables' rates is lost, in as few pieces as that takes.

        >>> Pieces.of(Mesh("1x3", cable_rates={"0,0-0,1": 0.75}))
        Pieces(per_chunk=4, per_step=array([3, 4]))
        """
        if not mesh.has_slow_cables:
            return cls(1, np.ones(mesh.n_cables, dtype=np.int64))
        cuts = [cls(q, np.floor(mesh.rates * q + ROUNDING).astype(np.int64)) for q in range(1, MAX_PIECES + 1)]
        best = min(cuts, key=lambda cut: (round(float((mesh.rates - cut.rates).sum()), 9), cut.per_chunk))
        unused = [(mesh.chip(a), mesh.chip(b)) for a, b in mesh.cables[best.per_step == 0].tolist()]
        if not unused or mesh.with_failures(failed_cables=unused).is_connected:
            return best
        # Some cable slower than 1/q is needed. It takes a piece a step, and such steps last longer.
        return cls(best.per_chunk, np.maximum(best.per_step, 1))

    @property
    def rates(self) -> NDArray[np.float64]:
        """The rate at which each cable is used."""
        return self.per_step / self.per_chunk

    def per_link(self, mesh: Mesh) -> NDArray[np.int64]:
        """Return the pieces that each link takes in a step."""
        a, b = mesh.cables.T
        links = np.full(mesh.n_link_slots, self.per_chunk, dtype=np.int64)
        links[mesh.link(a, b)] = links[mesh.link(b, a)] = self.per_step
        return links


@dataclass(frozen=True)
class Spans:
    """For each transfer its last step, and how many pieces go in its first step and in its last."""

    end: Ints
    head: Ints
    tail: Ints

    def cut(self, step: Ints, per_chunk: int) -> tuple[NDArray[np.int64], Ints, Ints, Ints]:
        """Return a row for each step of each transfer: the transfer, the step, the first piece and how many go."""
        n_steps = self.end - step + 1
        row = np.repeat(np.arange(len(step)), n_steps)
        position = (np.arange(len(row)) - np.repeat(np.cumsum(n_steps) - n_steps, n_steps)).astype(np.int32)
        head, tail, last = self.head[row], self.tail[row], n_steps[row] - 1
        width = (per_chunk - head - tail) // np.maximum(last - 1, 1)
        n_pieces = np.where(position == 0, head, np.where(position == last, tail, width))
        first = np.where(position == 0, 0, head + (position - 1) * width)
        return row, step[row] + position, first, n_pieces


class SlowLinks:
    """What is under way on slow links while the network is followed step by step."""

    def __init__(self, per_chunk: int, per_link: NDArray[np.int64], n_cells: int) -> None:
        self._whole = per_chunk
        self._per_link = per_link
        self._slow = np.flatnonzero(per_link < per_chunk)
        self._free_at = np.zeros(len(per_link), dtype=np.int64)
        self._spare = np.zeros(len(per_link), dtype=np.int64)
        self._held_until = np.full(n_cells, -1, dtype=np.int32)
        self._arriving: dict[int, list[Ints]] = {}
        self._spans: list[Ints] = []
        self.step = 0

    @property
    def is_busy(self) -> bool:
        """Whether some chunk is still on its way."""
        return bool(self._arriving)

    @property
    def closed(self) -> NDArray[np.int64]:
        """The links that can start no other chunk in this step."""
        return self._slow[self._free_at[self._slow] > self.step]

    def holds(self, cells: Ints) -> NDArray[np.bool_]:
        """Say of each cell whether a chunk is coming in over a slow link, and no other may meet it."""
        return np.asarray(self._held_until[cells] >= self.step)

    def send(self, going: Ints, link: NDArray[np.integer], meets: Ints) -> Ints:
        """Start transfers, and return those that arrive in this step; `meets` is the cell to hold, or −1."""
        per_step = self._per_link[link]
        slow = np.flatnonzero(per_step < self._whole)
        end = np.full(len(going), self.step, dtype=np.int32)
        head, tail = np.full((2, len(going)), self._whole, dtype=np.int32)
        if len(slow):
            on, width = link[slow], per_step[slow]
            first = np.where((self._free_at[on] == self.step) & (self._spare[on] > 0), self._spare[on], width)
            more = -(-(self._whole - first) // width)
            self._spare[on] = more * width - (self._whole - first)
            end[slow], head[slow], tail[slow] = self.step + more, first, width - self._spare[on]
            self._free_at[on] = end[slow] + (self._spare[on] == 0)
            held = np.flatnonzero(meets[slow] >= 0)
            self._held_until[meets[slow][held]] = end[slow][held]
            for moment in np.unique(end[slow]).tolist():
                self._arriving.setdefault(moment, []).append(going[slow[end[slow] == moment]])
        self._spans.append(np.stack([end, head, tail]))
        arrived = [going[end == self.step], *self._arriving.pop(self.step, [])]
        self.step += 1
        return np.concatenate(arrived)

    def spans(self) -> Spans:
        """Return the spans of all transfers, in the order in which they started."""
        return Spans(*np.concatenate([np.empty((3, 0), dtype=np.int32), *self._spans], axis=1))
