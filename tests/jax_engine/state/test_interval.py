"""How often copies are kept: by what they cost, simulated step by step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jax_engine.restart_cases import Started, assert_is_step
from meshmend.jax.state.interval import FIRST_AFTER, FIRST_INTERVAL, LARGEST_SLOWDOWN, CopyInterval
from meshmend.jax.state.mirror import AGREED_AFTER


def simulate(step_s: float, cost_s: float, written_s: float, n_steps: int, noise: float = 0.0) -> tuple[list[int], Any]:
    """A loop in which each copy makes some of the next steps longer: its steps with a copy, and how it went."""
    now, rng = 0.0, np.random.default_rng(0)
    interval = CopyInterval("auto", 0, lambda: now)
    proposals: list[tuple[int, int]] = []
    kept: list[int] = []
    written_at = -1.0
    for step in range(1, n_steps + 1):
        now += step_s * (1 + noise * rng.random())
        # The loop notices late what delays the devices.
        now += cost_s / 3 * sum(3 <= step - copied <= 5 for copied in kept[-6:])
        is_writing = now < written_at
        if interval.due(step, is_writing=is_writing):
            agreed = [one for at, one in proposals if at + AGREED_AFTER <= step]
            proposals.append((step, interval.wanted(is_writing=is_writing)))
            interval.begun(step, agreed[-1] if agreed else None)
            if not is_writing:
                kept.append(step)
                written_at = now + written_s
    return kept, SimpleNamespace(seconds=now, interval=interval)


@pytest.mark.parametrize("cost", [0.01, 0.03, 0.1, 0.5, 2.0, 7.0])
def test_copies_slow_training_down_by_what_they_may(cost: float) -> None:
    """The oracle: a copy that costs c steps may be kept every c / 0.03 of them."""
    kept, _ = simulate(1.0, cost, 0.1, 5000)
    assert kept[0] == FIRST_AFTER
    assert kept[1] - kept[0] == FIRST_INTERVAL
    late = kept[len(kept) // 2 :]
    expected = max(1, cost / LARGEST_SLOWDOWN)
    assert np.mean(np.diff(late)) == pytest.approx(expected, rel=0.15, abs=1.01)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_does_not_make_copies_seem_expensive(noise: float) -> None:
    kept, found = simulate(1.0, 0.5, 0.1, 3000, noise)
    _, bare = simulate(1.0, 0.0, 0.1, 3000, noise)
    assert found.seconds / bare.seconds < 1 + 1.5 * LARGEST_SLOWDOWN
    assert len(kept) > 3000 / (0.5 / LARGEST_SLOWDOWN) / 3


def test_copies_that_take_long_to_write_come_more_seldom() -> None:
    kept, _ = simulate(1.0, 0.0, 50.0, 3000)
    assert min(np.diff(kept[4:])) >= 50


def test_a_number_of_steps_is_what_it_says() -> None:
    every = CopyInterval(3, 100)
    assert [step for step in range(101, 111) if every.due(step, is_writing=True)] == [102, 105, 108]
    assert not any(CopyInterval(0, 0).due(step, is_writing=False) for step in range(10))


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
    # While a write hangs, copies that are due are made by the devices and dropped; the loop goes on.
    monkeypatch.setattr(type(mirror), "is_writing", property(lambda _: True))
    job.keep(*range(FIRST_AFTER + 1, FIRST_AFTER + 3 * FIRST_INTERVAL))
    assert n_written == 1
    monkeypatch.undo()
    monkeypatch.setattr(mirror.memory, "write", counted)
    job.keep(*range(FIRST_AFTER + 3 * FIRST_INTERVAL, FIRST_AFTER + 9 * FIRST_INTERVAL))
    mirror.wait()
    assert n_written >= 2
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
