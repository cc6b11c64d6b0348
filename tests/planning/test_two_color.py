from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from checks import assert_all_reduces

from meshmend import Mesh, plan
from meshmend.cost import busiest_link_load, link_load

SHAPES = ["1x1", "1x4", "2x2", "3x3", "4x8", "5x7"]


@pytest.mark.parametrize(("shape", "wrap"), list(product(SHAPES, [False, True, (True, False), (False, True)])))
def test_full_meshes_and_tori(shape: str, wrap: bool | tuple[bool, bool]) -> None:
    assert_all_reduces(plan(Mesh(shape, wrap=wrap), "two-color"))


def test_no_hop_of_a_plain_mesh_is_longer_than_two_chips() -> None:
    schedule = plan(Mesh("8x6"), "two-color")
    coords = schedule.mesh.coords
    assert np.abs(coords[schedule.src] - coords[schedule.dst]).sum(axis=1).max() == 2


def test_on_a_torus_every_hop_is_between_neighbours() -> None:
    schedule = plan(Mesh("8x6", wrap=True), "two-color")
    assert (schedule.mesh.link(schedule.src, schedule.dst) >= 0).all()


def test_load_on_a_square_torus_is_what_two_rings_give() -> None:
    n = 8
    load = link_load(plan(Mesh((n, n), wrap=True), "two-color"))
    # A link lies on one ring of each color. Half of the payload goes through one color's ring and the n-th part of
    # a half through the other's; half of that goes this way round, (n−1)/n of it to reduce and as much to gather.
    expected = 2 * (n - 1) / n * (1 / 2 + 1 / (2 * n)) / 2
    assert np.count_nonzero(load) == 4 * n * n
    np.testing.assert_allclose(load[load > 0], expected)


def test_load_on_a_square_mesh_is_twice_that_because_each_link_lies_on_both_halves_of_a_ring() -> None:
    n = 8
    assert busiest_link_load(plan(Mesh((n, n)), "two-color")) == pytest.approx(2 * (n - 1) / n * (1 / 2 + 1 / (2 * n)))


def test_steps_grow_with_the_sides_not_with_the_chips() -> None:
    assert plan(Mesh("16x16"), "two-color", verify=False).n_steps == 4 * 15
