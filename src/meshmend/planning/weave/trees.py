"""Trees: a family of spanning trees that together load every cable alike.

A tree is a *comb*. It follows all lines of the mesh along one axis, and joins them within one slab across that
axis, where it is a comb again: in 2-D all rows and one column as the spine (warp), or all columns and one row
(weft). From tree to tree the first axis is the one whose cables have carried least, and the spine moves to where
least has been carried. On a full N×N mesh 2N trees then use every cable exactly N+1 times.

Holes break lines and spines. So a tree is taken as the lightest spanning tree where a cable weighs little if it
belongs to the comb, and much once it has carried more than its share: a broken comb mends itself over the cables
beside it, and no cable is used much more than the others, whatever has failed. A slow cable's share is less by its
rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.topology import Mesh

NAME, PHASES = "weave", ("reduce to the roots", "broadcast from the roots")
ALLOWANCE = 1.5
"""Uses beyond its share that a cable may have at no cost: combs on a full mesh stay within it."""
OVERLOAD_WEIGHT = 8.0
"""Weight of each further use, in ranks of the comb: large, so that hardly any cable goes beyond the allowance."""
DISTANCE_WEIGHT = 0.5
"""Weight of a mend as far from the spine as the mesh is long: near mends keep the tree shallow."""
UNUSED_WEIGHT, NEVER = 1e9, 1e-6
"""Weight of a cable that is not to be used, and what stands for its rate of 0."""
LOAD_WEIGHT = 0.01
NOISE_WEIGHT = 0.005
"""Between equals the less used cable goes first, then chance decides (seeded: plans repeat)."""
BLOCK_CELLS = 2**20
"""Chips × trees that are searched at once."""

Weigh = Callable[[NDArray[np.float64], float], tuple[int, NDArray[np.float64]]]


@dataclass(frozen=True)
class Trees:
    """Spanning trees of the live chips, one row per tree: their cables, and the axis that their lines follow."""

    mesh: Mesh
    cables: NDArray[np.int32]
    axis: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.cables)


@dataclass(frozen=True)
class Rooted:
    """Trees with roots. Row i, column r: the parent of rank r in tree i (−1 at its root), and its depth."""

    parent: NDArray[np.int32]
    depth: NDArray[np.int32]


def grow(mesh: Mesh, n_trees: int, rates: NDArray[np.float64] | None = None) -> Trees:
    """Return `n_trees` spanning trees of a connected mesh that share its cables evenly, or by their `rates`.

    Cables of rate 0 are not used.

    >>> trees = grow(Mesh("4x4"), 8)
    >>> set(np.bincount(trees.cables.ravel()).tolist())      # each of 24 cables in 5 of the 8 trees
    {5}
    """
    combs = Combs(mesh)
    chance = np.random.default_rng(0)
    shares = np.ones(mesh.n_cables) if rates is None else np.maximum(rates, NEVER)
    per_share = mesh.n_cables / max(shares.sum(), 1.0)

    def weigh(load: NDArray[np.float64], fair: float) -> tuple[int, NDArray[np.float64]]:
        axis, weight = combs.next(load / shares)
        beyond = load / shares - fair * per_share
        weight += LOAD_WEIGHT * beyond + NOISE_WEIGHT * chance.random(len(load))
        weight += OVERLOAD_WEIGHT * np.maximum(beyond - ALLOWANCE, 0.0)
        if rates is not None:
            weight[rates == 0] += UNUSED_WEIGHT
        return axis, weight

    return lightest_trees(mesh, n_trees, weigh)


def lightest_trees(mesh: Mesh, n_trees: int, weigh: Weigh) -> Trees:
    """Return spanning trees of a connected mesh, each the lightest by what cables weigh after those before it.

    `weigh` receives how often each cable was used, and how often would be fair; it returns the axis of the next tree's
    lines and the weights.
    """
    # SciPy's graph module takes a noticeable part of `import meshmend`; only planning pays.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import minimum_spanning_tree

    n_chips, n_cables = mesh.n_chips, mesh.n_cables
    a, b = mesh.cables.T.astype(np.int64)
    by_ends = np.lexsort((b, a))
    ends = (a * n_chips + b)[by_ends]
    bounds = np.searchsorted(a[by_ends], np.arange(n_chips + 1)).astype(np.int32)
    far_ends = b[by_ends].astype(np.int32)
    used = np.empty((n_trees, n_chips - 1), dtype=np.int32)
    axis = np.empty(n_trees, dtype=np.int8)
    load = np.zeros(n_cables)
    for i in range(n_trees):
        axis[i], weight = weigh(load, i * (n_chips - 1) / max(n_cables, 1))
        # SciPy takes a weight of zero for an absent cable.
        weight += 1.0 - weight.min(initial=0.0)
        graph = csr_array((weight[by_ends], far_ends.copy(), bounds.copy()), shape=(n_chips, n_chips))
        tree = minimum_spanning_tree(graph, overwrite=True)  # saves it a slower copy
        near = np.repeat(np.arange(n_chips), np.diff(tree.indptr))
        used[i] = by_ends[np.searchsorted(ends, near * n_chips + tree.indices)]
        load[used[i]] += 1.0
    return Trees(mesh, used, axis)


class Combs:
    """Draws the next comb: which cables it prefers, given what all have carried so far."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        a, b = mesh.cables.T
        self._at = mesh.coords[a].astype(np.int64)
        self._axis = np.argmax(self._at != mesh.coords[b], axis=1)
        self._count = np.bincount(self._axis, minlength=mesh.n_axes)
        self._axes = np.flatnonzero(self._count)
        # Of spines that have carried the same, the most central comes first: it makes the shallowest tree.
        self._visits = [np.argsort(np.abs(2 * np.arange(n) - n + 1), kind="stable") for n in mesh.shape]

    def next(self, load: NDArray[np.float64]) -> tuple[int, NDArray[np.float64]]:
        """Return the axis of the lines, and for each cable its rank in the comb: lines, spine …, all others."""
        mesh, at, axis = self._mesh, self._at, self._axis
        mean = np.bincount(axis, load, minlength=mesh.n_axes) / np.maximum(self._count, 1)
        order = self._axes[np.argsort(np.round(mean[self._axes], 9), kind="stable")]
        rank = np.full(len(load), float(len(order)))
        away = np.zeros(len(load))
        inside = np.ones(len(load), dtype=np.bool_)
        for level, along in enumerate(order):
            rank[inside & (axis == along)] = level
            if level + 1 == len(order):
                break
            length = mesh.shape[along]
            joins = np.flatnonzero(inside & (axis == order[level + 1]))
            carried = np.bincount(at[joins, along], load[joins], minlength=length)
            number = np.bincount(at[joins, along], minlength=length)
            mean_at = np.where(number > 0, np.round(carried / np.maximum(number, 1), 9), np.inf)
            visits = self._visits[along]
            spine = int(visits[np.argmin(mean_at[visits])])
            apart = np.abs(at[:, along] - spine)
            away += (np.minimum(apart, length - apart) if mesh.wrap[along] else apart) / length
            inside &= at[:, along] == spine
        return int(order[0]), rank + np.where(rank == len(order), DISTANCE_WEIGHT * away, 0.0)


def measure(trees: Trees) -> tuple[NDArray[np.int32], Rooted]:
    """Return how far, within each tree, each rank is from the chip farthest from it; and the trees, rooted somewhere.

    The chip farthest from anywhere is one end of a longest path, and from any chip one of that path's two ends is
    farthest.
    """
    anywhere = _root_at(trees, np.zeros(len(trees), dtype=np.int64))
    from_one_end = _root_at(trees, anywhere.depth.argmax(axis=1))
    from_other_end = _root_at(trees, from_one_end.depth.argmax(axis=1))
    return np.maximum(from_one_end.depth, from_other_end.depth), from_one_end


def reroot(rooted: Rooted, which: NDArray[np.int64], roots: NDArray[np.int64]) -> Rooted:
    """Return tree `which[i]` with its root at rank `roots[i]`: the cables between old and new root are reversed."""
    parent = rooted.parent[which]
    n_chips = parent.shape[1]
    tree = np.arange(len(which))
    at, below = roots.astype(np.int32), np.full(len(which), -1, dtype=np.int32)
    while len(tree):
        above = parent[tree, at]
        parent[tree, at] = below
        on = above >= 0
        tree, at, below = tree[on], above[on], at[on]
    depth = np.empty(parent.shape, dtype=np.int32)
    for block in blocks(len(which), n_chips):
        depth[block] = _depth(parent[block])
    return Rooted(parent, depth)


def _depth(parent: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return depths from parents: look twice as far up in every round."""
    cells = np.arange(parent.size, dtype=np.int32).reshape(parent.shape)
    up = np.where(parent < 0, cells, parent + cells[:, :1]).ravel()
    hops = (parent.ravel() >= 0).astype(np.int32)
    while hops[up].any():
        hops += hops[up]
        up = up[up]
    return hops.reshape(parent.shape)


def _root_at(trees: Trees, roots: NDArray[np.int64]) -> Rooted:
    n_chips = trees.mesh.n_chips
    parent = np.empty((len(trees), n_chips), dtype=np.int32)
    depth = np.empty((len(trees), n_chips), dtype=np.int32)
    for block in blocks(len(trees), n_chips):
        parent[block], depth[block] = _search(trees.mesh, trees.cables[block], roots[block])
    return Rooted(parent, depth)


def blocks(n_rows: int, n_chips: int) -> Iterator[slice]:
    """Cut rows of `n_chips` cells into blocks of a size that stays in memory."""
    rows = max(1, BLOCK_CELLS // n_chips)
    for first in range(0, n_rows, rows):
        yield slice(first, min(first + rows, n_rows))


def _search(
    mesh: Mesh, cables: NDArray[np.int32], roots: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return parents and depths: one breadth-first search over all trees side by side, joined at an extra chip."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order

    n_trees, n_chips = len(cables), mesh.n_chips
    n_cells = n_trees * n_chips
    first = np.arange(n_trees)[:, None] * n_chips
    a, b = mesh.cables.T.astype(np.int64)
    one = np.concatenate([(a[cables] + first).ravel(), np.full(n_trees, n_cells)])
    other = np.concatenate([(b[cables] + first).ravel(), roots + first.ravel()])
    graph = csr_array((np.ones(len(one), dtype=np.int8), (one, other)), shape=(n_cells + 1, n_cells + 1))
    order, before = breadth_first_order(graph, n_cells, directed=False)
    # The search visits level by level: a level ends where the children of the level before end.
    position = np.empty(n_cells + 1, dtype=np.int64)
    position[order] = np.arange(n_cells + 1)
    position_before = position[before[order[1:]]]
    depth = np.empty(n_cells + 1, dtype=np.int32)
    start, stop, level = 1, n_trees + 1, 0
    while start < stop:
        depth[order[start:stop]] = level
        start, stop, level = stop, 1 + int(np.searchsorted(position_before, stop)), level + 1
    parent = before[:n_cells].reshape(n_trees, n_chips) - first
    parent[np.arange(n_trees), roots] = -1
    return parent.astype(np.int32), depth[:n_cells].reshape(n_trees, n_chips)
