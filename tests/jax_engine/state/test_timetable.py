"""When a job keeps its state: by what copies cost, simulated step by step, and in a real job."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_engine.restart_cases import Started, assert_is_step
from meshmend.jax.state.timetable import FIRST_AFTER, LARGEST_SLOWDOWN, VOTE_EVERY_S, Timetable, Wishes

CALLERS = [(0, 0.0), (8, 5.0), (10, 5.0), (20, 5.0), (50, 5.0), (100, 30.0), (5, 1.0)]
"""What the body of the caller's loop does: after every so many steps, it takes so many seconds."""


@dataclass
class Loop:
    """Hosts that run a training loop together; each has a clock of its own, which began at another time."""

    step_s: float = 0.1
    cut_s: float = 0.0
    write_s: tuple[float, ...] = (0.0,)
    """Seconds that each host takes to write a copy."""
    caller: tuple[int, float] = (0, 0.0)
    noise: float = 0.0
    shares_cores: bool = True
    now: float = 0.0
    kept: list[int] = field(default_factory=list)
    votes: list[int] = field(default_factory=list)
    late: int = 0

    def clock(self, host: int) -> float:
        return self.now + 1000 * host

    def run(self, n_steps: int) -> Loop:
        rng = np.random.default_rng(0)
        tables = [
            Timetable("auto", leads=i == 0, shares_cores=self.shares_cores, clock=partial(self.clock, i))
            for i in range(len(self.write_s))
        ]
        written_at = [0.0] * len(tables)
        for step in range(1, n_steps + 1):
            self.now += self.step_s * (1 + self.noise * rng.random())
            began = self.now
            for table, at in zip(tables, written_at, strict=True):
                if table._cut is not None and at <= began:
                    self.now = at
                    table.copy_is_written()
                    self.now = began
                table.tick(step)
            assert len({table.copy_due(step) for table in tables}) == 1, "hosts must agree on the copies"
            assert len({table.vote_due(step) for table in tables}) == 1, "and on the votes"
            due = tables[0].copy_due(step) or tables[0].vote_due(step)
            wishes = Wishes(*map(max, zip(*(table.wishes() for table in tables), strict=True))) if due else Wishes()
            if tables[0].copy_due(step):
                is_late = any(at > self.now for at in written_at)
                for table in tables:
                    table.voted(step, partial(Wishes, *wishes))
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
                    table.voted(step, partial(Wishes, *wishes))
            every, seconds = self.caller
            if every and step % every == 0:
                self.now += seconds
        return self

    @property
    def interval(self) -> float:
        """Steps between copies in the end."""
        late = self.kept[len(self.kept) // 2 :]
        return float(np.mean(np.diff(late)))


@pytest.mark.parametrize("cost_s", [0.0, 0.002, 0.02, 0.3])
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


def test_the_second_copy_knows_what_the_first_has_cost() -> None:
    found = Loop(step_s=1.0, cut_s=1.0, write_s=(2.0,)).run(400)
    assert found.kept[:2] == [FIRST_AFTER, pytest.approx(FIRST_AFTER + 3.0 / LARGEST_SLOWDOWN, abs=3)]


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


def test_a_loop_that_sleeps_keeps_copies_as_often_as_one_that_does_not(tmp_path: Path) -> None:
    kept = {}
    for pause_s in (0.0, 0.5):
        job = Started(memory=tmp_path / str(pause_s), memory_every="auto")
        job.restore()
        for step in range(1, 61):
            job.keep(step)
            time.sleep(0.02 if step % 5 else pause_s)
        job.crash()
        kept[pause_s] = len(job.events("kept"))
    assert kept[0.5] >= 0.5 * kept[0.0]
    assert kept[0.0] > 1


def test_the_last_step_is_kept_where_there_is_no_disk(tmp_path: Path) -> None:
    job = Started(memory=tmp_path, memory_every="auto")
    job.restore()
    job.keep(1)
    job.keeper.keep(2, *job.values(2), extra=["after", 2], save=True)
    job.keeper.close()
    again = Started(memory=tmp_path, memory_every="auto")
    assert_is_step(again, again.restore(), 2)
