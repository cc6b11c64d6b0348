"""How much computing the TPU compiler puts beside permutes: read from the order of instructions in compiled code.

A permute is in flight between its start and its done. What the compiler schedules in between runs meanwhile; its own
estimate of the cycles says how much that is. An order of instructions is not a measurement: it says what may overlap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Overlap:
    """One computation of compiled code, such as the body of a loop, in the compiler's own estimated cycles."""

    name: str
    loop: str = ""
    """What JAX calls the loop whose body this is, as in "jit(step)/jvp()/while"; empty for what is no body."""
    permutes: int = 0
    """An asynchronous pair counts once."""
    covered: int = 0
    """Those of them that have computing beside them."""
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

    @property
    def place(self) -> str:
        """Where this is in a step with scanned layers: "backward", "forward", or "outside" their loops."""
        if "transpose(" in self.loop:
            return "backward"
        return "forward" if "jvp(" in self.loop else "outside"


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
    found: list[_Count] = []
    loops: dict[str, str] = {}
    current: _Count | None = None
    for line in hlo.splitlines():
        opened = None if line.startswith(" ") else re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if opened:
            current = _Count(opened[1])
        elif current is None:
            continue
        elif line.startswith("}"):
            if current.permutes or current.loops or current.cycles:
                found.append(current)
            current = None
        else:
            current.read(line)
            if " while(" in line and (body := re.search(r"body=%?([\w.\-]+)", line)):
                name = re.search(r'op_name="([^"]*)"', line)
                loops[body[1]] = name[1] if name else "while"
    return [one.overlap(loops.get(one.name, "")) for one in found]


class _Count:
    """What has been read of one computation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.permutes = self.covered = self.waiting = self.loops = self.cycles = self.hidden = 0
        self.flying: dict[str, bool] = {}
        """Whether there was computing yet, for each permute that has started."""

    def read(self, line: str) -> None:
        if " collective-permute-start(" in line:
            self.permutes += 1
            self.flying[re.findall(r"%?([\w.\-]+) =", line)[0]] = False
        elif " collective-permute-done(" in line:
            ended = re.search(r" collective-permute-done\(.*?%?([\w.\-]+)\)", line)
            self.covered += self.flying.pop(ended[1] if ended else "", False)
        elif " collective-permute(" in line:
            self.permutes += 1
            self.waiting += 1
        elif " while(" in line:
            self.loops += 1
        elif cost := re.search(r'"estimated_cycles":"(\d+)"', line):
            self.cycles += int(cost[1])
            if self.flying:
                self.hidden += int(cost[1])
                self.flying = dict.fromkeys(self.flying, True)

    def overlap(self, loop: str) -> Overlap:
        return Overlap(self.name, loop, self.permutes, self.covered, self.waiting, self.loops, self.cycles, self.hidden)


def bodies_with_permutes(hlo: str) -> list[Overlap]:
    """Return the computations that have permutes, those with most computing first."""
    with_permutes = [one for one in overlaps(hlo) if one.permutes]
    return sorted(with_permutes, key=lambda one: -one.cycles)
