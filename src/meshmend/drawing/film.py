"""Film: a schedule as frames of arrows, one frame per step. The page and the studio show it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshmend.drawing.fullness import fullness
from meshmend.drawing.geometry import ASIDE, FigureLayout, Stroke, strokes
from meshmend.drawing.style import some_chunks
from meshmend.errors import DrawingError
from meshmend.schedule import Schedule


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
        return fullness(self.schedule, self.first, self.last)

    def strokes(self, chip: float) -> list[Stroke]:
        """Return the line of each arrow; the two directions of a cable lie beside each other."""
        src, dst, _ = self.arrows
        n = self.schedule.mesh.n_chips
        pairs, pair = np.unique(src * n + dst, return_inverse=True)
        lines = strokes(self.layout, *np.divmod(pairs, n), chip=chip, aside=ASIDE)
        return [lines[i] for i in pair]


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
