"""Lowering to loops, lanes and tables: held to tables written by hand, to plain references and to NumPy."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import meshmend as mm
import meshmend.numpy as mmn
from jax_engine import cases
from jax_engine.cases import replay
from meshmend.schedule import Collective, Op, lanes
from meshmend.schedule.lanes import KEEP, Lane, ProgramShape, lower
from random_schedules import random_schedule

LARGE = tuple(name for name in cases.PLANS if "8x8" in name)
PLANS = [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in cases.PLANS]


def chain() -> mm.Schedule:
    """Three chips in a row, two chunks each of two runs: sums to the middle, then copies back, by hand."""
    return mm.Schedule(
        mm.Mesh((1, 3)), total_chunks=4,
        #     to the middle, twice   a second run     and back, in runs of 2
        step=[0, 0, 1, 1, 2, 2, 2, 2],
        src=[0, 2, 0, 2, 1, 1, 1, 1],
        dst=[1, 1, 1, 1, 0, 2, 0, 2],
        first_chunk=[0, 2, 2, 0, 0, 0, 2, 2],
        n_chunks=2, op=[0, 0, 0, 0, 1, 1, 1, 1], owners=[1, 1, 0, 1],
    )  # fmt: skip


def test_the_tables_of_a_schedule_by_hand() -> None:
    lowered = lower(chain())
    assert (lowered.shape.n_chips, lowered.shape.total_chunks) == (3, 4)
    assert lowered.shape.collective is Collective.ALL_REDUCE
    inwards, outwards = lowered.loops
    assert lowered.shape.lanes == (inwards.lanes, outwards.lanes)
    # The middle chip receives from both sides in each step: two lanes, each with one pair. The ends receive nothing.
    # The second edge takes the first colour, and the first edge gives way.
    assert inwards.lanes == (Lane(((2, 1),), 2, (Op.REDUCE, KEEP)), Lane(((0, 1),), 2, (Op.REDUCE, KEEP)))
    assert inwards.n_steps == 2
    assert inwards.send.tolist() == [[[0, 0], [0, 2]], [[0, 0], [0, 0]], [[2, 0], [0, 0]]]
    assert inwards.receive.tolist() == [[[0, 0], [0, 0]], [[2, 0], [0, 2]], [[0, 0], [0, 0]]]
    assert inwards.ops.tolist() == [[[2, 2]] * 2, [[0, 0]] * 2, [[2, 2]] * 2]
    # The middle chip sends each end two runs that do not join, in one step: four lanes.
    assert outwards.n_steps == 1
    assert Counter(pair for lane in outwards.lanes for pair in lane.pairs) == {(1, 0): 2, (1, 2): 2}
    assert len(outwards.lanes) == 4
    assert {lane.ops for lane in outwards.lanes} == {(Op.COPY, KEEP)}
    assert sorted(outwards.send[1, 0].tolist()) == [0, 0, 2, 2]
    assert lowered.owned.tolist() == [[2, 4, 4], [0, 1, 3], [4, 4, 4]]
    dtypes = [str(table.dtype) for table in (inwards.send, inwards.receive, inwards.ops, lowered.owned)]
    assert dtypes == ["int32", "int32", "uint8", "int32"]
    assert inwards.send.shape == inwards.receive.shape == inwards.ops.shape == (3, 2, 2)
    payload = np.arange(12).reshape(3, 4)
    assert (replay(lowered, payload) == payload.sum(axis=0)).all()


def test_a_shape_is_known_by_its_content() -> None:
    shape = lower(chain()).shape
    again = lower(chain()).shape
    assert shape == again
    assert hash(shape) == hash(again) == hash(shape.digest)
    assert len(shape.digest) == 64
    others = [
        dataclasses.replace(shape, n_chips=4),
        dataclasses.replace(shape, total_chunks=5),
        dataclasses.replace(shape, collective=Collective.ALL_GATHER),
        dataclasses.replace(shape, lanes=shape.lanes[:1]),
        dataclasses.replace(shape, lanes=((shape.lanes[0][0],), shape.lanes[1])),
    ]
    assert len({shape, *others}) == 6
    assert shape != shape.digest
    assert "lanes" not in repr(shape)


def cost_of(schedule: mm.Schedule, first: int, last: int) -> float:
    """Chunks that a chip moves in a loop of these steps, by counting: see `_Stretch.cost`."""
    rows = [i for i in range(schedule.n_transfers) if first <= schedule.step[i] < last]
    cost = 0.0
    for run in {int(schedule.n_chunks[i]) for i in rows}:
        mine = [i for i in rows if schedule.n_chunks[i] == run]
        in_steps = Counter((int(schedule.step[i]), int(schedule.src[i]), int(schedule.dst[i])) for i in mine)
        most: Counter[tuple[int, int]] = Counter()
        for (_, src, dst), times in in_steps.items():
            most[src, dst] = max(most[src, dst], times)
        degree: Counter[tuple[str, int]] = Counter()
        for (src, dst), times in most.items():
            degree["out", src] += times
            degree["in", dst] += times
        mixed = len({int(schedule.op[i]) for i in mine}) > 1
        cost += run * max(degree.values()) * (1.25 if mixed else 1.0)
    return cost * (last - first)


def loops_of(schedule: mm.Schedule) -> list[tuple[int, int]]:
    """Where loops begin and end, by the rule as it is written: join the cheapest two, count all costs anew."""
    kinds = [
        {(int(schedule.n_chunks[i]), int(schedule.op[i])) for i in np.flatnonzero(schedule.step == step)}
        for step in range(schedule.n_steps)
    ]
    edges = [0, *(t for t in range(1, schedule.n_steps) if kinds[t] != kinds[t - 1]), schedule.n_steps]
    loops = list(pairwise(edges))
    if schedule.n_steps <= 24:
        loops = [
            loop for first, last in loops for loop in join(schedule, [(t, t + 1) for t in range(first, last)], 0.05)
        ]
    return join(schedule, loops, 0.01)


def join(schedule: mm.Schedule, loops: list[tuple[int, int]], worth: float) -> list[tuple[int, int]]:
    while len(loops) > 1:
        costs = [cost_of(schedule, *loop) for loop in loops]
        added = [
            cost_of(schedule, loops[i][0], loops[i + 1][1]) - costs[i] - costs[i + 1] for i in range(len(loops) - 1)
        ]
        best = added.index(min(added))
        if len(loops) <= 16 and added[best] > worth * sum(costs):
            break
        loops[best : best + 2] = [(loops[best][0], loops[best + 1][1])]
    return loops


@pytest.mark.parametrize("seed", range(30))
def test_any_schedule_is_cut_by_the_rule_and_runs_as_numpy_does(seed: int) -> None:
    schedule = random_schedule(seed, max_chips=6 + seed % 5, max_chunks=9)
    lowered = lower(schedule)
    if schedule.n_steps:
        edges = np.cumsum([0, *(loop.n_steps for loop in lowered.loops)]).tolist()
        assert list(pairwise(edges)) == loops_of(schedule)
    for loop in lowered.loops:
        assert loop.send.min(initial=0) >= 0
        used = {op for lane in loop.lanes for op in lane.ops}
        assert used == set(np.unique(loop.ops).tolist())
        for number, lane in enumerate(loop.lanes):
            assert lane.ops == tuple(np.unique(loop.ops[:, :, number]).tolist())
            for ends in zip(*lane.pairs, strict=True):
                assert len(set(ends)) == len(ends)
    payload = np.random.default_rng(seed).integers(-99, 99, (schedule.mesh.n_chips, schedule.total_chunks))
    assert (replay(lowered, payload) == mmn.run(schedule, payload)).all()


def alternating(n_kinds: int, steps_each: int) -> mm.Schedule:
    """Two chips, `n_kinds` stretches of run lengths 1, 2, 1, 2, …, each of which would cost more if joined."""
    run = [1 + kind % 2 for kind in range(n_kinds) for _ in range(steps_each)]
    step = np.arange(len(run))
    return mm.Schedule(
        mm.Mesh((1, 2)), total_chunks=2, step=step, src=step % 2, dst=1 - step % 2, first_chunk=0,
        n_chunks=run, op=1, owners=[0, 0], collective=Collective.ALL_GATHER,
    )  # fmt: skip


def test_no_more_than_sixteen_loops_and_no_fewer_where_joining_costs() -> None:
    assert lanes.MAX_LOOPS == 16
    for n_kinds, wanted in ((2, 2), (7, 7), (16, 16), (17, 16), (21, 16)):
        schedule = alternating(n_kinds, 3)
        lowered = lower(schedule)
        assert len(lowered.loops) == wanted <= lanes.MAX_LOOPS
        assert sum(loop.n_steps for loop in lowered.loops) == schedule.n_steps
        edges = np.cumsum([0, *(loop.n_steps for loop in lowered.loops)]).tolist()
        assert list(pairwise(edges)) == loops_of(schedule)


@pytest.mark.parametrize(("n_steps", "n_loops"), [(5, 2), (20, 2), (40, 1)])
def test_stretches_are_joined_if_that_moves_at_most_a_hundredth_more(n_steps: int, n_loops: int) -> None:
    """Steps of runs 1 and 2 cost 3 chunks each, a last step of run 2 costs 2; joined it costs 3: 1 more of 3n + 2."""
    run = [1, 2] * n_steps + [2]
    schedule = mm.Schedule(
        mm.Mesh((1, 2)), total_chunks=3, step=[*np.repeat(np.arange(n_steps), 2), n_steps], src=0, dst=1,
        first_chunk=[0, 1] * n_steps + [1], n_chunks=run, op=1, owners=[0] * 3, collective=Collective.ALL_GATHER,
    )  # fmt: skip
    assert len(lower(schedule).loops) == n_loops
    assert (0.01 * (3 * n_steps + 2) >= 1) == (n_loops == 1)


def test_more_steps_than_pairs_of_chips() -> None:
    """Three chips in a row, twenty steps, in each of which all four neighbour pairs add: two lanes throughout."""
    src, dst, chunk = [0, 1, 1, 2], [1, 0, 2, 1], [0, 1, 0, 1]
    schedule = mm.Schedule(
        mm.Mesh((1, 3)), total_chunks=2, step=np.repeat(np.arange(20), 4), src=src * 20, dst=dst * 20,
        first_chunk=chunk * 20, op=Op.REDUCE, owners=[2, 0], collective=Collective.REDUCE_SCATTER,
    )  # fmt: skip
    held = payload = np.array([[5, 1], [7, 2], [11, 3]])
    for _ in range(20):
        before, held = held, held.copy()
        for a, b, c in zip(src, dst, chunk, strict=True):
            held[b, c] = before[b, c] + before[a, c]
    lowered = lower(schedule)
    assert [len(loop.lanes) for loop in lowered.loops] == [2]
    assert (replay(lowered, payload) == held).all()


@pytest.mark.parametrize("name", PLANS)
def test_tables_do_what_the_schedule_says(name: str) -> None:
    schedule = cases.schedule_of(name)
    payload = np.random.default_rng(0).integers(-99, 99, (schedule.mesh.n_chips, schedule.total_chunks))
    lowered = lower(schedule)
    assert (replay(lowered, payload) == mmn.run(schedule, payload)).all()
    assert len(lowered.loops) <= lanes.MAX_LOOPS
    assert sum(loop.n_steps for loop in lowered.loops) == schedule.n_steps


def test_rings_have_two_lanes_and_no_idle_chip() -> None:
    lowered = lower(mm.plan(mm.Mesh("4x4", failed=["2x2@0,0"]), "hamiltonian"))
    assert [[lane.ops for lane in loop.lanes] for loop in lowered.loops] == [[(Op.REDUCE,)] * 2, [(Op.COPY,)] * 2]


@pytest.mark.slow
def test_program_size_does_not_grow_with_the_mesh() -> None:
    def n_lanes(shape: str) -> list[int]:
        return [len(loop.lanes) for loop in lower(mm.plan(mm.Mesh(shape, failed=["4x2@2,2"]), "row-pairs")).loops]

    assert n_lanes("8x8") == n_lanes("16x16") == n_lanes("16x32")


def test_no_transfers_no_loops() -> None:
    alone = mm.Schedule(mm.Mesh((1, 1)), total_chunks=3, step=[], src=[], dst=[], op=[], owners=[0] * 3)
    lowered = lower(alone)
    assert lowered.loops == ()
    assert lowered.shape == ProgramShape(1, 3, Collective.ALL_REDUCE, (), ((0, 1, 2),))
    assert lowered.owned.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("seed", range(40))
def test_colouring_uses_as_few_colours_as_the_largest_degree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.integers(0, rng.integers(2, 101), rng.integers(1, 61)))
    colour, n_colours = lanes._colour(edges, 10)
    src, dst = np.divmod(edges, 10)
    assert n_colours == max(np.bincount(src).max(), np.bincount(dst).max())
    assert len(colour) == len(edges)
    assert set(colour.tolist()) <= set(range(n_colours))
    for number in range(n_colours):
        for ends in (src[colour == number], dst[colour == number]):
            assert len(np.unique(ends)) == len(ends)


@pytest.mark.parametrize("name", PLANS)
def test_lanes_are_counted_as_they_are_lowered(name: str) -> None:
    schedule = cases.schedule_of(name)
    lowered = lower(schedule)
    steps = [lowered.shape.repeat.n_steps] if lowered.shape.repeat else [loop.n_steps for loop in lowered.loops]
    made = [
        (n, len(loop.lanes), sum(lane.run for lane in loop.lanes)) for n, loop in zip(steps, lowered.loops, strict=True)
    ]
    assert [(count.n_steps, count.lanes, count.chunks) for count in lanes.count_lanes(schedule)] == made
    longest = [max(lane.run for lane in loop.lanes) for loop in lowered.loops]
    assert [count.longest for count in lanes.count_lanes(schedule)] == longest


def test_lanes_of_a_repeated_schedule_are_counted_for_all_its_steps() -> None:
    schedule = mm.plan(mm.Mesh("8x8", failed=["2x2@2,2"]), "weave", trees=8, chunks=800)
    (count,), lowered = lanes.count_lanes(schedule), lower(schedule)
    assert lowered.shape.repeat is not None
    assert count.n_steps == lowered.shape.repeat.n_steps
    assert count.lanes == len(lowered.loops[0].lanes)


def test_partners_that_change_with_every_step_are_loops_of_one_lane() -> None:
    """Recursive doubling on 16 chips: in each of its four steps every chip exchanges with one other."""
    schedule = mm.plan(mm.Mesh("4x4"), "latency", halvings=0, parts=1)
    assert [(loop.n_steps, len(loop.lanes)) for loop in lower(schedule).loops] == [(1, 1)] * 4
