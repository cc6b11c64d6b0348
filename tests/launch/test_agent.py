"""The agent's loop, with a store and workers that follow a script; `tests/jax_restart/test_agent.py` has real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshmend.errors import LaunchError
from meshmend.launch import agent
from meshmend.launch.agent import HostAgent, LeaveError
from meshmend.launch.failure import WorkerFailure
from meshmend.launch.member import Assignment
from meshmend.launch.membership import SILENT_S
from meshmend.launch.worker import Workers


class Scripted:
    """Member and workers in one: how each round ends, in order.

    A number is an exit code, "lost" a host that is lost while the worker runs, a number and "lost" a worker that fails
    because of it, "frozen" a worker that a signal has stopped, "over" and "failed" how the others end the job. A
    "cable" is one of this host's that has died. A
    `WorkerFailure` is one that the worker reports, and then waits; one that is alone ends the round, and one of every
    host ("every host") the job.
    """

    def __init__(self, *rounds: Any) -> None:
        self.rounds = list(rounds)
        self.over: dict[str, Any] | None = None
        self.now: Any = None
        self.has_news = False
        self.told: list[str] = []
        self.is_running = False
        self.n_looks = 0

    def join(self, port: int, why: str) -> Assignment:
        assert port > 0
        assert not self.is_running, "the worker of the last round still runs"
        self.now, self.has_news, self.n_looks = self.rounds.pop(0), False, 0
        self.told.append(f"join {why}".strip())
        return Assignment(len(self.told), "name", (0, 2), 1, "127.0.0.1:5000", ())

    def wait_stopped(self, timeout_s: float) -> dict[str, Any] | None:
        if self.now == "asked to leave":
            raise LeaveError
        if self.now == "cable":
            return None
        if self.now in ("frozen", "frozen for a moment"):
            self.n_looks += 1
            is_over = self.now == "frozen for a moment" and self.n_looks > 2 * SILENT_S / agent.MONITOR_S
            return {"why": "host 1 is lost", "lost": 1} if is_over else None
        if self.now in ("over", "failed"):
            self.over = {"ok": self.now == "over", "why": "so it is"}
            return self.over
        if isinstance(self.now, WorkerFailure):
            if self.told[-1].startswith("raised") and self.now.trace == "every host":
                self.over = {"ok": False, "why": f"every host raised {self.now.error}"}
                return self.over
            # The others have longer than that to raise it, too.
            is_heard = self.told[-1].startswith("raised") and timeout_s < agent.NEWS_S
            return {"why": "host 1 starts again", "lost": None} if is_heard else None
        # Where the worker fails first, the store says why a little later, and says it from then on.
        self.has_news = self.has_news or timeout_s >= agent.NEWS_S or not isinstance(self.now, tuple)
        return {"why": "host 1 is lost", "lost": 1} if self.has_news and not isinstance(self.now, int) else None

    def finish(self, timeout_s: float) -> dict[str, Any]:
        self.told.append("finish")
        return self.over or {"ok": True, "why": "all have finished"}

    def failure(self) -> WorkerFailure | None:
        return self.now if isinstance(self.now, WorkerFailure) else None

    def raised(self, why: str) -> None:
        self.told.append(f"raised {why}")

    def fail(self, why: str) -> None:
        self.told.append(f"fail: {why}")

    def start(self, argv: list[str], environment: dict[str, str]) -> int:
        assert argv == ["train.py"]
        assert environment["MESHMEND_ROUND"].endswith('"coordinator":"127.0.0.1:5000","hosts":[0,2],"process":1}')
        assert environment["OWN"] == "1"
        self.is_running = True
        return 7

    def poll(self) -> int | None:
        if isinstance(self.now, tuple):
            return int(self.now[0])
        return self.now if isinstance(self.now, int) else None

    def is_frozen(self) -> bool:
        """One of a moment goes on again and again, just before that would count."""
        looks_per_moment = int(SILENT_S / agent.MONITOR_S)
        return self.now == "frozen" or (self.now == "frozen for a moment" and self.n_looks % looks_per_moment > 0)

    def ask_to_end(self, patience_s: float) -> None:
        assert self.is_running
        assert 20 < patience_s < 28, "Slurm and Kubernetes give 30 s"
        self.told.append("asked to end")

    def stop(self) -> None:
        self.is_running = False
        self.now = 0 if self.now == "lost, and has finished" else self.now


def supervise(script: Scripted, *, steps: list[int], max_restarts: int = 2, is_training: bool = True) -> Any:
    reached = iter(steps)
    reports: list[tuple[str, Any]] = []
    supervisor = HostAgent(
        ["train.py"],
        script,  # type: ignore[arg-type]
        script,  # type: ignore[arg-type]
        max_restarts=max_restarts,
        admit=lambda: None,
        environment=lambda _: {"OWN": "1"},
        progress=lambda: next(reached),
        report=lambda event, **facts: reports.append((event, facts.get("left"))),
        is_training=lambda: is_training,
        dead_cables=lambda: "0,0-0,1" if script.now == "cable" else "",
    )
    try:
        return supervisor.run(), reports
    finally:
        assert not script.is_running


def test_a_change_of_hosts_is_no_failure() -> None:
    """Neither where the worker is stopped for it, nor where it fails because of it."""
    script = Scripted("lost", (1, "lost"), "lost", (-6, "lost"), 0)
    over, reports = supervise(script, steps=[], max_restarts=0)
    assert over["ok"]
    assert script.told == ["join"] * 5 + ["finish"]
    assert [event for event, _ in reports] == ["started"] * 5


def test_a_cable_that_dies_begins_a_round_and_is_no_failure() -> None:
    script = Scripted("cable", "cable", 0)
    over, reports = supervise(script, steps=[], max_restarts=0)
    assert over["ok"]
    why = "join its cable 0,0-0,1 does not answer any more, and plans avoid it from now on"
    assert script.told == ["join", why, why, "finish"]
    assert [event for event, _ in reports] == ["started"] * 3


def test_a_worker_that_has_finished_while_it_was_stopped_is_done() -> None:
    """It asked for another round, though nothing was left to be done."""
    script = Scripted("lost, and has finished")
    over, _ = supervise(script, steps=[])
    assert over["ok"]
    assert script.told == ["join", "finish"]


def test_a_worker_that_has_finished_while_its_host_was_asked_to_leave_is_done() -> None:
    class Finishes(Scripted):
        def ask_to_end(self, patience_s: float) -> None:
            super().ask_to_end(patience_s)
            self.now = 0

    script = Finishes("asked to leave")
    with pytest.raises(LeaveError):
        supervise(script, steps=[])
    assert script.told == ["join", "asked to end", "finish"]


@pytest.mark.parametrize("is_training", [True, False])
def test_a_worker_that_trains_has_time_to_save_when_its_host_is_asked_to_leave(is_training: bool) -> None:
    script = Scripted("asked to leave")
    with pytest.raises(LeaveError):
        supervise(script, steps=[], is_training=is_training)
    assert script.told == ["join", "asked to end"][: 1 + is_training]


def test_a_worker_that_has_saved_because_another_host_leaves_is_no_failure() -> None:
    script = Scripted(agent.STOPPED, 0)
    over, reports = supervise(script, steps=[], max_restarts=0)
    assert over["ok"]
    assert script.told == [
        "join",
        "join its worker has saved the state with the others, because a host was asked to leave",
        "finish",
    ]
    assert [event for event, _ in reports] == ["started"] * 2


def test_a_worker_that_a_signal_has_stopped_is_started_again_as_a_silent_host_would_be() -> None:
    script = Scripted("frozen", "frozen for a moment", 0)
    _, reports = supervise(script, steps=[3])
    assert script.told == ["join", "join its worker was frozen for 10 s by SIGSTOP", "join", "finish"]
    assert [event for event, _ in reports] == ["started", "failed", "started", "started"]


def test_a_worker_is_frozen_until_it_is_continued(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(60)")
    workers = Workers(warm=False)
    try:
        pid = workers.start([str(script)], dict(os.environ))
        for number, expected in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
            os.kill(pid, number)
            until = time.monotonic() + 30
            while workers.is_frozen() != expected and time.monotonic() < until:
                time.sleep(0.01)
            assert workers.is_frozen() == expected
            assert workers.poll() is None
        workers.stop()
        assert not workers.is_frozen(), "it has ended"
    finally:
        workers.close()


def test_failures_count_until_there_is_a_new_step() -> None:
    script = Scripted(3, "lost", -9, 3, 3, 0)
    _, reports = supervise(script, steps=[0, 0, 5, 5])
    assert [left for event, left in reports if event == "failed"] == [2, 1, 2, 1]
    because = "its worker ended with"
    asked = ["", f"{because} exit code 3", "", f"{because} SIGKILL", f"{because} exit code 3", f"{because} exit code 3"]
    assert script.told == [f"join {why}".strip() for why in asked] + ["finish"]


def test_a_worker_that_fails_again_and_again_ends_the_job() -> None:
    script = Scripted(3, 3, 4, 0)
    why = "3 starts in a row made no new step; at the last one its worker ended with exit code 4"
    with pytest.raises(LaunchError, match=rf"^{why}\.$"):
        supervise(script, steps=[0, 0, 0])
    assert script.told[-1] == f"fail: {why}"
    assert script.rounds == [0]


def test_an_error_that_would_come_again_ends_the_job() -> None:
    """At once, however far the job had come."""
    final = WorkerFailure("final", "ParameterError: steps is -1.", "Traceback …")
    for script, steps in ((Scripted(final, 0), []), (Scripted(3, final, 0), [5])):
        with pytest.raises(LaunchError, match=r"steps is -1\. A restart would raise it again\."):
            supervise(script, steps=steps)
        assert script.told[-1] == "fail: ParameterError: steps is -1. A restart would raise it again"
        assert script.rounds == [0]


def test_an_error_of_one_host_that_a_restart_repeats_ends_the_job() -> None:
    """The same words from the same line, and no new step between: otherwise it is tried again."""
    first, other_line, other_words = (
        WorkerFailure("lasting", f"ValueError: {words}", f"Traceback … line {line}")
        for words, line in (("boom", 7), ("boom", 8), ("bang", 7))
    )
    script = Scripted(first, "lost", first, 0)
    with pytest.raises(LaunchError, match=r"^ValueError: boom\. A restart has raised it again, at the same line\.$"):
        supervise(script, steps=[5, 5])
    assert script.told[-1] == "fail: ValueError: boom. A restart has raised it again, at the same line"
    assert script.rounds == [0]
    for again, steps in ((first, [5, 6, 6]), (other_line, [5, 5]), (other_words, [5, 5]), (3, [5, 5])):
        script = Scripted(first, again, 0)
        over, _ = supervise(script, steps=steps)
        assert over["ok"], again


def test_an_error_of_one_host_is_a_failure_and_one_of_every_host_ends_the_job() -> None:
    alone, everywhere = (WorkerFailure("lasting", "ValueError: boom", trace) for trace in ("", "every host"))
    script = Scripted(alone, replace(alone, trace="elsewhere"), everywhere, 0)
    with pytest.raises(LaunchError, match="The job is over: every host raised ValueError: boom"):
        supervise(script, steps=[0, 5])
    again = "join its script raised ValueError: boom"
    assert script.told == ["join", *(["raised ValueError: boom", again] * 2), "raised ValueError: boom"]


def test_a_worker_that_has_lost_its_peer_is_no_failure() -> None:
    class Lost(Scripted):
        def failure(self) -> WorkerFailure | None:
            return WorkerFailure("transient", "lost a peer: …", "") if isinstance(self.now, tuple) else None

    script = Lost((13, "lost"), 0)
    _, reports = supervise(script, steps=[], max_restarts=0)
    assert script.told == ["join", "join", "finish"]
    assert [event for event, _ in reports] == ["started", "raised", "started"]


def test_a_script_that_has_changed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("1")
    script = Scripted("lost", "lost", 0)
    real = script.join
    monkeypatch.setattr(script, "join", lambda *given: (Path("train.py").write_text("2"), real(*given))[1])
    _, reports = supervise(script, steps=[])
    assert [event for event, _ in reports] == ["started", "changed", "started", "started"]


def test_the_end_of_the_job_stops_the_worker() -> None:
    over, _ = supervise(Scripted("lost", "over"), steps=[])
    assert over == {"ok": True, "why": "so it is"}
    with pytest.raises(LaunchError, match="The job is over: so it is"):
        supervise(Scripted("failed"), steps=[])


def test_the_launcher_runs_without_torch_and_without_jax() -> None:
    blocked = "import sys; sys.modules.update(torch=None, jax=None)\n"
    code = blocked + "import meshmend.launch.agent, meshmend.launch.host, meshmend.cli.run, meshmend.cli.store"
    subprocess.run([sys.executable, "-c", code], check=True)
