from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path

from meshmend import Mesh
from meshmend.planning.weave.trees import Trees, grow, measure, reroot
from strategies import torn_meshes


def distances(trees: Trees, i: int) -> NDArray[np.float64]:
    """Hops between all pairs of chips within tree i, infinite where it does not join them."""
    a, b = trees.mesh.cables[trees.cables[i]].T
    n = trees.mesh.n_chips
    graph = csr_array((np.ones(len(a)), (a, b)), shape=(n, n))
    return np.asarray(shortest_path(graph, directed=False, unweighted=True))


def uses(trees: Trees) -> set[int]:
    return set(np.bincount(trees.cables.ravel(), minlength=trees.mesh.n_cables).tolist())


@settings(max_examples=40, deadline=None)
@given(mesh=torn_meshes().filter(lambda mesh: mesh.n_chips > 1), seed=st.integers(0, 1000))
def test_trees_span_and_can_be_rooted_anywhere(mesh: Mesh, seed: int) -> None:
    trees = grow(mesh, 4)
    eccentricity, somewhere = measure(trees)
    which = np.array([3, 0, 0, 1, 2])
    roots = np.random.default_rng(seed).integers(0, mesh.n_chips, len(which))
    rooted = reroot(somewhere, which, roots)
    for i in range(4):
        assert len(np.unique(trees.cables[i])) == mesh.n_chips - 1
        assert np.array_equal(eccentricity[i], distances(trees, i).max(axis=1))
    for row, (i, root) in enumerate(zip(which, roots, strict=True)):
        hops = distances(trees, i)
        assert np.array_equal(rooted.depth[row], hops[root])
        below = np.flatnonzero(np.arange(mesh.n_chips) != root)
        assert rooted.parent[row, root] == -1
        assert (hops[below, rooted.parent[row, below]] == 1).all()
        assert (rooted.depth[row, rooted.parent[row, below]] == rooted.depth[row, below] - 1).all()


@pytest.mark.parametrize("n", [2, 3, 8, 11, 16])
def test_full_square_uses_every_cable_equally(n: int) -> None:
    assert uses(grow(Mesh((n, n)), 2 * n)) == {n + 1}
    assert uses(grow(Mesh((n, n)), 6 * n)) == {3 * (n + 1)}


def test_rectangles_use_every_cable_nearly_equally() -> None:
    counts = uses(grow(Mesh("6x10"), 600))
    assert max(counts) - min(counts) <= 4


def test_first_comb_has_the_middle_column_as_its_spine() -> None:
    mesh = Mesh("5x5")
    trees = grow(mesh, 1)
    cables = {(mesh.chip(int(a)), mesh.chip(int(b))) for a, b in mesh.cables[trees.cables[0]]}
    warp = {((r, c), (r, c + 1)) for r in range(5) for c in range(4)} | {((r, 2), (r + 1, 2)) for r in range(4)}
    weft = {((c, r), (c + 1, r)) for r in range(5) for c in range(4)} | {((2, r), (2, r + 1)) for r in range(4)}
    assert cables in (warp, weft)
    assert measure(trees)[0].min() == 4


def test_a_bridge_is_in_every_tree() -> None:
    mesh = Mesh("2x5", failed=["1,2"])
    trees = grow(mesh, 12)
    bridges = [i for i, (a, b) in enumerate(mesh.cables) if {mesh.chip(int(a))[1], mesh.chip(int(b))[1]} & {2}]
    assert len(bridges) == 2
    assert all(np.isin(bridges, tree).all() for tree in trees.cables)
