"""A whole job on one machine: a store, and hosts with virtual chips, each of which can be killed.

This is a cluster in miniature, for a first try, for tests and for measurements. The store is a process of its own, and
each host one with its agent and its worker below it, which die as a whole. Hosts are forks of one process that has
imported JAX (`nursery`), as far as they have its environment. Each worker has virtual CPU devices, as many
as its host has chips.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from meshmend.buckets import Folder, own_folder
from meshmend.errors import LaunchError
from meshmend.launch.host import HostDescription
from meshmend.launch.hosts import Hosts
from meshmend.launch.job import HostProcess, HostProcesses, Report
from meshmend.launch.membership import SILENT_S, START_S
from meshmend.launch.nursery import Nursery
from meshmend.launch.processes import die_with_parent, free_port
from meshmend.launch.signing import KEY_ENDS
from meshmend.launch.timeline import timeline_of

LOOPBACK = "127.0.0.1"
STORE_S = 120.0
"""How long the store's process may take to start, on an overloaded machine; that it has ended is noticed at once."""


class LocalJob(HostProcesses):
    """A job of virtual hosts that run `argv`, a script and its arguments. Leaving the `with` block ends everything.

    `shared` is the folder that all hosts see, and the store's. A round needs `least` hosts, by default half of them.
    `machine` is the file that describes the machine whose chips these virtual ones stand for. `environment` returns
    what a host's worker gets besides. A host that is killed loses its memory, which is a folder of its own. With a
    `secret`, checkpoints are signed, and compiled programs of earlier runs are loaded; by default there is one that
    ends with this run.
    `start_over` and `state_wait_s` are as in `HostDescription`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        hosts: Hosts,
        shared: Path,
        *,
        least: int | None = None,
        max_restarts: int = 3,
        warm: bool = True,
        silent_s: float = SILENT_S,
        start_s: float = START_S,
        machine: Path | None = None,
        secret: str | None = None,
        start_over: bool = False,
        state_wait_s: float = 0.0,
        environment: Callable[[int], Mapping[str, str]] = lambda _: {},
        on_line: Callable[[int, str], None] = lambda *_: None,
        on_event: Callable[[Report], None] = lambda _: None,
    ) -> None:
        super().__init__(secret=secret or secrets.token_hex(32), on_line=on_line, on_event=on_event)
        self.argv = list(argv)
        self.hosts = hosts
        self.shared = shared
        self.least = (len(hosts) + 1) // 2 if least is None else least
        self.job = f"local-{secrets.token_hex(4)}"
        self._max_restarts = max_restarts
        self._warm = warm
        self._silent_s = silent_s
        self._start_s = start_s
        self._machine = machine
        self._start_over = start_over
        self._state_wait_s = state_wait_s
        self._environment = environment
        self._more = {} if secret else {KEY_ENDS: "1"}
        self._port = 0
        self._store: subprocess.Popen[bytes] | None = None
        self._nursery: Nursery | None = None
        in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
        self._memory = tempfile.mkdtemp(prefix="meshmend-", dir=in_memory)

    def __enter__(self) -> Self:
        self.shared.mkdir(parents=True, exist_ok=True)
        try:
            self.start_store()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End all hosts and the store, and remove the hosts' memory."""
        try:
            super().close()
            self.kill_store()
        finally:
            if self._nursery is not None:
                self._nursery.close()
            shutil.rmtree(self._memory, ignore_errors=True)

    def start(self, *hosts: int) -> None:
        """Start hosts, including ones that have been killed; without arguments, all of them."""
        for host in hosts or range(len(self.hosts)):
            flags = f"--xla_force_host_platform_device_count={self.hosts.chips_per_host}"
            self.start_host(
                HostDescription(
                    argv=self.argv,
                    store=f"{LOOPBACK}:{self._port}",
                    host=host,
                    hosts=(self.least, len(self.hosts)),
                    job=self.job,
                    machine=str(self.hosts),
                    timeline=str(timeline_of(Path(self._memory), host)),
                    max_restarts=self._max_restarts,
                    silent_s=self._silent_s,
                    warm=self._warm,
                    start_over=self._start_over,
                    state_wait_s=self._state_wait_s,
                    environment={
                        **worker_environment(self.hosts, host, self.shared, self._machine),
                        "JAX_PLATFORMS": "cpu",
                        # Hosts share this machine's cores, so threads within an operation would only be in the way.
                        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags} --xla_cpu_multi_thread_eigen=false",
                        "OMP_NUM_THREADS": "1",
                        "MESHMEND_MEMORY": str(Path(self._memory) / f"host-{host}"),
                        **self._more,
                        **self._environment(host),
                    },
                )
            )

    def _begin(self, what: HostDescription, environment: Mapping[str, str], events: int, output: int) -> HostProcess:
        own = {**environment, **what.environment}
        if self._nursery is None and what.warm:
            self._nursery = Nursery(own)
        if self._nursery is None or not self._nursery.serves(own):
            return super()._begin(what, environment, events, output)
        return self._nursery.start(what, environment, events, output)

    def kill(self, host: int) -> float:
        """Kill a host as a power cut would, and wipe its memory; return when, as seconds since the epoch."""
        at = super().kill(host)
        shutil.rmtree(Path(self._memory) / f"host-{host}", ignore_errors=True)
        return at

    def start_store(self) -> None:
        """Start the store, or start it again where it was."""
        if not self._port:
            self._port = free_port(LOOPBACK)
        self._store = subprocess.Popen(  # noqa: S603  # our own interpreter and module
            [
                *(sys.executable, "-m", "meshmend.launch.store"),
                *(f"{LOOPBACK}:{self._port}", self.job, str(self._silent_s), str(self._start_s), str(self.shared)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env={**os.environ, "MESHMEND_SECRET": self._secret},
        )
        until = time.monotonic() + STORE_S
        while True:
            with suppress(OSError), socket.create_connection((LOOPBACK, self._port), timeout=1):
                return
            if self._store.poll() is not None or time.monotonic() > until:
                raise LaunchError(f"The rendezvous store does not start at {LOOPBACK}:{self._port}.")
            time.sleep(0.05)

    def kill_store(self) -> None:
        """Kill the store."""
        if self._store is not None:
            self._store.kill()
            self._store.wait()
            self._store = None

    def wait(self, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> dict[int, int]:
        """Wait until all hosts have ended; return their exit statuses. Raise `LaunchError` on timeout."""
        until = time.monotonic() + timeout_s
        while self.running:
            meanwhile()
            if time.monotonic() > until:
                raise LaunchError(f"Hosts {self.running} still run after {timeout_s:g} s.")
            self.watch(0.05)
        return dict(self.statuses)


def worker_environment(
    hosts: Hosts | None, host: int, shared: Folder | None, machine: Path | None = None
) -> dict[str, str]:
    """Return what every launched worker finds in its environment: where it is, and where the job keeps its files.

    `machine` is the file that describes the machine: it brings failed chips, failed and slow cables, and the hardware.
    """
    found: dict[str, str] = {}
    if hosts is not None:
        shape, tile = ("x".join(map(str, sides)) for sides in (hosts.shape, hosts.tile))
        found |= {"MESHMEND_SHAPE": shape, "MESHMEND_HOST_SHAPE": tile, "MESHMEND_HOST": str(host)}
        if any(hosts.wrap):
            found["MESHMEND_WRAP"] = ",".join(str(axis) for axis, wraps in enumerate(hosts.wrap) if wraps)
    if machine is not None:
        found["MESHMEND_MACHINE"] = str(machine)
    if shared is not None:
        compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(own_folder(shared) / "compiled"))
        found |= {"MESHMEND_SHARED": str(shared), "JAX_COMPILATION_CACHE_DIR": compiled}
    return found
