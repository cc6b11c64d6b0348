from __future__ import annotations

from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from checks import assert_all_reduces
from hypothesis import given
from hypothesis import strategies as st

from meshmend import Mesh, PlanError, Schedule, plan
from meshmend.cost import busiest_link_load, link_load
from meshmend.errors import ParameterError
from strategies import block_meshes


def can_be_served(mesh: Mesh) -> bool:
    """From the definition: the live blocks hang together, and some pair of rows or of columns is whole."""
    live = mesh.live[::2, ::2]
    blocks: nx.Graph[tuple[int, int]] = nx.grid_2d_graph(*live.shape)
    blocks.remove_nodes_from([block for block in list(blocks) if not live[block]])
    return nx.is_connected(blocks) and bool(live.all(axis=1).any() or live.all(axis=0).any())


@given(block_meshes(), st.integers(1, 3))
def test_any_blocks_that_can_be_served_are(mesh: Mesh, segments: int) -> None:
    if can_be_served(mesh):
        assert_all_reduces(plan(mesh, "row-pairs", segments=segments))
    else:
        with pytest.raises(PlanError, match=r"every row pair has a failure|survivors form [0-9]+ disconnected groups"):
            plan(mesh, "row-pairs", segments=segments)


@pytest.mark.parametrize("orientation", ["rows", "columns"])
@pytest.mark.parametrize("segments", [1, 2, 5])
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh("2x2"),
        Mesh("8x8"),
        Mesh("4x10", wrap=True),
        Mesh("8x8", failed=["2x2@0,0"]),
        Mesh("8x8", failed=["6x2@0,2"]),  # three yellow pairs on top of one another: yellow forwards through yellow
        Mesh("8x8", failed=["2x6@2,2"]),
        Mesh("10x8", failed=["2x2@2,2", "2x2@4,0", "2x2@4,4", "2x2@6,2"]),  # block (2,1) walled in but for one side
        Mesh("8x8", failed_cables=["2,3-2,4"]),  # a cable of a ring: its pair turns yellow
    ],
    ids=str,
)
def test_both_orientations_and_segments(mesh: Mesh, orientation: str, segments: int) -> None:
    try:
        schedule = plan(mesh, "row-pairs", orientation=orientation, segments=segments)
    except PlanError as error:
        assert not can_be_served_by(mesh, orientation), str(error)  # noqa: PT017
    else:
        assert_all_reduces(schedule)
        names = " ".join(schedule.phase_names)
        assert f"{orientation[:-1]} rings: reduce-scatter" in names


def can_be_served_by(mesh: Mesh, orientation: str) -> bool:
    live = mesh.live[::2, ::2]
    return can_be_served(mesh) and bool(live.all(axis=1 if orientation == "rows" else 0).any())


def test_load_of_every_link_on_the_full_mesh_is_what_section_2_1_implies() -> None:
    n = 32
    mesh = Mesh((n, n))
    load = link_load(plan(mesh, "row-pairs", orientation="rows"))
    # First phase: the ring of 2n chips reduces and gathers a half each way round, (2n−1)/2n of it over each link.
    ring = 2 * Fraction(2 * n - 1, 2 * n) / 2
    # Second phase: n/2 chips of a column share a shard, a 2n-th of the payload, and reduce and gather it in a ring;
    # a hop carries (n/2 − 1)/(n/2) of the shard each time. Each gap between two chips of such a ring is crossed by
    # one hop southwards and one northwards.
    shard = 2 * Fraction(n // 2 - 1, n // 2) / (2 * n)
    for link, carried in enumerate(load):
        rank, direction = divmod(link, 4)
        if mesh.neighbours[rank, direction] < 0:
            assert carried == 0
            continue
        row, column = mesh.chip(rank)
        expected = Fraction(0)
        if direction >= 2:  # east or west: along a row, always on that row pair's ring
            expected += ring
        else:
            upper = row if direction == 0 else row - 1
            if upper % 2 == 0 and column in (0, n - 1):  # the two ends of a ring
                expected += ring
            # The even rows' ring spans rows 0 … n−2, the odd rows' ring rows 1 … n−1.
            expected += shard * ((0 <= upper < n - 2) + (1 <= upper < n - 1))
        assert carried == pytest.approx(float(expected)), (row, column, direction)
    assert load.max() == pytest.approx(63 / 64 + 15 / 256)


@pytest.mark.parametrize("shape", ["16x32", pytest.param("32x32", marks=pytest.mark.slow)])
def test_the_papers_machines(shape: str) -> None:
    full, holed = Mesh(shape), Mesh(shape, failed=["4x2@6,8"])
    for orientation in ("rows", "columns"):
        whole = plan(full, "row-pairs", orientation=orientation)
        schedule = plan(holed, "row-pairs", orientation=orientation)
        assert_all_reduces(schedule)
        # The hole costs a few steps before and after, not a second allreduce.
        assert schedule.n_steps <= whole.n_steps + 12


def test_the_orientation_with_fewer_yellow_chips_is_taken() -> None:
    # 4×2 touches two row pairs, but only one column pair.
    schedule = plan(Mesh("8x8", failed=["4x2@2,2"]), "row-pairs")
    assert "column rings: reduce-scatter" in schedule.phase_names
    assert "row rings: reduce-scatter" in plan(Mesh("8x8", failed=["2x4@2,2"]), "row-pairs").phase_names


def yellow_transfers(schedule: Schedule) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    names = [i for i, name in enumerate(schedule.phase_names) if name == "yellow forwards to blue"]
    return np.isin(schedule.phase, names)


def test_every_yellow_chip_forwards_a_quarter_where_blue_lies_on_both_sides() -> None:
    # Figure 10: a 2×2 hole in the middle; each of the yellow chips hands on a quarter of the payload.
    schedule = plan(Mesh("8x8", failed=["2x2@2,2"]), "row-pairs", orientation="rows")
    forwards = yellow_transfers(schedule)
    senders, sent = np.unique(schedule.src[forwards], return_counts=True)
    yellow = {schedule.mesh.rank((r, c)) for r in (2, 3) for c in (0, 1, 4, 5, 6, 7)}
    assert set(senders.tolist()) == yellow
    chunks = sent * schedule.n_chunks[forwards][0]
    assert (chunks * 4 == schedule.total_chunks).all()


def test_blue_and_yellow_share_no_link_in_the_first_phase() -> None:
    schedule = plan(Mesh("16x16", failed=["4x2@6,8"]), "row-pairs", orientation="rows")
    links = schedule.mesh.link(schedule.src, schedule.dst)
    names = np.array(schedule.phase_names)[schedule.phase]
    blue = set(links[names == "row rings: reduce-scatter"].tolist())
    yellow = set(links[np.char.find(names, "yellow") >= 0].tolist())
    assert blue
    assert yellow
    assert not blue & yellow


def test_segments_hide_the_second_phase() -> None:
    mesh = Mesh("16x16", failed=["2x2@6,8"])
    one, four = (plan(mesh, "row-pairs", segments=s) for s in (1, 4))
    assert four.total_chunks == 4 * one.total_chunks
    # Four segments one after another would take four times the steps; in a pipeline the second phases vanish.
    assert four.n_steps < 4 * one.n_steps - 3 * 2 * 5
    assert busiest_link_load(four) == pytest.approx(busiest_link_load(one))


def test_parameters_that_make_no_sense() -> None:
    with pytest.raises(ParameterError, match="orientation is 'diagonal', expected 'auto', 'rows' or 'columns'"):
        plan(Mesh("4x4"), "row-pairs", orientation="diagonal")
    with pytest.raises(ParameterError, match="row-pairs has no parameter 'colour': it takes orientation, segments"):
        plan(Mesh("4x4"), "row-pairs", colour="red")
    with pytest.raises(ParameterError, match=r"There is no planner 'ring'. Planners: hamiltonian"):
        plan(Mesh("4x4"), "ring")
