"""Single: one chunk's way through an all-reduce, as an all-reduce of its own.

A few numbers (a loss, a norm) need no more than that: a plan for a large payload keeps every link busy for as many
steps as it has chunks, and most of them would carry nothing.
"""

from __future__ import annotations

import numpy as np

from meshmend.errors import ScheduleError
from meshmend.schedule.collective import Collective
from meshmend.schedule.schedule import Schedule

__all__ = ["single_chunk_of"]


def single_chunk_of(schedule: Schedule) -> Schedule:
    """Return the all-reduce of one chunk that takes the fewest steps, still to be proven.

    >>> import meshmend as mm
    >>> single_chunk_of(mm.plan(mm.Mesh("8x8"), "weave"))
    Schedule(weave all-reduce on 8x8: 64 chips, 19 steps, 1 chunk, 126 transfers)
    """
    if not schedule.collective.is_all_reduce:
        raise ScheduleError(f"Only an all-reduce has a chunk's all-reduce in it: got a {schedule.collective}.")
    rows = schedule.template
    chunk = _quickest(rows)
    keep = np.flatnonzero((rows.first_chunk <= chunk) & (chunk < rows.first_chunk + rows.n_chunks))
    used, phase = np.unique(rows.phase[keep], return_inverse=True)
    return rows.replace(
        keep,
        total_chunks=1,
        step=np.unique(rows.step[keep], return_inverse=True)[1],
        first_chunk=0,
        n_chunks=1,
        phase=phase,
        phase_names=tuple(schedule.phase_names[i] for i in used) or ("nothing to do",),
        owners=rows.owners[[chunk]],
        collective=Collective.ALL_REDUCE,
    )


def _quickest(rows: Schedule) -> int:
    """Return the chunk that fewest steps move."""
    counts = np.zeros(rows.total_chunks + 1, dtype=np.int64)
    starts = rows.step_starts
    for step in range(rows.n_steps):
        here = slice(int(starts[step]), int(starts[step + 1]))
        moved = np.zeros(rows.total_chunks + 1, dtype=np.int64)
        np.add.at(moved, rows.first_chunk[here], 1)
        np.add.at(moved, rows.first_chunk[here] + rows.n_chunks[here], -1)
        counts += np.cumsum(moved) > 0
    return int(np.argmin(counts[:-1]))
