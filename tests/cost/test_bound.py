import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend.cost import bound
from meshmend.errors import MeshError, ParameterError
from meshmend.schedule import Collective
from meshmend.topology import Mesh
from strategies import survivors


def test_paper_meshes() -> None:
    smaller, larger = (bound(Mesh(shape, failed=["4x2@6,8"])) for shape in ("16x32", "32x32"))
    assert smaller.units == pytest.approx(152 / 288)
    assert (smaller.parts, smaller.cables) == (153, 288)
    assert larger.units == pytest.approx(1015 / 1962)
    assert (larger.parts, larger.cables) == (1016, 1962)
    assert larger.why == "every element needs 1,015 of the 1,962 cables on its way up, and as many down"
    assert smaller.is_exact
    assert larger.is_exact


def test_a_hole_near_a_corner_binds_harder_than_the_count() -> None:
    found = bound(Mesh("8x8", failed=["2x2@2,2"]))
    assert (found.units, found.parts, found.cables) == (0.6, 13, 20)
    assert found.units > 59 / 100


@settings(max_examples=60, deadline=None)
@given(survivors(), st.sampled_from(list(Collective)), st.integers(0, 10**6))
def test_failing_a_cable_never_lowers_it(mesh: Mesh, collective: Collective, which: int) -> None:
    if mesh.n_cables == 0:
        return
    a, b = mesh.cables[which % mesh.n_cables].tolist()
    cut = Mesh(mesh.shape, wrap=mesh.wrap, failed=mesh.holes, failed_cables=[(mesh.chip(a), mesh.chip(b))])
    if cut.is_connected:
        assert bound(cut, collective=collective).units >= bound(mesh, collective=collective).units


def test_full_square_mesh_has_the_closed_form() -> None:
    for n in (2, 3, 8, 32):
        assert bound(Mesh((n, n))).units == pytest.approx((n + 1) / (2 * n))


def test_torus_has_no_corner() -> None:
    assert bound(Mesh("8x8", wrap=True)).units == pytest.approx(63 / 128)


def test_a_chip_with_one_cable_takes_the_whole_payload() -> None:
    found = bound(Mesh("4x4", failed_cables=["0,0-0,1"]))
    assert found.units == 1
    assert found.why == "a cable is the only way between two parts of the mesh, of 1 and 15 chips"


def test_a_corridor_binds_harder_than_cut_or_count() -> None:
    # Two 8×8 halls joined by a corridor of two rows: 2 cables cut it (1/2), and P − 1 of E is 0.57, but
    # the ladder's own 16 chips hang on 26 cables.
    halls = Mesh("8x24", failed=["3x8@0,8", "3x8@5,8"])
    graph = nx.Graph([(int(a), int(b)) for a, b in halls.cables])
    simple = max(1 / nx.edge_connectivity(graph), (halls.n_chips - 1) / halls.n_cables)
    found = bound(halls)
    assert found.units == pytest.approx((18 - 1) / (8 + 9 * 2))
    assert found.units > 1.1 * simple
    assert (found.parts, found.cables) == (18, 26)
    assert "narrow places" in found.why


def test_one_link_at_a_time_doubles_the_ring() -> None:
    mesh = Mesh("4x4")
    found = bound(mesh, links_at_once=1)
    assert found.units == pytest.approx(2 * 15 / 16)
    assert "only some of its links at once" in found.why
    assert bound(mesh, links_at_once=4).units == bound(mesh).units


HALVES = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)


@pytest.mark.parametrize("collective", HALVES)
def test_a_corner_bounds_half_a_collective(collective: Collective) -> None:
    found = bound(Mesh("8x8", failed=["2x2@2,2"]), collective=collective)
    assert found.units == pytest.approx(59 / 60 / 2)
    verb = "send" if collective is Collective.REDUCE_SCATTER else "receive"
    assert found.why == f"chip (0,0) must {verb} what it does not own over its 2 cables"
    assert found.is_exact


def test_half_a_collective_on_tori_lines_and_corridors() -> None:
    assert bound(Mesh("8x8", wrap=True), collective=HALVES[0]).units == pytest.approx(63 / 64 / 4)
    assert bound(Mesh("1x4"), collective=HALVES[0]).units == pytest.approx(3 / 4)
    # A hall of 16 chips hangs on one cable, over which the shares of the 17 others must come.
    halls = Mesh("4x9", failed=["3x1@0,4"])
    found = bound(halls, collective=HALVES[1])
    assert found.units == pytest.approx(17 / 33)
    assert found.why == "a cable is the only way between two parts of the mesh, of 16 and 17 chips"


def test_who_owns_what_changes_the_bound_of_a_half() -> None:
    mesh = Mesh("4x4")
    # One chip owns everything: a corner lacks all of it, and so does every other.
    alone = tuple(int(rank == 5) for rank in range(16))
    assert bound(mesh, collective=HALVES[1], shares=alone).units == pytest.approx(1 / 2)
    corners = tuple(int(rank in (0, 3, 12, 15)) for rank in range(16))
    # Each corner lacks three quarters over two cables, which is more than a chip beside it that lacks all over three.
    assert bound(mesh, collective=HALVES[1], shares=corners).units == pytest.approx(3 / 8)
    with pytest.raises(ParameterError, match="shares has 2 numbers, expected one for each of 16 chips"):
        bound(mesh, collective=HALVES[1], shares=(1, 1))


def test_half_a_collective_with_one_link_at_a_time() -> None:
    found = bound(Mesh("4x4"), collective=HALVES[1], links_at_once=1)
    assert found.units == pytest.approx(15 / 16)
    assert not found.is_exact
    assert str(found).startswith("at least 0.9375 M/b: chip (0,0) must receive what it does not own and drives only")


def test_single_chip_has_nothing_to_do() -> None:
    assert bound(Mesh("1x1")).units == 0


def test_survivors_in_two_parts_are_refused() -> None:
    with pytest.raises(MeshError, match="are in 2 parts with no live cable between them"):
        bound(Mesh("4x4", failed=["4x1@0,1"]))


@settings(max_examples=60, deadline=None)
@given(survivors())
def test_never_weaker_than_connectivity_and_count(mesh: Mesh) -> None:
    if mesh.n_chips == 1:
        return
    graph = nx.Graph([(int(a), int(b)) for a, b in mesh.cables])
    simple = max(1 / nx.edge_connectivity(graph), (mesh.n_chips - 1) / mesh.n_cables)
    assert bound(mesh).units >= simple * (1 - 1e-12)


def test_large_meshes_say_that_a_better_bound_may_exist() -> None:
    mesh = Mesh("128x128", failed=["2x2@10,10"])
    found = bound(mesh)
    assert found.units >= (mesh.n_chips - 1) / mesh.n_cables
    assert not found.is_exact
    assert str(found).startswith("at least 0.50")
    half = bound(mesh, collective=HALVES[0])
    assert half.units == pytest.approx((mesh.n_chips - 1) / mesh.n_chips / 2)
    assert not half.is_exact
