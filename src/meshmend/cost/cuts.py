"""Cuts: the partition of the chips that an all-reduce finds narrowest, and the cut that an all-gather does. Both exact.

**Partitions** (graph strength; Tutte, Nash-Williams; Cunningham 1985). Wanted is the least λ = cables between parts ÷
(parts − 1). For a λ in hand, a set S of chips is *dense* if more than λ(|S| − 1) cables lie within it. Merging dense
sets leads to the partition with the least (cables between parts) − λ · parts, and that one either has a smaller
quotient, which is the next λ, or shows that there is none (Newton's method; a handful of rounds).

Chips are added one by one, and each cable rests on its two ends, in any proportion, so that no chip bears more than λ.
By Hall's theorem a new chip v lies in no dense set if its cables can all rest on others. They are pushed away from it
along chains, each cable on the way turning to its other end, to the nearest chip with room. If some of them stay on v,
the chips that chains can reach bear λ each, all of it cables among themselves: with v they are a dense set, and the
densest that holds v. Sets without v are not dense, so every best partition has it within one part (the number of cables
within a set is supermodular), and it is merged into one chip. Room is nearly always close by: 1,000 chips take a third
of a second.

**Cuts.** A set T of chips that owns the share s(T) must receive the rest over its c(T) cables, so the most of
(1 − s(T)) / c(T) is wanted. A single chip is a first guess t. A better T has c(T) < (1 − s(T)) / t, so chips joined by
as many disjoint paths as that lie on one side of it: they are merged, which on most meshes leaves nothing to do. Else a
maximum flow into each remaining chip either shows that it can get everything within t, or a better T.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from meshmend.topology import Mesh

MAX_FLOW = 2**31 - 1
"""SciPy's flows are 32-bit."""

Labels = NDArray[np.int64]


def narrowest_partition(mesh: Mesh) -> Labels:
    """Return the part of each chip, for the partition with the least cables between parts ÷ (parts − 1).

    >>> narrowest_partition(Mesh("1x4")).tolist()
    [0, 1, 2, 3]
    """
    a, b = mesh.cables.T
    labels = np.arange(mesh.n_chips)
    least = Fraction(len(a), mesh.n_chips - 1)
    while True:
        found = _merge_dense(mesh, least)
        parts = int(found.max()) + 1
        quotient = Fraction(int((found[a] != found[b]).sum()), parts - 1) if parts > 1 else least
        if quotient >= least:
            return labels
        least, labels = quotient, found


def _merge_dense(mesh: Mesh, limit: Fraction) -> Labels:
    """Return the partition that is left when all dense sets are merged."""
    room, cable = limit.numerator, limit.denominator  # in units of a cable's 1/denominator
    part_of = [-1] * mesh.n_chips
    members: dict[int, list[int]] = {}
    borne: dict[int, int] = {}
    # rests[x][y]: how much of the cables between parts x and y rests on x.
    rests: dict[int, dict[int, int]] = {}
    for chip, near in enumerate(mesh.neighbours.tolist()):
        part_of[chip], members[chip], borne[chip] = chip, [chip], 0
        own: dict[int, int] = {}
        for other in near:
            if other >= 0 and part_of[other] >= 0:
                own[part_of[other]] = own.get(part_of[other], 0) + cable
        rests[chip] = own
        for other in own:
            rests[other][chip] = 0
        left = sum(own.values())
        while left:
            came, end = _find_room(rests, borne, chip, room)
            if end is None:
                _merge(came, chip, part_of, members, borne, rests)
                break
            path = [end]
            while path[-1] != chip:
                path.append(came[path[-1]])
            hops = list(zip(path[1:], path[:-1], strict=True))
            amount = min(left, room - borne[end], *(rests[x][y] for x, y in hops))
            for x, y in hops:
                rests[x][y] -= amount
                rests[y][x] += amount
            borne[end] += amount
            left -= amount
    return np.unique(part_of, return_inverse=True)[1]


def _find_room(
    rests: dict[int, dict[int, int]], borne: dict[int, int], start: int, room: int
) -> tuple[dict[int, int], int | None]:
    """Search from `start` along what can be pushed on; return where each part was come to from, and one with room."""
    came = {start: start}
    queue = deque([start])
    while queue:
        x = queue.popleft()
        for y, amount in rests[x].items():
            if amount and y not in came:
                came[y] = x
                if borne[y] < room:
                    return came, y
                queue.append(y)
    return came, None


def _merge(
    inside: dict[int, int],
    name: int,
    part_of: list[int],
    members: dict[int, list[int]],
    borne: dict[int, int],
    rests: dict[int, dict[int, int]],
) -> None:
    """Make one part of several. What they bear lies between themselves, so that the new part bears nothing."""
    outside: dict[int, int] = {}
    chips: list[int] = []
    for x in inside:
        for y in rests.pop(x):
            if y not in inside:
                outside[y] = outside.get(y, 0) + rests[y].pop(x)
        chips += members.pop(x)
        del borne[x]
    members[name], borne[name], rests[name] = chips, 0, dict.fromkeys(outside, 0)
    for y, amount in outside.items():
        rests[y][name] = amount
    for chip in chips:
        part_of[chip] = name


def narrowest_cut(mesh: Mesh, shares: Sequence[int]) -> NDArray[np.bool_] | None:
    """Return the chips T with the most (1 − s(T)) / c(T), where chip v owns `shares[v]` of all shares.

    None where the numbers are too large for exact flows.
    """
    owned, total = np.asarray(shares, dtype=np.int64), int(sum(shares))
    a, b = mesh.cables.T.astype(np.int64)
    degree = np.bincount(np.concatenate([a, b]), minlength=mesh.n_chips)
    singles = [Fraction(total - own, cables) for own, cables in zip(owned.tolist(), degree.tolist(), strict=True)]
    first = max(range(mesh.n_chips), key=singles.__getitem__)
    most = singles[first]
    best: NDArray[np.bool_] = np.arange(mesh.n_chips) == first
    # A better T has fewer cables than this, so that so many disjoint paths join no two chips that it parts.
    paths = math.ceil(Fraction(total - int(owned.min())) / most)
    part_of = _joined(mesh, paths)
    n = int(part_of.max()) + 1
    own = np.bincount(part_of, owned, n).astype(np.int64)
    a, b = part_of[a], part_of[b]
    apart = a != b
    a, b = a[apart], b[apart]
    waiting = deque(range(n) if n > 1 else ())
    while waiting:
        if max(total * most.denominator, most.numerator * len(a)) > MAX_FLOW:
            return None
        side = _starved(a, b, own, most, waiting[0])
        if side is None:
            waiting.popleft()
            continue
        # The same chip is tried again. Those before it need not be: within a longer time they get no less.
        most = Fraction(total - int(own[side].sum()), int((side[a] != side[b]).sum()))
        best = side[part_of]
    return best


def _joined(mesh: Mesh, paths: int) -> Labels:
    """Return parts of chips that so many paths join, no two over one cable. Not every such chip is found."""
    near = [[other for other in row if other >= 0] for row in mesh.neighbours.tolist()]
    part_of = list(range(mesh.n_chips))

    def part(chip: int) -> int:
        while part_of[chip] != chip:
            part_of[chip] = part_of[part_of[chip]]
            chip = part_of[chip]
        return chip

    for x, y in mesh.cables.tolist():
        # From the chip with fewer cables: where paths run out, the search has seen its side alone.
        start, end = (x, y) if len(near[x]) <= len(near[y]) else (y, x)
        if part(x) != part(y) and _are_joined(near, start, end, paths):
            part_of[part(x)] = part(y)
    return np.unique([part(chip) for chip in range(mesh.n_chips)], return_inverse=True)[1]


def _are_joined(near: list[list[int]], start: int, end: int, paths: int) -> bool:
    """Say whether so many paths lead from start to end, no two over one cable."""
    if len(near[start]) < paths:
        return False
    used: set[tuple[int, int]] = set()
    for _ in range(paths):
        came = {start: start}
        queue = deque([start])
        while queue and end not in came:
            x = queue.popleft()
            for y in near[x]:
                if y not in came and (x, y) not in used:
                    came[y] = x
                    queue.append(y)
        if end not in came:
            return False
        y = end
        while y != start:
            x = came[y]
            # To go back over a cable is to free it.
            if (y, x) in used:
                used.remove((y, x))
            else:
                used.add((x, y))
            y = x
    return True


def _starved(a: Labels, b: Labels, own: Labels, most: Fraction, part: int) -> NDArray[np.bool_] | None:
    """Return a set with `part` that cannot receive all it lacks within the time, or None.

    Links carry `most` each, a source gives every part what it owns: all of it must be able to flow into `part`.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    n, cable, unit = len(own), most.numerator, most.denominator
    tail = np.concatenate([a, b, np.full(n, n)])
    head = np.concatenate([b, a, np.arange(n)])
    capacity = np.concatenate([np.full(2 * len(a), cable), own * unit])
    graph = coo_array((capacity, (tail, head)), shape=(n + 1, n + 1)).tocsr().astype(np.int32)
    flow = maximum_flow(graph, n, part)
    if flow.flow_value == int(own.sum()) * unit:
        return None
    rest = graph - flow.flow
    rest.data = np.maximum(rest.data, 0)
    rest.eliminate_zeros()
    side = np.ones(n, dtype=np.bool_)
    reached = breadth_first_order(rest, n, return_predecessors=False)
    side[reached[reached < n]] = False
    return side
