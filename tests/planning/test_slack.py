"""Plans with slack: proven and exact whatever the mesh, and fast where engines wait for their data alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checks import QUARTERS, assert_all_reduces, assert_serves, slowed
from hypothesis import given, settings
from hypothesis import strategies as st

import meshmend as mm
from meshmend.cost import Hardware, find_hardware, predict
from meshmend.errors import ParameterError
from meshmend.planning import Auto, Gather, PlanCache, Weave, plan_shards
from meshmend.planning.auto import Candidates
from meshmend.schedule import Collective
from rows import others_slow
from strategies import torn_meshes

V6E = find_hardware("tpu-v6e")
HOLED = mm.Mesh("8x8", failed=["2x2@2,2"])


def units(schedule: mm.Schedule, payload_bytes: float, hardware: Hardware = V6E) -> float:
    """The asynchronous time in units of M/b."""
    seconds = predict(schedule, payload_bytes, hardware, mode="asynchronous").seconds
    return seconds * hardware.link_bytes_per_s / payload_bytes


def waits(schedule: mm.Schedule) -> int:
    """The fewest steps between the arrival of a chunk at a chip and its being sent on from there, by brute force."""
    least = schedule.n_steps
    arrived: dict[tuple[int, int], int] = {}
    for step, src, dst, chunk in zip(schedule.step, schedule.src, schedule.dst, schedule.first_chunk, strict=True):
        if (src, chunk) in arrived:
            least = min(least, int(step) - arrived[src, chunk])
        arrived[dst, chunk] = max(int(step), arrived.get((dst, chunk), -1))
    return least


@settings(max_examples=40, deadline=None)
@given(mesh=torn_meshes(), chunks=st.sampled_from([1, 7, 64]), lag=st.sampled_from([1, 2, 9]), even=st.booleans())
def test_any_survivors(mesh: mm.Mesh, chunks: int, lag: int, even: bool) -> None:
    schedule = mm.plan(mesh, Weave(chunks, lag=lag, owners="even" if even else "any"))
    assert schedule.n_transfers == 2 * (mesh.n_chips - 1) * chunks
    assert_all_reduces(schedule)
    if even:
        assert np.ptp(np.bincount(schedule.owners, minlength=mesh.n_chips)) <= 1


@pytest.mark.parametrize("mesh", [HOLED, mm.Mesh("4x4x4", wrap=True), mm.Mesh("5x7", failed=["1x3@2,2"])], ids=str)
def test_slow_cables_and_what_is_made_of_an_all_reduce(mesh: mm.Mesh) -> None:
    for seed in range(3):
        assert_all_reduces(Weave(40, lag=3).plan(slowed(mesh, QUARTERS, 0.2, seed)))
    for collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        assert_serves(mm.plan(mesh, "weave", collective=collective, chunks=mesh.n_chips, lag=4))
        assert_serves(mm.plan(mesh, "gather", collective=collective, chunks=4 * mesh.n_chips, lag=3))
    mm.verify(mm.plan(mesh, "weave", collective="all-reduce-with-update", chunks=2 * mesh.n_chips, lag=2))


def test_what_has_arrived_waits_and_is_sent_on_later() -> None:
    """Steps in which nothing goes are not counted, so that a few wait less: in the middle of a long plan none does."""
    for lag in (1, 4):
        schedule = Weave(400, lag=lag).plan(HOLED)
        assert waits(schedule) == lag + 1
        assert waits(Weave(400).plan(HOLED)) == 1
        assert waits(Weave(trees=8, chunks=8 * 20 * (lag + 1), lag=lag).plan(HOLED)) >= lag + 1
    assert waits(Gather(60 * 4, lag=3).plan(HOLED)) >= 4


@pytest.mark.parametrize("planner", ["hamiltonian", "two-color", "row-pairs", "latency", "weave"])
@pytest.mark.parametrize("parts", [2, 5])
def test_any_plan_can_be_interleaved(planner: str, parts: int) -> None:
    """Also those that send runs of several chunks at once, whose runs stay runs."""
    schedule = mm.plan(mm.Mesh("4x6"), planner)
    longer = schedule.interleaved(parts)
    assert (longer.total_chunks, longer.n_steps) == (parts * schedule.total_chunks, parts * schedule.n_steps)
    assert longer.n_transfers == parts * schedule.n_transfers
    assert_all_reduces(longer)


def test_a_template_is_interleaved_without_being_expanded() -> None:
    long = Weave(trees=8, chunks=8 * 2**14, lag=1).plan(HOLED)
    assert long.repeats == 2**13
    mm.verify(long)
    template = Weave(trees=8, chunks=8 * 30).plan(HOLED)
    assert template.interleaved(3) == template.template.interleaved(3).repeated(30, 3 * template.period)
    assert_all_reduces(template.interleaved(3))


CASES = [
    (HOLED, 1e7, 0.85, 1.4),
    (HOLED, 1e8, 0.66, 0.8),
    (mm.Mesh("4x4x4", wrap=True), 1e7, 0.40, 0.65),
]
LARGE = [
    (mm.Mesh("16x32", failed=["4x2@6,8"]), 1e7, 1.25, 2.0),
    (mm.Mesh("16x32", failed=["4x2@6,8"]), 1e8, 0.68, 0.9),
    (mm.Mesh("16x32", failed=["4x2@6,8"]), 1e9, 0.62, 0.66),
]


@pytest.mark.parametrize(
    ("mesh", "payload", "most", "without"),
    others_slow([*CASES, *LARGE], quick=CASES[1:]),
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("message_s", [0.0, pytest.param(20e-9, marks=pytest.mark.slow)], ids=["", "20 ns per message"])
def test_where_people_live(mesh: mm.Mesh, payload: float, most: float, without: float, message_s: float) -> None:
    """Links of v6e, 1 µs per hop; a chip that pays 20 ns for each message sends fewer and longer ones."""
    hardware = replace(V6E, name="v6e", message_s=message_s)
    schedule = mm.plan(mesh, payload_bytes=payload, hardware=hardware, mode="asynchronous")
    assert schedule.is_proven
    assert units(schedule, payload, hardware) <= most
    before = mm.plan(mesh, payload_bytes=payload, hardware=hardware)
    assert units(before, payload, hardware) >= without, "what was fastest in lock-step has no slack"


def test_lock_step_is_the_default_and_has_no_slack() -> None:
    for payload in (1e5, 1e7, 1e9):
        chosen = Auto(payload, "tpu-v6e").choose(HOLED)
        assert chosen.schedule == Auto(payload, "tpu-v6e", mode="lock-step").choose(HOLED).schedule
        assert all(getattr(one.planner, "lag", 0) == 0 for one in chosen.considered)


@pytest.mark.slow
def test_what_is_chosen_is_the_fastest_in_the_mode_of_its_engine() -> None:
    for payload in (3e4, 1e6, 3e7):
        choice = Auto(payload, "tpu-v6e", mode="asynchronous").choose(HOLED)
        assert choice.seconds == pytest.approx(
            predict(choice.schedule, payload, "tpu-v6e", mode="asynchronous").seconds
        )
        for one in choice.considered:
            if one.seconds is not None:
                other = predict(one.planner.plan(HOLED), payload, "tpu-v6e", mode="asynchronous").seconds
                assert one.seconds == pytest.approx(other)
                assert choice.seconds <= other
            # What was not made could not have been faster.
            assert one.floor_seconds is None or one.seconds is not None or one.floor_seconds >= choice.seconds
        lock_step = Auto(payload, "tpu-v6e").choose(HOLED).schedule
        assert choice.seconds <= 1.02 * predict(lock_step, payload, "tpu-v6e", mode="asynchronous").seconds


@pytest.mark.parametrize("budget_s", [0.5, 2.0, 10.0])
def test_the_budget_holds(budget_s: float) -> None:
    """By the work that was counted where it was measured: no test of how fast this machine is."""
    mesh = mm.Mesh("16x32", failed=["4x2@6,8"])
    for payload in (1e6, 1e7, 1e9):
        tried = Candidates(mesh, [Weave(budget_s=budget_s)]).variants(payload, V6E, mode="asynchronous")
        assert 1 <= len(tried) <= 6
        single = [one.n_transfers(mesh) for one in tried if isinstance(one, Weave) and one.trees is None]
        assert sum(single) * 3e-6 <= max(budget_s, 0.3)


@pytest.mark.slow
def test_a_reduce_scatter_and_an_all_gather_have_slack() -> None:
    for collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        least = mm.bound(HOLED, collective=collective, hardware=V6E, mode="asynchronous").least_seconds(1e7, 1e11)
        found = mm.plan(HOLED, collective=collective, payload_bytes=1e7, hardware=V6E, mode="asynchronous")
        assert units(found, 1e7) * 1e7 / 1e11 <= 1.06 * least
        order = list(range(HOLED.n_chips))[::-1]
        shards = plan_shards(HOLED, collective, order=order, payload_bytes=1e7, hardware=V6E, mode="asynchronous")
        assert_serves(shards)
        per_chip = shards.total_chunks // HOLED.n_chips
        assert shards.owners.tolist() == np.repeat(order, per_chip).tolist()


def test_the_cache_tells_modes_apart(tmp_path: str) -> None:
    cache = PlanCache(tmp_path)
    plans = [
        mm.plan(HOLED, payload_bytes=1e7, hardware=V6E, mode=mode, cache=cache, budget_s=1)
        for mode in ("lock-step", "asynchronous")
    ]
    assert len(cache) == 2
    assert plans[0] != plans[1]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ParameterError, match="mode is 'soon', expected one of: lock-step, asynchronous"):
        mm.plan(HOLED, payload_bytes=1e7, hardware="tpu-v6e", mode="soon")
    with pytest.raises(ParameterError, match="lag is -1, expected a whole number"):
        Weave(lag=-1)
    with pytest.raises(ParameterError, match=r"expected a multiple of trees, 8 · 2: 16, say"):
        Weave(trees=8, chunks=9, lag=1)
    with pytest.raises(ParameterError, match="expected a multiple of the 3 parts of each"):
        Gather(chunks=10, lag=2)
