"""Weave over slow cables: chunks in pieces, no step longer than another, and close to the weighted bound."""

from __future__ import annotations

import numpy as np
import pytest
from checks import QUARTERS, assert_all_reduces, slowed
from hypothesis import given, settings
from hypothesis import strategies as st

import meshmend as mm
from meshmend.cost import StepDemand, bound, find_hardware, predict
from meshmend.planning import Weave
from meshmend.planning.weave.pieces import MAX_PIECES, Pieces
from meshmend.planning.weave.trees import grow
from strategies import torn_meshes


def assert_within_rates(schedule: mm.Schedule, pieces: Pieces) -> None:
    """In every step a link carries no more pieces than it takes, counted one by one."""
    mesh = schedule.mesh
    link = mesh.link(schedule.src, schedule.dst)
    assert (link >= 0).all()
    asked: dict[tuple[int, int], int] = {}
    for key in zip(schedule.step.tolist(), link.tolist(), schedule.n_chunks.tolist(), strict=True):
        asked[key[:2]] = asked.get(key[:2], 0) + key[2]
    per_link = pieces.per_link(mesh)
    assert all(n <= per_link[on] for (_, on), n in asked.items())


@settings(max_examples=60, deadline=None)
@given(
    mesh=torn_meshes().filter(lambda mesh: mesh.n_chips > 1),
    rates=st.sampled_from([["1/2"], ["3/4"], QUARTERS, ["1/3", "1/2"], ["0.87"], ["1/100", "1"]]),
    part=st.sampled_from([0.1, 0.5, 1.0]),
    chunks=st.sampled_from([1, 2, 7, 40]),
    seed=st.integers(0, 1000),
)
def test_any_survivors_at_any_rates(mesh: mm.Mesh, rates: list[str], part: float, chunks: int, seed: int) -> None:
    slow = slowed(mesh, rates, part, seed)
    schedule = mm.plan(slow, Weave(chunks))
    pieces = Pieces.of(slow)
    assert schedule.total_chunks == chunks * pieces.per_chunk
    assert schedule.n_transfers <= Weave(chunks).n_transfers(slow) or not slow.has_slow_cables
    assert_within_rates(schedule, pieces)
    assert_all_reduces(schedule)


@pytest.mark.parametrize(
    ("rates", "per_chunk", "per_step"),
    [
        ({}, 1, [1, 1, 1]),
        ({"0,0-0,1": "1/2"}, 2, [1, 2, 2]),
        ({"0,0-0,1": "3/4"}, 4, [3, 4, 4]),
        ({"0,0-0,1": "1/3", "0,1-0,2": "1/2"}, 6, [2, 3, 6]),
        ({"0,0-0,1": "0.87"}, 7, [6, 7, 7]),
        ({"0,0-0,1": "1/100"}, 1, [1, 1, 1]),  # the only way: it must be used
    ],
)
def test_cutting(rates: dict[str, str], per_chunk: int, per_step: list[int]) -> None:
    found = Pieces.of(mm.Mesh("1x4", cable_rates=rates))
    assert found.per_chunk == per_chunk <= MAX_PIECES
    assert found.per_step.tolist() == per_step


def test_a_cable_that_is_too_slow_is_not_used_where_others_join() -> None:
    mesh = mm.Mesh("4x4", cable_rates={"1,1-1,2": "1/100"})
    schedule = mm.plan(mesh, "weave", chunks=64)
    used = set(zip(schedule.src.tolist(), schedule.dst.tolist(), strict=True))
    a, b = mesh.rank((1, 1)), mesh.rank((1, 2))
    assert (a, b) not in used
    assert (b, a) not in used
    assert schedule.total_chunks == 64


def test_trees_load_cables_by_their_rates() -> None:
    mesh = mm.Mesh("8x8", failed=["2x2@2,2"], cable_rates={"8x1@0,5": "1/2", "5,1-5,2": "1/4"})
    trees = grow(mesh, 256, mesh.rates)
    uses = np.bincount(trees.cables.ravel(), minlength=mesh.n_cables)
    assert (uses / mesh.rates).max() / 256 < 1.05 * bound(mesh).units


def test_no_step_is_longer_than_another_and_modes_agree() -> None:
    mesh = slowed(mm.Mesh("8x8", failed=["2x2@2,2"]), QUARTERS, 0.2, 3)
    schedule = Weave(256).plan(mesh)
    steps = StepDemand(schedule).step_seconds(1e9, find_hardware("ideal"))
    chunk_s = 1 / 256
    assert steps.max() == pytest.approx(chunk_s)
    lock_step, free = (predict(schedule, 1e9, "ideal", mode=mode) for mode in ("lock-step", "asynchronous"))
    assert free.seconds <= lock_step.seconds * (1 + 1e-9)
    assert lock_step.ratio_to_bound < 1.25


@pytest.mark.slow
@pytest.mark.parametrize(
    "rates",
    [{"8,15-8,16": "3/4"}, {"8,15-8,16": "1/2"}, {"16x1@0,16": "1/2"}, 1, 2],
    ids=["one at 3/4", "one at 1/2", "a column at 1/2", "random 1", "random 2"],
)
def test_16x32_is_close_to_its_weighted_bound(rates: dict[str, str] | int) -> None:
    whole = mm.Mesh("16x32", failed=["4x2@6,8"])
    mesh = (
        slowed(whole, QUARTERS, 0.05, rates)
        if isinstance(rates, int)
        else mm.Mesh("16x32", failed=["4x2@6,8"], cable_rates=rates)
    )
    schedule = mm.plan(mesh, Weave(4096))
    for mode in ("lock-step", "asynchronous"):
        assert predict(schedule, 1e9, "ideal", mode=mode).ratio_to_bound <= 1.08
