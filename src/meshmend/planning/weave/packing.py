"""Packing: so few trees that they can be repeated, and yet no cable in more of them than its share, rounded up.

`trees.grow` evens loads out over hundreds of trees; here there are a few dozen. They are grown straight: what a cable
has carried is smoothed along its line, so that a broken comb mends itself along one straight line per side, because
every bend costs waiting (`tracks`). What is then still carried too much is moved: a tree drops an overloaded cable and
rejoins its two parts over another one, of all trees and cables that serve the pair that makes fewest bends; where none
has room, the overload moves on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.weave.trees import Combs, Trees, lightest_trees, measure
from meshmend.topology import Mesh

REACH = 8
"""Positions to each side over which the load of a line's cables is smoothed."""
LOAD_WEIGHT = 0.1
LINE_NOISE = 0.02
ALLOWANCE, OVERLOAD_WEIGHT = 8.0, 2.0
"""As in `trees`, but with so few trees overload is better moved afterwards than avoided by crooked trees."""
TREES_TRIED = 10
FEW_BENDS = 3
"""A chip may be so many bends from the root at no cost."""
BEND_COST, DISTANCE_COST, FULL_COST = 3.0, 0.15, 8.0
GOOD_ENOUGH = 2.0
PATIENCE = 150
"""Moves after which overload that has not become less is taken to stay: where a hole leaves too few cables, it must."""

Ints = NDArray[np.int64]


def pack(mesh: Mesh, n_trees: int, most: int, moves: int) -> Trees:
    """Return trees of which, where that can be reached in so many moves, no cable is in more than `most`.

    >>> trees = pack(Mesh("8x8", failed=["2x2@2,2"]), 8, 5, moves=100)
    >>> int(np.bincount(trees.cables.ravel()).max())
    5
    """
    return _Balance(mesh, _grow_straight(mesh, n_trees), most).run(moves)


def _grow_straight(mesh: Mesh, n_trees: int) -> Trees:
    combs = Combs(mesh)
    chance = np.random.default_rng(0)
    a, b = mesh.cables.T
    at = mesh.coords[a].astype(np.int64)
    axis = np.argmax(at != mesh.coords[b], axis=1)
    line = np.array([_line_of(at, along, mesh.shape) for along in range(mesh.n_axes)])[axis, np.arange(len(axis))]
    line += axis * mesh.size

    def weigh(load: NDArray[np.float64], fair: float) -> tuple[int, NDArray[np.float64]]:
        along, weight = combs.next(load)
        beyond = load - fair
        weight += LOAD_WEIGHT * _smooth(beyond, axis, at, mesh.shape)
        weight += LINE_NOISE * chance.random(mesh.size * mesh.n_axes)[line]
        weight += OVERLOAD_WEIGHT * np.maximum(beyond - ALLOWANCE, 0.0)
        return along, weight

    return lightest_trees(mesh, n_trees, weigh)


def _line_of(at: Ints, along: int, shape: tuple[int, ...]) -> Ints:
    """Return a number below the mesh's size for the line along an axis that each chip is on."""
    start = at.copy()
    start[:, along] = 0
    return np.asarray(np.ravel_multi_index(tuple(start.T), shape))


def _smooth(values: NDArray[np.float64], axis: Ints, at: Ints, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the mean of `values` over the cables of the same line within `REACH` positions."""
    smoothed = values.copy()
    for along, length in enumerate(shape):
        mine = np.flatnonzero(axis == along)
        where = tuple(at[mine].T)
        # One more in front: differences of running sums are sums over windows.
        sums = np.zeros((2, *(n + (i == along) for i, n in enumerate(shape))))
        inside = tuple(column + (i == along) for i, column in enumerate(where))
        sums[(0, *inside)], sums[(1, *inside)] = values[mine], 1.0
        sums = np.cumsum(sums, axis=along + 1)
        position = np.arange(length)
        high, low = np.minimum(position + REACH + 1, length), np.maximum(position - REACH, 0)
        window = np.take(sums, high, axis=along + 1) - np.take(sums, low, axis=along + 1)
        total, count = window[(0, *where)], window[(1, *where)]
        smoothed[mine] = total / np.maximum(count, 1.0)
    return smoothed


class _Balance:
    """Moves overload from cable to cable until none is left, or it has been moved often enough."""

    def __init__(self, mesh: Mesh, trees: Trees, most: int) -> None:
        self._mesh, self._most, self._axis = mesh, most, trees.axis
        self._a, self._b = mesh.cables.T.astype(np.int64)
        at = mesh.coords.astype(np.int64)
        self._middle = (at[self._a] + at[self._b]) / 2
        self._cable_axis = np.argmax(at[self._a] != at[self._b], axis=1)
        self._has = np.zeros((len(trees), mesh.n_cables), dtype=np.bool_)
        self._has[np.arange(len(trees))[:, None], trees.cables] = True
        eccentricity, _ = measure(trees)
        self._roots = eccentricity.argmin(axis=1)
        self._known: dict[int, _Bends] = {}
        self._chance = np.random.default_rng(1)

    def run(self, moves: int) -> Trees:
        """Return the trees when no cable is overloaded, after so many moves, or when moving has not helped for long."""
        load = self._has.sum(axis=0)
        heat = np.zeros(len(load))
        best, least, since = self._has.copy(), self._overload(load), 0
        for _ in range(moves):
            if least[1] == 0 or since == PATIENCE:
                break
            # The busiest first: it decides the period, should moves run out.
            cable = int(self._chance.choice(np.flatnonzero(load == load.max())))
            heat[cable] += 1.0
            swap = self._best_swap(cable, load, heat)
            if swap is None:
                continue
            tree, other = swap
            self._has[tree, cable], self._has[tree, other] = False, True
            self._known.pop(tree, None)
            load[cable] -= 1
            load[other] += 1
            since += 1
            if (now := self._overload(load)) < least:
                best, least, since = self._has.copy(), now, 0
        cables = np.nonzero(best)[1].reshape(len(best), -1).astype(np.int32)
        return Trees(self._mesh, cables, self._axis)

    def _overload(self, load: Ints) -> tuple[int, int]:
        """Return what the busiest cable carries, which decides the period, and how much is carried too much in all."""
        return int(load.max()), int(np.maximum(load - self._most, 0).sum())

    def _best_swap(self, cable: int, load: Ints, heat: NDArray[np.float64]) -> tuple[int, int] | None:
        """Return the tree that should drop the cable and the one that it takes instead."""
        best: tuple[float, int, int] | None = None
        candidates = self._chance.permutation(np.flatnonzero(self._has[:, cable]))[:TREES_TRIED]
        for tree in candidates.tolist():
            if tree not in self._known:
                cables = np.flatnonzero(self._has[tree])
                self._known[tree] = _Bends(self._mesh, cables, self._cable_axis, int(self._roots[tree]))
            bends = self._known[tree]
            a, b = self._a, self._b
            lower = int(a[cable] if bends.parent[a[cable]] == b[cable] else b[cable])
            below = bends.below(lower)
            joins = np.flatnonzero(below[a] != below[b])
            joins = joins[joins != cable]
            if not len(joins):
                continue
            outer = np.where(below[a[joins]], b[joins], a[joins])
            inside = int(bends.bends[below].max()) - int(bends.bends[lower])
            made = bends.bends[outer] + (bends.axis[outer] != self._cable_axis[joins]) + 1 + inside
            cost = BEND_COST * np.maximum(made - FEW_BENDS, 0)
            cost += DISTANCE_COST * np.abs(self._middle[joins] - self._middle[cable]).sum(axis=1)
            cost += FULL_COST * (load[joins] >= self._most) + heat[joins] + self._chance.random(len(joins))
            least = int(cost.argmin())
            if best is None or cost[least] < best[0]:
                best = float(cost[least]), tree, int(joins[least])
            if best[0] <= GOOD_ENOUGH:
                break
        return None if best is None else best[1:]


class _Bends:
    """One tree from its root: parents, the axis of each chip's cable to its parent, and its bends to the root."""

    def __init__(self, mesh: Mesh, cables: Ints, cable_axis: Ints, root: int) -> None:
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order

        n = mesh.n_chips
        a, b = mesh.cables[cables].T
        graph = csr_array((np.ones(n - 1, dtype=np.int8), (a, b)), shape=(n, n))
        _, self.parent = breadth_first_order(graph, root, directed=False)
        self.axis = np.full(n, -1)
        self.axis[np.where(self.parent[b] == a, b, a)] = cable_axis[cables]
        self._up = np.where(self.parent < 0, np.arange(n), self.parent)
        above = self.axis[self._up]
        self.bends = ((self.axis != above) & (above >= 0)).astype(np.int64)
        jump = self._up
        # Look twice as far up in every round.
        while not np.array_equal(further := jump[jump], jump):
            self.bends += self.bends[jump]
            jump = further

    def below(self, chip: int) -> NDArray[np.bool_]:
        """Say of every chip whether it is at or below this one."""
        is_below = np.zeros(len(self._up), dtype=np.bool_)
        is_below[chip] = True
        jump = self._up.copy()
        jump[chip] = chip
        while not np.array_equal(further := jump[jump], jump):
            is_below |= is_below[jump]
            jump = further
        return np.asarray(is_below | is_below[jump])
