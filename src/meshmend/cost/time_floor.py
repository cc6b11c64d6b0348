"""Time floors: what no schedule is faster than on given hardware, with what steps and hops cost.

Bandwidth alone says nothing of short payloads. Four facts do, and each holds for every schedule:

- **Doubling.** A chip takes one message per chunk and step, and each adds at most as many contributions as its sender
  holds. So a sum of P contributions takes log₂ P steps at least, rounded up. An all-gather may do with one.
- **Distance.** What a chip contributes must come to the chip farthest from it. Each hop on its way costs a hop latency,
  whether it goes in one long step or in many short ones.
- **Bandwidth after all.** A step lasts for its latency, one hop and its busiest link's bytes, or longer. Summed over
  the steps that is the latency of all steps, and the bound.
- **The last to leave.** A chip v that lies e hops from the farthest must send all it contributes over its own links.
  Take what leaves it in the last step in which anything leaves it for the first time, and of that a transfer with the
  fewest hops, h. All else that leaves in that step has h hops or more, so the step lasts for h hop latencies and these
  bytes over v's links, or longer; the steps before it last for the other bytes; and from where it arrives there are
  e − h hops to go. Together: e hops, and the payload over v's links.

An asynchronous engine waits for no step to end, and many messages may be on their way into one chip at once. There one
step's latency is all that doubling asks for. The other facts hold as they are: of the last piece to leave v, the first
link is done no earlier than the payload over v's links takes, and its hops follow.

Each fact is a line, seconds + units · M/b, and the floor is the highest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.cost.hardware import Hardware, Mode
from meshmend.errors import name_chip
from meshmend.schedule import Collective
from meshmend.topology import Mesh

MAX_SOURCES = 1024
"""Chips whose distance from all others is measured. Of more chips than that, those that are likely to be farthest."""
NARROWEST = 64

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TimeFloor:
    """No schedule takes less than `seconds` and `units` · M/b, because of what `why` says."""

    seconds: float
    units: float
    why: str


def time_floors(
    mesh: Mesh,
    hardware: Hardware,
    mode: Mode,
    collective: Collective,
    *,
    units: float,
    drives: Floats,
    owns: NDArray[np.bool_],
) -> tuple[TimeFloor, ...]:
    """Return the lines of which the highest binds. `units` is the bound; `drives` the links' worth of each chip.

    `owns` says which chips own something of a reduce-scatter or an all-gather: those are at one end of every way.
    """
    adds = collective is not Collective.ALL_GATHER
    steps = (mesh.n_chips - 1).bit_length() if adds and mode == "lock-step" else 1
    many = f"{steps} step{'s' * (steps != 1)}"
    start = steps * hardware.step_latency_s
    hop = hardware.hop_latency_s
    floors = [TimeFloor(start + steps * hop, units, f"{many}, and what the cables carry")]
    if not collective.is_all_reduce:
        far = max(distance for _, distance in _eccentricities(mesh, np.flatnonzero(owns)))
        floors.append(TimeFloor(start + far * hop, 0.0, f"{many} and {far} hops to the farthest owner"))
        return tuple(floors)
    for rank, far in _outermost(_eccentricities(mesh, np.arange(mesh.n_chips)), drives):
        why = f"{many} and the {far} hops from chip {name_chip(mesh.chip(rank))}, after all of its payload has left it"
        floors.append(TimeFloor(start + far * hop, 1 / float(drives[rank]), why))
    return tuple(floors)


def _outermost(eccentricities: Iterator[tuple[int, int]], drives: Floats) -> list[tuple[int, int]]:
    """Return (chip, hops) of those chips than which no other has fewer links' worth and lies as far out."""
    best: dict[float, tuple[int, int]] = {}
    for rank, far in eccentricities:
        width = float(drives[rank])
        if width not in best or far > best[width][1]:
            best[width] = rank, far
    found: list[tuple[int, int]] = []
    for width in sorted(best):
        if not found or best[width][1] > found[-1][1]:
            found.append(best[width])
    return found


def _eccentricities(mesh: Mesh, sources: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield chips and how many hops they are from the chip farthest from them; not of all chips if they are many."""
    from scipy.sparse.csgraph import shortest_path

    if len(sources) > MAX_SOURCES:
        # The farthest from the farthest of any chip is an end of the mesh, and so are its narrowest chips.
        from_first = shortest_path(mesh.graph, directed=False, unweighted=True, indices=int(sources[0]))
        ends = [int(sources[0]), int(sources[np.argmax(from_first[sources])])]
        narrow = sources[np.argsort((mesh.neighbours[sources] >= 0).sum(axis=1), kind="stable")[:NARROWEST]]
        sources = np.unique([*ends, *narrow.tolist()])
    hops = shortest_path(mesh.graph, directed=False, unweighted=True, indices=sources)
    yield from zip(sources.tolist(), hops.max(axis=1).astype(int).tolist(), strict=True)
