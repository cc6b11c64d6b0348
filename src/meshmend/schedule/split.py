"""Split: the reduce-scatter and the all-gather that an all-reduce is made of.

Between the two only its owner holds the sum of a chunk: that is where a sharded weight update happens.
"""

from __future__ import annotations

import numpy as np

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

    No planner copies a chunk before its sum is complete, so neither schedule depends on the other's transfers. That is
    not assumed here: `verify` proves each of them.
    """
    if not schedule.collective.is_all_reduce:
        raise ScheduleError(f"Only an all-reduce can be split: got a schedule of a {schedule.collective}.")
    if schedule.repeats > 1:
        return _half_of_repeated(schedule, op, collective)
    keep = schedule.op == op
    if schedule.n_chunks[keep].sum() < schedule.total_chunks * (schedule.mesh.n_chips - 1):
        raise ScheduleError(
            f"{schedule.planner}'s all-reduce has no {collective} in it: its chips exchange partial sums and all keep "
            f"them. Plan one as such, with plan(mesh, collective='{collective}')."
        )
    _, step = np.unique(schedule.step[keep], return_inverse=True)
    used, phase = np.unique(schedule.phase[keep], return_inverse=True)
    return Schedule(
        schedule.mesh,
        total_chunks=schedule.total_chunks,
        step=step,
        src=schedule.src[keep],
        dst=schedule.dst[keep],
        first_chunk=schedule.first_chunk[keep],
        n_chunks=schedule.n_chunks[keep],
        op=schedule.op[keep],
        phase=phase,
        phase_names=tuple(schedule.phase_names[i] for i in used) or ("nothing to do",),
        owners=schedule.owners,
        collective=collective,
        planner=schedule.planner,
    )


def _half_of_repeated(schedule: Schedule, op: Op, collective: Collective) -> Schedule:
    """Keep the template's transfers of one kind where that is a schedule by itself, or else the expanded one's.

    Closing up a step of the template would shift what follows against the repeats before it: the half could still be
    right, as every order of the repeats is, but no longer be even over the links. So only whole ends are cut off.
    """
    template = schedule.template
    steps = np.unique(template.step[template.op == op])
    if len(steps) and len(steps) == steps[-1] - steps[0] + 1 and schedule.period <= len(steps):
        return _half(template, op, collective).repeated(schedule.repeats, schedule.period)
    return _half(schedule.expanded(), op, collective)
