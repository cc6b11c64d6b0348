"""Every placement of the holes that the ring planners are for."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from checks import assert_all_reduces

from meshmend import Mesh, PlanError, Region, plan
from meshmend.topology import all_placements, parse_shape

RING_PLANNERS = ("hamiltonian", "row-pairs")
STATED = r"survivors form 2 disconnected groups|every row pair has a failure"


def check(shape: str, holes: list[Region], planner: str) -> str:
    mesh = Mesh(shape, failed=holes)
    try:
        schedule = plan(mesh, planner, verify=False)
    except PlanError as error:
        with pytest.raises(PlanError, match=STATED):
            raise error
        return "stated error"
    assert_all_reduces(schedule)
    return "all-reduces"


@pytest.mark.parametrize("planner", RING_PLANNERS)
@pytest.mark.parametrize("hole", ["2x2", "2x4", "4x2", "2x6", "6x2"])
@pytest.mark.parametrize("shape", ["8x8", pytest.param("8x12", marks=pytest.mark.slow)])
def test_every_single_hole(shape: str, hole: str, planner: str) -> None:
    positions = all_placements(parse_shape(shape), parse_shape(hole))
    outcomes = Counter(check(shape, [position], planner) for position in positions)
    rows, columns = ((n - h) // 2 + 1 for n, h in zip(parse_shape(shape), parse_shape(hole), strict=True))
    # One such hole never cuts these meshes and always leaves a whole pair.
    assert outcomes == {"all-reduces": rows * columns}


@pytest.mark.parametrize("planner", ["row-pairs", pytest.param("hamiltonian", marks=pytest.mark.slow)])
def test_every_pair_of_boards_on_8x8(planner: str) -> None:
    boards = all_placements((8, 8), (2, 2))
    outcomes = Counter(check("8x8", list(pair), planner) for pair in combinations(boards, 2))
    # 16 boards make 120 pairs. A pair cuts the mesh only where it walls in a corner board: 4 ways.
    assert outcomes == {"all-reduces": 116, "stated error": 4}


def test_every_pair_of_boards_on_4x4_where_pairs_run_out() -> None:
    boards = all_placements((4, 4), (2, 2))
    outcomes = Counter(check("4x4", list(pair), "row-pairs") for pair in combinations(boards, 2))
    # The two diagonals cut the mesh and leave no whole pair; the other four leave one.
    assert outcomes == {"all-reduces": 4, "stated error": 2}


@pytest.mark.slow
@pytest.mark.parametrize("planner", RING_PLANNERS)
@pytest.mark.parametrize(("hole", "positions"), [("2x2", 8 * 16), ("4x2", 7 * 16), ("2x4", 8 * 15)])
def test_every_single_hole_on_the_papers_smaller_machine(hole: str, positions: int, planner: str) -> None:
    outcomes = Counter(check("16x32", [position], planner) for position in all_placements((16, 32), parse_shape(hole)))
    assert outcomes == {"all-reduces": positions}
