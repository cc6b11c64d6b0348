"""Film: a schedule as frames of arrows, one frame per step. The page and the studio show it.

Chips fill as their sums become complete. A chip is full when it holds every contribution to every chunk; of an
all-gather, when it holds every chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshmend.drawing.geometry import ASIDE, FigureLayout, Stroke, strokes
from meshmend.drawing.style import some_chunks
from meshmend.errors import DrawingError
from meshmend.schedule import Collective, Op, Schedule

LEVELS = 16
"""A chip is filled in so many steps. The last is for chips whose sums are complete, and for no others."""
MAX_CELLS = 2**22
"""Chunks held by chips that are followed; of a larger schedule, as many chunks as that allows, evenly spread."""


@dataclass(frozen=True)
class Film:
    """The steps `first` to `last` of a schedule. An arrow is a distinct (src, dst, phase), a frame a set of arrows."""

    schedule: Schedule
    first: int
    last: int
    chunks: tuple[int, ...] = ()
    """Chunks that can be followed."""

    @cached_property
    def layout(self) -> FigureLayout:
        """Where the chips lie."""
        return FigureLayout(self.schedule.mesh)

    @cached_property
    def _arrow_of_row(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keys of the arrows, and the arrow of every transfer shown."""
        s = self.schedule
        rows = slice(int(s.step_starts[self.first]), int(s.step_starts[self.last + 1]))
        n = s.mesh.n_chips
        keys = (s.phase[rows].astype(np.int64) * n + s.src[rows]) * n + s.dst[rows]
        found, arrow = np.unique(keys, return_inverse=True)
        return found, arrow

    @cached_property
    def arrows(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Source, destination and phase of each arrow."""
        n = self.schedule.mesh.n_chips
        rest, dst = np.divmod(self._arrow_of_row[0], n)
        phase, src = np.divmod(rest, n)
        return src, dst, phase

    def frame(self, step: int) -> NDArray[np.int64]:
        """Return the arrows of a step, in ascending order."""
        starts, origin = self.schedule.step_starts, self.schedule.step_starts[self.first]
        return np.unique(self._arrow_of_row[1][starts[step] - origin : starts[step + 1] - origin])

    @cached_property
    def levels(self) -> NDArray[np.uint8]:
        """How complete the sums of each chip (column) are after each step (row), from 0 to `LEVELS`."""
        s, n, total = self.schedule, self.schedule.mesh.n_chips, self.schedule.total_chunks
        followed = np.unique(np.linspace(0, total - 1, min(total, max(1, MAX_CELLS // n))).astype(np.int64))
        column = np.full(total, -1)
        column[followed] = np.arange(len(followed))
        # How many contributions each chip (row) holds of each chunk followed (column), and how many there are.
        held, most = np.ones((n, len(followed)), dtype=np.int64), n
        if s.collective is Collective.ALL_GATHER:
            held, most = np.zeros_like(held), 1
            held[s.owners[followed], np.arange(len(followed))] = 1
        sums = held.sum(axis=1)
        levels = np.empty((self.last - self.first + 1, n), dtype=np.uint8)
        for step in range(self.last + 1):
            rows = np.arange(s.step_starts[step], s.step_starts[step + 1])
            lengths = s.n_chunks[rows].astype(np.int64)
            row = np.repeat(rows, lengths)
            within = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            at = column[s.first_chunk[row] + within]
            row, at = row[at >= 0], at[at >= 0]
            dst = s.dst[row]
            # Reads see the state before the step. What is not a correct schedule may hold more than there is.
            now, got = held[dst, at], np.minimum(held[s.src[row], at], most)
            after = np.where(s.op[row] == Op.REDUCE, np.minimum(now + got, most), got)
            held[dst, at] = after
            np.add.at(sums, dst, after - now)
            if step >= self.first:
                levels[step - self.first] = np.clip(LEVELS * sums // (most * len(followed)), 0, LEVELS)
        return levels

    def strokes(self, chip: float) -> tuple[list[Stroke], list[int]]:
        """Return the lines between chips, and which of them each arrow has, whatever its phase.

        The two directions of a cable lie beside each other.
        """
        src, dst, _ = self.arrows
        n = self.schedule.mesh.n_chips
        pairs, pair = np.unique(src * n + dst, return_inverse=True)
        return strokes(self.layout, *np.divmod(pairs, n), chip=chip, aside=ASIDE), pair.tolist()


def film(schedule: Schedule, steps: tuple[int, int] | None = None, chunks: Iterable[int] | None = None) -> Film:
    """Return the film of all steps, or of `steps` = (first, last), with four chunks to follow, or those given."""
    if not schedule.n_steps:
        raise DrawingError(f"There is nothing to show step by step: {schedule!r} has no transfers.")
    first, last = steps if steps is not None else (0, schedule.n_steps - 1)
    if not 0 <= first <= last < schedule.n_steps:
        raise DrawingError(
            f"Steps {first} to {last} are not in the schedule, which has steps 0 to {schedule.n_steps - 1}."
        )
    return Film(schedule, first, last, some_chunks(schedule, chunks, 4))
