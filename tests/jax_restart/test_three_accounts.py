"""One goodput in three places: a real Prometheus, `meshmend watch`, and the timelines themselves, with hosts killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jax_restart.test_run import ROOT, environment, meshmend
from launch.test_operate import ask
from meshmend.launch.goodput import HostHistory, TimeAccount, summarize
from meshmend.launch.hosts import Hosts
from meshmend.launch.local import LocalJob
from meshmend.launch.metrics import serve_metrics
from meshmend.launch.processes import die_with_parent, free_port
from meshmend.launch.timeline import read_timeline, timeline_of
from timelines import read_account

N_HOSTS, KILLS, PATIENCE_S, TOLERANCE = 2, 5, 300.0, 0.005
SCRIPT = """
import time
import jax.numpy as jnp, numpy as np, optax
import meshmend.jax as mmj

job = mmj.Job(shared="SHARED", global_batch=64)
x = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)
data = [{"x": row, "y": row.sum()} for row in x]


def loss(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


for step in job.train(loss, optax.adam(0.05), {"w": jnp.zeros(8)}, data, steps=10**6):
    time.sleep(0.1)
"""

Series = list[tuple[float, float]]


def series(port: int, name: str) -> Series:
    """Return everything that Prometheus has of a metric: when it was scraped, and what it was."""
    (found,) = ask(port, f"{name}[1d]")
    return [(float(at), float(value)) for at, value in found["values"]]


def at(paths: list[Path], until: float) -> TimeAccount:
    """Return the account of what had been written at an instant."""
    events = [[e for e in read_timeline(path) if e["at"] + e.get("seconds", 0.0) <= until + 1e-4] for path in paths]
    account = summarize([HostHistory(each) for each in events])
    assert account is not None
    return account


def wait_for(condition: Callable[[], Any], job: LocalJob) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "the job does not go on"
        job.watch(0.2)


def through_five_losses(job: LocalJob, paths: list[Path]) -> list[dict[str, Any]]:
    """Kill hosts in turn and start each again; return what `meshmend watch` says after each loss."""
    shown = []

    def is_on(hosts: set[int], after: float) -> bool:
        found = read_account(paths)
        return found is not None and set(found.hosts) == hosts and found.last_step_at > after + 2 and found.step_s > 0

    job.start()
    everybody, now = set(range(N_HOSTS)), time.time()
    for number in range(KILLS):
        wait_for(partial(is_on, everybody, now), job)
        victim = number % N_HOSTS
        now = job.kill(victim)
        wait_for(partial(is_on, everybody - {victim}, now), job)
        words = ["watch", str(job.shared), "--once", "--json"]
        shown.append(json.loads("".join(meshmend(*words, folder=job.shared))))
        now = time.time()
        job.start(victim)
    wait_for(partial(is_on, everybody, now), job)
    return shown


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed: apt-get install prometheus"
)
def test_goodput_is_the_same_in_prometheus_in_watch_and_in_the_timelines(tmp_path: Path) -> None:
    """At every scrape, and after every loss: compared with what the timelines held at that very instant."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "train.py").write_text(SCRIPT.replace("SHARED", str(shared)))
    paths = [timeline_of(shared, host) for host in range(N_HOSTS)]
    metrics, port = free_port(), free_port()
    text = (ROOT / "examples/operate/prometheus.yml").read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:9464", f"127.0.0.1:{metrics}").replace("10s", "1s")
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(ROOT / "examples/operate/alerts.yml", tmp_path)
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (
        serve_metrics(shared, "127.0.0.1", metrics),
        subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        ) as prometheus,
    ):
        try:
            job = LocalJob(
                [str(tmp_path / "train.py")],
                Hosts.of("2x4", "2x2"),
                shared,
                least=1,
                environment=lambda _: {"PYTHONPATH": environment()["PYTHONPATH"]},
            )
            with job:
                shown = through_five_losses(job, paths)
            # Nobody writes any more, so all three speak of the same instant once Prometheus has looked again.
            last = read_account(paths)
            assert last is not None
            until = time.monotonic() + 60
            while series(port, "meshmend_steps_total")[-1][1] != last.step and time.monotonic() < until:
                time.sleep(0.5)
            time.sleep(3)
            goodput, seconds = (series(port, f"meshmend_{name}") for name in ("goodput_ratio", "job_seconds_total"))
        finally:
            prometheus.terminate()
    assert sum(bool(one.lost) for one in last.recoveries) == KILLS
    watched = json.loads("".join(meshmend("watch", str(shared), "--once", "--json", folder=tmp_path)))
    figures = {"Prometheus": goodput[-1][1], "meshmend watch": watched["goodput"], "timelines": last.goodput}
    assert 0.05 < last.goodput < 0.95
    assert figures == pytest.approx(dict.fromkeys(figures, last.goodput), rel=TOLERANCE)
    # While it ran, each sample is of its own instant: the time of the last event that it knew.
    apart = [0.0]
    for (when, value), (also, total_s) in zip(goodput, seconds, strict=True):
        assert when == also
        apart.append(abs(value / at(paths, last.began + total_s).goodput - 1) if value else 0.0)
    for one in shown:
        assert len(one["recoveries"]) >= 1
        apart.append(abs(one["goodput"] / at(paths, one["until"]).goodput - 1))
    sys.stderr.write(f"{figures}; {len(apart) - 1} instants, at most {max(apart):.3%} apart\n")
    assert len(goodput) > 30
    assert max(apart) < TOLERANCE
