from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

import meshmend as mm
import meshmend.numpy as mmn
from meshmend.cost import busiest_link_load
from meshmend.planning import Weave
from meshmend.planning.weave.planner import default_chunks
from strategies import tear, torn_meshes

POSITIONS = [("16x32", at) for at in ("0,0", "0,14", "6,14", "6,8")] + [
    ("32x32", at) for at in ("0,0", "0,14", "14,14", "6,8")
]
"""Corner, edge, centre and off-centre."""


def bound(mesh: mm.Mesh) -> float:
    """Payloads that the busiest link must carry at least: max(1/λ, (P−1)/E), λ by maximum flow."""
    if mesh.n_chips == 1:
        return 0.0
    a, b = mesh.cables.T
    ends = (np.concatenate([a, b]), np.concatenate([b, a]))
    graph = csr_array((np.ones(2 * len(a), np.int32), ends), shape=(mesh.n_chips, mesh.n_chips))
    fewest = min(maximum_flow(graph, 0, far).flow_value for far in range(1, mesh.n_chips))
    return max(1 / fewest, (mesh.n_chips - 1) / mesh.n_cables)


def ratio(schedule: mm.Schedule, mesh_bound: float) -> float:
    """Time of a long payload over the bound: a step lasts as long as one chunk on one link."""
    return schedule.n_steps / schedule.total_chunks / mesh_bound


def assert_one_chunk_a_link(schedule: mm.Schedule) -> None:
    link = schedule.mesh.link(schedule.src, schedule.dst)
    assert (link >= 0).all()
    assert (schedule.n_chunks == 1).all()
    assert len(np.unique(schedule.step.astype(np.int64) * schedule.mesh.n_link_slots + link)) == schedule.n_transfers


def assert_sums_exactly(schedule: mm.Schedule) -> None:
    payload = np.random.default_rng(0).integers(-(2**40), 2**40, (schedule.mesh.n_chips, schedule.total_chunks + 3))
    assert (mmn.run(schedule, payload) == payload.sum(axis=0)).all()


@settings(max_examples=60, deadline=None)
@given(mesh=torn_meshes(), chunks=st.sampled_from([None, 1, 2, 7, 64, 65, 200]))
def test_any_survivors(mesh: mm.Mesh, chunks: int | None) -> None:
    schedule = mm.plan(mesh, Weave(chunks))
    assert schedule.total_chunks == (chunks or default_chunks(mesh))
    assert schedule.n_transfers == 2 * (mesh.n_chips - 1) * schedule.total_chunks
    assert_one_chunk_a_link(schedule)
    assert_sums_exactly(schedule)
    owned = np.bincount(schedule.owners, minlength=mesh.n_chips)
    assert owned.max() - owned.min() <= 1


@pytest.mark.slow
def test_random_survivors_come_near_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    chance = np.random.default_rng(5)
    shapes: list[tuple[int, ...]] = [(16, 16), (9, 14), (6, 6, 6), (4, 5, 6)]
    loads, times = [], []
    for seed in range(120):
        shape = shapes[seed % len(shapes)]
        wrap = tuple(bool(w) for w in chance.random(len(shape)) < 0.5)
        lost_chips, lost_cables = (float(lost) for lost in chance.choice([0.01, 0.05, 0.2], 2))
        mesh = tear(shape, wrap, lost_chips, lost_cables, seed)
        schedule = mm.plan(mesh, Weave(1024))
        assert_sums_exactly(schedule)
        least = mm.bound(mesh).units
        assert least >= bound(mesh) - 1e-9
        loads.append(busiest_link_load(schedule) / least)
        times.append(ratio(schedule, least))
        assert min(loads) >= 1 - 1e-9
    with capsys.disabled():
        for name, figures in (("busiest link", loads), ("time, 1,024 chunks", times)):
            sys.stdout.write(f"\n{name} over the bound: median {np.median(figures):.3f}, worst {max(figures):.3f}")
    assert np.median(loads) < 1.05
    assert max(loads) < 1.5


@pytest.mark.parametrize("n", [8, 16, pytest.param(32, marks=pytest.mark.slow)])
def test_full_square_reaches_the_bound_exactly(n: int) -> None:
    schedule = mm.plan(mm.Mesh((n, n)), "weave", chunks=4 * n)
    assert busiest_link_load(schedule) == (n + 1) / (2 * n) == bound_of_full_square(n)


def bound_of_full_square(n: int) -> float:
    return max(1 / 2, (n * n - 1) / (2 * n * (n - 1)))


@pytest.mark.parametrize("n", [8, 24])
def test_default_chunks_keep_full_squares_exact(n: int) -> None:
    assert busiest_link_load(mm.plan(mm.Mesh((n, n)), "weave")) == (n + 1) / (2 * n)


@pytest.mark.parametrize(
    ("shape", "at"),
    [pytest.param(*case, marks=[] if case == POSITIONS[1] else pytest.mark.slow) for case in POSITIONS],
)
def test_holed_meshes_are_balanced(shape: str, at: str) -> None:
    mesh = mm.Mesh(shape, failed=[f"4x2@{at}"])
    schedule = mm.plan(mesh, "weave")
    least = (mesh.n_chips - 1) / mesh.n_cables  # λ is 2 here, and 1/2 is less
    assert busiest_link_load(schedule) <= 1.05 * least
    assert ratio(schedule, least) <= 1.25


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "at"), POSITIONS)
def test_4096_chunks_are_within_a_tenth_of_the_bound(shape: str, at: str) -> None:
    mesh = mm.Mesh(shape, failed=[f"4x2@{at}"])
    schedule = mm.plan(mesh, "weave", chunks=4096)
    least = (mesh.n_chips - 1) / mesh.n_cables
    assert busiest_link_load(schedule) <= 1.05 * least
    assert ratio(schedule, least) <= 1.10
    assert_one_chunk_a_link(schedule)


@pytest.mark.parametrize(
    ("mesh", "most"),
    [
        (mm.Mesh("8x8", wrap=True), 1.04),
        (mm.Mesh("6x6x6"), 1.04),
        (mm.Mesh("4x4x4", wrap=True), 1.04),
        (mm.Mesh("3x3x3x3"), 1.06),
        (mm.Mesh("7x9", failed=["3x1@2,2", "4,7"]), 1.06),
        (mm.Mesh("8x8", failed_cables=["0,0-0,1", "3,3-3,4", "3,3-4,3"]), 1.0),
        (mm.Mesh("1x12"), 1.0),
        (mm.Mesh((12,), wrap=True), 1.04),
    ],
    ids=str,
)
def test_other_meshes_are_balanced(mesh: mm.Mesh, most: float) -> None:
    schedule = mm.plan(mesh, "weave")
    assert bound(mesh) - 1e-9 <= busiest_link_load(schedule) <= most * bound(mesh) + 1e-9


def test_two_chips_keep_both_links_busy_in_every_step() -> None:
    schedule = mm.plan(mm.Mesh("1x2"), "weave", chunks=10)
    assert schedule.n_steps == 10


def test_one_chip_has_nothing_to_do() -> None:
    schedule = mm.plan(mm.Mesh("2x2", failed=["1x2@0,0", "1,1"]), "weave", chunks=3)
    assert (schedule.n_steps, schedule.owners.tolist()) == (0, [0, 0, 0])


def test_reduce_and_broadcast_overlap() -> None:
    up, down = mm.plan(mm.Mesh("8x8"), "weave").phases
    assert (up.name, down.name) == ("reduce to the roots", "broadcast from the roots")
    assert down.first_step < up.last_step // 4


def test_a_long_line() -> None:
    schedule = mm.plan(mm.Mesh((2_000,)), "weave", chunks=4)
    assert schedule.n_steps <= 2_000 + 8
