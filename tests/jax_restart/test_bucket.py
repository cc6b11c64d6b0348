"""A job whose hosts share no folder: what they have in common is in a bucket, and outlives all of them.

Each host is `meshmend run` in a mount namespace of its own, with a home, a memory and temporary files that nobody else
sees, and nothing else that it can write to. They reach the store and the bucket, as machines would.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bucket import Bucket
from meshmend.launch.processes import die_with_parent, free_port
from meshmend.launch.timeline import read_timeline, timeline_of
from waiting import until

pytest.importorskip("gcsfs")
pytest.importorskip("gcp_storage_emulator")

STEPS, SAMPLES, BATCH = 32, 64, 8
URL = "gs://bucket/jobs/train"
SCRIPT = f"""
import os, sys, time
import numpy as np, optax
import meshmend.jax as mmj

for path in {{elsewhere!r}}:
    try:
        open(os.path.join(path, "seen-by-others"), "w")
        sys.exit(path + " can be written to")
    except OSError:
        pass
job = mmj.Job(global_batch={BATCH}, memory_every=1, disk_every=4)
x = np.arange({SAMPLES * 3}, dtype=np.float32).reshape({SAMPLES}, 3)
for step in job.train(lambda w, row: row @ w, optax.sgd(1.0), np.zeros(3, np.float32), x, steps={STEPS}):
    print("step", step.number, "on", step.chips, flush=True)
    # Held until a host is killed, and then until all are.
    while (step.number, step.chips) in ((8, 6), (20, 4)):
        time.sleep(0.05)
print("params", job.params.tolist(), "resumed", job.resumed.source, job.resumed.step, flush=True)
"""
# Only what is in $1 and in memory can be written to, and nobody else sees it. $2 are parts that may be mounted apart.
AS_A_HOST = """
mount -o remount,bind,ro /
for part in $2; do mount --bind "$part" "$part"; mount -o remount,bind,ro "$part"; done
mount -t tmpfs none "$1"; mount -t tmpfs none /dev/shm; mkdir "$1/tmp"; cd "$1"; shift 2; exec "$@"
"""


def unsupported_reason() -> str:
    """Return why hosts cannot have mount namespaces here, "" if they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("unshare") is None:
        return "mount namespaces need Linux, root and unshare"
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return "" if not subprocess.run(probe, capture_output=True, check=False).returncode else "mounting is not allowed"


class Machines:
    """A store and hosts, started by the same commands each time, whose own files are gone when they are killed."""

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self.folder, self.events, self.own = folder, folder / "events", folder / "own"
        self.own.mkdir()
        self.lines: list[tuple[int | str, str]] = []
        self.processes: dict[int | str, subprocess.Popen[str]] = {}
        self._readers: dict[int | str, threading.Thread] = {}
        self._env = os.environ | bucket.environment | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "300"}
        self._store = f"127.0.0.1:{free_port('127.0.0.1')}"
        (folder / "secret").write_text(secrets.token_hex(32))
        (folder / "secret").chmod(0o600)
        self._elsewhere = sorted({str(folder), tempfile.gettempdir(), str(Path.home())})
        (folder / "train.py").write_text(SCRIPT.replace("{elsewhere!r}", repr(self._elsewhere)))

    def _meshmend(self, name: int | str, *words: str, within: tuple[str, ...] = (), **env: str) -> None:
        process = subprocess.Popen(
            [*within, sys.executable, "-m", "meshmend", *words],
            env=self._env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.processes[name] = process

        def read() -> None:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    self.lines.append((name, line.rstrip("\n")))

        self._readers[name] = threading.Thread(target=read, daemon=True)
        self._readers[name].start()

    def start_store(self) -> None:
        words = ("--listen", self._store, "--folder", str(self.events), "--secret-file", str(self.folder / "secret"))
        self._meshmend("store", "store", *words)

    def start(self, host: int) -> None:
        own, temporary = str(self.own), str(self.own / "tmp")
        within = ("unshare", "--mount", "sh", "-euc", AS_A_HOST, "sh", own, " ".join(self._elsewhere))
        words = ("--hosts", "2:3", "--shape", "2x3", "--host", "2x1", "--host-index", str(host), "--shared", URL)
        reach = ("--store", self._store, "--secret-file", str(self.folder / "secret"), str(self.folder / "train.py"))
        env = {
            "HOME": own,
            "TMPDIR": temporary,
            "XDG_CACHE_HOME": f"{own}/cache",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        }
        self._meshmend(host, "run", *words, *reach, within=within, **env)

    def kill(self, host: int | str) -> None:
        """End a host as a power cut does: all of its processes die, and its own files with them."""
        with contextlib.suppress(ProcessLookupError):
            self.processes[host].send_signal(signal.SIGKILL)
        self.processes.pop(host).wait()
        self._readers.pop(host).join(60)  # until nobody of that host is left who could write

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        def holds() -> Any:
            for name, process in self.processes.items():
                assert process.poll() in (None, 0), (what, name, self.shown())
            return condition()

        try:
            return until(holds, what, timeout_s=300)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.shown()}") from None

    def shown(self) -> str:
        return "\n".join(f"{name}: {line}" for name, line in self.lines)

    def saw(self, text: str) -> bool:
        return any(text in line for _, line in self.lines)

    def happened(self, event: str, **facts: Any) -> list[dict[str, Any]]:
        paths = [timeline_of(self.events, host) for host in range(3)]
        events = [line for path in paths if path.exists() for line in read_timeline(path)]
        return [one for one in events if one["event"] == event and facts.items() <= one.items()]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machines, Bucket]]:
    if why := unsupported_reason():
        pytest.skip(why)
    with Bucket() as bucket:
        made = Machines(tmp_path, bucket)
        try:
            yield made, bucket
        finally:
            for name in list(made.processes):
                made.kill(name)


def test_a_job_without_a_common_folder_outlives_its_hosts(machines: tuple[Machines, Bucket]) -> None:
    job, bucket = machines
    job.start_store()
    for host in range(3):
        job.start(host)
    # A host is lost: the others go on from their memories, with the program that was compiled for that loss.
    job.until(lambda: job.saw("step 8 on 6"), "the first eight steps")
    job.until(lambda: job.happened("compile ahead", lost=2), "the program for the loss of host 2")
    job.kill(2)
    job.until(lambda: job.saw("step 20 on 4"), "twelve steps on two hosts")
    restored = {(one["source"], one["step"]) for one in job.happened("restore") if one["round"] == 2}
    assert len(restored) == 1, restored
    ((source, step),) = restored
    assert (source, step in (7, 8)) == ("memory", True), step
    assert [one["loaded"].endswith(".program") for one in job.happened("compile", round=2) if "loaded" in one] == [
        *(True, True)
    ], job.happened("compile")
    # All are lost, and all that they had. A chip was put on the list before.
    words = ["quarantine", "add", URL, "1,2", "--why", "computes wrong numbers"]
    subprocess.run([sys.executable, "-m", "meshmend", *words], env=job._env, check=True, capture_output=True)
    job.until(lambda: "jobs/train/disk/20/commit_success.txt" in bucket.names("jobs/train/disk/20"), "a checkpoint")
    for host in (0, 1):
        job.kill(host)
    assert list(job.own.iterdir()) == [], "what a host had was its own"
    job.lines.clear()
    for host in range(3):
        job.start(host)
    job.until(lambda: all(process.poll() == 0 for process in job.processes.values()), "the end")
    assert job.saw("step 21 on 5")
    ended = {re.sub(r".*?params", "params", line) for _, line in job.lines if "params [" in line}
    # Gradients do not depend on the parameters here, and each sample was used once per epoch: sums of whole numbers.
    epochs = STEPS * BATCH // SAMPLES
    columns = [sum(range(first, SAMPLES * 3, 3)) for first in range(3)]
    exact = [-epochs * total / BATCH for total in columns]
    assert ended == {f"params {json.dumps(exact)} resumed disk 20"}, job.shown()
    assert len(job.happened("measuring")) == 3, "each host once: the second and third round found it in the bucket"
    assert {name.split("/")[2] for name in bucket.names("jobs/train/")} >= {
        *("name", "disk", "programs", "hardware", "planned-for.json", "quarantine.json")
    }
