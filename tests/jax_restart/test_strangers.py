"""Strangers at a job's coordinator: none of them ends the job, and none joins it."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from meshmend.errors import RestartError
from meshmend.launch.certificates import check_coordinator, make_credentials, write_credentials
from meshmend.launch.hosts import Hosts
from meshmend.launch.local import LocalJob

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'meshmend[tls]'")
has_tls = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters
needs_tls = pytest.mark.skipif(not has_tls, reason=f"JAX {jax.__version__} has no TLS: 0.12 has")

SECRET = "only the job knows this"  # noqa: S105
STEPS = 200
SCRIPT = f"""
import json, os, socket, subprocess, sys, time
import jax.numpy as jnp, numpy as np, optax
assert "MESHMEND_SECRET" not in os.environ
round_ = json.loads(os.environ["MESHMEND_ROUND"])
import meshmend.jax as mmj

if round_["number"] == 1 and round_["process"] == 0:
    # A stranger that is quicker than the job: it stands at the coordinator's port, and accepts whoever comes.
    stands = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(20)"
    port = int(round_["coordinator"].rpartition(":")[2])
    subprocess.Popen([sys.executable, "-c", stands, str(port)], start_new_session=True)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.05)
job = mmj.Job(os.environ["MESHMEND_SHARED"], 16, disk_every=0, compile_ahead=False, hardware="cpu-xla")
assert "MESHMEND_TLS" not in os.environ
data = np.ones((64, 4), np.float32)
for step in job.train(lambda w, x: (x @ w - 1) ** 2, optax.sgd(0.1), jnp.zeros(4), data, steps={STEPS}):
    if job.session.launch.process == 0:
        print("step", step.number, step.chips, json.dumps(round_), flush=True)
    if not os.path.exists(os.environ["MESHMEND_SHARED"] + "/calm"):
        time.sleep(0.3)
"""
"""It takes its time until the test has done all that it has to do."""


def stranger(address: str, credentials: str) -> subprocess.Popen[str]:
    """A process that calls the coordinator as if it were process 1."""
    code = "\n".join(
        [
            "import sys, jax",
            "from meshmend.launch.certificates import write_credentials",
            "files = write_credentials(sys.argv[2]) if sys.argv[2] else {}",
            "how = dict(initialization_timeout=3, cluster_detection_method='deactivate')",
            "jax.distributed.initialize(sys.argv[1], 4, 1, **how, **files)",
            "print('joined')",
        ]
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, address, credentials]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class Watched:
    """What a job of four hosts prints, and everybody else who has called it."""

    def __init__(self, folder: Path) -> None:
        (folder / "train.py").write_text(SCRIPT)
        hosts, shared = Hosts.of("2x2", "1x1"), folder / "shared"
        self.steps: list[tuple[int, int, int]] = []
        """Number, chips and round of each."""
        self.lines: list[str] = []
        self.where = ""
        self.called: list[subprocess.Popen[str]] = []
        settings: dict[str, Any] = {"on_line": self.on_line, "on_event": self.on_event}
        self.job = LocalJob([str(folder / "train.py")], hosts, shared, secret=SECRET, **settings)

    def on_line(self, _: int, line: str) -> None:
        self.lines.append(line)
        found = re.fullmatch(r"step (\d+) (\d+) (\{.*\})", line)
        if found is not None:
            round_ = json.loads(found[3])
            self.steps.append((int(found[1]), int(found[2]), round_["number"]))
            self.where = round_["coordinator"]

    def on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "raised":
            self.lines.append(event["error"])

    def until(self, condition: Callable[[], bool]) -> None:
        while self.job.running and not condition():
            self.job.watch(0.1)
        assert self.job.running, "\n".join(self.lines)

    def let_strangers_call(self) -> int:
        """Let one call without a certificate, one with another secret and one whose certificate has expired."""
        for credentials in (
            "",
            make_credentials("another secret", self.job.job, 1),
            make_credentials(SECRET, self.job.job, 1, days=-0.5),
        ):
            self.called.append(stranger(self.where, credentials))
        return len(self.steps)


@needs_tls
def test_strangers_neither_end_a_job_nor_join_it(tmp_path: Path) -> None:
    """Also one that stands at the coordinator's port before the job does, and through a host's loss and return."""
    watched = Watched(tmp_path)
    with watched.job as job:
        job.start()
        watched.until(lambda: len(watched.steps) >= 5)
        first = watched.let_strangers_call()
        watched.until(lambda: all(one.poll() is not None for one in watched.called))
        assert len(watched.steps) > first, "the job went on while they called"
        round_before = watched.steps[-1][2]
        job.kill(3)
        watched.until(lambda: watched.steps[-1][2] > round_before)
        watched.let_strangers_call()
        watched.until(lambda: all(one.poll() is not None for one in watched.called))
        job.start(3)
        watched.until(lambda: watched.steps[-1][1:] == (4, round_before + 2))
        (tmp_path / "shared" / "calm").touch()
        while job.running:
            job.watch(0.1)
        assert {job.statuses[host] for host in range(4)} == {0}, watched.lines
    numbers = [number for number, _, _ in watched.steps]
    assert sorted(set(numbers)) == list(range(1, STEPS + 1)), "a step is missing"
    for _, of_round in itertools.groupby(watched.steps, lambda step: step[2]):
        made = [number for number, _, _ in of_round]
        assert made == list(range(made[0], made[-1] + 1)), "none is made twice, but for those since the last copy"
    assert {chips for _, chips, _ in watched.steps} == {3, 4}
    # The first round met a stranger, and every later one was the job's own doing: a kill, and a return.
    assert {number for _, _, number in watched.steps} == {round_before, round_before + 1, round_before + 2}
    assert any("Another process listens at 127.0.0.1:" in line for line in watched.lines), watched.lines[:60]
    answers = [one.communicate(timeout=60)[0] for one in watched.called]
    assert len(answers) == 6
    assert 0 not in [one.returncode for one in watched.called]
    assert "joined" not in "".join(answers)


def certificate_of(secret: str, job: str = "train", days: float = 30.0) -> dict[str, str]:
    return write_credentials(make_credentials(secret, job, 0, days=days))


def serve(files: dict[str, str] | None) -> tuple[str, threading.Thread]:
    """Answer one caller as a coordinator would, with TLS or without."""
    import ssl

    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = server.accept()
        with server, connection:
            if files is None:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files["mtls_cert_file"], files["mtls_key_file"])
            context.load_verify_locations(files["mtls_ca_file"])
            context.verify_mode = ssl.CERT_REQUIRED
            context.set_alpn_protocols(["h2"])
            try:
                with context.wrap_socket(connection, server_side=True) as peer:
                    peer.sendall(b"\0")
                    peer.recv(1)
            except OSError:
                pass

    thread = threading.Thread(target=answer)
    thread.start()
    return f"127.0.0.1:{server.getsockname()[1]}", thread


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (None, "does not show that it belongs to this job"),
        (("another secret", "train", 30.0), "does not show that it belongs to this job"),
        ((SECRET, "train", -0.5), "certificate has expired"),
        ((SECRET, "another job", 30.0), "does not show that it belongs to this job"),
    ],
    ids=["no TLS", "another secret", "expired", "another job"],
)
def test_who_stands_at_the_coordinators_port_is_not_believed(theirs: Any, why: str) -> None:
    address, thread = serve(None if theirs is None else certificate_of(*theirs))
    with pytest.raises(RestartError, match=why):
        check_coordinator(address, certificate_of(SECRET), timeout_s=10)
    thread.join()


def test_the_jobs_own_coordinator_is_believed() -> None:
    address, thread = serve(certificate_of(SECRET))
    check_coordinator(address, certificate_of(SECRET), timeout_s=10)
    thread.join()


def test_without_a_secret_there_is_no_certificate() -> None:
    assert make_credentials("", "train", 0) == ""
