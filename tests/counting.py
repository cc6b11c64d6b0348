"""Whether a schedule is right, by counting: the oracle of `meshmend.schedule.verify`, with which it shares no code.

A dictionary for every chip and chunk says how often each contribution is in it, in Python's own unbounded integers.
Slow, and so plain that it can be checked by reading.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from meshmend import Collective, Mesh, Op, Schedule

Held = dict[tuple[int, int], Counter[int]]
"""For each (chip, chunk) how often each chip's contribution is in what is held there."""


def count(schedule: Schedule) -> Held | None:
    """Return what every chip holds of every chunk in the end; None if a step writes a chunk of a chip twice."""
    held = {
        (chip, chunk): Counter({chip: 1})
        for chip in range(schedule.mesh.n_chips)
        for chunk in range(schedule.total_chunks)
    }
    columns = (schedule.step, schedule.src, schedule.dst, schedule.first_chunk, schedule.n_chunks, schedule.op)
    rows = sorted(zip(*(column.tolist() for column in columns), strict=True))
    for _, step in groupby(rows, key=lambda row: row[0]):
        written: Held = {}
        for _, src, dst, first, n_chunks, op in step:
            for chunk in range(first, first + n_chunks):
                if (dst, chunk) in written:
                    return None
                arriving = Counter(held[src, chunk])
                if op == Op.REDUCE:
                    arriving.update(held[dst, chunk])
                written[dst, chunk] = arriving
        held.update(written)
    return held


def is_right(schedule: Schedule) -> bool:
    """Whether it does what its collective promises, over chips that are joined."""
    held = count(schedule)
    if held is None or not _are_joined(schedule.mesh, schedule):
        return False
    everyone = Counter(range(schedule.mesh.n_chips))
    for (chip, chunk), content in held.items():
        owner = int(schedule.owners[chunk])
        match schedule.collective:
            case Collective.ALL_REDUCE | Collective.ALL_REDUCE_WITH_UPDATE:
                right = content == everyone
            case Collective.REDUCE_SCATTER:
                right = chip != owner or content == everyone
            case Collective.ALL_GATHER:
                right = content == Counter([owner])
        if not right:
            return False
    return True


def _are_joined(mesh: Mesh, schedule: Schedule) -> bool:
    """Whether every transfer's two ends can reach each other over live cables."""
    part = list(range(mesh.n_chips))

    def root(chip: int) -> int:
        while part[chip] != chip:
            chip = part[chip]
        return chip

    for a, b in mesh.cables.tolist():
        part[root(a)] = root(b)
    return all(root(a) == root(b) for a, b in zip(schedule.src.tolist(), schedule.dst.tolist(), strict=True))
