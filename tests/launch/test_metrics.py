"""What Prometheus would scrape from a job, against the job's own account."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.made_up_jobs import everything, lived_through, write
from meshmend.errors import LaunchError
from meshmend.launch.goodput import CAUSES, HostHistory
from meshmend.launch.metrics import JobMetrics, serve_metrics
from meshmend.launch.processes import free_port, wait_for_server
from meshmend.launch.timeline import MARK, STAGES, Timeline
from meshmend.launch.watching import Watch
from timelines import read_account

prometheus = pytest.importorskip("prometheus_client.parser")


def scrape(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in prometheus.text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("seed", range(3))
def test_metrics_are_those_of_the_account(seed: int, tmp_path: Path) -> None:
    job = lived_through(seed)
    account = read_account(write(job, tmp_path))
    assert account is not None
    port = free_port()
    with serve_metrics(tmp_path, "127.0.0.1", port):
        found = scrape(port)
    assert found["meshmend_goodput_ratio", ()] == pytest.approx(account.goodput)
    assert found["meshmend_steps_total", ()] == job.step
    for cause in CAUSES:
        seconds = found["meshmend_badput_seconds_total", (("cause", cause),)]
        assert seconds == pytest.approx(account.badput_s[cause], abs=1e-6)
    parts = found["meshmend_training_seconds_total", ()] + sum(
        value for (name, _), value in found.items() if name == "meshmend_badput_seconds_total"
    )
    assert parts == pytest.approx(found["meshmend_job_seconds_total", ()])
    for stage in (*STAGES, "total"):
        assert found["meshmend_recovery_seconds_count", (("stage", stage),)] == job.round - 1
    everything = found["meshmend_recovery_seconds_sum", (("stage", "total"),)]
    assert everything == pytest.approx(sum(one.total_s for one in account.recoveries))


def test_the_page_names_every_metric(tmp_path: Path) -> None:
    served = {metric.name for metric in everything(tmp_path)}
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    causes = page.partition("## Where the time went")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(meshmend_\w+?)(?:_total)?(?:\{\w+\})?`", page)) == served
    assert set(re.findall(r"^\| ([a-z ]+) \| .* \| .* \|$", causes, re.M)) - {"cause"} == set(CAUSES)


def test_a_job_without_a_step_is_starting(tmp_path: Path) -> None:
    port = free_port()
    with serve_metrics(tmp_path, "127.0.0.1", port):
        found = scrape(port)
        assert found["meshmend_job_state", (("state", "starting"),)] == 1
        assert ("meshmend_goodput_ratio", ()) not in found
        refused = pytest.raises(LaunchError, match=f"--metrics 127.0.0.1:{port + 1}")
        with refused, serve_metrics(tmp_path, "127.0.0.1", port):
            pass


def test_a_watch_follows_files_that_are_full_and_hosts_that_come_later(tmp_path: Path) -> None:
    """What is followed event by event, through files that are condensed, is what is read in one go."""
    job = lived_through(1)
    (tmp_path / "timeline").mkdir()
    lines = {host: [json.dumps(event) for event in events] for host, events in enumerate(job.events)}
    timelines = [
        Timeline(tmp_path / "timeline" / f"host-{host}.jsonl", max_bytes=10_000) for host in range(job.n_hosts)
    ]
    watch = Watch(tmp_path)
    for host, timeline in enumerate(timelines):
        for number, line in enumerate(lines[host]):
            event = json.loads(line)
            timeline.note(event.pop("event"), at=event.pop("at"), **event)
            if number % 5 == 0:
                timeline.flush()
                watch.read()
        timeline.flush()
    watch.read()
    account = watch.account()
    assert account is not None
    assert account.total_s == pytest.approx(sum(job.truth.values()))
    assert account.step == job.step
    assert any(MARK in timeline.path.read_text()[:100] for timeline in timelines if timeline.path is not None)


def test_hosts_that_are_lost_are_shown_before_the_job_has_recovered(tmp_path: Path) -> None:
    timelines = [Timeline(tmp_path / "timeline" / f"host-{host}.jsonl", round=1) for host in range(4)]
    for timeline in timelines:
        timeline.note("process", at=1.0, seconds=1.0)
        timeline.note("fabric", at=2.0, seconds=1.0, chips=16, hosts=[0, 1, 2, 3], machine="4x4 in hosts of 2x2")
        timeline.note("step", at=4.0, step=1)
    watch = Watch(tmp_path)

    def seen() -> tuple[str, tuple[int, ...], int]:
        for timeline in timelines:
            timeline.flush()
        now = watch.snapshot()
        assert now.account is not None
        return now.state, now.account.hosts, now.account.chips

    assert seen() == ("stalled", (0, 1, 2, 3), 16)
    for host in (0, 2):
        timelines[host].note("host lost", at=5.0, lost=[1])
        timelines[host].note("gave up", at=5.0)
    assert seen() == ("recovering", (0, 2, 3), 12)
    timelines[0].note("host lost", at=6.0, lost=[3])
    timelines[0].note("below minimum", at=6.0, hosts=[0, 2], least=3)
    assert seen() == ("waiting", (0, 2), 8)
    for host in (0, 2, 3):
        timelines[host].facts["round"] = 2
        timelines[host].note("process", at=7.0, seconds=1.0)
    assert seen() == ("recovering", (0, 2), 8)  # host 3 is back, but has done no step
    for host in (0, 2, 3):
        timelines[host].note("fabric", at=8.0, seconds=1.0, chips=12, hosts=[0, 2, 3])
        timelines[host].note("step", at=9.0, step=2)
    assert seen() == ("stalled", (0, 2, 3), 12)


def test_losses_that_any_host_has_compiled_for_count_in_the_newest_round(tmp_path: Path) -> None:
    timelines = [Timeline(tmp_path / "timeline" / f"host-{host}.jsonl", round=1) for host in range(4)]
    metrics = JobMetrics(tmp_path)

    def begin(hosts: list[int], at: float) -> None:
        for host in hosts:
            timelines[host].note("process", at=at, seconds=1.0)
            timelines[host].note("fabric", at=at + 1, seconds=1.0, chips=4 * len(hosts), hosts=hosts)
            timelines[host].note("step", at=at + 2, step=int(at))

    def ratio() -> float:
        for timeline in timelines:
            timeline.flush()
        (found,) = (one for one in metrics.collect() if one.name == "meshmend_compiled_ahead_ratio")
        return float(found.samples[0].value)

    begin([0, 1, 2, 3], 1.0)
    assert ratio() == 0.0
    for host, lost in ((0, 0), (1, 1), (2, 2)):
        timelines[host].note("compile ahead", at=4.0, seconds=1.0, lost=lost, saved="a.program")
    timelines[0].note("compile ahead", at=5.0, seconds=1.0, domain="rack", saved="b.program")
    assert ratio() == 0.75
    timelines[2].note("compile ahead", at=5.0, seconds=1.0, lost=3, problem="no plan")
    assert ratio() == 0.75
    timelines[2].note("compile ahead", at=6.0, seconds=1.0, lost=3, saved="c.program")
    assert ratio() == 1.0
    for host in (0, 1, 2):
        timelines[host].facts["round"] = 2
    begin([0, 1, 2], 10.0)
    assert ratio() == 0.0, "what host 3 and the others have made in round 1 is for another mesh"


def test_whoever_watches_a_folder_can_serve_its_metrics(tmp_path: Path) -> None:
    account = read_account(write(lived_through(1), tmp_path))
    assert account is not None
    port = free_port()
    words = [sys.executable, "-m", "meshmend", "watch", str(tmp_path), "--metrics", f"127.0.0.1:{port}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as watching:
        try:
            wait_for_server(f"127.0.0.1:{port}", 60)
            assert watching.poll() is None, watching.communicate()[0]
            assert scrape(port)["meshmend_goodput_ratio", ()] == pytest.approx(account.goodput)
        finally:
            watching.terminate()


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="Give that of the job's store"):
        Watch(tmp_path / "missing")


def lost_again_and_again(folder: Path, n_hosts: int, n_rounds: int) -> JobMetrics:
    """The metrics of a job of which every host has given up in every round but the last, and then keeps a copy."""
    metrics = JobMetrics(folder)
    hosts = list(range(n_hosts))
    for host in hosts:
        history = metrics.watch.histories[str(host)] = HostHistory()
        for number in range(1, n_rounds + 1):
            at = 100.0 * number
            history.add({"event": "process", "at": at, "seconds": 1.0, "round": number})
            history.add({"event": "fabric", "at": at + 1, "seconds": 1.0, "hosts": hosts, "chips": 4 * n_hosts})
            history.add({"event": "step", "at": at + 4, "step": number, "round": number})
            history.add({"event": "kept", "at": at + 5, "step": number})
            if number < n_rounds:
                history.add({"event": "gave up", "at": at + 6 + host / n_hosts})
    return metrics


def n_lines(run: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs, those of generators and comprehensions for each of their items."""
    count, before = 0, sys.gettrace()

    def trace(*_: object) -> Any:
        nonlocal count
        count += 1
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(("hosts", "rounds"), [((560, 2240), (4, 4)), ((40, 40), (14, 56))])
def test_a_scrape_costs_in_proportion_to_hosts_and_to_rounds(
    hosts: tuple[int, int], rounds: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "read", lambda _: None)
    few, many = (lost_again_and_again(tmp_path, *sizes) for sizes in zip(hosts, rounds, strict=True))
    found = {metric.name: metric for metric in many.collect()}
    assert found["meshmend_copies_step"].samples[0].value == rounds[1]
    (detected,) = (
        one.value
        for one in found["meshmend_recovery_seconds"].samples
        if one.name.endswith("_sum") and one.labels["stage"] == "detect"
    )
    # Host 0 gives up first, two seconds after the step: all recoveries but the first start have that.
    assert detected == pytest.approx(2.0 * (rounds[1] - 1))
    ratio = n_lines(lambda: list(many.collect())) / n_lines(lambda: list(few.collect()))
    assert ratio < 4.5, f"four times as much costs {ratio:.1f} times as much"
