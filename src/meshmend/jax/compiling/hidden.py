"""How much computing the TPU compiler puts beside permutes: read from the order of instructions in compiled code.

A permute is in flight between its start and its done. What the compiler schedules in between runs meanwhile; its own
estimate of the cycles says how much that is. An order of instructions is not a measurement: it says what may overlap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass
class Overlap:
    """One computation of compiled code, such as the body of a loop, in the compiler's own estimated cycles."""

    name: str
    permutes: int = 0
    """An asynchronous pair counts once."""
    waiting: int = 0
    """Those of them that are not asynchronous: nothing runs meanwhile."""
    loops: int = 0
    cycles: int = 0
    """Of everything but permutes and loops."""
    hidden: int = 0
    """Cycles while at least one permute is in flight."""

    @property
    def share(self) -> float:
        """The share of computing that lies beside permutes."""
        return self.hidden / self.cycles if self.cycles else 0.0


def overlaps(hlo: str) -> list[Overlap]:
    """Return the computations of scheduled HLO that have permutes, loops or estimated costs, in its order.

    >>> hlo = '''%body (p: f32[8]) -> f32[8] {
    ...   %s = f32[8] collective-permute-start(%p)
    ...   %f = f32[8] fusion(%p), backend_config={"estimated_cycles":"300"}
    ...   %d = f32[8] collective-permute-done(%s)
    ...   %g = f32[8] fusion(%d), backend_config={"estimated_cycles":"100"}
    ... }'''
    >>> [(one.name, one.permutes, one.share) for one in overlaps(hlo)]
    [('body', 1, 0.75)]
    """
    found: list[Overlap] = []
    current: Overlap | None = None
    flying = 0
    for line in hlo.splitlines():
        opened = None if line.startswith(" ") else re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if opened:
            current, flying = Overlap(opened[1]), 0
        elif current is None:
            continue
        elif line.startswith("}"):
            if current.permutes or current.loops or current.cycles:
                found.append(current)
            current = None
        elif " collective-permute-start(" in line:
            current.permutes += 1
            flying += 1
        elif " collective-permute-done(" in line:
            flying -= 1
        elif " collective-permute(" in line:
            current.permutes += 1
            current.waiting += 1
        elif " while(" in line:
            current.loops += 1
        elif cost := re.search(r'"estimated_cycles":"(\d+)"', line):
            current.cycles += int(cost[1])
            current.hidden += int(cost[1]) if flying else 0
    return found


def bodies_with_permutes(hlo: str) -> list[Overlap]:
    """Return the computations that have permutes, those with most computing first.

    With unrolled plans in a scan over layers these are its forward and its backward body.
    """
    with_permutes = [one for one in overlaps(hlo) if one.permutes]
    return sorted(with_permutes, key=lambda one: -one.cycles)
