import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshmend as mm
import meshmend.numpy as mmn
from jax_engine import cases
from meshmend.jax import lanes
from meshmend.jax.lanes import KEEP, Lowered, lower
from meshmend.schedule import Op


def replay(lowered: Lowered, payload: np.ndarray) -> np.ndarray:
    """Run the tables on arrays, one chip, step and lane at a time: what the JAX engine must do."""
    held = payload.copy()
    for loop in lowered.loops:
        for t in range(loop.n_steps):
            before = held.copy()
            for number, lane in enumerate(loop.lanes):
                sender = {dst: src for src, dst in lane.pairs}
                for chip in range(lowered.shape.n_chips):
                    op, at = loop.ops[chip, t, number], loop.receive[chip, t, number]
                    assert op in lane.ops
                    if op == KEEP:
                        continue
                    sent = loop.send[sender[chip], t, number]
                    run = before[sender[chip], sent : sent + lane.run]
                    if op == Op.REDUCE:
                        run = run + before[chip, at : at + lane.run]
                    held[chip, at : at + lane.run] = run
    return held


@pytest.mark.parametrize("name", cases.PLANS)
def test_tables_do_what_the_schedule_says(name: str) -> None:
    schedule = cases.schedule_of(name)
    payload = np.random.default_rng(0).integers(-99, 99, (schedule.mesh.n_chips, schedule.total_chunks))
    assert (replay(lower(schedule), payload) == mmn.run(schedule, payload)).all()


@pytest.mark.parametrize("name", cases.PLANS)
def test_a_lane_is_a_permutation_and_there_are_few(name: str) -> None:
    schedule = cases.schedule_of(name)
    lowered = lower(schedule)
    assert len(lowered.loops) <= lanes.MAX_LOOPS
    assert sum(loop.n_steps for loop in lowered.loops) == schedule.n_steps
    for loop in lowered.loops:
        for lane in loop.lanes:
            for ends in zip(*lane.pairs, strict=True):
                assert len(set(ends)) == len(ends)


def test_rings_have_two_lanes_and_no_idle_chip() -> None:
    lowered = lower(mm.plan(mm.Mesh("8x8", failed=["2x2@2,2"]), "hamiltonian"))
    assert [[lane.ops for lane in loop.lanes] for loop in lowered.loops] == [[(Op.REDUCE,)] * 2, [(Op.COPY,)] * 2]


def test_program_size_does_not_grow_with_the_mesh() -> None:
    def n_lanes(shape: str) -> list[int]:
        return [len(loop.lanes) for loop in lower(mm.plan(mm.Mesh(shape, failed=["4x2@2,2"]), "row-pairs")).loops]

    assert n_lanes("8x8") == n_lanes("16x16") == n_lanes("16x32")


def test_two_runs_between_one_pair_in_one_step() -> None:
    mesh = mm.Mesh((1, 2))
    reduce, copy = ([op] * 2 for op in (Op.REDUCE, Op.COPY))
    schedule = mm.Schedule(
        mesh, total_chunks=4, step=[0, 0, 1, 1], src=[0, 0, 1, 1], dst=[1, 1, 0, 0], first_chunk=[0, 2] * 2,
        n_chunks=2, op=reduce + copy, owners=[1] * 4,
    )  # fmt: skip
    mm.verify(schedule)
    payload = np.arange(8).reshape(2, 4)
    assert (replay(lower(schedule), payload) == payload.sum(axis=0)).all()


def test_no_transfers_no_loops() -> None:
    alone = mm.Schedule(mm.Mesh((1, 1)), total_chunks=3, step=[], src=[], dst=[], op=[], owners=[0] * 3)
    assert lower(alone).loops == ()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=60))
def test_colouring_uses_as_few_colours_as_the_largest_degree(pairs: list[tuple[int, int]]) -> None:
    edges = np.sort([src * 10 + dst for src, dst in pairs])
    colour, n_colours = lanes._colour(edges, 10)
    src, dst = np.divmod(edges, 10)
    assert n_colours == max(np.bincount(src).max(), np.bincount(dst).max())
    for number in range(n_colours):
        for ends in (src[colour == number], dst[colour == number]):
            assert len(np.unique(ends)) == len(ends)


def test_owners_lists_are_padded() -> None:
    schedule = cases.schedule_of("row-pairs 8x8 - 2x2")
    owned = lower(schedule).owned
    for rank in range(60):
        mine = owned[rank][owned[rank] < schedule.total_chunks]
        assert mine.tolist() == np.flatnonzero(schedule.owners == rank).tolist()
    assert any((row == schedule.total_chunks).all() for row in owned), "yellow chips own nothing"
