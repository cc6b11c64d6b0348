"""Gather: everybody gets everything once, over live links, in about the least time there is."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from checks import QUARTERS, assert_serves, slowed
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import Collective, Mesh, PlanError, Schedule, bound, plan, predict, verify
from meshmend.cost import StepDemand, find_hardware
from meshmend.cost.hardware import Mode
from meshmend.errors import ParameterError
from meshmend.planning import Derived, Gather, PlanCache, Weave, make_planner
from meshmend.planning.gather.spreading import share_out, spread
from strategies import meshes

MODES: tuple[Mode, ...] = ("lock-step", "asynchronous")
HALVES = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)

CORRIDOR = Mesh("8x8", failed=["3x1@0,3", "3x1@5,3"])


def follow(mesh: Mesh, owners: list[int], takes: dict[tuple[int, int], int] | None = None) -> int:
    """Replay the deliveries with sets, by the rules alone; return the number of steps.

    `takes` is how many chunks each link takes in a step: by default one.
    """
    per_link = None
    if takes is not None:
        per_link = np.zeros(mesh.n_link_slots, dtype=np.int64)
        for (src, dst), most in takes.items():
            per_link[mesh.link(src, dst)] = most
    found = spread(mesh, np.array(owners), per_link)
    columns = (found[name].tolist() for name in ("step", "src", "dst", "first_chunk"))
    rows = list(zip(*columns, strict=True))
    holds = [{chunk for chunk, owner in enumerate(owners) if owner == rank} for rank in range(mesh.n_chips)]
    steps = 0
    for step, together in itertools.groupby(sorted(rows), key=lambda row: row[0]):
        assert step == steps
        steps += 1
        moves = [row[1:] for row in together]
        for link, carried in Counter((src, dst) for src, dst, _ in moves).items():
            assert carried <= (1 if takes is None else takes[link]), "a link carries too many chunks"
        assert len({(src, chunk) for src, _, chunk in moves}) == len(moves), "a chip sends a chunk twice in a step"
        assert len({(dst, chunk) for _, dst, chunk in moves}) == len(moves), "a chip takes a chunk twice in a step"
        for src, dst, chunk in moves:
            assert dst in mesh.neighbours[src]
            assert chunk in holds[src]
            assert chunk not in holds[dst]
        for _, dst, chunk in moves:
            holds[dst].add(chunk)
    assert all(len(held) == len(owners) for held in holds)
    return steps


@settings(max_examples=40, deadline=None)
@given(meshes(max_side=5, connected=True), st.integers(1, 150), st.integers(0, 1000))
def test_links_take_as_many_chunks_as_they_may(mesh: Mesh, chunks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    links = [link for a, b in mesh.cables.tolist() for link in ((a, b), (b, a))]
    follow(mesh, share_out(mesh.n_chips, chunks).tolist(), {link: int(rng.integers(1, 5)) for link in links})


def test_steps_by_hand_over_slow_links() -> None:
    both_ways = {(0, 1): 3, (1, 0): 3, (1, 2): 1, (2, 1): 1}
    assert follow(Mesh("1x3"), [0] * 10, both_ways) == 11  # ten over the slow link, one by one, after one step
    assert follow(Mesh("1x3"), [2] * 9, both_ways) == 10
    # Nothing goes over a link that takes nothing: the long way round.
    ring = {(0, 1): 0, (1, 0): 0, (1, 3): 2, (3, 1): 2, (0, 2): 2, (2, 0): 2, (2, 3): 2, (3, 2): 2}
    assert follow(Mesh("2x2"), [0, 0], ring) == 3


@given(st.integers(1, 300), st.integers(1, 2000))
def test_shares_differ_by_one_chunk_at_most(n_chips: int, chunks: int) -> None:
    shares = np.bincount(share_out(n_chips, chunks), minlength=n_chips)
    assert shares.sum() == chunks
    assert shares.max() - shares.min() <= 1


def test_steps_by_hand_over_equal_links() -> None:
    assert follow(Mesh("1x3"), [0] * 10) == 11  # ten chunks over one link, and one step more to the far end
    assert follow(Mesh("2x2"), [3, 3]) == 2  # one chunk each way round, and on to the two that lack it


@pytest.mark.parametrize("per_chip", [2, 4])
def test_two_cables_between_two_parts_bring_different_chunks(per_chip: int) -> None:
    least = 57 * per_chip / 2  # a corner receives what 57 others own over two cables
    assert follow(CORRIDOR, share_out(58, 58 * per_chip).tolist()) <= 1.02 * least


def ratio(schedule: Schedule) -> float:
    """Time by bandwidth alone over the optimum for the same owners; one chunk crosses a link in a step."""
    shares = tuple(np.bincount(schedule.owners, minlength=schedule.mesh.n_chips).tolist())
    least = bound(schedule.mesh, collective=schedule.collective, shares=shares)
    return schedule.n_steps / schedule.total_chunks / least.units


@pytest.mark.parametrize("collective", HALVES)
def test_at_the_optimum_round_a_board_counted_exactly(collective: Collective) -> None:
    schedule = Gather(collective=collective).plan(Mesh("8x8", failed=["2x2@2,2"]))
    assert verify(schedule, method="exact").method == "exact"
    assert ratio(schedule) <= 1.005
    assert_serves(schedule)


@pytest.mark.parametrize(
    ("shape", "hole"),
    [
        ("16x16", "2x2@6,6"),
        pytest.param("16x32", "4x2@6,8", marks=pytest.mark.slow),
        pytest.param("32x32", "4x2@6,8", marks=pytest.mark.slow),
    ],
)
def test_near_the_optimum_on_large_meshes_in_seconds(shape: str, hole: str) -> None:
    mesh = Mesh(shape, failed=[hole])
    mesh.neighbours  # noqa: B018  # so that the clock counts planning alone
    started = time.process_time()
    schedule = Gather(collective=Collective.REDUCE_SCATTER).plan(mesh)
    took = time.process_time() - started
    assert ratio(schedule) <= 1.02
    verify(schedule)
    assert took < 4  # two seconds on a core of its own: docs/planners.md


def random_survivors(rng: np.random.Generator) -> Mesh:
    """A connected mesh of two or three axes, some of them wrapped, with up to a third of its chips failed."""
    while True:
        shape = tuple(rng.integers(2, 11, 2).tolist() if rng.random() < 0.7 else rng.integers(2, 5, 3).tolist())
        wrap = tuple((rng.random(len(shape)) < 0.3).tolist())
        whole = Mesh(shape, wrap=wrap)
        lost = rng.choice(whole.size, int(whole.size * rng.uniform(0, 0.33)), replace=False)
        mesh = Mesh(shape, wrap=wrap, failed=[whole.chip(int(rank)) for rank in lost])
        if mesh.is_connected and mesh.n_chips > 1:
            return mesh


@pytest.mark.parametrize("n", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_near_the_optimum_on_random_survivors(n: int) -> None:
    rng = np.random.default_rng(15)
    for _ in range(n):
        mesh = random_survivors(rng)
        assert ratio(Gather().plan(mesh)) <= 1.05, mesh


@pytest.mark.parametrize("collective", HALVES)
@pytest.mark.parametrize("rates", [["1/2"], QUARTERS, ["1/3", "1/2"], ["0.87"], ["1/100", "1"]], ids=str)
@pytest.mark.parametrize("chunks", [1, 60])
def test_it_serves_slow_cables(collective: Collective, rates: list[str], chunks: int) -> None:
    mesh = slowed(Mesh("5x4", failed=["1,1"], failed_cables=["0,0-0,1"]), rates, 0.5, chunks)
    assert_serves(plan(mesh, "gather", collective=collective, chunks=chunks))


@pytest.mark.parametrize("collective", HALVES)
def test_a_slow_cable_counts_by_its_rate(collective: Collective) -> None:
    mesh = Mesh("8x8", failed=["2x2@2,2"], cable_rates={"0,0-0,1": "1/2"})
    least_s = 59 / 60 / 1.5  # a corner exchanges what 59 others own over a cable and a half
    schedule = Gather(collective=collective).plan(mesh)
    for mode in MODES:
        assert least_s <= predict(schedule, 1e9, "ideal", mode=mode).seconds * (1 + 1e-9) <= 1.01 * least_s
    assert_serves(schedule)


@pytest.mark.parametrize("seed", range(4))
def test_near_the_optimum_over_slow_cables(seed: int) -> None:
    mesh = slowed(Mesh("8x8", failed=["2x2@2,2"]), QUARTERS, 0.2, seed)
    schedule = Gather().plan(mesh)
    for mode in MODES:
        assert predict(schedule, 1e9, "ideal", mode=mode).ratio_to_bound <= 1.04


@pytest.mark.slow
@pytest.mark.parametrize("collective", HALVES)
@pytest.mark.parametrize(
    "rates",
    [{"8,15-8,16": "3/4"}, {"8,15-8,16": "1/2"}, {"16x1@0,16": "1/2"}, 1, 2],
    ids=["one at 3/4", "one at 1/2", "a column at 1/2", "random 1", "random 2"],
)
def test_near_the_optimum_over_slow_cables_of_a_large_mesh(rates: dict[str, str] | int, collective: Collective) -> None:
    whole = Mesh("16x32", failed=["4x2@6,8"])
    mesh = (
        slowed(whole, QUARTERS, 0.05, rates)
        if isinstance(rates, int)
        else Mesh("16x32", failed=["4x2@6,8"], cable_rates=rates)
    )
    schedule = plan(mesh, "gather", collective=collective)
    for mode in MODES:
        assert predict(schedule, 1e9, "ideal", mode=mode).ratio_to_bound <= 1.02


def test_no_schedule_costs_less_than_its_floor() -> None:
    rng = np.random.default_rng(1)
    ideal = find_hardware("ideal")
    for collective in HALVES:
        for part in (0.0, 0.0, 0.5):
            mesh = slowed(random_survivors(rng), QUARTERS, part, seed=1)
            able = [make_planner(name, collective=collective) for name in ("hamiltonian", "two-color", "row-pairs")]
            planners = [p for p in able if p.unsupported_reason(mesh) is None] + [Derived(Weave(chunks=50), collective)]
            for planner in [Gather(50, collective), Gather(3, collective), *planners]:
                schedule, floor = planner.plan(mesh), planner.floor(mesh)
                assert schedule.n_steps >= floor.steps
                assert StepDemand(schedule).seconds(1e9, ideal) >= floor.link_load * (1 - 1e-9)


@pytest.mark.parametrize("collective", HALVES)
@pytest.mark.parametrize(("payload", "hardware"), [(1e3, "tpu-v4"), (3e6, "tpu-v4"), (3e6, "tpu-v3-xla")])
def test_auto_takes_the_fastest_of_gather_and_the_halves(collective: Collective, payload: float, hardware: str) -> None:
    mesh = Mesh("4x6", failed=["2x2@0,2"])
    machine = find_hardware(hardware)
    taken = plan(mesh, collective=collective, payload_bytes=payload, hardware=hardware)
    assert_serves(taken)
    rivals = [
        plan(mesh, name, collective=collective, payload_bytes=payload, hardware=hardware)
        for name in ("gather", "weave", "hamiltonian", "row-pairs")
    ]
    times = [StepDemand(rival).seconds(payload, machine) for rival in rivals]
    assert StepDemand(taken).seconds(payload, machine) <= min(times) * (1 + 1e-9)


def test_auto_takes_gather_where_no_ring_is() -> None:
    mesh = Mesh("5x5", failed=["2,2"])
    assert plan(mesh, collective="all-gather", payload_bytes=1e8, hardware="tpu-v4").planner == "gather"


def test_what_cannot_be_planned_is_told_with_what_can() -> None:
    with pytest.raises(PlanError, match="gather cannot plan for 4x4: it plans reduce-scatters and all-gathers") as told:
        plan(Mesh("4x4"), "gather")
    assert "Request collective='reduce-scatter' or 'all-gather'" in str(told.value)
    assert "weave" in str(told.value)
    with pytest.raises(ParameterError, match=r"There is no collective 'broadcast'. Collectives: all-reduce, reduce-"):
        plan(Mesh("4x4"), collective="broadcast")
    with pytest.raises(ParameterError, match=r"its collective is all-reduce: plan cannot make it all-gather. Pass its"):
        plan(Mesh("4x4"), Weave(), collective="all-gather")
    with pytest.raises(PlanError, match="takes at most 2,236,962 chunks on 16 chips, and 9,999,999 were asked for"):
        plan(Mesh("4x4"), "gather", collective="all-gather", chunks=9_999_999)


def test_the_cache_tells_collectives_apart(tmp_path: str) -> None:
    cache, mesh = PlanCache(tmp_path), Mesh("2x3")
    asked = [(name, collective) for name in ("auto", "weave") for collective in Collective]
    asked += [("gather", collective) for collective in HALVES]
    for name, collective in asked:
        for _ in range(2):
            assert plan(mesh, name, collective=collective, cache=cache).collective is collective
    assert len(cache) == len(asked)
