"""Sites: a grid of 2^p × 2^q × … places laid over whatever chips survive, and who stands in for whom.

Exchanges in few steps want a power of two of partners, as near each other as a grid's halves. So a grid with as many
sites as the largest power of two in the number of chips is laid over the mesh, and every site is given to a live chip
near it: an assignment of least cost. Beside a hole that is not enough. A site whose nearest partners were pushed round
the hole to one side belongs on that side as well, so sites are moved towards their partners, half of them at a time,
and the best of a few rounds is kept. Chips without a site are folded into a chip with one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.topology import Mesh

ROUNDS = 12
"""Rounds of moving sites; later ones find nothing better."""
STAY = 30.0
"""What it costs a site to move in a round in which it should stay."""
SEED = 0

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bit:
    """A bit of the sites' numbers: sites that differ in it alone are `reach` chips apart along `axis`."""

    number: int
    axis: int
    reach: float


@dataclass(frozen=True)
class Sites:
    """`chips[s]` is the rank at site s, `folded[s]` the rank that is folded into it, −1 for none."""

    chips: Ints
    folded: Ints
    bits: tuple[Bit, ...]

    @property
    def n(self) -> int:
        """Number of sites."""
        return len(self.chips)


def n_sites(mesh: Mesh) -> int:
    """Return the number of sites: the largest power of two that is not above the number of chips."""
    return 1 << (mesh.n_chips.bit_length() - 1)


@lru_cache(maxsize=8)
def lay_out(mesh: Mesh) -> Sites:
    """Lay the grid over `mesh`, whose survivors are connected.

    >>> lay_out(Mesh("2x3")).chips.tolist()
    [0, 2, 3, 5]
    """
    powers = _powers(mesh)
    bits = _bits(mesh, powers)
    n = n_sites(mesh)
    apart = _distances(mesh, powers)
    cost = apart.max(axis=2) ** 2 + 0.1 * apart.sum(axis=2)
    if n == mesh.n_chips and not cost.min(axis=1).any():  # a chip at every site
        return Sites(cost.argmin(axis=1), np.full(n, -1, dtype=np.int64), bits)
    from scipy.optimize import linear_sum_assignment  # a quarter of a second to import
    from scipy.sparse.csgraph import shortest_path

    hops: Floats = shortest_path(mesh.graph, directed=False, unweighted=True)
    _, chips = linear_sum_assignment(cost)
    best = chips = np.asarray(chips, dtype=np.int64)
    least = _worth(hops, chips, bits)
    rng = np.random.default_rng(SEED)
    for _ in range(ROUNDS if n < mesh.n_chips or not mesh.is_full else 0):
        pull = np.zeros_like(cost)
        for bit in bits:
            excess = hops[chips[np.arange(n) ^ (1 << bit.number)]] - bit.reach
            pull += np.maximum(excess, 0) ** 2 * (4.0 / bit.reach)
        stays = rng.random((n, 1)) < 0.5
        moves = np.arange(mesh.n_chips) != chips[:, None]
        _, chips = linear_sum_assignment(0.3 * cost + pull + STAY * (moves & stays))
        chips = np.asarray(chips, dtype=np.int64)
        worth = _worth(hops, chips, bits)
        if worth < least:
            best, least = chips, worth
    folded = np.full(n, -1, dtype=np.int64)
    rest = np.setdiff1d(np.arange(mesh.n_chips), best)
    if len(rest):
        row, site = linear_sum_assignment(hops[np.ix_(rest, best)] ** 2)
        folded[site] = rest[row]
    return Sites(best, folded, bits)


def _powers(mesh: Mesh) -> tuple[int, ...]:
    """Return how many times the grid halves each axis: so that sites lie about as far apart along all of them."""
    m = n_sites(mesh).bit_length() - 1
    splits = list(_splits(m, mesh.n_axes))
    fitting = [p for p in splits if all(2**power <= length for power, length in zip(p, mesh.shape, strict=True))]

    def unevenness(powers: tuple[int, ...]) -> float:
        gaps = [math.log(length / 2**p) for p, length in zip(powers, mesh.shape, strict=True) if length > 1 or p]
        return max(gaps) - min(gaps) if gaps else 0.0

    return min(fitting or splits, key=unevenness)


def _splits(total: int, n_parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as an ordered sum, in order: 31,824 for 2,048 chips on eight axes.

    >>> list(_splits(2, 2))
    [(0, 2), (1, 1), (2, 0)]
    """
    # As dividers among the places of a row: what lies between two of them is a part.
    for dividers in itertools.combinations(range(total + n_parts - 1), n_parts - 1):
        edges = (-1, *dividers, total + n_parts - 1)
        yield tuple(after - before - 1 for before, after in itertools.pairwise(edges))


def _bits(mesh: Mesh, powers: tuple[int, ...]) -> tuple[Bit, ...]:
    """Return the bits of a site's number: those of the last axis are the lowest."""
    found, number = [], 0
    for axis in reversed(range(mesh.n_axes)):
        for bit in range(powers[axis]):
            found.append(Bit(number, axis, 2**bit * mesh.shape[axis] / 2 ** powers[axis]))
            number += 1
    return tuple(found)


def _distances(mesh: Mesh, powers: tuple[int, ...]) -> Floats:
    """Return how far each chip is from the middle of each site's cell, along every axis: (site, chip, axis)."""
    positions: Any = np.unravel_index(np.arange(2 ** sum(powers)), [2**p for p in powers])
    apart = np.empty((2 ** sum(powers), mesh.n_chips, mesh.n_axes))
    for axis, (power, length, wrap) in enumerate(zip(powers, mesh.shape, mesh.wrap, strict=True)):
        middle = (positions[axis] + 0.5) * length / 2**power - 0.5
        apart[:, :, axis] = np.abs(middle[:, None] - mesh.coords[:, axis])
        if wrap:
            np.minimum(apart[:, :, axis], length - apart[:, :, axis], out=apart[:, :, axis])
    return apart


def _worth(hops: Floats, chips: Ints, bits: tuple[Bit, ...]) -> tuple[float, float]:
    """Return what exchanges cost: a step lasts as long as its longest; then all of them count."""
    numbers = np.arange(len(chips))
    far = [hops[chips, chips[numbers ^ (1 << bit.number)]] for bit in bits]
    return float(sum(x.max() for x in far)), float(sum((x**2).sum() for x in far))
