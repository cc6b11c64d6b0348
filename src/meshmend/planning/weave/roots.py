"""Roots: which chunk takes which tree, and which chip owns it.

The owner of a chunk is the root of its tree. Every chip owns the same number of chunks, give or take one, because
a sharded weight update is as slow as its busiest chip. Yet a root in a corner makes a tree twice as deep as one in
the middle. It only matters for the first chunks and the last, while links wait for something to do: so those take
the shallowest trees and the most central roots, and the corners own chunks from the middle of the payload.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshmend.planning.weave.trees import Trees

ROUNDING = 1e-9


def order_trees(trees: Trees, radius: NDArray[np.int32], n_chunks: int, ends: int) -> NDArray[np.int64]:
    """Return the tree of each chunk: all in turn, but with the shallowest for the first and last `ends` chunks.

    `radius` is the depth of each tree from its middle. Trees along different axes take turns, also at the ends.
    """
    dealt = np.arange(n_chunks) % len(trees)
    axes = [np.flatnonzero(trees.axis[dealt] == axis) for axis in np.unique(trees.axis[dealt])]
    shallow = [chunks[np.argsort(radius[dealt[chunks]], kind="stable")] for chunks in axes]
    rounds = min(2 * min(ends, n_chunks // 4) // len(axes), *(len(chunks) for chunks in axes))
    picked = np.stack([chunks[:rounds] for chunks in shallow], axis=1)
    first, last = picked[0::2].ravel(), picked[1::2][::-1].ravel()
    middle = np.ones(n_chunks, dtype=np.bool_)
    middle[picked.ravel()] = False
    return np.asarray(dealt[np.concatenate([first, np.flatnonzero(middle), last])])


def shallow(trees: Trees, radius: NDArray[np.int32], hop: float) -> NDArray[np.int64]:
    """Return which trees to take where a hop's latency is `hop` of the payload's time: those up to some depth.

    A deep tree takes longer, up and down; without the deep ones the others' cables carry more. The depth is the one
    for which both together take least.
    """
    cables, best, taken = trees.cables, float("inf"), np.arange(len(trees))
    for deepest in np.unique(radius):
        few = np.flatnonzero(radius <= deepest)
        uses = np.bincount(cables[few].ravel(), minlength=trees.mesh.n_cables) / trees.mesh.rates
        time = float(uses.max(initial=0.0)) / len(few) + 2 * float(deepest) * hop
        if time < best - ROUNDING:
            best, taken = time, few
    return taken


def choose_roots(eccentricity: NDArray[np.int32], tree_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank that owns each chunk: as central in its tree as an even share of chunks allows.

    Chunks choose in turn, from both ends of the payload inwards.
    """
    n_chunks, n_chips = len(tree_of), eccentricity.shape[1]
    share, one_more = divmod(n_chunks, n_chips)
    roots = np.empty(n_chunks, dtype=np.int64)
    owned = np.zeros(n_chips, dtype=np.int64)
    closed = np.zeros(n_chips, dtype=np.int32)
    never = np.int32(np.iinfo(np.int32).max // 2)
    positions = np.arange(n_chunks)
    for chunk in np.argsort(np.minimum(positions, n_chunks - 1 - positions), kind="stable"):
        root = int((eccentricity[tree_of[chunk]] + closed).argmin())
        roots[chunk] = root
        owned[root] += 1
        if owned[root] > share:
            one_more -= 1
            closed[root] = never
            if one_more == 0:
                closed[owned >= share] = never
        elif owned[root] == share and one_more == 0:
            closed[root] = never
    return roots
