"""A lowered plan over more devices than it has chips: the others stand by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.schedule.lanes import KEEP, Lane, Loop, Lowered


def with_bystanders(lowered: Lowered, places: Sequence[int] | Sequence[Sequence[int]], n_devices: int) -> Lowered:
    """Return the same loops over more devices than chips: rank r is device `places[r]`, all others stand by.

    A device that stands by runs every permute, since a runtime may want all of its devices in one program. It sends
    to nobody, receives nothing and keeps what it holds. Where `places[r]` are several devices, a plan between groups of
    devices runs once per place in a group: the first devices of all groups sum what they have, the second ones, ….

    >>> import meshmend as mm
    >>> from meshmend.schedule.lanes import lower
    >>> lowered = with_bystanders(lower(mm.plan(mm.Mesh("2x2"), "hamiltonian")), [0, 1, 3, 4], 5)
    >>> lowered.loops[0].lanes[0].pairs, lowered.loops[0].ops[2].tolist()
    (((0, 3), (1, 4), (3, 0), (4, 1)), [[2, 2], [2, 2], [2, 2]])
    """
    shape, flat = lowered.shape, np.array(places, dtype=np.int64).ravel().tolist()
    per_chip = len(flat) // shape.n_chips
    if len(places) != shape.n_chips or len({*flat}) < len(flat) or not ({*flat} <= {*range(n_devices)}):
        raise ParameterError(
            f"places should be {shape.n_chips} different numbers from 0 to {n_devices - 1}, the device of each live "
            f"chip in order of rank; got {len(places)}: {list(places)[:8]}{' …' * (len(places) > 8)}"
        )
    where = np.array(flat, dtype=np.int64).reshape(shape.n_chips, per_chip)

    def spread(table: NDArray[Any], idle: int) -> NDArray[Any]:
        over = np.full((n_devices, *table.shape[1:]), idle, dtype=table.dtype)
        over[where] = table[:, None]
        return over

    def moved(lane: Lane) -> Lane:
        pairs = tuple((int(a), int(b)) for src, dst in lane.pairs for a, b in zip(where[src], where[dst], strict=True))
        return Lane(pairs, lane.run, tuple(sorted({*lane.ops, KEEP})))

    loops = tuple(
        Loop(tuple(map(moved, loop.lanes)), spread(loop.send, 0), spread(loop.receive, 0), spread(loop.ops, KEEP))
        for loop in lowered.loops
    )
    owned = tuple(map(tuple, spread(lowered.owned, shape.total_chunks).tolist()))
    return Lowered(replace(shape, lanes=tuple(loop.lanes for loop in loops), owned=owned), loops)


def inputs_of(lowered: Lowered) -> dict[str, NDArray[np.generic]]:
    """Return the tables that a program reads, in its order, by name; each has one row per device."""
    found: dict[str, NDArray[np.generic]] = {}
    for i, loop in enumerate(lowered.loops):
        found |= {f"table_{i}_send": loop.send, f"table_{i}_receive": loop.receive}
        found |= {f"table_{i}_ops": loop.ops} if loop.reads_ops else {}
    return found
