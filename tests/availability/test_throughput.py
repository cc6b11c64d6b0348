"""What is put together from a few plans, against plans for the very states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from meshmend.availability import Assumptions
from meshmend.availability.throughput import Throughput, largest_part, outermost, step_error, whole_parts
from meshmend.topology import Mesh, Region, all_placements

SHORT: dict[str, Any] = {"payload_bytes": 50e6, "compute_s": 0.012}
"""A thirteenth of BERT, payload and compute alike: planned sooner."""


def errors(assumptions: Assumptions, states: Sequence[Sequence[Region]]) -> list[float]:
    """Errors of the step's length, state by state."""
    known = Throughput(assumptions)
    found = []
    for holes in states:
        exact = known.exact(Mesh(assumptions.mesh.shape, failed=holes))
        found.append(step_error(assumptions, known.holed_s(holes), exact))
    return found


def random_states(shape: tuple[int, int], n: int, holes: int, seed: int) -> list[list[Region]]:
    chance = random.Random(seed)
    kinds = [all_placements(shape, part, align=part) for part in ((4, 2), (2, 2), (1, 1))]
    states = [outermost([chance.choice(chance.choice(kinds)) for _ in range(holes)]) for _ in range(n)]
    return [state for state in states if Mesh(shape, failed=state).is_connected]


@pytest.mark.parametrize("holes", [1, 3])
def test_estimated_steps_are_close_to_planned_ones(holes: int) -> None:
    """Where the all-reduce is 4 % of a step, as in BERT, on 16x16."""
    found = errors(Assumptions.of("16x16", **SHORT), random_states((16, 16), 5, holes, seed=1))
    assert len(found) >= 4
    assert max(map(abs, found)) < 0.01
    assert abs(np.mean(found)) < 0.004


@pytest.mark.slow
@pytest.mark.parametrize("holes", [1, 2, 4])
def test_estimated_steps_are_close_to_planned_ones_on_the_papers_machine(holes: int) -> None:
    found = errors(Assumptions.of("32x32"), random_states((32, 32), 20, holes, seed=2))
    assert max(map(abs, found)) < 0.01
    assert abs(np.mean(found)) < 0.002


def test_full_meshes_lie_between_two_that_are_planned() -> None:
    assumptions = Assumptions.of("16x16", **SHORT)
    known = Throughput(assumptions)
    for shape in ((16, 14), (12, 16), (8, 16)):
        assert step_error(assumptions, known.full_s(shape), known.exact(Mesh(shape))) == pytest.approx(0, abs=0.003)
    assert known.full_s((16, 16)) == known.exact(Mesh("16x16"))
    assert known.full_s((8, 8)) == known.exact(Mesh("8x8"))


def test_a_hole_in_the_middle_is_exact() -> None:
    known = Throughput(Assumptions.of("16x16", **SHORT))
    middle = Region(at=(4, 6), shape=(4, 2))
    assert known.holed_s([middle]) == known.exact(Mesh("16x16", failed=[middle]))


def test_no_payload_no_planning() -> None:
    known = Throughput(Assumptions.of("32x32", payload_bytes=0.0))
    assert known.holed_s([Region(at=(0, 2), shape=(4, 2))]) == 0
    assert known.rate(512, known.full_s((16, 32))) == 0.5


def test_links_one_at_a_time() -> None:
    """Where a chip drives one link at once, the trees say nothing: the host in the middle stands for all."""
    known = Throughput(Assumptions.of("8x8", hardware="tpu-v3-xla"))
    corner, middle = Region(at=(0, 2), shape=(2, 2)), Region(at=(0, 2), shape=(4, 2))
    assert known.holed_s([corner]) == known.holed_s([middle]) == known.exact(Mesh("8x8", failed=[middle]))
    assert known.holed_s([corner, Region(at=(6, 6), shape=(2, 2))]) == known.holed_s([middle])


def test_largest_part() -> None:
    live = np.ones((3, 5), dtype=bool)
    live[:, 1] = False
    part = np.zeros((3, 5), dtype=bool)
    part[:, 2:] = True
    assert (largest_part(live, Mesh("3x5")) == part).all()
    assert (largest_part(live, Mesh("3x5", wrap=True)) == live).all()
    assert not largest_part(np.zeros((3, 5), dtype=bool), Mesh("3x5", wrap=True)).any()


def test_whole_hosts_and_outermost_holes() -> None:
    live = np.ones((8, 4), dtype=bool)
    live[5, 3] = False
    assert whole_parts(live, (4, 2)).tolist() == [[True, True], [True, False]]
    host, board, chip = Region((4, 2), (4, 2)), Region((4, 2), (2, 2)), Region((0, 0), (1, 1))
    assert outermost([chip, board, host]) == [host, chip]
