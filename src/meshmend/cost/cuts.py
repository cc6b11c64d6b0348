"""Cuts: the partition of the chips that an all-reduce finds narrowest, and the cut that an all-gather does. Both exact.

A cable counts by its rate: a cable of rate 1/2 is half a cable. Rates are fractions, so that whole numbers in units of
their common denominator stand for them and everything stays exact.

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
as wide a flow as that lie on one side of it: they are merged, which on most meshes leaves nothing to do. Else a
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
    >>> narrowest_partition(Mesh("1x4", cable_rates={"0,1-0,2": 0.5})).tolist()
    [0, 0, 1, 1]
    """
    a, b = mesh.cables.T
    width = cable_widths(mesh)[0]
    labels = np.arange(mesh.n_chips)
    least = Fraction(int(width.sum()), mesh.n_chips - 1)
    while True:
        found = _merge_dense(mesh, width, least)
        parts = int(found.max()) + 1
        quotient = Fraction(int(width[found[a] != found[b]].sum()), parts - 1) if parts > 1 else least
        if quotient >= least:
            return labels
        least, labels = quotient, found


def cable_widths(mesh: Mesh) -> tuple[Labels, int]:
    """Return the rate of each cable as a whole number, and the number that stands for rate 1."""
    unit = math.lcm(*(rate.denominator for rate in mesh.cable_rates.values()))
    # Python's numbers where 64 bits might not hold their sum: a thousand odd rates have a huge common denominator.
    kind: type = np.int64 if unit * mesh.n_cables < 2**62 else object
    width: Labels = np.full(mesh.n_cables, unit, dtype=kind)
    slow = {(mesh.rank(a), mesh.rank(b)): rate for (a, b), rate in mesh.cable_rates.items()}
    if slow:
        for number, (a, b) in enumerate(mesh.cables.tolist()):
            rate = slow.get((a, b) if a < b else (b, a))
            if rate is not None:
                width[number] = rate.numerator * (unit // rate.denominator)
    return width, unit


def _merge_dense(mesh: Mesh, width: Labels, limit: Fraction) -> Labels:
    """Return the partition that is left when all dense sets are merged."""
    room = limit.numerator  # in units of 1/denominator
    near_width: list[dict[int, int]] = [{} for _ in range(mesh.n_chips)]
    for (a, b), wide in zip(mesh.cables.tolist(), width.tolist(), strict=True):
        near_width[a][b] = near_width[b][a] = wide * limit.denominator
    part_of = [-1] * mesh.n_chips
    members: dict[int, list[int]] = {}
    borne: dict[int, int] = {}
    # rests[x][y]: how much of the cables between parts x and y rests on x.
    rests: dict[int, dict[int, int]] = {}
    for chip, near in enumerate(near_width):
        part_of[chip], members[chip], borne[chip] = chip, [chip], 0
        own: dict[int, int] = {}
        for other, wide in near.items():
            if part_of[other] >= 0:
                own[part_of[other]] = own.get(part_of[other], 0) + wide
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
    width, unit = cable_widths(mesh)
    if unit * mesh.n_cables > MAX_FLOW:
        return None
    across = np.bincount(np.concatenate([a, b]), np.concatenate([width, width]), mesh.n_chips).astype(np.int64)
    singles = [Fraction(total - own, wide) for own, wide in zip(owned.tolist(), across.tolist(), strict=True)]
    first = max(range(mesh.n_chips), key=singles.__getitem__)
    most = singles[first]
    best: NDArray[np.bool_] = np.arange(mesh.n_chips) == first
    # A better T has narrower cables than this, so that no flow so wide joins two chips that it parts.
    part_of = _joined(mesh, width, math.ceil(Fraction(total - int(owned.min())) / most))
    n = int(part_of.max()) + 1
    own = np.bincount(part_of, owned, n).astype(np.int64)
    a, b = part_of[a], part_of[b]
    apart = a != b
    a, b, width = a[apart], b[apart], width[apart]
    waiting = deque(range(n) if n > 1 else ())
    while waiting:
        if max(total * most.denominator, most.numerator * int(width.sum())) > MAX_FLOW:
            return None
        side = _starved(a, b, width, own, most, waiting[0])
        if side is None:
            waiting.popleft()
            continue
        # The same chip is tried again. Those before it need not be: within a longer time they get no less.
        most = Fraction(total - int(own[side].sum()), int(width[side[a] != side[b]].sum()))
        best = side[part_of]
    return best


def _joined(mesh: Mesh, width: Labels, least: int) -> Labels:
    """Return parts of chips that a flow so wide joins. Not every such chip is found."""
    near: list[dict[int, int]] = [{} for _ in range(mesh.n_chips)]
    for (x, y), wide in zip(mesh.cables.tolist(), width.tolist(), strict=True):
        near[x][y] = near[y][x] = wide
    across = [sum(row.values()) for row in near]
    part_of = list(range(mesh.n_chips))

    def part(chip: int) -> int:
        while part_of[chip] != chip:
            part_of[chip] = part_of[part_of[chip]]
            chip = part_of[chip]
        return chip

    for x, y in mesh.cables.tolist():
        # From the chip with narrower cables: where paths run out, the search has seen its side alone.
        start, end = (x, y) if across[x] <= across[y] else (y, x)
        if part(x) != part(y) and across[start] >= least and _are_joined(near, start, end, least):
            part_of[part(x)] = part(y)
    return np.unique([part(chip) for chip in range(mesh.n_chips)], return_inverse=True)[1]


def _are_joined(near: list[dict[int, int]], start: int, end: int, least: int) -> bool:
    """Say whether a flow so wide leads from start to end."""
    flow: dict[tuple[int, int], int] = {}  # what goes from x to y, less what comes back
    while least > 0:
        came = {start: start}
        queue = deque([start])
        while queue and end not in came:
            x = queue.popleft()
            for y, wide in near[x].items():
                if y not in came and flow.get((x, y), 0) < wide:
                    came[y] = x
                    queue.append(y)
        if end not in came:
            return False
        path = [end]
        while path[-1] != start:
            path.append(came[path[-1]])
        hops = list(zip(path[1:], path[:-1], strict=True))
        amount = min(near[x][y] - flow.get((x, y), 0) for x, y in hops)
        for x, y in hops:
            flow[x, y] = flow.get((x, y), 0) + amount
            flow[y, x] = flow.get((y, x), 0) - amount
        least -= amount
    return True


def _starved(a: Labels, b: Labels, width: Labels, own: Labels, most: Fraction, part: int) -> NDArray[np.bool_] | None:
    """Return a set with `part` that cannot receive all it lacks within the time, or None.

    Links carry `most` times their width, a source gives every part what it owns: all of it must be able to flow into
    `part`.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    n, unit = len(own), most.denominator
    tail = np.concatenate([a, b, np.full(n, n)])
    head = np.concatenate([b, a, np.arange(n)])
    capacity = np.concatenate([np.tile(width * most.numerator, 2), own * unit])
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
