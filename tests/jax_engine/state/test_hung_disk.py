"""A shared disk that hangs while a job trains: steps go on, it is said once, and saves resume when it is back."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_engine.restart_cases import Started, assert_is_step, finish_save
from meshmend.errors import RestartError, TransientError
from meshmend.jax.state.disk.disk import Disk
from meshmend.jax.state.disk.orbax import ChunkStore

ocp = pytest.importorskip("orbax.checkpoint")

LIMIT_S = 0.5
"""`disk_timeout_s` of the jobs here."""
PATIENCE_S = 60.0
"""Far more than anything here takes, for machines that are busy with something else."""
WHERE = {"as it is begun": (ocp.CheckpointManager, "save"), "as it is written": (ChunkStore, "commit")}


@pytest.fixture
def back() -> Iterator[threading.Event]:
    """When the disk answers again: at the latest at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def hang(patch: pytest.MonkeyPatch, where: str, back: threading.Event) -> None:
    """Let a call to the disk hang until it is back."""
    kind, name = WHERE[where]
    real = getattr(kind, name)
    patch.setattr(kind, name, lambda *given, **named: back.wait() and real(*given, **named))


def started(folder: Path, **options: Any) -> Started:
    limits: Any = {"disk_every": 1, "disk_timeout_s": LIMIT_S}
    job = Started(**{"memory": folder / "memory", "disk": folder / "disk"} | limits | options)
    job.restore()
    return job


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("where", WHERE)
def test_training_goes_on_while_a_save_hangs_and_says_so(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: threading.Event
) -> None:
    job = started(tmp_path)
    job.keep(1)
    until(lambda: bool(job.keeper.checkpoints.note_saved() or job.events("saved")))  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        hang(patch, where, back)
        begun = time.monotonic()
        with pytest.warns(RuntimeWarning, match=r"is not saved on disk: the checkpoint of step 2 hangs") as said:
            job.keep(2, 3)
        assert time.monotonic() - begun < LIMIT_S + PATIENCE_S / 2
        assert len(said) == 1
        # From now on nobody waits for it, and nobody says it again.
        begun = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            job.keep(*range(4, 24))
        assert time.monotonic() - begun < 20 * LIMIT_S, "training waited for the disk in every step"
        assert [event["step"] for event in job.events("saved")] == [1]
        assert [event["step"] for event in job.events("not saved")][-20:] == list(range(4, 24))
        back.set()
        until(lambda: job.keeper.checkpoints._saving._over.is_set())  # type: ignore[union-attr]
    job.keep(24)
    until(lambda: job.keeper.checkpoints._saving._over.is_set())  # type: ignore[union-attr]
    job.keeper.close()
    assert [event["step"] for event in job.events("saved")][-1] == 24
    again = started(tmp_path / "elsewhere", disk=tmp_path / "disk", memory_every=0)
    assert_is_step(again, again.keeper.restore(again.params, again.state), 24)


def test_the_end_waits_for_a_hanging_save_but_not_for_ever_and_copies_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: threading.Event
) -> None:
    job = started(tmp_path, disk_every=100)
    with monkeypatch.context() as patch:
        hang(patch, "as it is written", back)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a busy machine may be too slow to begin it in time
            job.keeper.keep(1, *job.values(1), extra=["after", 1], save=True)
        with pytest.warns(RuntimeWarning, match="Step 1 is not saved on disk: the checkpoint of step 1 hangs"):
            job.keeper.close()
    # The folder is free, and the copies in memory are there.
    again = Started(memory=tmp_path / "memory")
    assert_is_step(again, again.restore(), 1)
    again.keeper.close()


def test_the_barriers_of_a_save_are_no_programs_on_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax's barriers are, unless it is told which processes there are; beside training they could deadlock."""
    multihost = pytest.importorskip("orbax.checkpoint._src.multihost.multihost")
    barriers: list[Any] = []
    monkeypatch.setattr(multihost, "sync_global_processes", lambda *_, **how: barriers.append(how.get("processes")))
    job = started(tmp_path, disk_timeout_s=PATIENCE_S)
    job.keep(1, 2)
    job.keeper.close()
    assert [event["step"] for event in job.events("saved")] == [1, 2]
    assert len(barriers) > 2
    assert all(processes == {0} for processes in barriers)


def test_a_step_asks_no_disk_and_starts_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    begun: list[str] = []
    steps, start = Disk.steps, threading.Thread.start

    def ask(disk: Disk) -> list[int]:
        asked.append(threading.current_thread().name)
        return steps(disk)

    def begin(thread: threading.Thread) -> None:
        begun.append(thread.name)
        start(thread)

    monkeypatch.setattr(Disk, "steps", ask)
    job = started(tmp_path, disk_every=20, memory_every=0)
    asked.clear()
    monkeypatch.setattr(threading.Thread, "start", begin)
    job.keep(*range(1, 20))
    assert not asked
    assert not begun
    job.keep(20)
    job.keeper.close()
    assert set(asked) == {"meshmend-checkpoint"}


def test_a_checkpoint_over_another_s_claim_is_not_written_and_stops_the_job(tmp_path: Path) -> None:
    job = started(tmp_path, disk_every=2, disk_timeout_s=PATIENCE_S)
    Disk(tmp_path / "disk").hold_claim(7)

    job.keep(2)
    with pytest.raises(RestartError, match="continues as attempt 7, while this one was attempt 1"):
        finish_save(job)
    assert not (tmp_path / "disk" / "2").exists()
    job.keeper.abandon()


def until(happened: Any) -> None:
    """Return when it has; fail if it takes too long."""
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("what", ["facts", "_read"])
def test_a_checkpoint_that_hangs_while_it_is_read_is_tried_again_and_no_older_one(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: threading.Event
) -> None:
    job = started(tmp_path, memory_every=0, disk_timeout_s=PATIENCE_S)
    for step in (1, 2):
        job.keep(step)
        finish_save(job)
    job.keeper.close()
    with monkeypatch.context() as patch:
        real, n_calls = getattr(Disk, what), 0

        def hung(self: Disk, *given: Any) -> Any:
            nonlocal n_calls
            n_calls += 1
            is_offer = what == "facts" and n_calls <= 2  # of two checkpoints; the disk hangs after these
            return real(self, *given) if is_offer else back.wait() and real(self, *given)

        patch.setattr(Disk, what, hung)
        again = Started(memory_every=0, disk=tmp_path / "disk", disk_timeout_s=LIMIT_S)
        with pytest.raises(TransientError, match=r"step 2 .*no answer within .*goes back to no older one"):
            again.restore()
        back.set()
    third = Started(memory_every=0, disk=tmp_path / "disk")
    assert_is_step(third, third.restore(), 2)
