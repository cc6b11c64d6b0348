"""Compiling for holes that have not happened: failures are told, and nobody waits for a build when a peer is lost."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshmend.errors import PlanError
from meshmend.jax.compile import CompileAhead
from meshmend.jax.session import Session
from meshmend.launch import Timeline, read_timeline

PATIENCE_S = 60.0
"""Far more than anything here takes, for machines that are busy with something else."""


def session_of(*lost: int | str, timeline: Path | None = None, job: str | None = None) -> Session:
    """A session whose fabrics are the numbers of the hosts that they have lost."""
    launch = SimpleNamespace(job=job or f"job-{secrets.token_hex(8)}", process=0)
    one = SimpleNamespace(
        fabrics_ahead=lambda **_: iter([(i, i) for i in lost]), timeline=Timeline(timeline), launch=launch
    )
    return cast(Session, one)


class SlowBuild:
    """A build that lasts until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go, self.built = threading.Event(), threading.Event(), list[Any]()

    def __call__(self, fabric: Any) -> None:
        self.begun.set()
        assert self.let_go.wait(PATIENCE_S)
        self.built.append(fabric)


@pytest.mark.parametrize("error", [RuntimeError("peer lost"), SystemExit(3)])
def test_an_exception_does_not_wait_for_the_build(error: BaseException) -> None:
    build = SlowBuild()
    ahead = CompileAhead(session_of(0, 1), build)

    def train() -> None:
        with ahead:
            assert build.begun.wait(PATIENCE_S)
            raise error

    with pytest.raises(type(error)):
        train()
    # Here the build still runs: it cannot end before it is let go.
    assert (build.built, ahead.ready) == ([], [])
    build.let_go.set()
    ahead.wait()
    assert (build.built, ahead.ready) == ([0], [0])


@pytest.mark.parametrize("error", [None, SystemExit(0)])
def test_an_orderly_end_waits_for_the_build_and_leaves_the_rest(error: SystemExit | None) -> None:
    build = SlowBuild()
    threading.Timer(0.2, build.let_go.set).start()
    try:
        with CompileAhead(session_of(0, 1), build) as ahead:
            assert build.begun.wait(PATIENCE_S)
            if error is not None:
                raise error
    except SystemExit:
        assert error is not None
    assert (build.built, ahead.ready) == ([0], [0])


def test_hosts_of_one_machine_take_turns_where_cores_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of a local job share one core: the second builds when the first is done, or not at all."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    job, first, second, third = f"job-{secrets.token_hex(8)}", SlowBuild(), SlowBuild(), SlowBuild()
    with CompileAhead(session_of(0, job=job), first):
        assert first.begun.wait(PATIENCE_S)
        one, other = CompileAhead(session_of(1, job=job), second), CompileAhead(session_of(2, job=job), third)
        other.stop()
        assert not other.ready
        assert not second.begun.wait(0.3)
        with CompileAhead(session_of(3), third):  # another job's host
            assert third.begun.wait(PATIENCE_S)
            third.let_go.set()
        first.let_go.set()
        assert second.begun.wait(PATIENCE_S)
        second.let_go.set()
        one.wait()
    assert (first.built, second.built, third.built) == ([0], [1], [3])


def run(session: Session, build: Callable[[Any], None]) -> CompileAhead:
    ahead = CompileAhead(session, build)
    ahead.wait()
    return ahead


def test_a_build_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"

    def build(fabric: Any) -> None:
        if fabric in (1, 3):
            raise OSError(f"plan cache: stale file handle {fabric}")
        if fabric == 2:
            raise PlanError("row-pairs", "8x8", "the hole is too wide")

    with pytest.warns(UserWarning, match=r"loss of host 1 failed: OSError: plan cache: stale file handle 1") as caught:
        ahead = run(session := session_of(*range(5), timeline=path), build)
    session.timeline.flush()
    assert len(caught) == 1, "once"
    assert ahead.ready == [0, 4]
    assert [event.get("problem") for event in read_timeline(path)] == [
        None,
        "OSError: plan cache: stale file handle 1",
        "the hole is too wide",
        "OSError: plan cache: stale file handle 3",
        None,
    ]


def test_whole_domains_are_named(tmp_path: Path) -> None:
    def build(fabric: Any) -> None:
        if fabric == "rack 7":
            raise OSError("no space left")

    one = session_of(0, "rack 7", "rack 8", timeline=tmp_path / "timeline.jsonl")
    with pytest.warns(UserWarning, match="for the loss of domain rack 7 failed: OSError: no space left"):
        ahead = run(one, build)
    assert ahead.ready == [0, "rack 8"]
    events = [(event.get("lost"), event.get("domain"), "problem" in event) for event in one.timeline.events]
    assert events == [(0, None, False), (None, "rack 7", True), (None, "rack 8", False)]


def test_losses_that_cannot_be_listed_are_reported() -> None:
    def fabrics(*, is_divided: bool) -> Any:
        yield 0, 0
        raise RuntimeError("no devices")

    one = session_of()
    one.fabrics_ahead = fabrics  # type: ignore[assignment, method-assign]
    with pytest.warns(UserWarning, match="the possible losses failed: RuntimeError: no devices"):
        ahead = run(one, lambda _: None)
    assert ahead.ready == [0], "each is built as soon as it is listed"
    assert one.timeline.events[-1]["problem"] == "RuntimeError: no devices"


def test_an_interpreter_that_ends_with_a_build_under_way_does_not_crash() -> None:
    """A daemon thread inside XLA's compiler aborts the process if the interpreter ends under it."""
    code = """
import os, threading, types, jax, jax.numpy as jnp
from meshmend.jax.compile import CompileAhead
from meshmend.launch import Timeline

def many(x):
    for i in range(40):
        x = jnp.sin(x) @ x + i
    return x

lowered, begun = jax.jit(many).lower(jnp.ones((4, 4))), threading.Event()
launch = types.SimpleNamespace(job=f"of process {os.getpid()}")
losses = lambda **_: iter([(0, None), (1, None)])
session = types.SimpleNamespace(fabrics_ahead=losses, timeline=Timeline(None), launch=launch)

def build(_):
    begun.set()
    lowered.compile()

try:
    with CompileAhead(session, build):
        begun.wait()
        raise RuntimeError("peer lost")
except RuntimeError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "peer lost\n"), done.stderr
