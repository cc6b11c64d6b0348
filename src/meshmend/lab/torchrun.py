"""The hosts of a job on one machine, under torchrun: a separate store, one agent per host, killed without warning.

This is a cluster in miniature: each host is an agent (`torchrun`) with its worker, and dies as a whole. The
rendezvous store is a separate process, because a job does not survive the loss of the host that runs its store.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from meshmend.errors import LabError
from meshmend.lab.chips import QUICK_NAMES, die_with_parent

RENDEZVOUS = {
    "last_call_timeout": 1,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
    "join_timeout": 300,
    "read_timeout": 10,
}
"""In seconds. An agent that is silent for interval × attempts is dead; a round waits for `last_call_timeout` for more
hosts once it has enough. An agent that waits for another one in the store for `read_timeout` ends."""

STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Torchrun:
    """Hosts 0 to `n_hosts` − 1, each a torchrun agent that runs `command` (a script and its arguments) as its worker.

    `min_hosts` is a majority by default: with fewer, hosts that come back while the others are slow to respond may
    continue as a second job. An agent that ends with an error is started again up to `revivals` times, as a host's
    init system would do: all agents end if one of them dies while ranks are being assigned. That closes their
    rendezvous permanently, so the next one has a new name.

    Each has MESHMEND_HOST in its environment, and what `environment` returns for its number. A host's output goes to
    `folder/host-N.log`. Leaving the `with` block kills everything; all of it also dies with this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        n_hosts: int,
        folder: Path,
        *,
        min_hosts: int | None = None,
        environment: Callable[[int], Mapping[str, str]] = lambda _: {},
        max_restarts: int = 20,
        revivals: int = 0,
        rendezvous: Mapping[str, int] | None = None,
    ) -> None:
        self.command = list(command)
        self.n_hosts = n_hosts
        self.min_hosts = n_hosts // 2 + 1 if min_hosts is None else min_hosts
        self.folder = folder
        self.max_restarts = max_restarts
        self.revivals = revivals
        self._environment = environment
        self._rendezvous = {**RENDEZVOUS, **(rendezvous or {})}
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._store: subprocess.Popen[str] | None = None
        self._port = 0
        self._revived: dict[int, int] = {}
        self._round: dict[int, int] = {}
        self._newest_round = 0

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._store = subprocess.Popen(  # noqa: S603  # our own interpreter and a constant
            [sys.executable, "-c", STORE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env={**QUICK_NAMES, **os.environ},
        )
        line = self._store.stdout.readline() if self._store.stdout else ""
        if not line.strip():
            self.close()
            raise LabError("The rendezvous store does not start. Is torch installed?")
        self._port = int(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all hosts and the store."""
        for host in list(self._agents):
            self.kill(host)
        if self._store is not None:
            self._store.kill()
            self._store.communicate()
            self._store = None

    def start(self, *hosts: int) -> None:
        """Start hosts, including ones that have been killed; without arguments, all of them."""
        conf = ",".join(f"{name}={value}" for name, value in {"is_host": 0, **self._rendezvous}.items())
        for host in hosts or range(self.n_hosts):
            if host in self._agents:
                raise LabError(f"Host {host} is already running.")
            self._round[host] = self._newest_round
            log = (self.folder / f"host-{host}.log").open("ab")
            with log:
                self._agents[host] = subprocess.Popen(  # noqa: S603  # our own interpreter and the caller's script
                    [
                        *(sys.executable, "-m", "torch.distributed.run"),
                        f"--nnodes={self.min_hosts}:{self.n_hosts}",
                        *("--nproc-per-node=1", f"--max-restarts={self.max_restarts}", "--monitor-interval=0.1"),
                        *(
                            "--rdzv-backend=c10d",
                            f"--rdzv-endpoint=127.0.0.1:{self._port}",
                            f"--rdzv-id=meshmend-{self._newest_round}",
                        ),
                        *(f"--rdzv-conf={conf}", "--local-addr=127.0.0.1"),
                        *self.command,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                    env={
                        **QUICK_NAMES,
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "TORCH_CPP_LOG_LEVEL": "ERROR",
                        # Otherwise every round uses the address and port of the first rank 0.
                        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                        "MESHMEND_HOST": str(host),
                        **self._environment(host),
                    },
                )

    def kill(self, host: int) -> float:
        """Kill a host as a power cut would, agent and worker by SIGKILL; return when, as seconds since the epoch."""
        agent = self._agents.pop(host)
        # The worker first: its agent is stopped, so it cannot react before it is killed too.
        with contextlib.suppress(ProcessLookupError):
            agent.send_signal(signal.SIGSTOP)
        workers = children(agent.pid)
        at = time.time()
        for pid in (*workers, agent.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()
        return at

    def revive(self) -> None:
        """Restart agents that have ended with an error. `wait` does this, too."""
        for host, agent in list(self._agents.items()):
            if agent.poll() and self._revived.get(host, 0) < self.revivals:
                self._revived[host] = self._revived.get(host, 0) + 1
                self._newest_round = max(self._newest_round, self._round[host] + 1)
                del self._agents[host]
                self.start(host)

    @property
    def running(self) -> list[int]:
        """Hosts whose agent is running."""
        return [host for host, agent in self._agents.items() if agent.poll() is None]

    def wait(self, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> dict[int, int]:
        """Wait until all agents have ended; return their exit statuses. Raise `LabError` on timeout."""
        until = time.monotonic() + timeout_s
        while self.running:
            meanwhile()
            self.revive()
            if time.monotonic() > until:
                raise LabError(f"Hosts {self.running} still run after {timeout_s:g} s; see {self.folder}/host-*.log.")
            time.sleep(0.05)
        return {host: agent.returncode for host, agent in self._agents.items()}


def children(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def die_with_launcher() -> None:
    """End this worker when its agent dies. torchrun gives workers a session of their own, so nothing else does."""
    die_with_parent(os.getppid())
