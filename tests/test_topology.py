from __future__ import annotations

import json
import time
from itertools import product

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend import Mesh, Region
from meshmend.errors import MeshError
from meshmend.topology import all_placements, parse_wrap
from strategies import meshes


def graph_of(mesh: Mesh) -> nx.Graph[tuple[int, ...]]:
    """The same mesh from first principles: one node a live chip, one edge a live cable."""
    graph: nx.Graph[tuple[int, ...]] = nx.Graph()
    for chip in product(*(range(n) for n in mesh.shape)):
        graph.add_node(chip)
        for axis, (length, wrap) in enumerate(zip(mesh.shape, mesh.wrap, strict=True)):
            if chip[axis] + 1 < length or wrap:
                graph.add_edge(chip, (*chip[:axis], (chip[axis] + 1) % length, *chip[axis + 1 :]))
    graph.remove_nodes_from([chip for chip in list(graph) if not mesh.live[chip]])
    graph.remove_edges_from(mesh.failed_cables)
    return graph


@given(meshes())
def test_cables_neighbours_and_parts_agree_with_a_graph_library(mesh: Mesh) -> None:
    graph = graph_of(mesh)
    assert mesh.n_chips == graph.number_of_nodes()
    cables = {frozenset(mesh.chip(int(end)) for end in cable) for cable in mesh.cables}
    assert cables == {frozenset(edge) for edge in graph.edges}
    assert mesh.n_cables == graph.number_of_edges()
    for rank in range(mesh.n_chips):
        around = {mesh.chip(int(n)) for n in mesh.neighbours[rank] if n >= 0}
        assert around == set(graph.neighbors(mesh.chip(rank)))
    assert mesh.n_components == nx.number_connected_components(graph)


@given(meshes())
def test_links_lead_where_they_say(mesh: Mesh) -> None:
    for a, b in mesh.cables:
        for src, dst in ((int(a), int(b)), (int(b), int(a))):
            link = int(mesh.link(src, dst))
            assert mesh.link_ends(link) == (mesh.chip(src), mesh.chip(dst))
    everyone = np.arange(mesh.n_chips)
    pairs = mesh.link(everyone[:, None], everyone[None, :])
    assert int((pairs >= 0).sum()) == 2 * mesh.n_cables


@given(meshes())
def test_holes_are_disjoint_boxes_of_exactly_the_failed_chips(mesh: Mesh) -> None:
    covered = np.zeros(mesh.shape, dtype=int)
    for hole in mesh.holes:
        covered[hole.slices] += 1
    assert np.array_equal(covered, (~mesh.live).astype(int))


def test_ranks_count_live_chips_in_row_major_order() -> None:
    mesh = Mesh("2x3", failed=["0,1"])
    assert [mesh.chip(rank) for rank in range(5)] == [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert mesh.rank((1, 0)) == 2
    with pytest.raises(MeshError, match=r"Chip \(0,1\) has failed, so it has no rank"):
        mesh.rank((0, 1))


def test_directions_are_south_north_east_west() -> None:
    mesh = Mesh("3x3")
    middle = mesh.rank((1, 1))
    assert [mesh.chip(int(n)) for n in mesh.neighbours[middle]] == [(2, 1), (0, 1), (1, 2), (1, 0)]


def test_equal_machines_are_equal_however_written() -> None:
    assert Mesh("8x8", failed=["2x2@2,2", "2x2@2,4"]) == Mesh((8, 8), failed=[Region((2, 2), (2, 4))])
    assert Mesh("8x8", failed=["1,1"], failed_cables=["1,1-1,2"]) == Mesh("8x8", failed=[(1, 1)])
    assert Mesh("4x4", failed_cables=["1,2-1,1"]) == Mesh("4x4", failed_cables=[((1, 1), (1, 2))])
    assert Mesh("4x4") != Mesh("4x4", wrap=True)
    assert Mesh("2x4", wrap=True) == Mesh("2x4", wrap=(False, True))


def test_a_mesh_cannot_be_changed() -> None:
    mesh = Mesh("4x4")
    for array in (mesh.live, mesh.rank_of, mesh.coords, mesh.neighbours, mesh.cables):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_paper_machines() -> None:
    small = Mesh("16x32", failed=["4x2@6,8"])
    large = Mesh("32x32", failed=["4x2@6,8"])
    assert (small.n_chips, large.n_chips) == (504, 1016)
    # A full R×C mesh has R(C−1) + C(R−1) cables; the 4×2 hole takes its own 10 and the 12 round it.
    assert small.n_cables == 16 * 31 + 32 * 15 - 22
    assert large.n_cables == 2 * 32 * 31 - 22


def test_a_quarter_of_a_million_chips_takes_less_than_a_second() -> None:
    started = time.process_time()
    mesh = Mesh((512, 512), failed=["4x2@6,8", "2x2@100,200", "32x32@300,300"])
    assert mesh.n_chips == 512 * 512 - 8 - 4 - 1024
    assert mesh.n_cables == len(mesh.cables)
    assert mesh.is_connected
    assert time.process_time() - started < 1.0


def test_three_dimensional_torus() -> None:
    mesh = Mesh((16, 16, 16), wrap=True, failed=["2x2x2@4,4,4"])
    assert mesh.n_chips == 4096 - 8
    # Each failed chip takes 6 cables with it; the 12 inside the hole would be counted twice.
    assert mesh.n_cables == 3 * 4096 - (8 * 6 - 12)
    assert mesh.is_connected
    assert (mesh.neighbours >= 0).sum(axis=1).min() == 5


def test_survivors_that_are_cut_apart() -> None:
    mesh = Mesh("4x4", failed=["1x4@1,0"])
    assert not mesh.is_connected
    assert mesh.n_components == 2
    assert len(set(mesh.component_of[:4])) == 1
    assert mesh.component_of[0] != mesh.component_of[-1]


def test_short_forms() -> None:
    assert Region.parse("6,8") == Region(at=(6, 8), shape=(1, 1))
    assert str(Region.parse("2x2x2@0,1,2")) == "2x2x2@0,1,2"
    assert str(Mesh("4x4", failed=["2x2@0,0"], wrap=(False, True))) == "4x4 wrapped on axis 1 minus 2x2@0,0"


def test_all_placements_counts() -> None:
    assert len(all_placements((8, 8), (2, 2))) == 16
    assert len(all_placements((16, 32), (4, 2))) == 7 * 16


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mesh("16*32"), "'16\\*32' is not a shape. Write rows x columns"),
        (lambda: Mesh("0x4"), "at least one chip each"),
        (lambda: Mesh(()), "1 to 8 axes"),
        (lambda: Mesh((2,) * 9), "1 to 8 axes"),
        (lambda: Mesh("9999x9999"), "99,980,001 chips; the limit is 16,777,216"),
        (lambda: Mesh("999999999x999999999x999999999"), "the limit is"),
        (lambda: Mesh("4x4", wrap=(True,)), "one value for each of 2 axes: got 1"),
        (lambda: Mesh("4x4", wrap="00"), "wrap is True, False, or one of them per axis, .* got '00'"),  # type: ignore[arg-type]
        (lambda: Mesh("4x4", wrap=(0, 1)), r"one of them per axis, .* got \(0, 1\)"),  # type: ignore[arg-type]
        (lambda: Mesh("4x4", failed=["2x2@3,0"]), r"2x2@3,0 reaches chip \(4,1\), outside the 4x4"),
        (lambda: Mesh("4x4", failed=["4,0"]), r"\(4,0\) lies outside the 4x4 mesh; coordinates count from 0"),
        (lambda: Mesh("4x4", failed=[(-1, 0)]), r"\(-1,0\) lies outside"),
        (lambda: Mesh("4x4", failed=["1x1x1@0,0,0"]), "3 coordinates, but the 4x4 mesh has 2 axes"),
        (lambda: Mesh("4x4", failed=["2x2 at 1,1"]), "is not a hole. Write rows x columns @ row,column"),
        (lambda: Mesh("2x2", failed=["2x2@0,0"]), "All 4 chips of the 2x2 mesh have failed"),
        (lambda: Mesh("4x4", failed="2x2@0,0"), r"failed is a list of holes, even of one: write failed=\['2x2@0,0'\]"),
        (lambda: Mesh("4x4", failed=Region((0, 0), (2, 2))), "failed is a list of holes"),  # type: ignore[arg-type]
        (lambda: Mesh("4x4", failed_cables="0,0-0,1"), "failed_cables is a list, even of one"),
        (lambda: Mesh((4.5, 4)), r"A shape is whole numbers, as in \(6, 8\): got \(4.5, 4\)"),  # type: ignore[arg-type]
        (lambda: Mesh(4), "A shape is whole numbers"),  # type: ignore[arg-type]
        (lambda: Mesh("4x4", failed=[(1.0, 1)]), "A region's corner is whole numbers"),  # type: ignore[list-item]
        (lambda: Region((0, 0), (0, 2)), "at least one chip long"),
        (lambda: Region((0,), (2, 2)), "same number of axes"),
        (lambda: Mesh("4x4", failed_cables=["0,0-0,2"]), "No cable joins"),
        (lambda: Mesh("4x4", failed_cables=["0,0-0,3"]), "No cable joins"),
        (lambda: Mesh("4x4", failed_cables=["0,0"]), "is not a cable. Write its two chips"),
        (lambda: Mesh("4x4").link_ends(1), r"chip \(0,0\) has none that way"),
    ],
)
def test_nonsense_is_refused_with_a_reason(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(MeshError, match=message):
        build()


@pytest.mark.parametrize("text", ["00", "01", "2", "0,0", "0,", ",1", "", "-1", "+1", "٠", "0, 1", "All", "true"])
def test_what_says_no_axes_that_wrap(text: str) -> None:
    with pytest.raises(MeshError, match="--wrap: expected none, all, or axes from 0 to 1, each once, as in 0,1"):
        parse_wrap(text, 2, given="--wrap:")


def test_axes_that_wrap() -> None:
    read = {text: parse_wrap(text, 2, given="") for text in ("none", "all", "0", "1", "0,1", "1,0")}
    assert [axes for axes, wraps in read.items() if wraps[0]] == ["all", "0", "0,1", "1,0"]
    assert [axes for axes, wraps in read.items() if wraps[1]] == ["all", "1", "0,1", "1,0"]


@given(meshes(), st.sampled_from(["1/2", "3/4"]))
def test_a_mesh_is_written_read_and_damaged_further(mesh: Mesh, rate: str) -> None:
    cables = [(mesh.chip(int(a)), mesh.chip(int(b))) for a, b in mesh.cables]
    slow = [(cable, rate) for cable in cables[:2]]
    damaged = mesh.with_failures(failed_cables=cables[2:3], cable_rates=slow)
    holes, gone = [str(hole) for hole in mesh.holes], [*mesh.failed_cables, *cables[2:3]]
    assert damaged == Mesh(mesh.shape, wrap=mesh.wrap, failed=holes, failed_cables=gone, cable_rates=slow)
    for one in (mesh, damaged):
        assert Mesh.from_dict(json.loads(json.dumps(one.to_dict()))) == one
        assert ("cable_rates" in one.to_dict()) == one.has_slow_cables
    assert damaged.whole.is_full
    assert damaged.whole.shape == mesh.shape
    assert damaged.whole.cable_rates == damaged.cable_rates
