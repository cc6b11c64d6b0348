"""Schedules that no planner made, run by the reference engine and by what each lowering makes of them, exactly.

`pytest -m slow tests/schedule/test_random_schedules.py` is the long sweep.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import meshmend.numpy as mmn
from counting import is_right
from meshmend import Collective, Op, Schedule, verify
from meshmend.errors import LoweringError
from meshmend.schedule.neighbour_hops import neighbour_hops
from random_schedules import random_schedule

SEEDS = [
    pytest.param(range(60), id="60"),
    pytest.param(range(60, 2_500), id="2440", marks=pytest.mark.slow),
]


def payload_of(schedule: Schedule, seed: int) -> NDArray[np.int64]:
    """Large integers, of a size that does not divide by the chunks."""
    size = 3 * schedule.total_chunks - 1
    return np.random.default_rng(seed).integers(-(2**40), 2**40, (schedule.mesh.n_chips, size))


def check_result(schedule: Schedule, payload: NDArray[np.int64], result: NDArray[np.int64]) -> None:
    """Hold a result to sums that are made here; `payload` has three numbers per chunk, less one in the last."""
    owner = schedule.owners[np.arange(payload.shape[1]) // 3]
    total = payload.sum(axis=0)
    match schedule.collective:
        case Collective.ALL_REDUCE | Collective.ALL_REDUCE_WITH_TURN:
            assert (result == total).all()
        case Collective.REDUCE_SCATTER:
            assert (result[owner, np.arange(payload.shape[1])] == total).all()
        case Collective.ALL_GATHER:
            assert (result == payload[owner, np.arange(payload.shape[1])]).all()


def run_tables(lowered: Any, payload: NDArray[np.int64]) -> NDArray[np.int64]:
    """Run a JAX program's tables on arrays, a permute at a time, the way `lax.ppermute` is defined."""
    from meshmend.schedule.lanes import KEEP

    n_chips, total_chunks = lowered.shape.n_chips, lowered.shape.total_chunks
    padded = np.zeros((n_chips, total_chunks, 3), dtype=np.int64)
    padded.reshape(n_chips, -1)[:, : payload.shape[1]] = payload
    for loop in lowered.loops:
        for step in range(loop.n_steps):
            before = padded.copy()
            for number, lane in enumerate(loop.lanes):
                # A permute gives zeros to chips that nobody sends to, and no chip may occur twice at either end.
                assert all(len(set(ends)) == len(ends) for ends in zip(*lane.pairs, strict=True))
                sent = {src: int(loop.send[src, step, number]) for src, _ in lane.pairs}
                arriving = np.zeros((n_chips, lane.run, 3), dtype=np.int64)
                for src, dst in lane.pairs:
                    assert 0 <= sent[src] <= total_chunks - lane.run
                    arriving[dst] = before[src, sent[src] : sent[src] + lane.run]
                for chip in range(n_chips):
                    op, at = int(loop.ops[chip, step, number]), int(loop.receive[chip, step, number])
                    assert op in lane.ops
                    own = before[chip, at : at + lane.run]
                    if op != KEEP:
                        padded[chip, at : at + lane.run] = arriving[chip] + own if op == Op.REDUCE else arriving[chip]
    return padded.reshape(n_chips, -1)[:, : payload.shape[1]]


def test_they_are_varied_and_repeatable() -> None:
    facts: Counter[str] = Counter()
    for seed in range(150):
        schedule = random_schedule(seed)
        mesh = schedule.mesh
        assert mesh.is_connected
        assert 1 <= mesh.n_chips <= 12
        reads = set(zip(schedule.step.tolist(), schedule.src.tolist(), strict=True))
        facts.update(
            {
                schedule.collective: 1,
                f"{mesh.n_axes} axes": 1,
                "torus": any(mesh.wrap),
                "holes": bool(mesh.holes),
                "cables": bool(mesh.failed_cables),
                "far": bool((mesh.link(schedule.src, schedule.dst) < 0).any()),
                "runs": len(set(schedule.n_chunks.tolist())) > 1,
                "read and written in one step": any(
                    write in reads for write in zip(schedule.step.tolist(), schedule.dst.tolist(), strict=True)
                ),
                "copies before the last sum": schedule.n_transfers > 0
                and bool((np.diff(schedule.op.astype(int)) < 0).any()),
            }
        )
    assert len(facts) == 3 + 3 + 7
    assert min(facts.values()) >= 10, facts
    assert random_schedule(7) == random_schedule(7) != random_schedule(8)
    wide = [random_schedule(seed, collective=Collective.ALL_REDUCE, max_chips=30) for seed in range(30)]
    assert {schedule.collective for schedule in wide} == {Collective.ALL_REDUCE}
    assert 12 < max(schedule.mesh.n_chips for schedule in wide) <= 30


@pytest.mark.parametrize("seeds", SEEDS)
def test_they_are_right_by_every_way_of_counting(seeds: range) -> None:
    for seed in seeds:
        schedule = random_schedule(seed)
        assert is_right(schedule), seed
        for method in ("exact", "fingerprint"):
            assert verify(schedule, method=method).transfers == schedule.n_transfers


@pytest.mark.parametrize("seeds", SEEDS)
def test_the_reference_engine_sums_them_exactly(seeds: range) -> None:
    for seed in seeds:
        schedule = random_schedule(seed)
        payload = payload_of(schedule, seed)
        check_result(schedule, payload, mmn.run(schedule, payload))


@pytest.mark.parametrize("seeds", SEEDS)
def test_their_neighbour_form_is_equal_or_refused(seeds: range) -> None:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        schedule = random_schedule(seed)
        try:
            lowered = neighbour_hops(schedule)
        except LoweringError:
            outcomes["refused"] += 1
            continue
        assert (schedule.mesh.link(lowered.src, lowered.dst) >= 0).all()
        assert is_right(lowered), seed
        payload = payload_of(schedule, seed)
        check_result(schedule, payload, mmn.run(lowered, payload))
        outcomes["as it was" if lowered is schedule else "lowered"] += 1
    assert outcomes["lowered"] >= len(seeds) // 20, outcomes


@pytest.mark.parametrize("seeds", SEEDS)
def test_jax_tables_move_the_same_numbers(seeds: range) -> None:
    pytest.importorskip("jax")
    from meshmend.schedule.lanes import lower

    for seed in seeds:
        schedule = random_schedule(seed)
        payload = payload_of(schedule, seed)
        result = run_tables(lower(schedule), payload)
        check_result(schedule, payload, result)
        # What no collective promises is the same too: the tables are the schedule, stale values and all.
        assert (result == mmn.run(schedule, payload)).all(), seed
