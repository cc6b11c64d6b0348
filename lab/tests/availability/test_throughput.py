"""What is put together from a few plans, against plans for the very states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from meshmend.cost import predict
from meshmend.planning import plan
from meshmend.topology import Mesh, Region, all_placements
from meshmend_lab.availability import Assumptions
from meshmend_lab.availability.throughput import (
    BUDGET_S,
    Throughput,
    largest_part,
    outermost,
    step_error,
    whole_parts,
)

SHORT: dict[str, Any] = {"payload_bytes": 50e6, "compute_s": 0.012, "hardware": "tpu-v3"}
"""A thirteenth of BERT at 2 bytes per gradient, payload and compute alike: planned sooner. All links at once."""


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


@pytest.mark.slow  # each plans for ten states of 256 chips
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
    paper = Assumptions.of("32x32", payload_bytes=668e6, hardware="tpu-v3")
    found = errors(paper, random_states((32, 32), 20, holes, seed=2))
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
    """Where a chip drives one link at once, the trees say nothing: one hole of each kind stands for all."""
    known = Throughput(Assumptions.of("8x8", hardware="tpu-v3-xla"))
    corner, middle = Region(at=(0, 0), shape=(4, 2)), Region(at=(0, 2), shape=(4, 2))
    assert known.holed_s([corner]) == known.holed_s([middle]) == known.exact(Mesh("8x8", failed=[middle]))
    chip = Region(at=(7, 0), shape=(1, 1))
    assert known.holed_s([corner, chip]) == known.holed_s([chip]) > 1.1 * known.holed_s([corner])
    assert known.n_planned == 3


@pytest.mark.slow
@pytest.mark.parametrize("holes", [1, 3])
def test_estimated_steps_are_close_to_planned_ones_one_link_at_a_time(holes: int) -> None:
    """As jobs run, with 4 bytes per gradient: the all-reduce is a fifth of a step."""
    machine = Assumptions.of("16x16", **SHORT | {"payload_bytes": 1e8, "hardware": "tpu-v3-xla"})
    found = errors(machine, random_states((16, 16), 5, holes, seed=1))
    assert len(found) >= 4
    # The third state of three holes leaves a corner chip with one cable, which costs half as much again.
    *others, worst = sorted(map(abs, found))
    assert max(others) < 0.04
    assert worst < (0.04 if holes == 1 else 0.13)


def slow_axis(shape: str) -> Mesh:
    """A machine whose cables along axis 1 have half the rate."""
    rows, columns = Mesh(shape).shape
    return Mesh(shape, cable_rates={f"{r},{c}-{r},{c + 1}": 0.5 for r in range(rows) for c in range(columns - 1)})


def test_slow_cables_are_priced() -> None:
    """Within 5 % of what the plan for the very machine is predicted to take; equal cables are 1.5 times off."""
    machine = slow_axis("8x8")
    target: dict[str, Any] = {"payload_bytes": 2e7, "hardware": "tpu-v3"}
    assumptions = Assumptions.of(machine, compute_s=0.005, **target)
    known = Throughput(assumptions)

    def planned(mesh: Mesh) -> float:
        return predict(plan(mesh, budget_s=BUDGET_S, **target), 2e7, "tpu-v3").seconds

    assert known.exact(machine) == pytest.approx(planned(machine), rel=0.05)
    assert planned(machine) / planned(Mesh("8x8")) > 1.3
    assert known.full_s((4, 4)) == pytest.approx(planned(slow_axis("4x4")), rel=0.05)
    hole = Region(at=(0, 6), shape=(4, 2))
    assert abs(step_error(assumptions, known.holed_s([hole]), planned(machine.fail(hole)))) < 0.01


def test_the_half_that_slow_cables_slow_most_stands_for_smaller_meshes() -> None:
    machine = Mesh("4x4", cable_rates={"2,2-2,3": 0.25})
    known = Throughput(Assumptions.of(machine, host=(2, 2), **SHORT))
    assert known.full_s((2, 2)) == known.exact(Mesh("2x2", cable_rates={"0,0-0,1": 0.25}))
    assert known.full_s((4, 4)) == known.exact(machine) > known.exact(Mesh("4x4"))


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
