"""Split: the reduce-scatter and the all-gather that an all-reduce is made of, and the way of one of its chunks.

Between the two only its owner holds the sum of a chunk: that is where a sharded weight update happens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ScheduleError
from meshmend.schedule import Collective, Op, Schedule

__all__ = ["all_gather_of", "reduce_scatter_of"]


def reduce_scatter_of(schedule: Schedule) -> Schedule:
    """Return the reduce-scatter of an all-reduce: its reductions, after which every chunk is complete at its owner.

    >>> import meshmend as mm
    >>> reduce_scatter_of(mm.plan(mm.Mesh("4x4"), "hamiltonian"))
    Schedule(hamiltonian reduce-scatter on 4x4: 16 chips, 15 steps, 32 chunks, 480 transfers)
    """
    return _half(schedule, Op.REDUCE, Collective.REDUCE_SCATTER)


def all_gather_of(schedule: Schedule) -> Schedule:
    """Return the all-gather of an all-reduce: its copies, which send every owner's chunks to all chips.

    >>> import meshmend as mm
    >>> all_gather_of(mm.plan(mm.Mesh("4x4"), "hamiltonian"))
    Schedule(hamiltonian all-gather on 4x4: 16 chips, 15 steps, 32 chunks, 480 transfers)
    """
    return _half(schedule, Op.COPY, Collective.ALL_GATHER)


def _half(schedule: Schedule, op: Op, collective: Collective) -> Schedule:
    """Keep the transfers of one kind, in the same order; empty steps are removed.

    Not in a template: there they stay idle, or what follows would shift against the repeats before it.

    No planner copies a chunk before its sum is complete, so neither schedule depends on the other's transfers. That is
    not assumed here: `verify` proves each of them.
    """
    if not schedule.collective.is_all_reduce:
        raise ScheduleError(f"Only an all-reduce can be split: got a schedule of a {schedule.collective}.")
    rows = schedule.template
    keep = rows.op == op
    if rows.n_chunks[keep].sum() < rows.total_chunks * (rows.mesh.n_chips - 1):
        raise ScheduleError(
            f"{schedule.planner}'s all-reduce has no {collective} in it: its chips exchange partial sums and all keep "
            f"them. Plan one as such, with plan(mesh, collective='{collective}')."
        )
    step = rows.step[keep] - rows.step[keep].min(initial=rows.n_steps)
    if schedule.repeats == 1:
        _, step = np.unique(step, return_inverse=True)
    elif not schedule.period <= int(step.max(initial=-1)) + 1 <= len(step):
        # So little is left of the template that it cannot be repeated by itself.
        return _half(schedule.expanded(), op, collective)
    half = rows.replace(keep, step=step, collective=collective, may_idle=schedule.repeats > 1, **_phases_of(rows, keep))
    return half.repeated(schedule.repeats, schedule.period)


def single_chunk_of(schedule: Schedule) -> Schedule:
    """Return the all-reduce of one chunk that takes the fewest steps, still to be proven.

    A few numbers (a loss, a norm) need no more than that: a plan for a large payload keeps every link busy for as many
    steps as it has chunks, and most of them would carry nothing.

    >>> import meshmend as mm
    >>> single_chunk_of(mm.plan(mm.Mesh("8x8"), "weave"))
    Schedule(weave all-reduce on 8x8: 64 chips, 19 steps, 1 chunk, 126 transfers)
    """
    if not schedule.collective.is_all_reduce:
        raise ScheduleError(f"Only an all-reduce has a chunk's all-reduce in it: got a {schedule.collective}.")
    rows = schedule.template
    chunk = _quickest(rows)
    keep = np.flatnonzero((rows.first_chunk <= chunk) & (chunk < rows.first_chunk + rows.n_chunks))
    return rows.replace(
        keep,
        total_chunks=1,
        step=np.unique(rows.step[keep], return_inverse=True)[1],
        first_chunk=0,
        n_chunks=1,
        owners=rows.owners[[chunk]],
        collective=Collective.ALL_REDUCE,
        **_phases_of(rows, keep),
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


def _phases_of(rows: Schedule, keep: NDArray[Any]) -> dict[str, Any]:
    """Return the phases of those rows that are kept, and their names."""
    used, phase = np.unique(rows.phase[keep], return_inverse=True)
    return {"phase": phase, "phase_names": tuple(rows.phase_names[i] for i in used) or ("nothing to do",)}
