"""Hosts compile ahead for each other: what a survivor loads after a loss is a program that another host compiled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from meshmend.files import write_whole
from meshmend.launch.environment import DOMAIN
from meshmend.launch.hosts import Hosts
from meshmend.launch.local import LocalJob
from meshmend.launch.timeline import read_timeline
from timelines import check_fields

PATIENCE_S = 240.0
SCRIPT = """
import pathlib, time
import numpy as np, optax
import meshmend.jax as mmj

job = mmj.Job(global_batch=24, disk_every=0, hardware="cpu-xla", memory_every=1)
data = np.random.default_rng(0).integers(-3, 4, (240, 8)).astype(np.float32)
last = pathlib.Path("last")
for step in job.train(lambda w, x: x @ w, optax.adam(0.125), np.zeros(8, np.float32), data, steps=100_000):
    if last.exists() and step.number >= int(last.read_text()):
        break
    time.sleep(0.01)
job.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "domains", "lost", "covered", "who"),
    [
        # By hand: of four hosts, survivors are numbered 0 to 2, so that the last one compiles for nothing.
        ("2x2", "", (1,), {"0": 2, "1": 0, "2": 1, "3": 2}, "1"),
        ("2x3", "aabbcc", (2, 3), {"0": 4, "1": 0, "2": 1, "3": 2, "4": 3, "5": 4, "a": 3, "b": 0, "c": 1}, "b"),
    ],
)
def test_survivors_load_what_another_host_has_compiled(
    shape: str,
    domains: str,
    lost: tuple[int, ...],
    covered: dict[str, int],
    who: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    machine, shared, log = Hosts.of(shape, "1x1"), tmp_path / "shared", list[str]()
    n_hosts = len(machine)

    def events(host: int, kind: str) -> list[dict[str, Any]]:
        lines = read_timeline(shared / f"timeline/host-{host}.jsonl")
        check_fields(lines)
        return [line for line in lines if line["event"] == kind]

    def until(condition: Any, what: str) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not condition():
            job.watch(0.2)
            assert time.monotonic() < give_up_at, f"never: {what}\n{log}"
            assert job.running, f"ended before: {what}\n{log}"

    def ahead() -> dict[str, dict[str, Any]]:
        """Return by what is lost the event, with its host."""
        found: dict[str, dict[str, Any]] = {}
        for host in range(n_hosts):
            for event in events(host, "compile ahead"):
                name = str(event.get("lost", event.get("domain")))
                assert name not in found, "each loss is compiled for once"
                found[name] = event | {"host": host}
        return found

    options: dict[str, Any] = {"environment": lambda host: {DOMAIN: domains[host]}} if domains else {}
    with LocalJob(
        [str(tmp_path / "train.py")],
        machine,
        shared,
        least=2,
        on_line=lambda host, line: log.append(f"{host}: {line}"),
        **options,
    ) as job:
        job.start()
        until(lambda: len(ahead()) == len(covered), "all losses are compiled for")
        made = ahead()
        for host in lost:
            job.kill(host)
        left = sorted({*range(n_hosts)} - {*lost})
        until(lambda: any(one["chips"] == len(left) for one in events(left[0], "step")), "a step of the survivors")
        # Far ahead, so that all see it before they are there.
        write_whole(Path("last"), str(max(one["step"] for one in events(left[0], "step")) + 300))
        statuses = job.wait(PATIENCE_S)
    assert all("saved" in event for event in made.values()), made
    assert {name: event["host"] for name, event in made.items()} == covered
    assert {host: statuses[host] for host in left} == dict.fromkeys(left, 0), log
    for host in left:
        loaded = [(event["round"], event["loaded"]) for event in events(host, "compile") if "loaded" in event]
        assert loaded[-1] == (max(event["round"] for event in events(host, "step")), made[who]["saved"])
        assert events(host, "restore")[-1]["source"] == "memory"
