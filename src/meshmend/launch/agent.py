"""torch's elastic agent on one host: what it starts, and how it meets the agents of the other hosts.

`torch.distributed.elastic` has the agent: its loop starts the worker, watches it, and starts it again when it fails or
when the hosts change. Two parts of it are made to be replaced, and are replaced here: the rendezvous, by our store,
which hears of a dead host at once and whose secret keeps others out (torch's own store has none, and unpickles what it
is sent); and how a worker is started, by a process that has imported JAX already.

The agent's hooks have a leading underscore in torch, though its documentation names them for this use. So this file is
listed in `tests/test_architecture.py`, and `tests/jax_restart/test_agent.py` says what breaks.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

# One worker per host: ranks follow from the hosts, and torch needs no store of its own to assign them.
os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from meshmend.errors import LaunchError
from meshmend.launch.member import Member, Place
from meshmend.launch.processes import free_port
from meshmend.launch.worker import Workers

MONITOR_S = 0.05
"""Interval at which the agent looks at its worker and at what the store has said."""
NEWS_S = 1.0
"""How long a failed worker's agent waits to hear from the store that a host was lost, which explains the failure."""
FINISH_S = 300.0
"""How long an agent whose worker has finished waits for the others."""


class StoreRendezvous(RendezvousHandler):
    """The rendezvous of the agents through our store."""

    def __init__(self, member: Member, job: str, admit: Callable[[], None] = lambda: None) -> None:
        self.member = member
        self._admit = admit
        """Called before each round; raises if this host is to have no part in it."""
        self.place: Place | None = None
        self.why = ""
        """Why the next round is asked for, if it is for this host's own reasons."""
        self._job = job

    def get_backend(self) -> str:
        """Return the name that torch records."""
        return "meshmend"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round."""
        self._admit()
        self.place = self.member.join(free_port(), self.why)
        self.why = ""
        address, port = self.place.coordinator.rsplit(":", 1)
        where = RendezvousStoreInfo(address, int(port))
        return RendezvousInfo(HashStore(), self.place.process, len(self.place.hosts), where)

    def num_nodes_waiting(self) -> int:
        """Return whether the round has ended for this host: a host was lost, or another one has come."""
        return int(self.member.stopped is not None)

    def is_closed(self) -> bool:
        """Return whether the job is over."""
        return self.member.over is not None

    def set_closed(self) -> None:
        """Do nothing: the store knows when the job is over."""

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._job

    def shutdown(self) -> bool:
        """Leave the job."""
        self.member.close()
        return True


class HostAgent(SimpleElasticAgent):
    """The agent of a host, with one worker. `environment` returns what a worker gets besides that of the agent."""

    def __init__(
        self,
        argv: Sequence[str],
        rendezvous: StoreRendezvous,
        workers: Workers,
        *,
        max_restarts: int,
        environment: Callable[[Place], dict[str, str]],
        progress: Callable[[], int],
        report: Callable[..., None],
    ) -> None:
        spec = WorkerSpec(
            role="host",
            local_world_size=1,
            rdzv_handler=rendezvous,
            entrypoint=argv[0],
            args=tuple(argv[1:]),
            max_restarts=max_restarts,
            monitor_interval=MONITOR_S,
        )
        super().__init__(spec, exit_barrier_timeout=FINISH_S)
        self.argv = list(argv)
        self.rendezvous = rendezvous
        self.workers = workers
        self._environment = environment
        self._progress = progress
        self._report = report
        self._reached = 0

    def _start_workers(self, _: WorkerGroup) -> dict[int, Any]:
        place = self.rendezvous.place
        assert place is not None  # noqa: S101  # a rendezvous precedes every start
        # As short as can be: Linux takes 128 KiB for one variable, which 20,000 hosts fill.
        round_ = json.dumps(describe(place), separators=(",", ":"))
        facts = {"MESHMEND_ROUND": round_, **self._environment(place)}
        pid = self.workers.start(self.argv, {**os.environ, **facts})
        self._report("started", round=place.number, pid=pid)
        return {0: pid}

    def _stop_workers(self, *_: Any) -> None:
        self.workers.stop()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        over, rank = self.rendezvous.member.over, worker_group.workers[0].global_rank
        if over is not None:
            self.workers.stop()
            if not over["ok"]:
                raise LaunchError(f"The job is over: {over['why']}.")
        code = self.workers.poll()
        if code is None:
            return RunResult(WorkerState.HEALTHY)
        if code == 0 or over is not None:
            return RunResult(WorkerState.SUCCEEDED, return_values={rank: None})
        if self.rendezvous.member.wait_stopped(NEWS_S) is not None:
            # Its peers are gone, so this failure is none of its own: torch sees a change of hosts, and counts nothing.
            return RunResult(WorkerState.HEALTHY)
        reached = self._progress()
        if reached > self._reached:
            self._reached, self._remaining_restarts = reached, self._worker_group.spec.max_restarts
        self.rendezvous.why = f"its worker ended with {name_code(code)}"
        self._report("failed", code=code, left=self._remaining_restarts)
        if not self._remaining_restarts:
            self.rendezvous.member.fail(f"its worker ended with {name_code(code)} again and again, without a new step")
        failure = ProcessFailure(local_rank=0, pid=self.workers.pid, exitcode=code, error_file="<none>")
        return RunResult(WorkerState.FAILED, failures={rank: failure})

    def _shutdown(self, *_: Any, **__: Any) -> None:
        self.workers.stop()

    def _exit_barrier(self) -> None:
        # torch's own would use a store of torch's.
        self.rendezvous.member.finish(FINISH_S)


def describe(place: Place) -> dict[str, Any]:
    """Return what a worker must know of its round, for `meshmend.jax.job.read_launch`."""
    return {
        "number": place.number,
        "coordinator": place.coordinator,
        "hosts": list(place.hosts),
        "process": place.process,
    }


def name_code(code: int) -> str:
    """Name an exit code, or the signal that a code below zero stands for.

    >>> name_code(1), name_code(-9)
    ('exit code 1', 'SIGKILL')
    """
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
