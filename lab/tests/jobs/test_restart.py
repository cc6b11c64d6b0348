"""Jobs whose hosts are killed: the launcher brings them back, and nothing of what they did is lost."""

from __future__ import annotations

import random
import secrets
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jax_restart.command import runs
from meshmend.errors import ParameterError
from meshmend_lab.bench.restart import Failure, HostKill, Run, campaign
from meshmend_lab.bench.trainee import TrainingJob

STEPS = 30


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def undisturbed(caches: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Run(TrainingJob(str(folder), caches=str(caches), steps=STEPS, exact=True, disk_every=5, pause_on_hole_s=1.0))
    run.go([], random.Random(0))
    assert sorted(run.digests()) == list(range(1, STEPS + 1))
    return run


def failed(undisturbed: Run, folder: Path, kill: HostKill, **job: Any) -> tuple[Run, Failure]:
    run = Run(replace(undisturbed.job, folder=str(folder), **job))
    # At step 12: the save of step 10 has waited for that of step 5, which is therefore whole.
    return run, run.go([kill], random.Random(5))[0]


def assert_same_trajectory(run: Run, undisturbed: Run) -> None:
    mine, theirs = run.digests(), undisturbed.digests()
    # A step may be committed by processes that are ended before they can note its digest; the next one tells.
    assert len(mine) >= STEPS - 1
    assert STEPS in mine
    assert mine.items() <= theirs.items()


@pytest.mark.slow
def test_the_trajectory_is_bit_identical_though_the_coordinators_host_dies(undisturbed: Run, tmp_path: Path) -> None:
    run, failure = failed(undisturbed, tmp_path, HostKill((0,)))
    assert failure.source == "memory"
    assert failure.lost_steps == 0
    assert_same_trajectory(run, undisturbed)


@pytest.mark.slow
def test_after_a_loss_that_was_prepared_for_nothing_is_traced_or_compiled(
    undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    first = Run(replace(undisturbed.job, folder=str(tmp_path / "first"), pause_s=1.0))
    first.go([], random.Random(0))
    assert "Finished tracing" in (first.folder / "host-0.log").read_text(), "the oracle: JAX logs what it traces"
    noted = [(host, event) for host in range(4) for event in first.events(host) if event["event"] == "compile ahead"]
    assert sorted(event["lost"] for _, event in noted) == [0, 1, 2, 3], "each loss once, whichever host it falls to"
    assert len({host for host, _ in noted}) > 1, "hosts share the work"
    assert all("saved" in event for _, event in noted)
    run, failure = failed(undisturbed, tmp_path / "second", HostKill((2,)))
    assert failure.source == "memory"
    assert_same_trajectory(run, undisturbed)
    for host in (0, 1, 3):
        step = next(e for e in run.events(host) if e["event"] == "step" and e["round"] > 1)
        starts = [e for e in run.events(host) if e["event"] == "compile" and "seconds" in e]
        begun = next(e for e in starts if e["round"] == step["round"])
        assert "loaded" in begun, begun
        log = [line.split(" ", 1) for line in (run.folder / f"host-{host}.log").read_text().splitlines()]
        during = [text for at, text in log if begun["at"] - 1 <= float(at) <= step["at"]]
        assert not [text for text in during if "Finished tracing" in text or "Compiling" in text]


@pytest.mark.slow
def test_losing_the_keeper_of_the_lost_parts_during_recovery_brings_the_job_back_to_disk(
    undisturbed: Run, tmp_path: Path
) -> None:
    # Of six hosts: without both, the mesh of the others is whole.
    run, failure = failed(undisturbed, tmp_path, HostKill((2, 3), apart_s=1.0), shape="4x6")
    assert failure.source == "disk"
    assert_same_trajectory(run, undisturbed)


@pytest.mark.slow
def test_a_second_host_may_die_during_recovery(undisturbed: Run, tmp_path: Path) -> None:
    run, failure = failed(undisturbed, tmp_path, HostKill((3, 1), apart_s=4.0))
    assert failure.source == "memory"
    assert failure.lost_steps == 0
    assert_same_trajectory(run, undisturbed)


@pytest.mark.slow
def test_twenty_failures() -> None:
    report = campaign(20, seed=0)
    facts = report.facts()
    assert facts["failures"] == 20
    assert facts["of_host_0"] >= 1
    assert facts["during_recovery"] == 5
    assert facts["lost_steps"] == 0


@pytest.mark.slow
def test_hosts_of_a_job_with_sharded_parameters_die_and_come_back() -> None:
    report = campaign(3, host="2x2", shard="fsdp", second=False)
    facts = report.facts()
    assert facts["failures"] == 3
    assert facts["of_host_0"] >= 1
    assert facts["sources"] == {"memory": 3, "disk": 0}
    assert facts["lost_steps"] == 0


def test_a_campaign_of_something_else_is_refused() -> None:
    with pytest.raises(ParameterError, match="shard is 'all', expected 'update' or 'fsdp'"):
        campaign(1, shard="all")


@pytest.mark.slow
def test_thirty_failures_of_hosts_store_and_both_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pytest -m slow lab/tests/jobs/test_restart.py -k thirty`: a quarter of an hour on two cores."""
    mark, made, make = secrets.token_hex(16), list[Path](), tempfile.mkdtemp

    def noted(**how: Any) -> str:
        made.append(Path(make(**how)))
        return str(made[-1])

    monkeypatch.setenv("MESHMEND_CAMPAIGN", mark)  # every process of the jobs inherits both
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    report = campaign(30, host="1x1", per_run=10, second=False, store=True)
    facts = report.facts()
    assert facts["failures"] == 30
    assert (facts["of_store"], facts["of_store_and_host"]) == (20, 10)
    assert facts["of_host_0"] >= 1
    assert facts["sources"] == {"memory": 20, "disk": 0}
    assert facts["lost_steps"] == 0
    until = time.monotonic() + 10
    while (left := processes_with(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    assert len(made) > 3
    assert not [folder for folder in made if folder.exists()]
    assert not list(tmp_path.iterdir())


def processes_with(mark: str) -> list[int]:
    """Return the processes that were started with this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile
            if mark.encode() in path.read_bytes() and runs(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found
