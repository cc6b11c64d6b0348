from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from checks import assert_all_reduces
from hypothesis import given

from meshmend import Mesh, PlanError, plan
from meshmend.cost import link_load
from meshmend.planning.hamiltonian import find_ring
from strategies import block_meshes


def assert_is_ring(mesh: Mesh) -> None:
    ring = find_ring(mesh)
    assert sorted(ring.tolist()) == list(range(mesh.n_chips))
    assert (mesh.link(ring, np.roll(ring, -1)) >= 0).all()


@given(block_meshes())
def test_any_connected_blocks_have_a_ring_and_only_those(mesh: Mesh) -> None:
    blocks: nx.Graph[tuple[int, int]] = nx.grid_2d_graph(mesh.shape[0] // 2, mesh.shape[1] // 2)
    blocks.remove_nodes_from([(r, c) for r, c in list(blocks) if not mesh.live[2 * r, 2 * c]])
    if nx.is_connected(blocks):
        assert_is_ring(mesh)
        assert_all_reduces(plan(mesh, "hamiltonian"))
    else:
        with pytest.raises(PlanError, match=r"the survivors form [0-9]+ disconnected groups"):
            plan(mesh, "hamiltonian")


@pytest.mark.parametrize("shape", ["2x3", "3x2", "3x4", "5x8", "8x5", "2x2", "2x8", "6x6"])
def test_full_meshes_with_an_even_side(shape: str) -> None:
    assert_is_ring(Mesh(shape))
    assert_all_reduces(plan(Mesh(shape), "hamiltonian"))


@pytest.mark.parametrize("cable", ["2,3-3,3", "1,2-2,2", "2,2-2,3", "3,3-3,4", "2,2-3,2"])
def test_one_failed_cable_in_the_middle_is_left_out(cable: str) -> None:
    mesh = Mesh("6x6", failed_cables=[cable])
    assert_is_ring(mesh)
    assert_all_reduces(plan(mesh, "hamiltonian"))


def test_failed_cables_that_leave_no_ring_are_named() -> None:
    no_way_out = r"the failed cable \(0,{}\)-{} is a side of a 2×2 block. The ring leaves a side out only where"
    with pytest.raises(PlanError, match=no_way_out.format(0, r"\(0,1\)")):
        plan(Mesh("4x4", failed_cables=["0,0-0,1"]), "hamiltonian")
    # The first cable forces the join that the second one forbids, in whichever order they are looked at.
    with pytest.raises(PlanError, match=no_way_out.format(1, r"\(1,1\)")):
        plan(Mesh("4x4", failed_cables=["0,1-1,1", "1,1-1,2"]), "hamiltonian")
    with pytest.raises(PlanError, match="failed cables leave 2×2 blocks that cannot be joined"):
        plan(Mesh("2x4", failed_cables=["0,1-0,2"]), "hamiltonian")
    # The four inner sides round the middle of a 4×4 mesh force all four joins: a closed loop.
    round_the_middle = ["0,1-1,1", "1,2-1,3", "2,2-3,2", "2,0-2,1"]
    with pytest.raises(PlanError, match="force the ring round a closed loop of blocks"):
        plan(Mesh("4x4", failed_cables=round_the_middle), "hamiltonian")


def test_every_ring_link_carries_the_same_in_both_directions() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    load = link_load(plan(mesh, "hamiltonian"))
    # Each half goes round once to reduce and once to gather: 2 · (P−1)/P · 1/2 over each of the 2P links in use.
    assert np.count_nonzero(load) == 2 * 60
    np.testing.assert_allclose(load[load > 0], 59 / 60)
