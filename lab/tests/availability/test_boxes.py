from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshmend.topology import Mesh, Region
from meshmend_lab.availability.boxes import largest_box, part_of

Grid = NDArray[np.bool_]


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    cells = draw(st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    return np.array(cells, dtype=bool).reshape(shape)


def largest_by_trying_all(grid: Grid) -> int:
    sides = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in grid.shape]
    boxes = (tuple(slice(a, b) for a, b in box) for box in product(*sides))
    return max((grid[box].size for box in boxes if grid[box].all()), default=0)


@given(grids())
def test_the_box_is_healthy_and_none_is_larger(grid: Grid) -> None:
    box = largest_box(grid)
    if box is None:
        assert not grid.any()
    else:
        assert grid[box.slices].shape == box.shape
        assert grid[box.slices].all()
    assert (0 if box is None else box.n_chips) == largest_by_trying_all(grid)


@pytest.mark.parametrize(
    ("dead", "size"),
    [((0, 0), 8 * 15), ((3, 8), 8 * 8), ((4, 7), 8 * 8), ((7, 4), 7 * 16)],
)
def test_one_host_of_a_32x32_machine(dead: tuple[int, int], size: int) -> None:
    grid = np.ones((8, 16), dtype=bool)
    grid[dead] = False
    box = largest_box(grid)
    assert box is not None
    assert box.n_chips == size


def test_a_part_has_the_cables_of_its_chips() -> None:
    torus = Mesh("4x6", wrap=True, failed_cables=["1,1-1,2"], cable_rates={"0,2-0,3": 0.5, "3,0-0,0": 0.25})
    left = part_of(torus, Region(at=(0, 0), shape=(4, 3)))
    assert left == Mesh("4x3", wrap=[True, False], failed_cables=["1,1-1,2"], cable_rates={"3,0-0,0": 0.25})
    flat = part_of(torus, Region(at=(0, 0), shape=(4, 6)), keeps_wrap=False)
    assert flat == Mesh("4x6", failed_cables=["1,1-1,2"], cable_rates={"0,2-0,3": 0.5})
