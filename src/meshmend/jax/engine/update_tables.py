"""When each chip updates which of its chunks: a table per loop, beside the lanes' tables.

An update may be in any step from the one that completes the chunk at its owner to the one before it is sent on. It
takes time, and neighbours wait for each other at every step; so updates are spread, one per chip and step where there
is room. Rows are folded into a period as those of `lanes` are. Nothing here needs JAX.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from meshmend.schedule import Schedule
from meshmend.schedule.fused_update import update_windows
from meshmend.schedule.lanes import Lowered

NO_UPDATE = np.iinfo(np.int32).min
"""A cell of the table without an update: no number of chunks that is added makes it one."""

UpdateTable = Annotated[NDArray[np.int32], "int32[N, T, S]"]
"""For each rank and step of a loop the chunks that it updates after that step's writes."""


def update_tables(schedule: Schedule, lowered: Lowered) -> tuple[UpdateTable, ...]:
    """Return a table per loop, with as many cells per step as any chip needs in that loop.

    >>> import meshmend as mm
    >>> from meshmend.schedule.lanes import lower
    >>> schedule = mm.plan(mm.Mesh("4x4"), "hamiltonian", collective="all-reduce-with-update")
    >>> [table.shape for table in update_tables(schedule, lower(schedule))]
    [(16, 15, 2), (16, 15, 0)]
    """
    repeat = lowered.shape.repeat
    rows = schedule.expanded() if repeat is None else schedule.template
    period = rows.n_steps if repeat is None else repeat.period
    if not lowered.loops:
        return ()
    step = _spread(rows, period)
    update, within = np.divmod(step, period)
    # A repeat that began earlier is further on in the same step: see `lanes`.
    shifted = np.arange(rows.total_chunks) - update * rows.total_chunks
    order = np.lexsort((update, within, rows.owners))
    chip, within, shifted = rows.owners[order], within[order], shifted[order]
    fresh = np.flatnonzero(np.diff(chip.astype(np.int64) * period + within, prepend=-1))
    position = np.arange(len(order)) - np.repeat(fresh, np.diff(fresh, append=len(order)))
    tables, start = [], 0
    for loop in lowered.loops:
        here = (start <= within) & (within < start + loop.n_steps)
        table = np.full((schedule.mesh.n_chips, loop.n_steps, position[here].max(initial=-1) + 1), NO_UPDATE, np.int32)
        table[chip[here], within[here] - start, position[here]] = shifted[here]
        tables.append(table)
        start += loop.n_steps
    return tuple(tables)


def _spread(rows: Schedule, period: int) -> Annotated[NDArray[np.int64], "[K]"]:
    """Choose each chunk's step: of those it may have, the earliest in which its owner updates fewest others.

    Chunks with the least choice choose first, and among them the one that must be sent on first.
    """
    first, last = update_windows(rows)
    load = np.zeros((rows.mesh.n_chips, period), dtype=np.int32)
    chosen = first.copy()
    for chunk in np.lexsort((last, last - first)).tolist():
        mine = load[rows.owners[chunk]]
        steps = np.arange(first[chunk], min(int(last[chunk]) + 1, first[chunk] + period))
        best = int(np.argmin(mine[steps % period]))
        chosen[chunk] = steps[best]
        mine[steps[best] % period] += 1
    return chosen
