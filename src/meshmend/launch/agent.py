"""The agent of one host: it starts the host's worker, watches it and the other hosts, and starts it again.

A worker is started once per round. It is stopped when the round ends, because a host was lost or another one has come,
and started again with the next round. A worker that fails by itself asks for a new round for all. If it fails again and
again without a new step between, the job is over. So it is if the script has raised an error on every host, or one that
a restart would repeat: what it asks for cannot be done, or a restart has repeated it already, at the same line.

`supervise` decides all this; `HostAgent` has the processes, and does what is decided.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from meshmend.errors import LaunchError
from meshmend.launch.failure import WorkerFailure
from meshmend.launch.member import OVER, Assignment, Member
from meshmend.launch.membership import SILENT_S, Message
from meshmend.launch.processes import free_port
from meshmend.launch.worker import Workers

MONITOR_S = 0.05
"""Interval at which the agent looks at its worker; what the store says, it hears at once."""
NEWS_S = 1.0
"""How long a failed worker's agent waits to hear from the store that a host was lost, which explains the failure."""
FINISH_S = 300.0
"""How long an agent whose worker has finished waits for the others."""
SAVE_S = 25.0
"""How long a worker has to save its state when this host is asked to leave: Slurm and Kubernetes give it 30 s."""
STOPPED = 128 + signal.SIGTERM
"""Exit code of a worker that has saved its state with all others, because one of them was asked to end."""

T = TypeVar("T")
FROZEN = -signal.SIGSTOP
"""In place of the exit code of a worker that a signal has stopped for `SILENT_S`: as a host that is silent so long."""


class LeaveError(BaseException):
    """Somebody asks this host to leave the job."""


class HostAgent:
    """Runs a script as this host's worker, round after round.

    `admit` is called before each round, and raises if this host is to have no part in it. `environment` returns what a
    worker gets besides that of the agent, `progress` the last step that is done, and `report` is told what happens.
    `is_training` says whether the worker has something to save when this host is asked to leave (`LeaveError`), and
    `dead_cables` names cables of this host that have died since it was asked the last time.
    """

    def __init__(
        self,
        argv: Sequence[str],
        member: Member,
        workers: Workers,
        *,
        max_restarts: int,
        admit: Callable[[], None],
        environment: Callable[[Assignment], dict[str, str]],
        progress: Callable[[], int],
        report: Callable[..., None],
        is_training: Callable[[], bool] = lambda: True,
        dead_cables: Callable[[], str] = str,
    ) -> None:
        self.argv = list(argv)
        self._script = _digest(self.argv[0])
        self.member = member
        self.workers = workers
        self.max_restarts = max_restarts
        self._admit = admit
        self._environment = environment
        self._progress = progress
        self._report = report
        self._is_training = is_training
        self._dead_cables = dead_cables

    def run(self) -> Message:
        """Run until the job is over, and return how it ended. Raises `LaunchError` if it has failed, here or elsewhere.

        However it ends, the worker is stopped.
        """
        acts: dict[str, Any] = {"join": self._join, "start": self._start, "look": self._look, "stop": self._stop}
        decisions, answer = supervise(self.max_restarts, self._progress, self._report), None
        try:
            while True:
                act = decisions.send(answer)
                answer = (acts.get(act.do) or getattr(self.member, act.do))(act.given)
        except StopIteration as end:
            over: Message = end.value
            return over
        except LeaveError:
            if self._is_training():
                self.workers.ask_to_end(SAVE_S)
                if self.workers.poll() == 0:  # it has finished: the job need not start again without it
                    self.member.finish(0.0)
            raise
        finally:
            self.workers.stop()

    def _join(self, why: str) -> Assignment:
        self._admit()
        if (script := _digest(self.argv[0])) != self._script:
            self._script = script
            self._report("changed", script=self.argv[0])
        return self.member.join(free_port(), why)

    def _start(self, assigned: Assignment) -> None:
        # As short as can be: Linux takes 128 KiB for one variable, which 20,000 hosts fill.
        round_ = json.dumps(describe(assigned), separators=(",", ":"))
        facts = {"MESHMEND_ROUND": round_, **self._environment(assigned)}
        pid = self.workers.start(self.argv, {**os.environ, **facts})
        self._report("started", round=assigned.number, pid=pid)

    def _look(self, patience_s: float) -> Seen:
        stopped = self.member.wait_stopped(patience_s)
        over, code, failure = self.member.over, self.workers.poll(), self.workers.failure()
        is_frozen = code is None and self.workers.is_frozen()
        return Seen(stopped, over, code, failure, is_frozen, self._dead_cables())

    def _stop(self, _: None) -> int | None:
        self.workers.stop()
        return self.workers.poll()


@dataclass(frozen=True)
class Act:
    """What an agent does next."""

    do: Literal["join", "start", "look", "stop", "raised", "fail", "finish"]
    given: Any = None


@dataclass(frozen=True)
class Seen:
    """What an agent sees of its worker and of the store."""

    stopped: Message | None
    over: Message | None
    code: int | None
    failure: WorkerFailure | None
    is_frozen: bool = False
    dead_cables: str = ""


Decisions = Generator[Act, Any, T]
"""What an agent does, one act after the other: it is sent what came of each."""


def supervise(
    max_restarts: int, progress: Callable[[], int], report: Callable[..., None] = lambda *_, **__: None
) -> Decisions[Message]:
    """Decide what an agent does, round after round, and return how the job ended.

    It knows nothing of processes, sockets or clocks, so that a simulator can run it, too. The acts:

        join     ask for the next round, with this host's own reason; the answer is an `Assignment`
        start    start the worker for it
        look     wait until the round ends, but no longer than this; the answer is a `Seen`
        stop     end the worker; the answer is its exit code
        raised   tell the store that the worker has raised this error, and will end with it
        fail     tell the store that this host gives up
        finish   tell the store that the worker has finished, and wait for the others; the answer is how the job ended
    """
    over: Message
    left, reached, why = max_restarts, 0, ""
    before: WorkerFailure | None = None
    while True:
        assigned = yield Act("join", why)
        yield Act("start", assigned)
        code, failure, dead = yield from _watch(before, reached, progress, report)
        if code == 0:
            over = yield Act("finish", FINISH_S)
            return over
        if failure is not None and failure.kind == "final":
            # Before the worker ends: the others would take that for the reason.
            has_again = before is not None and before.error == failure.error
            again = "has raised it again, at the same line" if has_again else "would raise it again"
            yield from _give_up(f"{failure.error.rstrip('.')}. A restart {again}")
        ended = yield Act("stop")
        if ended == 0:  # it has finished since
            over = yield Act("finish", FINISH_S)
            return over
        why = ""
        if code == STOPPED:
            why = "its worker has saved the state with the others, because a host was asked to leave"
            continue
        if dead:
            why = f"its cable {dead} does not answer any more, and plans avoid it from now on"
            continue
        if failure is not None and failure.kind == "lasting":
            why = f"its script raised {failure.error}"
        elif code is not None:
            how = f"was frozen for {SILENT_S:g} s by" if code == FROZEN else "ended with"
            why = f"its worker {how} {name_code(code)}"
        else:
            continue  # the hosts change, which is no failure of the worker's own
        now = progress()
        if now > reached:
            reached, left = now, max_restarts
        before = failure
        report("failed", why=why.removeprefix("its "), left=left)
        if not left:
            n_starts = f"{max_restarts + 1} start{'s in a row' * (max_restarts > 0)}"
            yield from _give_up(f"{n_starts} made no new step; at the last one {why.rstrip('.')}")
        left -= 1


def _give_up(why: str) -> Decisions[NoReturn]:
    yield Act("fail", why)
    raise LaunchError(f"{why}.")


def _watch(
    before: WorkerFailure | None, reached: int, progress: Callable[[], int], report: Callable[..., None]
) -> Decisions[tuple[int | None, WorkerFailure | None, str]]:
    """Return the worker's exit code and the error that it has given up with, None for what there is not; dead cables.

    The code is None if the round has ended before the worker, and 0 also when the job is over. An error that is the
    same as `before`, with no step after `reached`, is final.
    """
    told = is_repeated = False
    n_frozen = 0  # looks at it in a row: a clock would also count the time that this process was frozen itself
    while True:
        seen: Seen = yield Act("look", MONITOR_S)
        code, failure = seen.code, seen.failure
        n_frozen = n_frozen + 1 if seen.is_frozen else 0
        if n_frozen * MONITOR_S >= SILENT_S:
            code = FROZEN
        if failure is not None and not told:
            told = True
            report("raised", kind=failure.kind, error=failure.error, trace=failure.trace)
            if failure.kind == "lasting":
                yield Act("raised", failure.error)
                is_repeated = failure == before and progress() <= reached
        if seen.over is not None and not seen.over["ok"]:
            raise LaunchError(f"{OVER}{seen.over['why']}.")
        if code == 0 or seen.over is not None:
            return 0, None, ""
        if failure is not None and failure.kind == "final":
            return code, failure, ""
        if seen.stopped is not None:
            return None, failure if seen.stopped["lost"] is None else None, ""
        if seen.dead_cables:
            return None, None, seen.dead_cables
        # Where its peers are gone, the store says so within moments, and this failure is none of its own.
        if is_repeated or code is not None:
            news: Seen = yield Act("look", NEWS_S)
            if news.stopped is None:
                return code, replace(failure, kind="final") if failure is not None and is_repeated else failure, ""


def _digest(script: str) -> bytes:
    """Return a digest of the script, of nothing where it cannot be read: the worker will say so."""
    try:
        return hashlib.sha256(Path(script).read_bytes()).digest()
    except OSError:
        return b""


def describe(assigned: Assignment) -> dict[str, Any]:
    """Return what a worker must know of its round, for `read_launch`."""
    return {
        "number": assigned.number,
        "address": assigned.address,
        "coordinator": assigned.coordinator,
        "hosts": list(assigned.hosts),
        "process": assigned.process,
    }


def name_code(code: int) -> str:
    """Name an exit code, or the signal that a code below zero stands for.

    >>> name_code(1), name_code(-9)
    ('exit code 1', 'SIGKILL')
    """
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
