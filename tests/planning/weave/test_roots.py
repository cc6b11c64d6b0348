from __future__ import annotations

import numpy as np
import pytest

from meshmend import Mesh
from meshmend.planning.weave.roots import choose_roots, order_trees
from meshmend.planning.weave.trees import grow, measure


@pytest.mark.parametrize("n_chunks", [1, 5, 63, 64, 65, 127, 128, 200, 640])
def test_every_chip_owns_its_share(n_chunks: int) -> None:
    trees = grow(Mesh("8x8"), 16)
    eccentricity, _ = measure(trees)
    roots = choose_roots(eccentricity, np.arange(n_chunks) % 16)
    owned = np.bincount(roots, minlength=64)
    assert owned.sum() == n_chunks
    assert owned.max() - owned.min() <= 1


def test_first_and_last_chunks_have_the_shallowest_trees_and_central_roots() -> None:
    trees = grow(Mesh("16x16"), 64)
    eccentricity, _ = measure(trees)
    radius = eccentricity.min(axis=1)
    tree_of = order_trees(trees, radius, 512, ends=16)
    depth = eccentricity[tree_of, choose_roots(eccentricity, tree_of)]
    ends = np.r_[0:8, 504:512]
    assert depth[ends].max() <= radius.min() + 2
    assert depth[200:300].mean() > depth[ends].mean() + 4


def test_every_tree_is_used() -> None:
    trees = grow(Mesh("4x6"), 20)
    tree_of = order_trees(trees, measure(trees)[0].min(axis=1), 60, ends=5)
    assert np.bincount(tree_of).tolist() == [3] * 20


def test_kinds_of_tree_alternate_at_the_ends() -> None:
    trees = grow(Mesh("8x8"), 32)
    tree_of = order_trees(trees, measure(trees)[0].min(axis=1), 128, ends=8)
    kind = trees.axis[tree_of]
    assert (kind[:7] != kind[1:8]).all()
    assert (kind[-8:-1] != kind[-7:]).all()
