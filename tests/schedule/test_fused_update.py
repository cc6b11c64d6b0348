"""The fused update: an owner may replace a chunk's sum, and every chip ends with what it put there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import meshmend as mm
import meshmend.numpy as mmn
from meshmend import Collective, Mesh, Op, Schedule, verify
from meshmend.errors import PlanError, ScheduleError, UpdateError
from meshmend.planning import Weave
from meshmend.schedule.fused_update import update_steps, with_update
from random_schedules import random_schedule
from strategies import tear

WITH_UPDATE = Collective.ALL_REDUCE_WITH_UPDATE
LINE = Mesh("1x3")


def line(**changes: Any) -> Schedule:
    """All-reduce over a line of three chips: up to the last, and down again."""
    arguments: dict[str, Any] = {
        "total_chunks": 1,
        "step": [0, 1, 2, 3],
        "src": [0, 1, 2, 1],
        "dst": [1, 2, 1, 0],
        "op": [Op.REDUCE, Op.REDUCE, Op.COPY, Op.COPY],
        "owners": [2],
        "collective": WITH_UPDATE,
    }
    return Schedule(LINE, **(arguments | changes))


def update(chunk: int, total: NDArray[Any]) -> NDArray[Any]:
    """Not linear, and another one for every chunk: what is applied twice, or to a part of the sum, shows."""
    return np.asarray(total * total % 1009 + chunk)


def assert_updates(schedule: Schedule) -> None:
    """Both oracles: the proof, and integers that the owners have changed on the way."""
    verify(schedule)
    rng = np.random.default_rng(schedule.n_transfers)
    payload = rng.integers(-999, 1000, (schedule.mesh.n_chips, schedule.total_chunks, 2))
    calls: list[int] = []

    def counted(chunk: int, total: NDArray[Any]) -> NDArray[Any]:
        calls.append(chunk)
        return update(chunk, total)

    found = mmn.run(schedule, payload, update=counted)
    total = payload.sum(axis=0)
    expected = np.array([update(chunk, total[chunk]) for chunk in range(schedule.total_chunks)])
    assert np.array_equal(found, np.broadcast_to(expected, payload.shape))
    assert sorted(calls) == list(range(schedule.total_chunks))


def test_a_line_is_updated_at_its_end() -> None:
    assert_updates(line())
    assert update_steps(line()).tolist() == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # An all-reduce all the same: only the owner is another.
        ({"owners": [1]}, r"Chunk 0 is not updated at its owner \(0,1\), which has the last REDUCE of it in step 0\. "
         r"Chip \(0,0\) ends with a value that is no copy of what the owner has then; its last write there is step"),
        ({"owners": [0]}, r"its owner \(0,0\), which has the last REDUCE of it in step -1"),
        # The owner's partial sum is sent on, and the rest is added there: the sum is right, but not the owner's.
        (
            {"step": [0, 1, 1, 2, 3], "src": [0, 1, 2, 1, 1], "dst": [1, 2, 1, 0, 2],
             "op": [Op.REDUCE, Op.REDUCE, Op.REDUCE, Op.COPY, Op.COPY], "owners": [2]},
            r"step 1 sends it from its owner before that",
        ),
    ],
)  # fmt: skip
def test_all_reduces_that_are_not_updated_at_their_owners(changes: dict[str, Any], message: str) -> None:
    verify(line(**changes, collective=Collective.ALL_REDUCE))
    with pytest.raises(UpdateError, match=message) as error:
        verify(line(**changes))
    assert error.value.chunk == 0


@pytest.mark.parametrize("planner", ["weave", "hamiltonian", "row-pairs", "two-color"])
@pytest.mark.parametrize("text", ["8x8", "8x8 minus 2x2@2,2", "6x4 minus 2x2@0,0", "1x1", "1x2"])
def test_every_planner_is_updated_at_its_owners(planner: str, text: str) -> None:
    shape, _, hole = text.partition(" minus ")
    mesh = Mesh(shape, failed=[hole] if hole else [])
    try:
        schedule = mm.plan(mesh, planner, collective=WITH_UPDATE)
    except PlanError:
        pytest.skip("not a mesh for this planner")
    assert schedule.collective is WITH_UPDATE
    assert_updates(schedule)
    # As many owners shifted by one are no longer those.
    if mesh.n_chips > 1 and len(np.unique(schedule.owners)) > 1:
        with pytest.raises(UpdateError):
            verify(schedule.replace(owners=np.roll(schedule.owners, 1)))


def test_weave_is_updated_on_any_survivors() -> None:
    for seed in range(40):
        mesh = tear((4, 5), (seed % 2 == 0, False), 0.2, 0.1, seed)
        if mesh.is_connected:
            assert_updates(mm.plan(mesh, "weave", chunks=7, collective=WITH_UPDATE))


def test_repeats_are_updated_as_their_template_does() -> None:
    template = mm.plan(Mesh("3x3"), "weave", chunks=4)
    repeated = with_update(template.repeated(5, period=3))
    assert (repeated.repeats, repeated.period) == (5, 3)
    assert_updates(repeated)
    assert_updates(with_update(repeated.replace(collective=Collective.ALL_REDUCE)))


def test_a_template_with_idle_steps_is_updated_too() -> None:
    schedule = mm.plan(Mesh("8x8", failed=["2x2@2,2"]), Weave(chunks=80, trees=8, budget_s=0.2))
    assert len(np.unique(schedule.template.step)) < schedule.template.n_steps
    assert_updates(with_update(schedule))


def test_random_schedules_are_judged_as_exact_following_judges_them() -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(400):
        schedule = with_update(random_schedule(seed, collective=Collective.ALL_REDUCE, max_chips=6, max_chunks=4))
        updates = follow(schedule)
        verdicts[updates] += 1
        if updates:
            assert_updates(schedule)
        else:
            with pytest.raises(UpdateError):
                verify(schedule)
    assert min(verdicts.values()) > 20


def follow(schedule: Schedule) -> bool:
    """Follow every chunk with Python's sets: what is put in the owner's place must be what every chip ends with."""
    for chunk in range(schedule.total_chunks):
        rows = [
            row
            for row in range(schedule.n_transfers)
            if schedule.first_chunk[row] <= chunk < schedule.first_chunk[row] + schedule.n_chunks[row]
        ]
        owner = int(schedule.owners[chunk])
        adds = [int(schedule.step[r]) for r in rows if schedule.dst[r] == owner and schedule.op[r] == Op.REDUCE]
        update = max(adds, default=-1)
        held: list[list[Any]] = [[chip] for chip in range(schedule.mesh.n_chips)]
        for step in range(-1, schedule.n_steps):
            now = [r for r in rows if schedule.step[r] == step]
            arriving = [(r, held[schedule.src[r]]) for r in now]
            for r, values in arriving:
                dst = schedule.dst[r]
                held[dst] = values if schedule.op[r] == Op.COPY else [*held[dst], *values]
            if step == update:
                held[owner] = ["token"]
        if any(values != ["token"] for values in held):
            return False
    return True


def test_what_has_no_update_says_so() -> None:
    with pytest.raises(ScheduleError, match=r"for all-reduce, which has no update\. Plan with collective='all-red"):
        mmn.run(mm.plan(LINE, "weave"), np.ones((3, 4)), update=update)
    with pytest.raises(
        ScheduleError, match="Only an all-reduce can have an update: got a schedule of a reduce-scatter"
    ):
        with_update(mm.plan(LINE, collective="reduce-scatter"))
    with pytest.raises(PlanError, match=r"no chip is the first where a chunk .* so it has no all-reduce-with-update"):
        mm.plan(Mesh("4x4"), "latency", collective=WITH_UPDATE)


def test_an_update_costs_what_the_all_reduce_costs() -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"])
    plain, updated = (mm.plan(mesh, "weave", chunks=256, collective=c) for c in (Collective.ALL_REDUCE, WITH_UPDATE))
    one, other = (mm.predict(schedule, 1e8, "ideal") for schedule in (plain, updated))
    assert (one.seconds, one.bound_seconds) == (other.seconds, other.bound_seconds)
