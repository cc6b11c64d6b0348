"""Hosts die that only have each other's shards, before the first checkpoint: the survivor does not begin anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshmend.jax.data.exactly_once import check_positions
from meshmend.jax.state.memory.placement import place_on
from meshmend.launch.hosts import Hosts
from meshmend.launch.job import HostProcesses
from meshmend.launch.local import LocalJob
from meshmend.launch.timeline import read_timeline
from meshmend.topology import Mesh

STEPS, SAMPLES, HELD = 16, 64, 8
SCRIPT = f"""
import time
import numpy as np, optax
import meshmend.jax as mmj

job = mmj.Job(global_batch=12, memory_every=1, disk_every=0)
x = np.arange({SAMPLES}, dtype=np.float32)[:, None] / {SAMPLES}
params = {{"w": np.zeros((1, 24), np.float32)}}
for step in job.train(lambda p, b: ((b @ p["w"]) ** 2).sum(axis=1), optax.adam(0.1), params, x, steps={STEPS},
                      update="sharded"):
    while step.number == {HELD} and not (job.shared.path / "go").exists():
        time.sleep(0.05)  # until hosts were killed: steps are quicker than the news of them
"""
HOSTS = Hosts.of("1x3", "1x1")
KEPT = place_on((0, 1, 2), Mesh("1x3")).kept.tolist()
LOST = (0, KEPT.index(0))
(SURVIVOR,) = {0, 1, 2} - {*LOST}


def events(shared: Path, kind: str, host: int = SURVIVOR) -> list[dict[str, Any]]:
    return [event for event in read_timeline(shared / f"timeline/host-{host}.jsonl") if event["event"] == kind]


@contextmanager
def with_a_survivor(
    folder: Path, state_wait_s: float
) -> Iterator[tuple[LocalJob, Callable[[Callable[[], bool]], None]]]:
    """A job in which two hosts have died at the same moment, with their memory intact."""
    script, shared, log = folder / "train.py", folder / "shared", list[str]()
    script.write_text(SCRIPT)
    with LocalJob(
        [str(script)], HOSTS, shared, least=1, state_wait_s=state_wait_s, on_line=lambda _, line: log.append(line)
    ) as job:

        def wait_until(is_so: Callable[[], bool]) -> None:
            give_up_at = time.monotonic() + 240
            while not is_so():
                job.watch(0.1)
                assert time.monotonic() < give_up_at, log

        job.start()
        wait_until(lambda: any(event["step"] >= 5 for event in events(shared, "step")))
        for host in LOST:
            HostProcesses.kill(job, host)
        (shared / "go").touch()
        yield job, wait_until


def test_the_survivor_waits_and_goes_on_when_the_hosts_are_back(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with with_a_survivor(tmp_path, state_wait_s=600) as (job, wait_until):
        wait_until(lambda: bool(events(shared, "state incomplete")))
        (incomplete,) = events(shared, "state incomplete")
        assert incomplete["hosts"] == sorted(LOST)
        job.start(*LOST)
        assert job.wait(240) == {0: 0, 1: 0, 2: 0}
    restored = [(event["source"], event["step"]) for event in events(shared, "restore")]
    # Where one of the two comes first, the survivor may restore with it in a round between.
    assert {source for source, _ in restored} == {"start", "memory"}
    assert all(step >= 3 for source, step in restored if source == "memory")
    assert check_positions(shared, SAMPLES) == STEPS


@pytest.mark.slow
def test_where_the_hosts_do_not_come_back_the_job_ends_and_every_copy_is_there(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with with_a_survivor(tmp_path, state_wait_s=2) as (job, _):
        statuses = job.wait(240)
        assert statuses[SURVIVOR] != 0
        kept = sorted(Path(job._memory).glob(f"host-{SURVIVOR}/*/host-{SURVIVOR}/0*"))
        assert len(kept) == 2
    assert events(shared, "state incomplete")
    assert [event["source"] for event in events(shared, "restore")] == ["start"]
    assert max(event["step"] for event in events(shared, "step")) < STEPS
