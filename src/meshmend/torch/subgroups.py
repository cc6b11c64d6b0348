"""Sub-groups: which mesh the members of a process group form, among the live chips of a machine.

The members' distinct coordinates on each axis are the lines of a grid. Where the lines lie side by side it is a
rectangle of the mesh, such as a tile; where they lie apart, as those of corresponding chips of all tiles do, it is a
coarser mesh, whose cables are straight paths over other chips. Places of the grid without a member are holes.

How fast such a cable is: see `meshmend.topology.tiles`. Chips of tiles that are s long along an axis share the links
there with s − 1 other groups that do the same, so each gets 1/s of a link.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, product

from meshmend.errors import Coordinate
from meshmend.topology import Cable, Mesh
from meshmend.topology.rates import MAX_RATE_DENOMINATOR
from meshmend.topology.tiles import onward_rates


def mesh_of(chips: Sequence[Coordinate], live: Mesh) -> Mesh | None:
    """Return the mesh that these chips form, whose ranks are in row-major order of the chips; None if they form none.

    >>> machine = Mesh("4x4", failed=["2x2@2,2"])
    >>> mesh_of([(0, 2), (0, 3), (1, 2), (1, 3)], machine)
    Mesh(2x2: 4 chips)
    >>> mesh_of([(0, 1), (0, 3), (2, 1)], machine)
    Mesh(2x2 minus 1x1@1,1: 3 of 4 chips)
    >>> mesh_of([(0, 0), (1, 1)], machine) is None
    True
    """
    members = set(chips)
    if len(members) == live.n_chips:
        return live if live.is_connected else None
    lines = [sorted({chip[axis] for chip in members}) for axis in range(live.n_axes)]
    wrap = [live.wrap[axis] and _goes_round(lines[axis], live.shape[axis]) for axis in range(live.n_axes)]
    apart = [min((b - a for a, b in pairwise(line)), default=1) for line in lines]
    nearest = min((apart[axis] for axis, line in enumerate(lines) if len(line) > 1), default=1)
    onward = [onward_rates(live, axis) for axis in range(live.n_axes)]
    rates: dict[Cable, Fraction] = {}
    for here in product(*(range(len(line)) for line in lines)):
        for axis, line in enumerate(lines):
            there = (*here[:axis], (here[axis] + 1) % len(line), *here[axis + 1 :])
            if there[axis] <= here[axis] and not wrap[axis]:
                continue
            start = tuple(line_of[at] for line_of, at in zip(lines, here, strict=True))
            steps = (line[there[axis]] - line[here[axis]]) % live.shape[axis]
            # The slowest cable on a straight path towards larger coordinates counts, 0 where it is broken.
            path = [(*start[:axis], (start[axis] + i) % live.shape[axis], *start[axis + 1 :]) for i in range(steps)]
            slowest = Fraction(float(min(onward[axis][at] for at in path))).limit_denominator(MAX_RATE_DENOMINATOR)
            rate = Fraction(nearest, apart[axis]) * slowest
            if rate != 1:
                rates[min(here, there), max(here, there)] = rate
    absent = [
        at
        for at in product(*(range(len(line)) for line in lines))
        if tuple(line[i] for line, i in zip(lines, at, strict=True)) not in members
    ]
    mesh = Mesh([len(line) for line in lines], wrap=wrap, failed=absent, cable_rates=rates)
    return mesh if mesh.is_connected else None


def _goes_round(line: Sequence[int], length: int) -> bool:
    """Return whether lines on an axis that wraps lie equally far apart all the way round."""
    gaps = {(b - a) % length for a, b in zip(line, [*line[1:], line[0]], strict=True)}
    return len(line) > 2 and len(gaps) == 1
