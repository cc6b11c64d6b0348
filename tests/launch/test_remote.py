"""A job that is watched by its address is the job that is watched in its folder."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch.test_goodput import lived_through
from launch.test_metrics import write
from meshmend.cli import app
from meshmend.errors import LaunchError
from meshmend.launch.metrics import serve_metrics
from meshmend.launch.processes import free_port
from meshmend.launch.remote import RemoteWatch, read_snapshot
from meshmend.launch.timeline import Timeline
from meshmend.launch.watching import Watch

pytest.importorskip("prometheus_client")


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def printed(*words: str) -> str:
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["watch", *words])  # wide enough for any folder
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("seed", range(3))
def test_by_its_address_a_job_looks_as_in_its_folder(seed: int, tmp_path: Path) -> None:
    job = lived_through(seed)
    for host, events in enumerate(job.events):
        machine = {"machine": "4x4 in hosts of 2x2"}
        events[:] = [event | machine if event["event"] == "fabric" else event for event in events]
        events.append({"at": job.now, "event": "saved", "step": host + 1})
    write(job, tmp_path)
    port = free_port()
    with serve_metrics(tmp_path, "127.0.0.1", port):
        url = f"http://127.0.0.1:{port}"
        assert RemoteWatch(url).snapshot() == Watch(tmp_path).snapshot()
        assert json.loads(printed(url, "--json")) == json.loads(printed(str(tmp_path), "--json"))
        lines = printed(f"{url}/metrics", "--once").splitlines()
        assert lines[1:] == printed(str(tmp_path), "--once").splitlines()[1:]
        assert "✗" not in "".join(lines)
        assert sum(line.count("●") for line in lines) == 16


def test_a_job_without_a_step_can_be_watched(tmp_path: Path) -> None:
    Timeline(tmp_path / "timeline" / "host-3.jsonl").note("process", seconds=1.0)
    port = free_port()
    with serve_metrics(tmp_path, "127.0.0.1", port):
        now = RemoteWatch(f"http://127.0.0.1:{port}/watch.json").snapshot()
    assert (now.state, now.account, now.started) == ("starting", None, ("3",))


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[]", b"{}", b'{"state": "fine"}', b'{"state": "training", "began": 1}', b"[" * 100_000],
)
def test_what_is_no_job_is_refused(body: bytes) -> None:
    with answering(body) as url, pytest.raises(LaunchError, match="does not serve a job of this version of meshmend"):
        RemoteWatch(url).snapshot()


def test_nobody_and_somebody_else_are_told_apart() -> None:
    with answering(b"", 404) as url, pytest.raises(LaunchError, match="answers 404: what serves there is no job"):
        RemoteWatch(url).snapshot()
    with pytest.raises(
        LaunchError, match=r"does not answer \(Connection refused\)\. The job serves there while it runs"
    ):
        RemoteWatch(f"http://127.0.0.1:{free_port()}").snapshot()
    with pytest.raises(LaunchError, match=r"begins with 'ftp', not with http:// or https://: give one as in http://10"):
        RemoteWatch("ftp://127.0.0.1:9464")


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", "1"), ("step", None), ("badput_s", 3), ("hosts", ["a"]), ("recoveries", [1]), ("machine", 5)],
)
def test_every_value_is_checked(name: str, value: Any, tmp_path: Path) -> None:
    write(lived_through(0), tmp_path)
    facts = json.loads(json.dumps(Watch(tmp_path).snapshot().facts()))
    assert read_snapshot(facts) == Watch(tmp_path).snapshot()
    with pytest.raises((TypeError, ValueError)):
        read_snapshot(facts | {name: value})


def test_hosts_that_are_lost_are_shown_before_the_job_has_recovered(tmp_path: Path) -> None:
    timelines = [Timeline(tmp_path / "timeline" / f"host-{host}.jsonl", attempt=1) for host in range(4)]
    for timeline in timelines:
        timeline.note("process", at=1.0, seconds=1.0)
        timeline.note("fabric", at=2.0, seconds=1.0, chips=16, hosts=[0, 1, 2, 3], machine="4x4 in hosts of 2x2")
        timeline.note("step", at=4.0, step=1)
    watch = Watch(tmp_path)
    assert (watch.snapshot().state, watch.snapshot().account.hosts) == ("stalled", (0, 1, 2, 3))  # type: ignore[union-attr]
    for host in (0, 2):
        timelines[host].note("host lost", at=5.0, lost=[1])
        timelines[host].note("gave up", at=5.0)
    now = watch.snapshot()
    assert now.account is not None
    assert (now.state, now.account.hosts, now.account.chips) == ("recovering", (0, 2, 3), 12)
    timelines[0].note("host lost", at=6.0, lost=[3])
    timelines[0].note("below minimum", at=6.0, hosts=[0, 2], least=3)
    now = watch.snapshot()
    assert now.account is not None
    assert (now.state, now.account.hosts, now.account.chips) == ("waiting", (0, 2), 8)
    for host in (0, 2, 3):
        timelines[host].facts["attempt"] = 2
        timelines[host].note("process", at=7.0, seconds=1.0)
    now = watch.snapshot()
    assert now.account is not None
    assert (now.state, now.account.hosts) == ("recovering", (0, 2))  # host 3 is back, but has done no step
    for host in (0, 2, 3):
        timelines[host].note("fabric", at=8.0, seconds=1.0, chips=12, hosts=[0, 2, 3])
        timelines[host].note("step", at=9.0, step=2)
    now = watch.snapshot()
    assert now.account is not None
    assert (now.account.hosts, now.account.chips) == ((0, 2, 3), 12)


def test_whoever_watches_a_folder_can_serve_its_metrics(tmp_path: Path) -> None:
    write(lived_through(1), tmp_path)
    port = free_port()
    words = [sys.executable, "-m", "meshmend", "watch", str(tmp_path), "--metrics", f"127.0.0.1:{port}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as watching:
        try:
            give_up_at = time.monotonic() + 60
            while True:
                try:
                    look = RemoteWatch(f"http://127.0.0.1:{port}").snapshot()
                    break
                except LaunchError:
                    assert time.monotonic() < give_up_at
                    assert watching.poll() is None, watching.communicate()[0]
                    time.sleep(0.1)
            assert look == Watch(tmp_path).snapshot()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                assert b"meshmend_goodput_ratio" in answer.read()
        finally:
            watching.terminate()
