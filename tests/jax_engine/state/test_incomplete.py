"""A state whose parts are partly with hosts that are absent: nobody begins anew, and nothing is removed."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jax_engine.restart_cases import Started, assert_is_step
from meshmend.errors import RestartError
from meshmend.jax.state.holdings import Record
from meshmend.jax.state.memory.copies import Copy
from meshmend.launch.environment import LAUNCHER, Launch
from waiting import until

Options = dict[str, Any]


@pytest.fixture
def kept(tmp_path: Path) -> Options:
    """What a job has kept of steps 3 and 4 in memory."""
    options: Options = {"memory": tmp_path / "memory"}
    job = Started(**options)
    job.restore()
    job.keep(3, 4)
    job.crash()
    return options


@pytest.fixture
def lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if half of the parts had been with hosts 1 and 2."""
    offer = Copy.offer

    def of_survivors(self: Copy, *given: Any) -> dict[str, Any]:
        found = offer(self, *given)
        return found | {"parts": found["parts"][:2], "hosts": [(0, 2)]}

    monkeypatch.setattr(Copy, "offer", of_survivors)


def launched(job: Started, **facts: Any) -> Started:
    """Return a job as `meshmend run` starts it."""
    launch = Launch("127.0.0.1:1", 1, 0, launcher=LAUNCHER, **facts)
    job.session = replace(job.session, launch=launch)
    job.keeper.session = job.session
    return job


def files(options: Options) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in options["memory"].glob("0*")}


def test_a_job_whose_hosts_have_lost_their_memory_does_not_begin_anew(tmp_path: Path) -> None:
    """Neither where a copy was complete before, nor where that cannot be found out; on purpose, it does."""
    memory, record = tmp_path / "memory", tmp_path / "kept.json"
    job = Started(memory=memory, record=Record(tmp_path))
    job.restore()
    job.keep(3)
    assert not record.exists(), "nobody knows yet that all hosts have written it"
    job.keep(4, 5)
    job.crash()
    until(record.exists)
    shutil.rmtree(memory)
    again: Options = {"memory": memory, "record": Record(tmp_path)}
    with pytest.raises(RestartError, match=r"copies in memory of step 3 \(attempt 1\) lack 4 of 4 parts\n.*kept\.json"):
        Started(**again).restore()
    begun_anew = launched(Started(**again), start_over=2, round=2)
    assert begun_anew.restore().step == 0
    begun_anew.crash()
    record.write_text("{}")
    with pytest.raises(RestartError, match=r"what this job has kept is not known: .*kept\.json is damaged: 'attempt'"):
        Started(**again).restore()
    record.unlink()
    assert Started(**again).restore().step == 0


@pytest.mark.usefixtures("lacks")
def test_without_a_launcher_the_error_says_what_is_missing_and_where(kept: Options) -> None:
    before = files(kept)
    with pytest.raises(
        RestartError,
        match=r"(?s)can be restored:\n- the copies in memory of step 4 \(attempt 1\) lack 2 of 4 parts, which only "
        r"hosts 1, 2 have\n.*Nothing was removed .*meshmend run --start-over",
    ):
        Started(**kept).restore()
    assert files(kept) == before


@pytest.mark.usefixtures("lacks")
def test_under_the_launcher_survivors_wait_and_then_end(kept: Options) -> None:
    before = files(kept)
    job = launched(Started(**kept), state_wait_s=0.3)
    began = time.monotonic()
    with (
        pytest.warns(RuntimeWarning, match=r"which only hosts 1, 2 have\. Nothing is removed\. The job waits up to"),
        pytest.raises(RestartError, match=r"hosts 1, 2 have \(waited 0.005 min for them\)"),
    ):
        job.restore()
    assert time.monotonic() - began >= 0.3
    assert [(event["step"], event["hosts"]) for event in job.events("state incomplete")] == [(4, [1, 2])]
    assert files(kept) == before


def test_when_the_hosts_are_back_the_state_is_restored(kept: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as absent:
        offer = Copy.offer
        absent.setattr(Copy, "offer", lambda self, given: offer(self, given) | {"parts": [0], "hosts": [(0, 1)]})
        with pytest.raises(RestartError, match="which only host 1 has"):
            Started(**kept).restore()
    again = Started(**kept)
    assert_is_step(again, again.restore(), 4)


@pytest.mark.usefixtures("lacks")
def test_a_job_begins_anew_on_purpose_and_stays_with_it(kept: Options) -> None:
    first = launched(Started(**kept), round=5, start_over=5)
    found = first.restore()
    assert (found.source, found.step, first.keeper.attempt) == ("start", 0, 5)
    first.crash()
    # A host is lost before the first copy: the next round does not go back to what was before.
    second = launched(Started(**kept), round=6, start_over=5)
    assert second.restore().source == "start"
    second.crash()


def test_what_was_kept_goes_when_a_job_that_began_anew_has_copies(kept: Options) -> None:
    job = launched(Started(**kept), round=5, start_over=5)
    assert job.restore().source == "start"
    job.keep(1, 2)
    job.crash()
    assert sorted(files(kept)) == [f"{5:06d}-{step:012d}" for step in (1, 2)]
    again = launched(Started(**kept), round=6, start_over=5)
    assert_is_step(again, again.restore(), 2)


def test_checkpoints_of_before_are_out_of_the_way_of_a_job_that_begins_anew(tmp_path: Path) -> None:
    options: Options = {"memory_every": 0, "disk": tmp_path / "disk", "disk_every": 1}
    job = Started(**options)
    job.restore()
    job.keep(7)
    job.keeper.close()
    anew = launched(Started(**options), round=5, start_over=5)
    assert anew.restore().source == "start"
    anew.keep(1)
    anew.keeper.close()
    assert (tmp_path / "disk" / "abandoned" / "7").is_dir()
    again = launched(Started(**options), round=6, start_over=5)
    assert_is_step(again, again.restore(), 1)
