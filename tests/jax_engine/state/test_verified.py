"""After a check has found wrong numbers a job goes back to the last state that is verified, and not to a later one."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_engine.restart_cases import Started, assert_is_step, collect, elements, empty, with_parts
from meshmend.errors import RestartError
from meshmend.jax.state.candidates import UNCHECKED, Trust, rank_sources
from meshmend.jax.state.disk.disk import Disk
from meshmend.jax.state.memory.copies import MAGIC, Copy, HostMemory, read_copy
from meshmend.jax.state.memory.peer_copy import copy_of, make_parts_fn
from meshmend.jax.state.memory.placement import place

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def kept(folder: Path) -> list[tuple[int, int]]:
    """Attempt and step of each copy in a folder, by its file name; without those that were set aside."""
    return sorted(
        (int(path.name[:6]), int(path.name[7:])) for path in folder.iterdir() if re.fullmatch(r"\d{6}-\d+", path.name)
    )


def test_a_job_goes_back_to_the_verified_copy_however_many_steps_ago(tmp_path: Path) -> None:
    job = Started(memory=tmp_path, untrusted=[])
    assert (job.restore().verified, job.keeper.verified) == (0, 0)
    job.keep(1, 2)
    job.keep(3, pin=True)
    job.keep(4, 5)
    job.keeper.verify(3)
    job.keep(6, 7, 8)
    job.keep(9, pin=True)  # being checked
    job.keep(*range(10, 16))
    job.crash()
    assert kept(tmp_path) == [(1, 3), (1, 9), (1, 14), (1, 15)]
    assert [read_copy(path).verified for path in sorted(tmp_path.glob("0*"))] == [0, 3, 3, 3]

    # An ordinary restart goes on from the last step, and still has the verified one.
    job = Started(memory=tmp_path, untrusted=[])
    found = job.restore()
    assert_is_step(job, found, 15)
    assert (found.verified, job.keeper.verified) == (3, 3)
    job.keep(*range(16, 22))
    job.crash()
    assert kept(tmp_path) == [(1, 3), (2, 20), (2, 21)]

    # An observation in the second attempt.
    job = Started(memory=tmp_path, untrusted=[(2, 3)])
    with pytest.warns(
        RuntimeWarning, match=r"memory at step 3; skipped: a check found wrong numbers in attempt 2, and"
    ):
        found = job.restore()
    assert_is_step(job, found, 3)
    assert (found.source, found.verified, job.keeper.attempt) == ("memory", 3, 3)
    assert "not trusted are the copies in memory of step 21" in job.events("skipped")[0]["why"]
    job.keep(4, 5)
    job.keep(6, pin=True)
    job.keep(7)
    job.crash()
    assert kept(tmp_path) == [(3, 3), (3, 6), (3, 7)]  # the first one is as safe as the others now

    # What the third attempt keeps is trusted.
    job = Started(memory=tmp_path, untrusted=[(2, 3)])
    assert_is_step(job, job.restore(), 7)
    assert job.keeper.verified == 3


def test_the_copy_of_a_restart_replaces_the_verified_one_only_when_all_hosts_have_it(tmp_path: Path) -> None:
    job = Started(memory=tmp_path, untrusted=[])
    job.restore()
    job.keep(3, pin=True)
    job.keeper.verify(3)
    job.keep(4)
    job.crash()
    # Three attempts end before their first step: of none is it known that all hosts have written its copy.
    doubted, damaged = "not trusted are the copies in memory of step 4", "is damaged"
    for attempt, told in ((2, [doubted]), (3, []), (4, [doubted, damaged])):
        job = Started(memory=tmp_path, untrusted=[(attempt - 1, 3)])
        with ExitStack() as warned:
            for warning in told:
                warned.enter_context(pytest.warns(RuntimeWarning, match=warning))
            job.restore()
        job.crash()
        assert kept(tmp_path)[0] == (1, 3)
        if attempt == 3:
            (tmp_path / f"{3:06d}-{3:012d}").write_bytes(b"torn")
            (tmp_path / f"{2:06d}-{3:012d}").unlink()
    assert kept(tmp_path) == [(1, 3), (4, 3)]  # what attempt 3 left is aside, being later than what was restored
    job = Started(memory=tmp_path, untrusted=[(4, 3)])
    with warnings.catch_warnings(action="ignore"):
        assert_is_step(job, job.restore(), 3)


def test_going_back_to_the_start_is_for_jobs_that_have_verified_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory": tmp_path / "memory", "disk": tmp_path / "disk", "disk_every": 2}
    job = Started(**options, untrusted=[])
    job.restore()
    job.keep(1, 2, 3)
    job.crash()
    job = Started(**options, untrusted=[(1, 0)])
    with pytest.warns(
        RuntimeWarning, match=r"Resuming from start at step 0; skipped: .*attempt 1, and the last verified"
    ):
        found = job.restore()
    assert (found.source, found.step, found.verified, found.extra) == ("start", 0, 0, ["start"])
    assert kept(tmp_path / "memory") == []
    assert [event["steps"] for event in job.events("set aside")] == [[2]]
    job.keep(1, 2)  # Orbax would save nothing before a step that is there
    job.crash()
    job = Started(**options, untrusted=[(1, 0)])
    assert_is_step(job, job.restore(), 2)


def test_if_the_verified_state_is_lost_only_a_person_may_start_over(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory": tmp_path / "memory", "disk": tmp_path / "disk", "disk_every": 4}
    job = Started(**options, untrusted=[])
    job.restore()
    job.keep(2, pin=True)
    job.keep(3, 4, 5)
    job.keeper.verify(2)
    job.crash()
    (tmp_path / "memory" / f"{1:06d}-{2:012d}").unlink()
    before = sorted(str(path) for path in tmp_path.rglob("*") if path.parent.name != "attempts")
    expected = (
        r"(?s)of step 2, the last verified one, or before can be restored:\n- a check found wrong numbers in "
        r"attempt 1.*step 5 \(attempt 1\).*checkpoint on disk of step 4.*To start over, remove "
        r".*disk.* move fault_log.jsonl"
    )
    with pytest.raises(RestartError, match=expected):
        Started(**options, untrusted=[(1, 2)]).restore()
    assert sorted(str(path) for path in tmp_path.rglob("*") if path.parent.name != "attempts") == before
    # The person says that the states are good: the observations are gone.
    job = Started(**options, untrusted=[])
    assert_is_step(job, job.restore(), 5)


def test_untrusted_checkpoints_are_set_aside_and_an_older_one_is_good(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory_every": 0, "disk": tmp_path, "disk_every": 5}
    job = Started(**options, untrusted=[])
    job.restore()
    job.keep(5)
    job.keeper.verify(7)
    job.keep(10)
    job.crash()
    job.keeper.close()
    assert [job.keeper.disk.facts(step).verified for step in (5, 10)] == [0, 7]  # type: ignore[union-attr]
    job = Started(**options, untrusted=[(1, 7)])
    with pytest.warns(RuntimeWarning, match="not trusted are the checkpoint on disk of step 10"):
        found = job.restore()
    assert_is_step(job, found, 5)
    assert (found.source, found.verified) == ("disk", 5)  # step 7 was good, so step 5 was
    assert (tmp_path / "abandoned" / "10").is_dir()
    assert not (tmp_path / "10").exists()
    job.keep(10)
    job.crash()
    job.keeper.close()
    job = Started(**options, untrusted=[(1, 7)])
    assert_is_step(job, job.restore(), 10)


def test_the_last_verified_checkpoint_stays_on_disk(tmp_path: Path) -> None:
    """Without copies in memory there is nothing else to go back to."""
    options: dict[str, Any] = {"memory_every": 0, "disk": tmp_path, "disk_every": 1}
    job = Started(**options, untrusted=[])
    job.restore()
    job.keep(1, 2, 3)
    job.keeper.verify(2)
    job.keep(4, 5, 6)
    job.crash()
    job.keeper.close()
    assert Disk(tmp_path).steps() == [2, 5, 6]
    job = Started(**options, untrusted=[(1, 2)])
    with pytest.warns(RuntimeWarning, match="at step 2"):
        assert_is_step(job, job.restore(), 2)


def test_a_state_from_before_the_checks_is_taken_for_good(tmp_path: Path) -> None:
    job = Started(memory=tmp_path)
    assert job.restore().verified == 0
    job.keep(1, 2)
    job.crash()
    copies = HostMemory(tmp_path).read()[0]
    assert [copy.verified for copy in copies] == [UNCHECKED, UNCHECKED]
    job = Started(memory=tmp_path, untrusted=[])
    assert job.restore().verified == 2
    job.keep(*range(3, 9))
    job.crash()
    job = Started(memory=tmp_path, untrusted=[(2, 2)])
    with pytest.warns(RuntimeWarning, match="at step 2"):
        assert_is_step(job, job.restore(), 2)


def test_a_copy_that_claims_another_verified_step_is_damaged(tmp_path: Path) -> None:
    job = Started(memory=tmp_path)
    job.restore()
    job.keep(1)
    job.crash()
    (path,) = tmp_path.glob("0*")
    magic, line, rest = path.read_bytes().split(b"\n", 2)
    assert magic + b"\n" == MAGIC
    length = int(line.split()[0])
    facts = json.loads(rest[:length])
    for value, why in ((2, "expected a verified step up to 1, got 2"), (-2, "got -2"), ("x", "invalid literal")):
        header = json.dumps({**facts, "verified": value}).encode()
        line = f"{len(header)} {hashlib.sha256(header).hexdigest()} -\n".encode()
        path.write_bytes(MAGIC + line + header + rest[length:])
        with pytest.raises(RestartError, match=f"does not describe a copy .*{why}"):
            read_copy(path)


def test_a_step_that_is_not_due_is_kept_if_it_is_held(tmp_path: Path) -> None:
    job = Started(memory=tmp_path, memory_every=4, untrusted=[])
    job.restore()
    job.keep(1, 2)
    job.keep(3, pin=True)
    job.keep(4, 5, 6)
    job.keeper.verify(5)  # not pinned: the newest pinned one before it stays
    job.keep(*range(7, 21))
    job.crash()
    assert kept(tmp_path) == [(1, 3), (1, 16), (1, 20)]
    assert job.keeper.verified == 5
    job.keeper.verify(4)  # nothing new
    assert job.keeper.verified == 5
    job = Started(memory=tmp_path, untrusted=[(1, 5)])
    with pytest.warns(RuntimeWarning, match="at step 3"):
        found = job.restore()
    assert_is_step(job, found, 3)
    assert found.verified == 3
    none = Started(memory_every=0, untrusted=[])
    none.restore()
    none.keep(1, pin=True)
    none.keeper.verify(1)
    assert none.keeper.verified == 1


@pytest.mark.parametrize("sharded", [False, True])
def test_the_verified_copies_survive_the_loss_of_one_host(tmp_path: Path, sharded: bool) -> None:
    job = Started(shape="2x3", sharded=sharded, memory_every=0)
    placement = place(job.fabric, host_of_chip=[0, 0, 1, 1, 2, 2])
    cut = jax.jit(make_parts_fn(job.layout, placement))
    memories = [HostMemory(tmp_path / str(host)) for host in range(3)]
    for step in range(1, 12):
        parts = cut(*job.values(step))
        for host, memory in enumerate(memories):
            if step == 4:
                memory.pinned = frozenset({4})
            copy = copy_of(parts, job.layout, placement, host, 1, step, ["after", step], "run")
            memory.write(replace(copy, verified=0 if step < 6 else 4))
    trust = Trust(((1, 4),))
    for lost in range(3):
        held = [memory.read()[0] for host, memory in enumerate(memories) if host != lost]
        sources = rank_sources([[copy.offer(job.layout.copy_identity) for copy in copies] for copies in held])
        (source,) = [one for one in sources if one.is_whole and trust.trusts(one.attempt, one.step)]
        assert (source.step, trust.verified_step(source, sources)) == (4, 4)
        assert (
            Trust().verified_step(source, sources) == 4
        )  # the later copies say so, whether or not there was an observation
        vectors = empty(job.layout.outline)
        for process, copies in enumerate(held):
            (mine,) = [copy for copy in copies if copy.step == 4]
            collect(with_parts(mine), source, process, vectors)
        assert {name: vector.tobytes() for name, vector in vectors.items()} == elements(job, job.values(4))


PARTS: dict[str, Any] = {}
COPIES = st.dictionaries(
    st.tuples(st.integers(1, 3), st.integers(1, 6)),  # attempt and step
    st.tuples(st.booleans(), st.integers(0, 6)),  # whole, and the last verified step by then
    max_size=8,
)
SIGNS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), max_size=3)


@given(COPIES, SIGNS)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_the_newest_whole_state_that_is_trusted_is_restored(
    tmp_path_factory: pytest.TempPathFactory,
    copies: dict[tuple[int, int], tuple[bool, int]],
    observations: list[tuple[int, int]],
) -> None:
    folder = tmp_path_factory.mktemp("memory")
    job = Started(memory=folder, untrusted=observations)
    placement = place(job.fabric)
    cut = PARTS.get("2x2") or PARTS.setdefault("2x2", jax.jit(make_parts_fn(job.layout, placement)))
    for (attempt, step), (is_whole, verified) in copies.items():
        parts = cut(*job.values(step))
        copy = copy_of(parts, job.layout, placement, 0, attempt, step, ["after", step], f"run {attempt}")
        if not is_whole:
            copy = replace(copy, parts=copy.parts[1:], data=copy.data[1:])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("meshmend.jax.state.memory.copies.KEPT", 99)
            job.keeper.memory.write(replace(copy, verified=min(verified, step)))

    # The oracle: of all whole ones that no observation speaks against, the last attempt's last step.
    good = [
        (attempt, step)
        for (attempt, step), (is_whole, _) in copies.items()
        if is_whole and all(attempt > its_attempt or step <= last for its_attempt, last in observations)
    ]
    doubted = [key for key in copies if any(key[0] <= attempt and key[1] > last for attempt, last in observations)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshmend.jax.state.keeper.Mirror", MagicMock())
        patch.setattr("meshmend.jax.state.disk.background.warnings.warn", lambda *_, **__: None)
        if not good and doubted and min(last for attempt, last in observations if attempt == max(observations)[0]):
            with pytest.raises(RestartError, match="the last verified one, or before can be restored"):
                job.restore()
            assert kept(folder) == sorted(copies)
            return
        if not good and {*copies} - {*doubted}:
            # Parts are missing of what is trusted: the job does not start over by itself.
            with pytest.raises(RestartError, match="lack 1 of 4 parts"):
                job.restore()
            assert kept(folder) == sorted(copies)
            return
        found = job.restore()
    assert job.keeper.attempt == 1 + max([attempt for attempt, _ in (*copies, *observations)], default=0)
    if good:
        attempt, step = max(good)
        assert_is_step(job, found, step)
        assert kept(folder) == sorted(
            key for key in copies if key <= (attempt, step) and key[1] <= step and key not in doubted
        )
        assert found.verified <= step
        if any(attempt <= its_attempt for its_attempt, _ in observations):
            assert found.verified == step
    else:
        assert (found.source, found.verified) == ("start", 0)
        assert kept(folder) == []
    job.keeper.memory.lock.release()


def test_hosts_that_recorded_different_steps_count_with_the_earlier(tmp_path: Path) -> None:
    job = Started(memory_every=0)
    layout = job.layout

    outline = replace(layout.outline, n_shares=4)

    def half(parts: tuple[int, ...], verified: int) -> Copy:
        return Copy(1, 9, outline, parts, [], None, layout.copy_identity, "run", verified)

    for one, other in ((3, 5), (5, 3)):
        offers = [[half((0, 1), one).offer(layout.copy_identity)], [half((2, 3), other).offer(layout.copy_identity)]]
        (source,) = rank_sources(offers)
        assert source.is_whole
        assert source.verified == 3
        assert source.holders == {0: [0], 1: [0], 2: [1], 3: [1]}
