"""A store that is crowded, paused, replaced or without means: none of that ends a host."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch.serving import JOB, SECRET, Serving, connected, joined, lone_host, running
from meshmend.errors import LaunchError
from meshmend.launch.membership import Membership
from meshmend.launch.messages import (
    MAX_HELLO_BYTES,
    REFUSALS,
    make_challenge,
    make_nonce,
    pack_refusal,
    read_frame,
)
from meshmend.launch.processes import free_port, raise_file_limit
from meshmend.launch.store import Store


def knock(port: int) -> socket.socket:
    """Connect to a store, and say nothing."""
    return socket.create_connection(("127.0.0.1", port), timeout=5)


@contextlib.contextmanager
def impostor(port: int, *codes: str) -> Iterator[Counter[str]]:
    """Answer everybody in the store's place with one refusal after the other; yield how often each was sent."""
    server = socket.create_server(("127.0.0.1", port))
    ended, sent = threading.Event(), Counter[str]()

    def serve() -> None:
        for code in itertools.cycle(codes):
            if ended.is_set():
                return
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.sendall(make_challenge(make_nonce()) + pack_refusal(code))
                time.sleep(0.02)
                connection.close()
                sent[code] += 1

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield sent
    finally:
        ended.set()
        with contextlib.suppress(OSError):
            knock(port).close()
        thread.join()
        server.close()


def test_hosts_that_come_at_once_are_all_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than is room for unauthenticated connections, before the store has served the first."""
    monkeypatch.setattr("meshmend.launch.store.MAX_UNAUTHENTICATED", 10)
    monkeypatch.setattr("meshmend.launch.store.PATIENCE_S", 0.0)
    n = 100
    with Serving(start_s=60) as serving:
        with serving.paused(1.0):
            members = [serving.member(host, machine="", hosts=(n, n)) for host in range(n)]
            time.sleep(0.5)
        places = joined(*members)
        assert [assigned.process for assigned in places] == list(range(n))
        assert {assigned.hosts for assigned in places} == {tuple(range(n))}
        assert any("unreachable" in received for received in serving.received.values())  # some had to come twice


def test_no_word_that_is_not_signed_ends_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody without the secret answers in the store's place while it is away."""
    for name in ("AGAIN_S", "LONGEST_AGAIN_S"):
        monkeypatch.setattr(f"meshmend.launch.member.{name}", 0.05)
    with Serving(silent_s=2) as serving:
        first, second = running(serving)
        serving.stop()
        with impostor(serving.port, *REFUSALS) as sent:
            until = time.monotonic() + 20
            while min(sent[code] for code in REFUSALS) < 4:
                assert time.monotonic() < until, sent
                assert first.wait_stopped(0.1) is None
        with Serving(port=serving.port) as again:
            again.wait_for("joined: 2 of 2")
            assert first.wait_stopped(0.1) is second.wait_stopped(0.1) is None


def test_a_crowded_store_is_waited_for_and_a_foreign_one_is_not() -> None:
    port = free_port("127.0.0.1")
    host = partial(lone_host, port, reach_s=0.5, silent_s=1)
    with impostor(port, "full", "slow", "files"):
        patient = host()
        time.sleep(2)
        assert patient.wait_stopped(0) is None
    patient.close()
    refused = pytest.raises(LaunchError, match=r"No store answers at .*refuses this host: its secret or its job")
    with impostor(port, "key"), refused:
        host().join(7000)


def test_connections_that_send_nothing_do_not_keep_hosts_out(serving: Serving) -> None:
    """As many as there are places, and as many again in the kernel's queue."""
    raise_file_limit()
    with contextlib.ExitStack() as outsiders:
        for _ in range(2000):
            outsiders.enter_context(knock(serving.port))
        began = time.monotonic()
        running(serving)
        assert time.monotonic() - began < 5
        serving.wait_for("refused: too many came at once (and ")
        assert len(serving.lines) < 20


def test_a_store_that_pauses_drops_nobody() -> None:
    """For almost as long as a host may be silent: what they have said is in the store's own buffers."""
    with Serving(silent_s=3) as serving:
        first, second = running(serving)
        time.sleep(0.9)
        with serving.paused(2.7):
            pass
        assert first.wait_stopped(1.5) is None
        assert second.wait_stopped(0) is None
        assert serving.received == {0: ["round"], 1: ["round"]}


def test_a_member_that_is_unknown_is_told_that_it_was_dropped() -> None:
    """Two processes of one host: the first was silent, so the second has taken its place."""
    with Serving(silent_s=30) as serving, connected(serving) as (first, channel):
        time.sleep(2.5)
        with connected(serving):
            first.sendall(channel.pack({"type": "beat"}))
            said = [channel.unpack(read_frame(first.recv, MAX_HELLO_BYTES))["type"]]
            while said[-1] == "beat":
                said.append(channel.unpack(read_frame(first.recv, MAX_HELLO_BYTES))["type"])
            assert said[-1] == "dropped"


def test_a_host_that_comes_back_when_the_job_is_over_hears_how_it_ended(serving: Serving) -> None:
    first, second = running(serving)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(first.finish, 10)
        second.finish(10)
        assert end.result()["ok"]
    late = serving.member(1)
    with pytest.raises(LaunchError, match="The job is over: all hosts have finished"):
        late.join(7000)
    assert late.over is not None
    assert late.over["ok"]


def test_without_descriptors_hosts_wait_and_people_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr("meshmend.launch.store.OWN_FILES", limit - 2)
    settings: dict[str, Any] = {"hosts": (1, 3), "reach_s": 1.0, "silent_s": 1.0}
    with Serving(start_s=60) as serving:
        _, second = (serving.member(host, **settings) for host in (0, 1))
        serving.wait_for("joined: 2 of 3")
        third = serving.member(2, **settings)
        serving.wait_for(f"no file descriptor was left for it (the limit is {limit}: start the store with a higher `ul")
        time.sleep(1.5)
        assert third.wait_stopped(0) is None
        second.close()
        serving.wait_for("host 2 has joined: 2 of 3")


def test_a_system_without_means_costs_nobody_its_connection(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = running(serving)
    server = serving.store._server

    class Scarce:
        def accept(self) -> Any:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

        def fileno(self) -> int:
            return server.fileno()

    monkeypatch.setattr(serving.store, "_server", Scarce())
    knock(serving.port).close()
    serving.wait_for("2 connections are all that the system allows: Too many open files in system")
    time.sleep(1.2)
    monkeypatch.setattr(serving.store, "_server", server)
    assert first.wait_stopped(0.1) is None
    serving.member(1)
    time.sleep(1.5)
    assert "refused" not in serving.received[1]


def test_the_soft_limit_of_descriptors_is_raised() -> None:
    code = "import resource as r; from meshmend.launch.processes import raise_file_limit as raise_; raise_(); "
    code += "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    limits = 64, 512
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )
    assert done.stdout.split() == ["512", "512"]


@pytest.mark.parametrize("kind", ["full", "stuck"])
def test_a_log_that_cannot_be_written_does_not_stop_the_store(kind: str) -> None:
    stuck = threading.Event()

    def tell(_: str) -> None:
        if kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        stuck.wait(30)

    with Store(Membership(), job=JOB, secret=SECRET, log=tell) as store:
        ended = threading.Event()
        thread = threading.Thread(target=store.serve, args=(ended.is_set,))
        thread.start()
        for _ in range(1200):  # more than are kept
            store._log.put("a line")
        alone = lone_host(store.port)
        assert alone.join(7000).hosts == (0,)
        alone.close()
        ended.set()
        thread.join()
    stuck.set()


def test_the_command_lives_though_its_log_is_full() -> None:
    port = free_port("127.0.0.1")
    words = [sys.executable, "-m", "meshmend", "store", "--job", JOB, "--listen", f"127.0.0.1:{port}"]
    environment = {**os.environ, "MESHMEND_SECRET": SECRET}
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(words, stdout=full, stderr=subprocess.PIPE, env=environment) as store,
    ):
        alone = lone_host(port)
        assert alone.join(7000).hosts == (0,)
        assert alone.finish(10)["ok"]
        alone.close()
        assert store.wait(20) == 0
        assert store.stderr is not None
        assert store.stderr.read() == b""
