"""A job's events arrive once each, whatever the endpoint does: against real HTTP servers on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from meshmend.errors import LaunchError
from meshmend.launch import webhook
from meshmend.launch.places import find_webhook
from meshmend.launch.processes import free_port
from meshmend.launch.timeline import Timeline
from meshmend.launch.webhook import Webhook, message_of


class Endpoint:
    """What is posted to; `behaviour` says how the next requests end: a status, or "hang". The rest are accepted."""

    def __init__(self, port: int, behaviour: list[int | str]) -> None:
        self.behaviour = behaviour
        self.tries: list[str] = []
        self.accepted: list[dict[str, Any]] = []
        self.released = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/json"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.tries.append(body["id"])
                now = endpoint.behaviour.pop(0) if endpoint.behaviour else 200
                if now == "hang":
                    endpoint.released.wait(30)
                    return
                if now == 200:
                    endpoint.accepted.append(body)
                self.send_response(int(now))
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                endpoint.tries.append("GET")
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        return [message["id"] for message in self.accepted]


@contextmanager
def serving(*behaviour: int | str, port: int = 0) -> Iterator[Endpoint]:
    endpoint = Endpoint(port, list(behaviour))
    thread = threading.Thread(target=endpoint.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.released.set()
        endpoint.server.shutdown()
        endpoint.server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "LOOK_S", 0.05)
    monkeypatch.setattr(webhook, "FIRST_RETRY_S", 0.05)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "timeline").mkdir()
    return tmp_path


def lose(folder: Path, host: int, *, by: tuple[int, ...] = (0,), at: float | None = None) -> str:
    """Have some hosts write down that another one is lost."""
    for survivor in by:
        timeline = Timeline(folder / "timeline" / f"host-{survivor}.jsonl", job="night", launch=1, attempt=3)
        timeline.note(
            "host lost",
            at=at,
            id=f"round/host lost {host}",
            text=f"night: host {host} is lost",
            step=40,
            lost=[host],
            chips=[[0, host]],
        )
    return f"round/host lost {host}"


def until(condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_endpoint_that_fails_and_hangs_gets_each_event_once(folder: Path) -> None:
    said: list[str] = []
    with serving(500, 503, "hang") as endpoint, Webhook(folder, endpoint.url, tell=said.append, post_s=0.3) as sender:
        first = lose(folder, 1, by=(0, 2, 3))
        until(lambda: endpoint.accepted)
        second = lose(folder, 2, by=(3, 0))
        until(lambda: len(endpoint.accepted) == 2)
        Timeline(folder / "timeline" / "host-0.jsonl", job="night", launch=2, attempt=4).note(
            "recovered", at=1e10, seconds=23.5, id="next/recovered", text="night: training", step=41, hosts=[0, 3]
        )
        until(lambda: len(endpoint.accepted) == 3)
        time.sleep(0.3)
        assert endpoint.tries == [first] * 4 + [second, "next/recovered"]
        assert (sender.n_sent, sender.n_waiting, sender.problem) == (3, 0, "")
    lost, _, recovered = endpoint.accepted
    assert abs(lost.pop("time") - time.time()) < 60
    assert lost == {
        "id": first,
        "kind": "host lost",
        "job": "night",
        "hosts": [1],
        "chips": [[0, 1]],
        "step": 40,
        "attempt": 3,
        "seconds": None,
        "text": "night: host 1 is lost",
    }
    assert (recovered["kind"], recovered["hosts"], recovered["chips"]) == ("recovered", [0, 3], [])
    assert (recovered["seconds"], recovered["time"]) == (23.5, 1e10 + 23.5)
    address = endpoint.url.removesuffix("/hook")
    assert said == [
        f"{address} does not take events: it answers 500. They are kept, and sent again",
        f"{address} takes events again",
    ]


def test_events_while_the_endpoint_is_down_arrive_later_and_in_order(folder: Path) -> None:
    port = free_port("127.0.0.1")
    with Webhook(folder, f"http://127.0.0.1:{port}/hook") as sender:
        ids = [lose(folder, host) for host in range(5)]
        until(lambda: sender.problem and sender.n_waiting == 5)
        assert "refused" in sender.problem
        with serving(port=port) as endpoint:
            until(lambda: len(endpoint.accepted) == 5)
    assert endpoint.ids == ids


SENDER = """
import sys, time
from meshmend.launch import webhook
webhook.LOOK_S = 0.05
with webhook.Webhook(sys.argv[1], sys.argv[2]) as sender:
    print(sender.is_sender, flush=True)
    time.sleep(60)
"""


def test_another_sender_takes_over_when_one_is_killed(folder: Path) -> None:
    with serving() as endpoint:
        words = [sys.executable, "-c", SENDER, str(folder), endpoint.url]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as first:
            assert first.stdout is not None
            assert first.stdout.readline() == b"True\n"
            with Webhook(folder, endpoint.url) as second:
                ids = [lose(folder, 1, by=(0, 2))]
                until(lambda: endpoint.accepted)
                time.sleep(0.3)
                assert not second.is_sender
                first.send_signal(signal.SIGKILL)
                first.wait()
                ids.append(lose(folder, 2))
                until(lambda: len(endpoint.accepted) == 2)
                assert second.is_sender
    assert endpoint.tries == endpoint.ids == ids


def test_a_sender_that_comes_back_goes_on_where_it_was(folder: Path) -> None:
    lose(folder, 0, at=time.time() - 10)  # before anybody sent
    with serving() as endpoint:
        with Webhook(folder, endpoint.url):
            ids = [lose(folder, 1)]
        ids.append(lose(folder, 2))  # while nobody sends
        with Webhook(folder, endpoint.url):
            pass
        with Webhook(folder, endpoint.url + "/of-somebody-else"):  # begins now
            ids.append(lose(folder, 3))
    assert endpoint.ids == ids
    assert not list(folder.glob("*hook*/*"))
    assert all("hook/" not in path.read_text() for path in folder.glob("webhook-*.json"))  # the URL is a secret


def test_an_event_that_is_refused_does_not_hold_up_the_next(folder: Path) -> None:
    said: list[str] = []
    with serving(404, 429, 404, 400) as endpoint, Webhook(folder, endpoint.url, tell=said.append):
        first, second = lose(folder, 1), lose(folder, 2)
        until(lambda: endpoint.accepted)
    assert endpoint.tries == [first] * 4 + [second]  # an answer of 429 is no refusal
    assert endpoint.ids == [second]
    assert any(line.endswith("refuses it (it answers 400): night: host 1 is lost") for line in said)


def test_redirects_are_not_followed(folder: Path) -> None:
    with serving(302, 303) as endpoint, Webhook(folder, endpoint.url):
        lose(folder, 1)
        until(lambda: endpoint.accepted)
    assert "GET" not in endpoint.tries


def test_the_end_does_not_wait_for_an_endpoint_that_hangs(folder: Path) -> None:
    said: list[str] = []
    with serving(*["hang"] * 9) as endpoint:
        with Webhook(folder, endpoint.url, tell=said.append, post_s=20, finish_s=0.3):
            lose(folder, 1)
            until(lambda: endpoint.tries)
            began = time.monotonic()
        assert time.monotonic() - began < 5
    assert said[-1].startswith(f"1 event could not be sent to {endpoint.url.removesuffix('/hook')} ")
    assert "--webhook URL` with the same URL sends what is left" in said[-1]


def test_what_waits_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "MAX_WAITING", 10)
    monkeypatch.setattr(webhook, "MAX_RECORDED", 4)
    port = free_port("127.0.0.1")
    with Webhook(folder, f"http://127.0.0.1:{port}/hook") as sender:
        ids = [lose(folder, host) for host in range(30)]
        until(lambda: sender.problem and len(sender._watch.books) == 1)
        until(lambda: sender.n_waiting == 10)
        with serving(port=port) as endpoint:
            until(lambda: len(endpoint.accepted) == 10)
    assert endpoint.ids[1:] == ids[-9:]  # the first may have been on its way
    with serving(port=port) as endpoint, Webhook(folder, endpoint.url):
        pass
    assert endpoint.accepted == []  # what is no longer recorded is too old to be sent


def test_lines_that_are_no_events_of_ours_are_not_sent() -> None:
    good = {"at": 1.0, "event": "quarantined", "id": "a", "text": "b", "hosts": [1], "chips": [[0, 1]]}
    assert message_of(good) is not None
    wrong: tuple[dict[str, Any], ...] = (
        {"event": "step"},
        {"at": "now"},
        {"hosts": 3},
        {"hosts": ["x"]},
        {"chips": [1]},
        {"step": None},
        {"seconds": []},
    )
    for bad in wrong:
        assert message_of(good | bad) is None
    assert message_of({name: value for name, value in good.items() if name != "id"}) is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://example.com/secret", "begins with 'ftp', not with http:// or https://"),
        ("file:///secret", "begins with 'file', not with"),
        ("hooks.example.com/secret", "not with http:// or https://: give one as in https://hooks.example.com/"),
        ("http:///secret", "names no host"),
        ("http://a b/secret", "names no host"),
        ("http://me:word@example.com/secret", "has a user name in it"),
        ("http://example.com:99999/secret", "is not a URL"),
        ("http://[::1/secret", "is not a URL"),
    ],
)
def test_what_is_no_address_is_refused(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as refused:
        find_webhook(None, {"MESHMEND_WEBHOOK": url})
    assert message in str(refused.value)
    assert "secret" not in str(refused.value).replace("secret'", "")
    with pytest.raises(LaunchError):
        Webhook(tmp_path, url)
