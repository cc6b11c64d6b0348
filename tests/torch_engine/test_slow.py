"""Slow cables: when members measure, which rates follow, and that all plan alike from them."""

from __future__ import annotations

import itertools
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import Mesh
from meshmend.schedule import Schedule
from meshmend.topology import Cable, name_cable

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402

from meshmend.launch.cables import CableWatch  # noqa: E402
from meshmend.torch import slow  # noqa: E402
from meshmend.torch.membership import with_rates  # noqa: E402
from meshmend.torch.mesh_group import MeshGroup  # noqa: E402
from meshmend.torch.plans import Plans  # noqa: E402
from meshmend.torch.slow import CALLS, FIRST_S, LONGEST_S, Pace, lanes_of, rates_of  # noqa: E402
from meshmend.torch.subgroups import mesh_of  # noqa: E402
from torch_engine.processes import remembered  # noqa: E402
from torch_engine.threads import Group, on_every_thread  # noqa: E402

MESHES = [
    Mesh("2x2"),
    Mesh("2x3"),
    Mesh("1x4", wrap=True),
    Mesh("3x3", wrap=True),
    Mesh("3x3", failed=["1,1"]),
    Mesh("2x2x3", failed_cables=["0,0,0-0,0,1"]),
]


planning = threading.Lock()


def once(mesh: Mesh, **target: Any) -> Schedule:
    """Plan, once for all threads."""
    with planning:
        return remembered(mesh, **target)


def cables_of(mesh: Mesh) -> list[Cable]:
    return [(mesh.chip(a), mesh.chip(b)) for a, b in mesh.cables.tolist()]


# -- when -------------------------------------------------------------------------------------------------------------


def moments(seconds_of: Callable[[float], float], until_s: float, took_s: float = 0.0) -> list[float]:
    """Return when a member asks for a measurement, each of which changes nothing."""
    pace, now, found = Pace(), 0.0, []
    while now < until_s:
        own_s = seconds_of(now)
        now += own_s
        pace.note("gradients", own_s, now)
        if pace.is_due(now):
            found.append(now)
            now += took_s
            pace.measured(now, took_s, has_changed=False)
    return found


def test_a_steady_job_is_measured_ever_more_rarely() -> None:
    found = moments(lambda _: 0.5, 4 * 3600)
    assert found[0] == pytest.approx(FIRST_S, abs=1.1)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert all(b >= a - 1 for a, b in itertools.pairwise(gaps))
    assert gaps[0] == pytest.approx(2 * FIRST_S, abs=1.1)
    assert gaps[-1] == pytest.approx(LONGEST_S, abs=1.1)


@pytest.mark.parametrize("seed", range(5))
def test_a_job_that_is_slow_for_another_reason_loses_little(seed: int) -> None:
    draw = random.Random(seed)
    # Minutes in which all calls take longer, and minutes in which they do not.
    found = moments(lambda now: (1 + 2 * (now // 60 % 2)) * draw.uniform(0.1, 0.2), 3600, took_s=0.3)
    assert len(found) > 3
    assert 0.3 * len(found) < 0.01 * 3600
    in_first = sum(now < 300 for now in found)
    assert 0.3 * in_first < 0.015 * 300


@pytest.mark.parametrize("after_s", [10.0, 600.0, 7200.0])
def test_calls_that_take_longer_are_a_reason(after_s: float) -> None:
    found = moments(lambda now: 0.2 if now < after_s else 0.3, after_s + LONGEST_S)
    soonest = next(now for now in found if now >= after_s)
    # Five calls in a row, and no more than a tenth of the longest pause.
    assert after_s + CALLS * 0.3 - 0.01 <= soonest <= after_s + LONGEST_S / 10 + 2
    assert after_s > 100 or soonest < after_s + 3


def test_single_slow_calls_are_no_reason() -> None:
    calls = iter(range(10**6))
    found = moments(lambda _: 0.5 if next(calls) % CALLS == 0 else 0.1, 3600)
    assert found[0] > FIRST_S - 1
    assert len(found) < 10


def test_a_change_brings_the_next_measurement_forward_and_kinds_are_apart() -> None:
    pace = Pace()
    for now in range(200):
        pace.note("long", 1.0, now)
        pace.note("short", 0.001, now)
        assert pace.is_due(now) == (now >= FIRST_S)
    pace.measured(200.0, 0.1, has_changed=False)
    assert not pace.is_due(200 + 2 * FIRST_S - 1)
    pace.measured(300.0, 0.1, has_changed=True)
    assert pace.is_due(300 + FIRST_S)
    pace.measured(400.0, 10.0, has_changed=True)
    assert not pace.is_due(400 + 499)
    assert pace.is_due(400 + 500)


# -- which rates ------------------------------------------------------------------------------------------------------


@given(
    truth=st.floats(1 / 16, 1.0),
    noise=st.lists(st.tuples(st.floats(1, 1.1), st.floats(1, 1.1)), min_size=1, max_size=30),
)
def test_noise_makes_no_rate_flap_and_rates_are_near_the_truth(truth: float, noise: list[tuple[float, float]]) -> None:
    known: dict[str, Fraction] = {}
    changes = 0
    for fast_s, slow_s in noise:
        found = rates_of({"0,0-0,1": fast_s, "0,1-0,2": slow_s / truth}, fast_s, known)
        assert found.keys() <= {"0,1-0,2"}
        changes += found != known
        known = found
    rate = known.get("0,1-0,2", Fraction(1))
    assert rate == 1 or rate in [Fraction(1, 2**k) for k in range(1, 5)]
    # A change that noise may cause at first stays then.
    assert changes <= 2
    if truth <= 0.5:
        assert rate <= 0.5
        assert rate / 1.77 <= truth <= rate * 1.77
    if truth > 0.61:
        assert not known


def test_a_rate_that_is_known_stays_near_the_limit_and_goes_where_the_cable_is_faster() -> None:
    cable = "0,1-0,2"

    def rate(own_s: float, known: Fraction | None) -> Fraction:
        found = rates_of({"0,0-0,1": 1.0, cable: own_s}, 1.0, {} if known is None else {cable: known})
        return found.get(cable, Fraction(1))

    half, quarter = Fraction(1, 2), Fraction(1, 4)
    assert [rate(own_s, None) for own_s in (1.7, 1.9, 2.7, 3, 4, 100)] == [1, half, half, quarter, quarter, half**4]
    assert [rate(own_s, half) for own_s in (1.2, 1.5, 3, 3.3, 4)] == [1, half, half, quarter, quarter]
    assert [rate(own_s, quarter) for own_s in (1.7, 2.0, 3.0, 5.5, 8.0)] == [1, half, quarter, quarter, half**3]


def test_what_was_not_measured_is_as_before() -> None:
    known = {"0,0-1,0": Fraction(1, 4), "1,0-2,0": Fraction(0)}
    assert rates_of({}, 0.0, known) == known
    assert rates_of({"0,0-0,1": 1.0, "0,1-0,2": 8.0}, 1.0, known) == known | {"0,1-0,2": Fraction(1, 8)}


def test_a_lucky_time_of_one_cable_accuses_no_other() -> None:
    # Over the fastest cable, 1.0 is usual: the others' best times are no better than that, and not slow.
    assert not rates_of({"0,0-0,1": 0.4, "0,1-0,2": 1.0, "0,2-0,3": 1.1}, 1.0, {})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_lanes_have_each_cable_once_and_no_chip_twice(mesh: Mesh) -> None:
    found = lanes_of(mesh)
    assert sorted(pair for lane in found for pair in lane) == sorted(map(tuple, mesh.cables.tolist()))
    for lane in found:
        chips = [chip for pair in lane for chip in pair]
        assert len(set(chips)) == len(chips)
    assert len(found) <= 3 * mesh.n_axes


# -- all alike --------------------------------------------------------------------------------------------------------


class Known(CableWatch):
    """A watch that asks nobody: the cables that a test calls dead, and those that it calls answering."""

    dead: frozenset[Cable] = frozenset()  # type: ignore[assignment]  # in place of a property
    answering: frozenset[Cable] = frozenset()  # type: ignore[assignment]


BYTES_PER_S = 4e6
clock = threading.local()
"""The seconds of each member's own clock: they pass while messages arrive."""


@contextmanager
def clocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow, "time", SimpleNamespace(monotonic=lambda: getattr(clock, "now", 0.0)))
        yield


def slowed(group: Group, part_of: Callable[[int], float]) -> None:
    """Let what arrives take time on this member's clock, by a peer's part of the full rate."""
    receive = group.recv

    def recv(tensors: list[Any], peer: int, tag: int) -> Any:
        work = receive(tensors, peer, tag)
        wait, seconds = work.wait, tensors[0].nbytes / BYTES_PER_S / part_of(peer)

        def timed(timeout: timedelta) -> bool:
            clock.now = getattr(clock, "now", 0.0) + seconds
            return wait(timeout)

        work.wait = timed  # type: ignore[method-assign]
        return work

    group.recv = recv  # type: ignore[method-assign]


class Member:
    """A member of a group whose cables have the rates of a dictionary, which the test changes between calls."""

    def __init__(
        self, machine: Mesh, chips: Sequence[tuple[int, ...]], rank: int, group: Group, rates: dict[Any, float]
    ):
        self.watch = Known(chips[rank])
        self.watch.answering = frozenset(cable for cable in cables_of(machine) if chips[rank] in cable)
        slowed(group, lambda peer: rates.get((min(chips[rank], chips[peer]), max(chips[rank], chips[peer])), 1.0))
        mesh = mesh_of(chips, machine)
        assert mesh is not None
        self.group = MeshGroup(
            mesh,
            chips,
            group,  # type: ignore[arg-type]  # it has all that a channel needs
            Plans(once, hardware="ethernet-10g"),
            timedelta(seconds=30),
            watch=self.watch,
            with_rates=lambda rates: mesh_of(chips, with_rates(machine, rates)),
        )

    def ask(self) -> None:
        """Make the next call one before which all measure."""
        self.group._pace._since = time.monotonic() - 10 * LONGEST_S
        assert self.group._is_due()

    def reduce(self, rank: int) -> list[float]:
        payload = torch.full((3000,), float(rank + 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.group.all_reduce([payload], dist.ReduceOp.SUM)
        sums: list[float] = payload.unique().tolist()
        return sums


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_all_plan_for_the_rates_that_cables_have(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    cables = cables_of(mesh)
    parts = st.sampled_from([0.24, 0.26, 0.5, 0.9, 1.0])
    slowest = [
        {data.draw(st.sampled_from(cables)): data.draw(parts) for _ in range(data.draw(st.integers(0, 2)))}
        for _ in range(2)
    ]
    asks = [data.draw(st.integers(0, mesh.n_chips - 1)) for _ in slowest]

    def main(rank: int, group: Group) -> Any:
        rates: dict[Any, float] = {}
        member = Member(mesh, [mesh.chip(r) for r in range(mesh.n_chips)], rank, group, rates)
        found = [(member.group.mesh, member.reduce(rank))]
        for now, who in zip(slowest, asks, strict=True):
            # Nobody is in a call: all have left the one before, whose end each of them waits for.
            rates.clear()
            rates.update(now)
            if rank == who:
                member.ask()
            found.append((member.reduce(rank), member.group.mesh)[::-1])
        return found, member.watch.slow

    total = float(sum(range(1, mesh.n_chips + 1)))
    with clocks():
        members = on_every_thread(mesh.n_chips, main)
    assert not [member for member in members if isinstance(member, Exception)]
    for rank, (found, known) in enumerate(members):
        assert [sums for _, sums in found] == [[total]] * 3
        levels = [{cable: round(4 * part) / 4 for cable, part in now.items() if part < 0.6} for now in slowest]
        expected = [with_rates(mesh, {name_cable(c): Fraction(r) for c, r in level.items()}) for level in levels]
        assert [planned_for for planned_for, _ in found] == [mesh, *expected]
        assert known.keys() == {name_cable(cable) for cable in levels[-1] if mesh.chip(rank) in cable}


def test_a_cable_that_one_end_has_never_heard_over_is_not_accused() -> None:
    mesh, cable = Mesh("2x2"), ((0, 0), (0, 1))

    def main(rank: int, group: Group) -> Any:
        member = Member(mesh, [mesh.chip(r) for r in range(4)], rank, group, {cable: 0.25})
        if rank == 1:
            member.watch.answering -= {cable}
        if rank == 2:
            member.ask()
        return member.reduce(rank), member.group.mesh

    with clocks():
        assert on_every_thread(4, main) == [([10.0], mesh)] * 4


def test_where_no_cable_answers_nobody_measures() -> None:
    mesh = Mesh("2x2")

    def main(rank: int, group: Group) -> Any:
        member = Member(mesh, [mesh.chip(r) for r in range(4)], rank, group, {((0, 0), (0, 1)): 0.25})
        member.watch.answering = frozenset()
        member.group._pace._since = time.monotonic() - 10 * LONGEST_S
        return member.reduce(rank), member.group.mesh

    with pytest.MonkeyPatch.context() as patch, clocks():
        patch.delattr("meshmend.torch.mesh_group.find_rates")
        assert on_every_thread(4, main) == [([10.0], mesh)] * 4


def test_a_tile_names_cables_as_the_machine_does_and_its_other_groups_hear() -> None:
    machine, tile = Mesh("4x4"), [(2, 2), (2, 3), (3, 2), (3, 3)]
    cable = ((2, 3), (3, 3))

    def main(rank: int, group: Group) -> Any:
        member = Member(machine, tile, rank, group, {cable: 0.25})
        if rank == 0:
            member.ask()
        sums = member.reduce(rank)
        return sums, member.group.mesh, member.watch.slow

    known = {"2,3-3,3": Fraction(1, 4)}
    expected = Mesh("2x2", cable_rates={"0,1-1,1": "1/4"})
    with clocks():
        found = on_every_thread(4, main)
    assert found == [([10.0], expected, known if chip in cable else {}) for chip in tile]

    def hears(rank: int, group: Group) -> Any:
        member = Member(machine, tile, rank, group, {})
        member.watch.slow = found[rank][2]
        return member.reduce(rank), member.group.mesh

    assert on_every_thread(4, hears) == [([10.0], expected)] * 4


def test_a_member_that_measures_something_else_is_heard_by_all() -> None:
    mesh = Mesh("3x3")

    def main(rank: int, group: Group) -> Any:
        member = Member(mesh, [mesh.chip(r) for r in range(9)], rank, group, {})
        if rank == 4:
            said = {"1,1-1,2": Fraction(1, 8)}
            member.watch.learn = lambda rates: CableWatch.learn(member.watch, said)  # type: ignore[method-assign]
        if rank == 0:
            member.ask()
        return member.reduce(rank), member.group.mesh

    with clocks():
        assert on_every_thread(9, main) == [([45.0], Mesh("3x3", cable_rates={"1,1-1,2": "1/8"}))] * 9


def test_a_slow_cable_that_dies_is_dead_and_one_that_a_file_calls_slower_stays_so() -> None:
    mesh = Mesh("3x3", cable_rates={"0,0-0,1": "1/8"})
    first, other = ((0, 0), (0, 1)), ((1, 1), (1, 2))

    def main(rank: int, group: Group) -> Any:
        member = Member(mesh, [mesh.chip(r) for r in range(9)], rank, group, {first: 0.25, other: 0.25})
        if rank == 3:
            member.ask()
        found = [member.reduce(rank), member.group.mesh]
        if rank == 4:
            member.watch.dead = frozenset({other})
        return [*found, member.reduce(rank), member.group.mesh]

    slower = Mesh("3x3", cable_rates={"0,0-0,1": "1/8", "1,1-1,2": "1/4"})
    left = Mesh("3x3", cable_rates={"0,0-0,1": "1/8"}, failed_cables=["1,1-1,2"])
    with clocks():
        assert on_every_thread(9, main) == [[[45.0], slower, [45.0], left]] * 9


def test_a_watch_warns_once_of_a_slow_cable() -> None:
    watch = CableWatch((0, 1))
    with pytest.warns(UserWarning, match=r"Cable 0,1-0,2 has about 1/4 of the fastest cable's rate"):
        watch.learn({"0,1-0,2": Fraction(1, 4), "1,0-1,1": Fraction(1, 2), "0,1-1,1": Fraction(0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.learn({"0,1-0,2": Fraction(1, 8)})
    assert watch.slow == watch.rates == {"0,1-0,2": Fraction(1, 8)}
