"""Strangers at a rendezvous, silent, slow or hostile: they neither end it, nor hold it up, nor join it."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from jax_engine.job.rendezvous_cases import KEY, PATIENCE_S, Attack, Hosting, hello, visitor
from meshmend.jax.job import rendezvous_host
from meshmend.jax.job.rendezvous import _introduce
from meshmend.launch import messages
from meshmend.launch.messages import MAGIC, MessageError


def test_silent_visitors_are_dropped_one_by_one_and_hold_nobody_up() -> None:
    with Hosting(2, visitor_s=0.05) as hosting, contextlib.ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(socket.create_connection(("127.0.0.1", hosting.port)))
        hosting.until_true(lambda: hosting.host.turned_away["slow"] == 20)
        hosting.host.visitor_s = PATIENCE_S
        assert [fact["host"] for fact in hosting.join(1).result()] == [0, 1]


def test_a_visitor_that_trickles_is_dropped_when_its_time_is_up() -> None:
    """Each byte is in time, the whole message is not."""
    with Hosting(2, visitor_s=0.5) as hosting, visitor(hosting.port) as (connection, nonce):
        with contextlib.suppress(ConnectionError):
            for byte in hello(1, nonce, n=2):
                connection.sendall(bytes([byte]))
                time.sleep(0.02)  # 200 bytes and more
        hosting.until_true(lambda: hosting.host.turned_away["slow"] == 1)
        hosting.host.visitor_s = PATIENCE_S
        assert [fact["host"] for fact in hosting.join(1).result()] == [0, 1]


def test_a_flood_of_silent_visitors_makes_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_host, "MAX_UNDECIDED", 16)
    with Hosting(2) as hosting, contextlib.ExitStack() as silent:
        for i in range(100):
            one = silent.enter_context(socket.create_connection(("127.0.0.1", hosting.port)))
            one.sendall(MAGIC[: i % 4])
        hosting.until_true(lambda: hosting.host.turned_away["full"] == 84)
        assert len(hosting.host._undecided) == 16
        assert [fact["host"] for fact in hosting.join(1).result()] == [0, 1]


@pytest.mark.parametrize("n", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_visitors_neither_end_a_rendezvous_nor_join_it(n: int) -> None:
    """Processes 1 and 2 come while strangers do, and process 3 after them all: just these four are counted."""
    files, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    undecided = 0
    with Hosting(4, timeout_s=1e6) as hosting:
        attack = Attack(hosting.port, seed=n)
        first = hosting.join(1)
        hosting.until_true(lambda: 1 in hosting.host.counted)
        kinds = sorted(attack.kinds)
        for i in range(n):
            attack.visit(kinds[i % len(kinds)])
            undecided = max(undecided, len(hosting.host._undecided))
            assert threading.active_count() <= threads + 4  # this test's own
            assert set(hosting.host.counted) <= {1, 2}
            if i == n // 2:
                second = hosting.join(2)
        hosting.until_true(lambda: hosting.host.turned_away.total() + len(hosting.host._undecided) == n)
        hosting.until_true(lambda: 2 in hosting.host.counted)
        assert not first.done()
        third = hosting.join(3)
        expected = [0, 1, 2, 3]
        for one in (hosting.result, first, second, third):
            assert [fact["host"] for fact in one.result()] == expected
        attack.close()
    assert undecided <= rendezvous_host.MAX_UNDECIDED
    assert {"malformed", "key", "taken", "size", "process", "gone"} <= set(hosting.host.turned_away)
    assert len(list(Path("/proc/self/fd").iterdir())) <= files


@pytest.mark.parametrize("n", [100, pytest.param(5_000, marks=pytest.mark.slow)])
def test_a_visitor_survives_whatever_answers_instead_of_process_0(n: int) -> None:
    rng = random.Random(n)
    nonce = bytes(32)
    welcome = messages.pack("welcome", {}, KEY, nonce)
    answers = [
        lambda: rng.randbytes(rng.randrange(1, 300)),
        lambda: MAGIC + struct.pack(">I", rng.randrange(1 << 32)) + rng.randbytes(300),
        lambda: welcome[: rng.randrange(len(welcome))],
        lambda: messages.pack("welcome", {}, messages.make_key("sardine", "job"), nonce),
        lambda: messages.pack("welcome", {}, KEY, rng.randbytes(32)),
        lambda: messages.pack("everybody", {"everybody": [{}, {}]}, KEY, nonce),
        lambda: messages.pack_refusal(rng.choice(["key", "taken", "\x1b[2J", ""])),
        lambda: MAGIC + struct.pack(">I", 9000) + bytes(32) + b"[" * 9000,
    ]
    for i in range(n):
        mine, theirs = socket.socketpair()
        with mine, theirs:
            theirs.sendall((messages.make_challenge(nonce) if rng.random() < 0.8 else b"") + answers[i % 8]())
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises((MessageError, ConnectionError)) as caught:
                _introduce(mine, {"process": 1}, KEY, nonce, time.monotonic() + PATIENCE_S)
            assert "\x1b" not in str(caught.value)
