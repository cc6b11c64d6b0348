"""When a job keeps its state: by what copies cost and by the clock, simulated step by step, and in a real job."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_engine.restart_cases import Started, assert_is_step
from meshmend.errors import ParameterError
from meshmend.jax.state.timetable import (
    FIRST_AFTER,
    KNOWN_AFTER,
    LARGEST_SLOWDOWN,
    VOTE_EVERY_S,
    Timetable,
    Wishes,
)
from rows import others_slow

CALLERS = [(0, 0.0), (8, 5.0), (10, 5.0), (20, 5.0), (50, 5.0), (100, 30.0), (5, 1.0)]
"""What the body of the caller's loop does: after every so many steps, it takes so many seconds."""


@dataclass
class Loop:
    """Hosts that run a training loop together; each has a clock of its own, which began at another time.

    And, with `drift`, each goes faster than the one before it by that share.
    """

    step_s: float = 0.1
    cut_s: float = 0.0
    write_s: tuple[float, ...] = (0.0,)
    """Seconds that each host takes to write a copy."""
    caller: tuple[int, float] = (0, 0.0)
    noise: float = 0.0
    shares_cores: bool = True
    memory_every: int | str = "auto"
    disk_every: int | str = 0
    drift: float = 0.0
    now: float = 0.0
    step: int = 0
    kept: list[int] = field(default_factory=list)
    votes: list[int] = field(default_factory=list)
    saved: list[tuple[int, float]] = field(default_factory=list)
    """Steps with a checkpoint, and when it began."""
    late: int = 0

    def clock(self, host: int) -> float:
        return self.now * (1 + self.drift * host) + 1000 * host

    def outcome(self, at: int, wishes: Wishes) -> Wishes:
        assert self.step >= at + KNOWN_AFTER, "the loop would wait for the vote"
        return wishes

    def run(self, n_steps: int) -> Loop:
        rng = np.random.default_rng(0)
        tables = [
            Timetable(
                self.memory_every,
                disk_every=self.disk_every,
                leads=i == 0,
                shares_cores=self.shares_cores,
                clock=partial(self.clock, i),
            )
            for i in range(len(self.write_s))
        ]
        written_at = [0.0] * len(tables)
        for step in range(1, n_steps + 1):
            self.now += self.step_s * (1 + self.noise * rng.random())
            began, self.step = self.now, step
            for table, at in zip(tables, written_at, strict=True):
                if table._cut is not None and at <= began:
                    self.now = at
                    table.copy_is_written()
                    self.now = began
                table.tick(step)
            assert len({table.copy_due(step) for table in tables}) == 1, "hosts must agree on the copies"
            assert len({table.vote_due(step) for table in tables}) == 1, "and on the votes"
            assert len({table.save_due(step) for table in tables}) == 1, "and on the checkpoints"
            due = tables[0].copy_due(step) or tables[0].vote_due(step)
            wishes = Wishes(*map(max, zip(*(table.wishes() for table in tables), strict=True))) if due else Wishes()
            if tables[0].copy_due(step):
                is_late = any(at > self.now for at in written_at)
                for table in tables:
                    table.voted(step, partial(self.outcome, step, wishes))
                    table.copied(step)
                    if not is_late:
                        table.copy_begins()
                self.now += self.cut_s
                for i, table in enumerate(tables if not is_late else []):
                    table.copy_is_cut()
                    written_at[i] = self.now + self.write_s[i]
                self.late += is_late
                self.kept += [] if is_late else [step]
            elif due:
                self.votes.append(step)
                for table in tables:
                    table.voted(step, partial(self.outcome, step, wishes))
            if tables[0].save_due(step):
                self.saved.append((step, self.now))
                for table in tables:
                    table.saved(step)
            every, seconds = self.caller
            if every and step % every == 0:
                self.now += seconds
        return self

    @property
    def interval(self) -> float:
        """Steps between copies in the end."""
        late = self.kept[len(self.kept) // 2 :]
        return float(np.mean(np.diff(late)))


@pytest.mark.parametrize("cost_s", others_slow([0.0, 0.002, 0.02, 0.3], quick=[0.0, 0.02]))
@pytest.mark.parametrize("caller", CALLERS[1:])
def test_the_callers_own_time_is_not_charged_to_copies(caller: tuple[int, float], cost_s: float) -> None:
    alone = Loop(cut_s=cost_s / 2, write_s=(cost_s / 2,)).run(5_000).interval
    beside = Loop(cut_s=cost_s / 2, write_s=(cost_s / 2,), caller=caller).run(5_000).interval
    assert alone / 2 <= beside <= 2 * alone
    if not cost_s:
        assert alone == 1


@pytest.mark.parametrize("cost", [0.01, 0.03, 0.1, 0.5, 2.0, 7.0])
def test_copies_slow_training_down_by_what_they_may(cost: float) -> None:
    """The oracle: a copy that costs c steps may be kept every c / 0.03 of them."""
    found = Loop(step_s=1.0, cut_s=cost / 2, write_s=(cost / 2,)).run(5000)
    assert found.kept[0] == FIRST_AFTER
    assert found.interval == pytest.approx(max(1, cost / LARGEST_SLOWDOWN), rel=0.15, abs=1.01)


def test_the_slowest_host_counts_and_all_agree() -> None:
    found = Loop(step_s=0.1, write_s=(0.01, 0.3, 0.02)).run(3000)
    assert found.interval == pytest.approx(0.3 / LARGEST_SLOWDOWN / 0.1, rel=0.1)


@pytest.mark.parametrize("noise", [0.1, 0.3, 1.0])
def test_noise_does_not_make_copies_seem_expensive(noise: float) -> None:
    found = Loop(step_s=1.0, cut_s=0.1, write_s=(0.4,), noise=noise).run(3000)
    assert found.interval == pytest.approx(0.5 / LARGEST_SLOWDOWN / (1 + noise / 2), rel=0.1)


def test_where_nobody_waits_for_writing_copies_leave_it_half_of_the_time() -> None:
    found = Loop(step_s=1.0, write_s=(50.0,), shares_cores=False).run(3000)
    assert found.interval == pytest.approx(100, abs=3)
    assert not found.late


@pytest.mark.parametrize("step_s", [0.001, 0.05, 3.0])
def test_votes_between_rare_copies_are_about_a_second_apart(step_s: float) -> None:
    found = Loop(step_s=step_s, write_s=(30.0,), shares_cores=True).run(6000)
    assert len(found.votes) < 40 + found.now / VOTE_EVERY_S
    late = np.diff(found.votes[len(found.votes) // 2 :])
    assert np.median(late) * step_s == pytest.approx(max(VOTE_EVERY_S, step_s), rel=0.1)


def test_a_number_of_steps_is_what_it_says() -> None:
    every = Timetable(3, 100)
    assert [step for step in range(101, 111) if every.copy_due(step)] == [102, 105, 108]
    assert not any(every.vote_due(step) for step in range(101, 111))
    assert not any(Timetable(0).copy_due(step) for step in range(10))


@pytest.mark.parametrize(("step_s", "n_hosts"), [(0.1, 1), (0.3, 3), (2.0, 40)])
@pytest.mark.parametrize(("every", "first_s", "every_s"), [("6min", 60, 360), ("90s", 60, 90), ("20 s", 20, 20)])
def test_checkpoints_come_by_time_and_the_first_after_a_minute(
    every: str, first_s: float, every_s: float, step_s: float, n_hosts: int
) -> None:
    """The oracle is the wall clock: no earlier than by the steps that a vote takes, no later than by a vote."""
    found = Loop(step_s, write_s=(0.0,) * n_hosts, disk_every=every, memory_every=0).run(round(4.5 * every_s / step_s))
    times = [0.0, *(at for _, at in found.saved)]
    expected = [first_s, *[every_s] * (len(times) - 2)]
    assert len(expected) >= 4
    for seconds, wanted in zip(np.diff(times), expected, strict=True):
        assert wanted - (KNOWN_AFTER + 1) * step_s <= seconds <= wanted + VOTE_EVERY_S + 2 * step_s
    assert len(found.votes) < 10 + found.now / VOTE_EVERY_S


@pytest.mark.parametrize("memory_every", [0, 1, 7, "auto"])
@pytest.mark.parametrize("cost_s", [0.0, 0.5])
def test_checkpoints_come_as_often_whatever_is_kept_in_memory(memory_every: int | str, cost_s: float) -> None:
    """Also where every step has a copy and a vote: one checkpoint per interval, however many votes ask for it."""
    hosts = (cost_s, cost_s / 2)
    found = Loop(0.1, write_s=hosts, memory_every=memory_every, disk_every="30s").run(3000)
    assert len(found.saved) == pytest.approx(10, abs=1)


def test_clocks_that_differ_never_part_the_hosts() -> None:
    """The fastest clock asks for the checkpoint, and all begin it after the same step; `Loop` asserts that."""
    found = Loop(0.1, write_s=(0.01, 0.02, 0.03), drift=0.5, disk_every="40s", noise=0.5).run(3000)
    assert np.diff([at for _, at in found.saved]) == pytest.approx(20, abs=2)


def test_long_steps_have_their_first_checkpoint_with_the_first_vote() -> None:
    found = Loop(step_s=60, write_s=(1.0, 1.0), disk_every="10min").run(60)
    steps = [step for step, _ in found.saved]
    assert steps[0] == FIRST_AFTER + KNOWN_AFTER
    assert set(np.diff(steps)) <= {9, 10, 11}


def test_checkpoints_after_a_number_of_steps_need_no_clock() -> None:
    found = Loop(step_s=60, memory_every=0, disk_every=20).run(100)
    assert [step for step, _ in found.saved] == [20, 40, 60, 80, 100]
    assert not found.votes


def test_a_keeper_begins_checkpoints_by_its_clock(tmp_path: Path) -> None:
    now = [0.0]
    for memory_every in (0, 1, "auto"):
        disk = tmp_path / str(memory_every)
        job = Started(memory=disk / "memory", memory_every=memory_every, disk=disk, disk_every="10min")
        job.restore()
        job.keeper._table._clock = lambda: now[0]
        for step in range(1, 19):
            now[0] += 60
            job.keep(step)
        job.crash()
        begun = [event["step"] for event in job.events("checkpoint")]
        assert begun == [7, 17]  # votes from step 4 on, known three steps later; ten steps are ten minutes
        again = Started(memory_every=0, disk=disk)
        assert_is_step(again, again.restore(), 17)


def test_what_is_no_time_is_refused_before_anything_is_restored(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"'10 minutes' is not a time\. Write it with its unit"):
        Started(disk=tmp_path, disk_every="10 minutes")


def test_a_late_copy_is_left_out_and_never_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Started(memory=tmp_path, memory_every="auto")
    job.restore()
    mirror: Any = job.keeper._mirror
    assert mirror is not None
    n_written = 0
    write = mirror.memory.write

    def counted(copy: Any) -> int:
        nonlocal n_written
        n_written += 1
        return int(write(copy))

    monkeypatch.setattr(mirror.memory, "write", counted)
    job.keep(*range(1, FIRST_AFTER + 1))
    mirror.wait()
    assert n_written == 1
    table = job.keeper._table
    monkeypatch.setattr(table, "copy_due", lambda _: True)
    # While a write hangs, copies that are due are made by the devices and dropped; the loop goes on.
    monkeypatch.setattr(type(mirror), "is_writing", property(lambda _: True))
    job.keep(*range(FIRST_AFTER + 1, FIRST_AFTER + 9))
    assert n_written == 1
    monkeypatch.undo()
    monkeypatch.setattr(mirror.memory, "write", counted)
    monkeypatch.setattr(table, "copy_due", lambda _: True)
    job.keep(FIRST_AFTER + 9)
    mirror.wait()
    assert n_written == 2
    job.crash()
    again = Started(memory=tmp_path, memory_every="auto")
    found = again.restore()
    assert found.step > FIRST_AFTER
    assert_is_step(again, found, found.step)


def test_the_last_step_is_kept_where_there_is_no_disk(tmp_path: Path) -> None:
    job = Started(memory=tmp_path, memory_every="auto")
    job.restore()
    job.keep(1)
    job.keeper.keep(2, *job.values(2), extra=["after", 2], save=True)
    job.keeper.close()
    again = Started(memory=tmp_path, memory_every="auto")
    assert_is_step(again, again.restore(), 2)
