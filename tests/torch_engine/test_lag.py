"""Who is slow, from the engine's queues: against a simulated link, and over a network of threads with their own clocks.

The simulations know what they have made slow. Real links are in tests/lab/test_lag.py.
"""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from meshmend import Mesh, plan
from meshmend.errors import ParameterError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")

from meshmend.torch import queue_times  # noqa: E402
from meshmend.torch.channel import Channel, Deadline  # noqa: E402
from meshmend.torch.engine import Engine  # noqa: E402
from meshmend.torch.queue_times import MOST_MESSAGES, Messages, QueueTimes, StepTimes  # noqa: E402
from meshmend.torch.queue_watch import EVERY, QueueWatch, clocks_apart, seconds_per_byte  # noqa: E402
from torch_engine.threads import Group, on_every_thread  # noqa: E402

MESH = Mesh("3x3", failed=["2,2"])
MEMBERS = [3, 1, 0, 2, 7, 6, 5, 4]
"""The group's number of each rank."""
BYTES, RATE = 1000, 1e6
Floats = NDArray[np.float64]


def queue(dice: np.random.Generator, n: int, rate: float) -> tuple[Floats, Floats, Floats]:
    """When messages leave and arrive over a link that carries one at a time, some in bursts and some alone."""
    left = np.sort(dice.integers(0, n, n) * 2 * BYTES / RATE)
    sizes = dice.integers(BYTES // 2, BYTES, n).astype(np.float64)
    came, free = np.empty(n), 0.0
    for number in range(n):
        free = came[number] = max(left[number], free) + sizes[number] / rate
    return left, came, sizes


@pytest.mark.parametrize("rate", [RATE, RATE / 2])
@pytest.mark.parametrize("ahead", [0.0, -5e4, 1e5])
def test_a_links_rate_is_found_whatever_the_two_clocks_say(rate: float, ahead: float) -> None:
    dice = np.random.default_rng(7)
    left, came, sizes = queue(dice, 50, rate)
    back_left, back_came, _ = queue(dice, 50, rate)
    found = clocks_apart(back_left, back_came + ahead, left + ahead, came)
    assert found == pytest.approx(ahead, abs=0.5 * BYTES / rate)  # the fastest ones differ in size
    assert seconds_per_byte(left + ahead - ahead, came, sizes, [50]) == pytest.approx(1 / rate)
    assert seconds_per_byte(left + ahead - found, came, sizes, [50]) == pytest.approx(1 / rate, rel=0.2)


def test_arrivals_that_nobody_saw_are_left_out() -> None:
    left, came, sizes = queue(np.random.default_rng(1), 200, RATE)
    came[np.random.default_rng(2).random(200) < 0.4] = math.nan
    assert seconds_per_byte(left, came, sizes, [200]) == pytest.approx(1 / RATE)
    assert np.isnan(seconds_per_byte(left, np.full(200, math.nan), sizes, [100, 100])).all()
    assert np.isnan(seconds_per_byte(np.empty(0), np.empty(0), np.empty(0), [0, 0])).all()
    assert math.isnan(clocks_apart(left, np.full(200, math.nan), left, came))


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_computing_is_what_is_neither_a_call_nor_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(queue_times, "time", clock)
    times = QueueTimes()
    for number in range(3):
        clock.now += 1.0
        with times.apart():  # a quorum
            clock.now += 50
        clock.now += 2.0
        with times.call():
            times.sent(1, 10)
            asked_at = clock.now
            clock.now += 30
            times.arrived(2, 20, asked_at)
            times.arrived(2, 30, clock.now)
            with times.apart():
                clock.now += 1
            clock.now += 1
        clock.now += 0.25
        ended = times.end_step()
        assert ended.step_s == 85.25
        assert ended.n_calls == 1
        assert ended.compute_s == 3.25 if number else math.isnan(ended.compute_s)
        assert ended.sent[1].n_bytes == [10]
        assert ended.arrived[2].n_bytes == [20, 30]
        assert ended.arrived[2].at[0] == asked_at + 30
        assert math.isnan(ended.arrived[2].at[1])
    many = Messages()
    for number in range(2 * MOST_MESSAGES):
        many.add(float(number), 1)
    assert len(many.at) == len(many.n_bytes) == MOST_MESSAGES


class Simulated:
    """The times of one chip whose clock is its own: computing with jitter, and links with queues."""

    def __init__(self, rank: int, slow: int | None, half: tuple[int, int] | None) -> None:
        self.rank, self.slow = rank, slow
        self.half = frozenset(half or ())
        self.n_steps = 0

    def end_step(self) -> StepTimes:
        step, self.n_steps = self.n_steps, self.n_steps + 1
        dice = np.random.default_rng([step, self.rank])
        found = StepTimes(compute_s=0.1 * float(np.exp(0.05 * dice.standard_normal())), step_s=0.2, n_calls=1)
        if self.rank == self.slow:
            found.compute_s *= 1.5
        for other in map(int, MESH.neighbours[self.rank][MESH.neighbours[self.rank] >= 0]):
            rate = RATE / 2 if {self.rank, other} == self.half else RATE
            member = MEMBERS[other]
            for sender, moments in ((self.rank, found.sent[member]), (other, found.arrived[member])):
                # Both ends draw the same messages, each reads its own clock.
                left, came, sizes = queue(np.random.default_rng([step, sender, self.rank + other]), 12, rate)
                at = (left if sender == self.rank else came) + 1000 * step + 77.0 * self.rank
                moments.at, moments.n_bytes = at.tolist(), sizes.astype(int).tolist()
        return found

    def apart(self) -> Any:
        return threading.Lock()


def watched(slow: int | None, half: tuple[int, int] | None, n_steps: int = 40) -> list[Any]:
    """Return the signs that each member gets."""

    def main(number: int, group: Group) -> list[tuple[int, str]]:
        watch = QueueWatch(Channel(group), MESH, MEMBERS)  # type: ignore[arg-type]  # a group of threads
        watch.times = Simulated(MEMBERS.index(number), slow, half)  # type: ignore[assignment]
        deadline = Deadline(timedelta(seconds=30))
        signs = [sign for step in range(n_steps) for sign in watch.add(step, deadline)]
        return [(sign.step, str(sign.suspects[0])) for sign in signs]

    return on_every_thread(MESH.n_chips, main)


def test_all_members_name_the_same_chip_and_cable_within_50_steps() -> None:
    cable = int(MESH.rank((1, 0))), int(MESH.rank((1, 1)))
    found = watched(int(MESH.rank((0, 2))), cable)
    assert found == [found[0]] * MESH.n_chips
    assert {name for _, name in found[0]} == {"0,2", "1,0-1,1"}
    assert all(step < 50 for step, _ in found[0])


def test_a_clean_mesh_names_nobody() -> None:
    assert watched(None, None) == [[]] * MESH.n_chips


def test_a_cable_that_is_known_to_be_slow_is_not_news() -> None:
    """Its rate is in the plan: what a byte takes is compared with what it should take."""
    mesh = Mesh("3x3", cable_rates={"0,0-0,1": "1/2"})
    channel = Channel(on_every_thread(mesh.n_chips, lambda _, group: group)[0])
    watch = QueueWatch(channel, mesh, range(mesh.n_chips))
    assert [watch._rates[way] for way in sorted(watch._near)] == [1.0, 0.5]


def test_calls_are_watched_and_exchanged_in_order() -> None:
    mesh = Mesh("2x2")
    schedule = plan(mesh, "hamiltonian")

    def main(rank: int, group: Group) -> tuple[bool, int, list[int]]:
        engine = Engine(schedule, rank, group)  # type: ignore[arg-type]  # a group of threads
        watch = QueueWatch(engine.channel, mesh, engine.members)
        with pytest.raises(ParameterError, match="watched already"):
            QueueWatch(engine.channel, mesh, engine.members)
        seen, exact = [], True
        for step in range(EVERY):
            payload = torch.full((100,), rank + 1)
            engine.all_reduce(payload)
            exact &= bool((payload == 10).all())
            seen.append(len(engine.channel.times._step.sent))  # type: ignore[union-attr]
            assert engine.in_turn(lambda _, deadline, step=step: watch.add(step, deadline)) == ()  # type: ignore[misc]
        watch.close()
        engine.all_reduce(payload)
        return exact, watch.stragglers._chips_late._n_steps, seen

    found = on_every_thread(4, main)
    assert found == [(True, EVERY, [len(set(plan_peers(schedule, rank)))] * EVERY) for rank in range(4)]


def plan_peers(schedule: Any, rank: int) -> list[int]:
    return [int(dst) for src, dst in zip(schedule.src, schedule.dst, strict=True) if src == rank]


def test_times_of_different_calls_are_left_out() -> None:
    mesh = Mesh("2x2")
    schedule = plan(mesh, "hamiltonian")

    def main(rank: int, group: Group) -> int:
        engine = Engine(schedule, rank, group)  # type: ignore[arg-type]
        watch = QueueWatch(engine.channel, mesh, engine.members)
        for step in range(2, 2 * EVERY):  # the first exchange is of six steps
            engine.all_reduce(torch.ones(8))
            if rank == 2 and step == EVERY + 3:
                watch.times.end_step()
            engine.in_turn(lambda _, deadline, step=step: watch.add(step, deadline))  # type: ignore[misc]
        return watch.stragglers._chips_late._n_steps

    assert on_every_thread(4, main) == [EVERY - 2] * 4


@pytest.mark.slow
@pytest.mark.parametrize("how", ["slow", "nothing"])
def test_a_slow_chip_leaves_a_job_under_torchft_and_no_step_is_undone(how: str, tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: pip install 'meshmend[torch]'")
    import meshmend.torch as mmt
    from meshmend.lab.chips import Chips
    from meshmend.quarantine import QuarantineList
    from torch_engine.lying import Lying, LyingJob, expected, finish, start

    n_steps, slow = 90, (0, 1)
    checks = mmt.Checks(digests_every=0, stragglers=True)
    job = LyingJob("3x3", tmp_path, checks, (Lying(slow, how, 10),), steps=n_steps, pause_s=0.1)
    with Chips() as chips:
        start(job, chips)
        found = finish(job, chips, timeout_s=300)
    entries = QuarantineList(job.shared).active()
    if how == "nothing":
        assert entries == ()
        assert all(end["steps"] == dict.fromkeys(range(1, n_steps + 1), 9) for end in found.values())
        return
    (entry,) = entries
    assert str(entry.suspect) == "0,1"
    assert entry.why.startswith("lag at step ")
    assert 10 + 24 <= entry.step <= 10 + 50
    assert "0,1 is in quarantine until" in found[slow]["left"]
    for chip, end in found.items():
        if chip != slow:
            n_before = sum(members == 9 for members in end["steps"].values())
            assert end["steps"] == {step: 9 if step <= n_before else 8 for step in range(1, n_steps + 1)}
            assert entry.step - 1 <= n_before <= entry.step + 8
            assert end["weights"] == expected(end["steps"]), chip
            assert not any("go back" in event["why"] for event in end["events"])
