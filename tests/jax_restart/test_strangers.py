"""Strangers at a job's coordinator: none of them ends the job, and none joins it."""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import subprocess
import sys
import threading
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
STEPS = 60
SCRIPT = f"""
import os, time
import jax.numpy as jnp, numpy as np, optax
assert "MESHMEND_SECRET" not in os.environ
round_ = os.environ["MESHMEND_ROUND"]
import meshmend.jax as mmj

job = mmj.Job(os.environ["MESHMEND_SHARED"], 16, disk_every=0, compile_ahead=False, hardware="cpu-xla")
assert "MESHMEND_TLS" not in os.environ
data = np.ones((64, 4), np.float32)
for step in job.train(lambda w, x: (x @ w - 1) ** 2, optax.sgd(0.1), jnp.zeros(4), data, steps={STEPS}):
    if job.session.launch.process == 0:
        print("step", step.number, round_, flush=True)
    time.sleep(0.15)
"""


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
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@needs_tls
def test_strangers_neither_end_a_job_nor_join_it(tmp_path: Path) -> None:
    """One without a certificate, one of another secret, and one whose certificate has expired; then the same again."""
    (tmp_path / "train.py").write_text(SCRIPT)
    steps: list[int] = []
    lines: list[str] = []
    where: list[str] = []

    def on_line(_: int, line: str) -> None:
        lines.append(line)
        found = re.fullmatch(r"step (\d+) (\{.*\})", line)
        if found is not None:
            steps.append(int(found[1]))
            where[:] = [json.loads(found[2])["coordinator"]]

    job = LocalJob(
        [str(tmp_path / "train.py")], Hosts.of("2x2", "1x1"), tmp_path / "shared", secret=SECRET, on_line=on_line
    )
    with job as running:
        running.start()
        while running.running and len(steps) < 5:
            running.watch(0.1)
        assert steps, lines
        others = [
            "",
            make_credentials("another secret", running.job, 1),
            make_credentials(SECRET, running.job, 1, days=-0.5),
        ]
        called = [stranger(where[0], credentials) for credentials in others]
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda one=one: answers.append(one.communicate(timeout=60))) for one in called
        ]
        for thread in threads:
            thread.start()
        at = len(steps)
        while running.running:
            running.watch(0.1)
        for thread in threads:
            thread.join()
        assert set(running.processes.statuses.values()) == {0}, lines
    assert steps == list(range(1, STEPS + 1)), "a step is missing, or was made twice"
    assert at < STEPS, "they called while the job trained"
    assert [one.returncode for one in called].count(0) == 0
    assert "joined" not in "".join(out for out, _ in answers)


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
