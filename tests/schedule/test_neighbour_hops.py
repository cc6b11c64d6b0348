from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from route_checks import up_down

import meshmend.numpy as mmn
from meshmend import Collective, Mesh, Op, Schedule, plan, verify
from meshmend.cost import busiest_link_load
from meshmend.errors import LoweringError, RoutingError
from meshmend.planning import RowPairs
from meshmend.routing import detour, dimension_order
from meshmend.schedule.neighbour_hops import neighbour_hops
from strategies import block_meshes, meshes


def check_lowered(schedule: Schedule, lowered: Schedule) -> None:
    mesh = schedule.mesh
    assert (mesh.link(lowered.src, lowered.dst) >= 0).all()
    assert verify(lowered).collective is schedule.collective
    assert np.array_equal(lowered.owners, schedule.owners)
    payload = np.random.default_rng(0).integers(-999, 999, (mesh.n_chips, 2 * schedule.total_chunks - 1))
    assert np.array_equal(mmn.run(lowered, payload), np.broadcast_to(payload.sum(axis=0), payload.shape))


# The larger one takes five seconds, and says what the smaller one says.
@pytest.mark.parametrize("shape", ["16x32", pytest.param("32x32", marks=pytest.mark.slow)])
def test_row_pairs_on_the_papers_meshes(shape: str) -> None:
    schedule = plan(Mesh(shape, failed=["4x2@6,8"]), "row-pairs", verify=False)
    lowered = neighbour_hops(schedule, verify=False)
    check_lowered(schedule, lowered)
    assert lowered.n_steps < 1.6 * schedule.n_steps
    # Sums that meet on the way travel together, so no link carries more than before.
    assert busiest_link_load(lowered) <= busiest_link_load(schedule)


def test_any_routes_will_do() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    schedule = plan(mesh, "row-pairs", segments=2)
    check_lowered(schedule, neighbour_hops(schedule, up_down(mesh)))


@settings(max_examples=25)
@given(block_meshes(), st.sampled_from(["rows", "columns"]), st.integers(1, 3))
def test_row_pairs_anywhere(mesh: Mesh, orientation: str, segments: int) -> None:
    planner = RowPairs(orientation=orientation, segments=segments)  # type: ignore[arg-type]
    if planner.unsupported_reason(mesh) is None:
        schedule = planner.plan(mesh)
        check_lowered(schedule, neighbour_hops(schedule))


@settings(max_examples=12)
@given(st.integers(1, 9), st.integers(1, 9))
def test_two_color_on_any_plain_mesh(rows: int, columns: int) -> None:
    schedule = plan(Mesh((rows, columns)), "two-color")
    check_lowered(schedule, neighbour_hops(schedule))


def far_trees(mesh: Mesh, chunks: int, seed: int) -> Schedule:
    """Each chunk is summed along a random tree whose edges join any two chips, and sent back the same way."""
    random = np.random.default_rng(seed)
    n = mesh.n_chips
    rows, owners = [], []
    for chunk in range(chunks):
        order = random.permutation(n)
        owners.append(order[-1])
        for i in range(n - 1):
            child, parent = order[i], order[random.integers(i + 1, n)]
            rows += [(i, child, parent, chunk, Op.REDUCE), (2 * n - 3 - i, parent, child, chunk, Op.COPY)]
    step, src, dst, first_chunk, op = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return Schedule(
        mesh, total_chunks=chunks, step=step, src=src, dst=dst, first_chunk=first_chunk, op=op, owners=owners
    )


@settings(max_examples=60)
@given(meshes(max_side=4, connected=True), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_any_sum_along_trees_has_a_neighbour_form(mesh: Mesh, chunks: int, seed: int) -> None:
    schedule = far_trees(mesh, chunks, seed)
    verify(schedule)
    check_lowered(schedule, neighbour_hops(schedule))


def test_a_schedule_between_neighbours_comes_back_as_it_is() -> None:
    schedule = plan(Mesh("4x4"), "hamiltonian")
    assert neighbour_hops(schedule) is schedule


def gather_at_the_end(op_back: Op = Op.COPY) -> Schedule:
    """On a line of three, the far chip sends over the middle one's head, both ways."""
    return Schedule(
        Mesh("1x3"),
        total_chunks=1,
        step=[0, 1, 2, 3],
        src=[2, 1, 0, 0],
        dst=[0, 0, 2, 1],
        op=[Op.REDUCE, Op.REDUCE, op_back, Op.COPY],
        owners=[0],
    )


def test_sums_merge_along_the_route_and_results_pass_where_the_copy_is_spent() -> None:
    lowered = neighbour_hops(gather_at_the_end())
    moves = zip(lowered.step, lowered.src, lowered.dst, lowered.op, strict=True)
    assert [tuple(map(int, move)) for move in moves] == [
        (0, 2, 1, Op.REDUCE),  # chip 1 has yet to send: the sums travel on together
        (1, 1, 0, Op.REDUCE),
        (2, 0, 1, Op.COPY),  # chip 1's copy is spent: the result is laid there
        (3, 1, 2, Op.COPY),
        (4, 0, 1, Op.COPY),
    ]
    check_lowered(gather_at_the_end(), lowered)


def test_a_chip_on_the_way_that_has_the_value_sends_it() -> None:
    line = Schedule(
        Mesh("1x3"),
        total_chunks=2,
        step=[0, 1],
        src=[0, 0],
        dst=[1, 2],
        n_chunks=2,
        op=Op.COPY,
        owners=[0, 0],
        collective=Collective.ALL_GATHER,
    )
    lowered = neighbour_hops(line)
    assert (lowered.src.tolist(), lowered.dst.tolist(), lowered.n_chunks.tolist()) == ([0, 1], [1, 2], [2, 2])


def test_a_reduce_scatter_may_pass_where_nothing_is_promised() -> None:
    line = Schedule(
        Mesh("1x3"),
        total_chunks=1,
        step=[0, 1],
        src=[1, 2],
        dst=[0, 0],
        op=Op.REDUCE,
        owners=[0],
        collective=Collective.REDUCE_SCATTER,
    )
    lowered = neighbour_hops(line)
    assert lowered.op.tolist() == [Op.REDUCE, Op.COPY, Op.REDUCE]
    assert verify(lowered).collective is Collective.REDUCE_SCATTER


def test_a_copy_that_is_still_needed_is_not_run_over() -> None:
    """Chip 2's chunk would have to pass chip 1 while chip 1 still holds its own contribution."""
    line = Schedule(
        Mesh("1x3"),
        total_chunks=1,
        step=[0, 1],
        src=[2, 1],
        dst=[0, 0],
        op=[Op.COPY, Op.REDUCE],
        owners=[0],
        collective=Collective.REDUCE_SCATTER,
    )
    with pytest.raises(LoweringError, match=r"step 0 sends chunk 0 over \(0,2\)→\(0,0\) by way of \(0,1\)") as caught:
        neighbour_hops(line)
    assert (caught.value.step, caught.value.chip, caught.value.chunk) == (0, (0, 1), 0)


def test_recursive_doubling_is_refused() -> None:
    pairs = [(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1)]
    doubling = Schedule(
        Mesh("1x4"),
        total_chunks=1,
        step=[0] * 4 + [1] * 4,
        src=[src for src, _ in pairs],
        dst=[dst for _, dst in pairs],
        op=Op.REDUCE,
        owners=[0],
    )
    verify(doubling)
    with pytest.raises(LoweringError, match="hand-made cannot be lowered to neighbour hops: its partial sums"):
        neighbour_hops(doubling)


def test_routes_must_fit() -> None:
    schedule = plan(Mesh("8x8", failed=["2x2@2,2"]), "row-pairs")
    with pytest.raises(RoutingError, match="The routes are for 8x8, the schedule for 8x8 minus 2x2@2,2"):
        neighbour_hops(schedule, detour(Mesh("8x8")))
    with pytest.raises(RoutingError, match=r"no route from \(\d,\d\) to \(\d,\d\) on 8x8 minus 2x2@2,2"):
        neighbour_hops(schedule, dimension_order(schedule.mesh))
