"""Exchanges wait for processes that are at work, and say who keeps the others waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import meshmend.jax as mmj
from meshmend.errors import PlanError, RestartError
from meshmend.jax.session import Session
from meshmend.jax.session.coordination import Coordination, Protocol, Question
from meshmend.jax.session.session import judge_plan
from meshmend.jax.train.plan import TrainingPlan
from meshmend.launch import Launch, Timeline
from meshmend.launch.processes import free_port
from meshmend.planning import Auto, PlanCache
from protocols import run_together
from rows import others_slow


class Service:
    """JAX's key-value store in memory, with the same errors."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls = Counter[str]()
        """Calls by the last part of their key, or by their kind."""
        self.changed = threading.Condition()
        self.down = False

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        self._check()
        self.calls[key.rpartition("/")[2]] += 1
        with self.changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        self.calls["waits"] += 1
        with self.changed:
            self.changed.wait_for(lambda: self.down or key in self.values, timeout_in_ms / 1000)
        self._check()
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
        return self.values[key]

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        self._check()
        self.calls["folders"] += 1
        with self.changed:
            return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        self._check()
        self.calls["deletes"] += 1
        with self.changed:
            for name in [name for name in self.values if name.startswith(key)]:
                del self.values[name]

    def stop(self) -> None:
        with self.changed:
            self.down = True
            self.changed.notify_all()

    def _check(self) -> None:
        if self.down:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses\nmore")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    one = Service()
    monkeypatch.setattr("jax._src.distributed.global_state.client", one)
    return one


def test_all_processes_hear_everybody(service: Service) -> None:
    boards = [Coordination(process, 3) for process in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for fact in ("a", "b"):
            told = list(pool.map(lambda one, fact=fact: one.exchange([fact, one.process]), boards))
            assert told == 3 * [[[fact, 0], [fact, 1], [fact, 2]]]


def test_facts_that_all_have_read_are_forgotten(service: Service) -> None:
    boards = [Coordination(process, 2) for process in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for fact in range(20):
            list(pool.map(lambda one, fact=fact: one.exchange(fact), boards))
    assert sorted(service.values) == ["meshmend/19/answer", "meshmend/19/facts/1"]
    boards[0].close()
    assert not service.values
    assert Coordination(0, 1).exchange((1, None)) == [[1, None]]


@pytest.mark.parametrize("n", [2, 50, 200])
def test_a_question_costs_each_process_two_messages_and_process_0_a_few_more(n: int, service: Service) -> None:
    boards = [Coordination(process, n) for process in range(n)]
    with ThreadPoolExecutor(n) as pool:
        for number in range(3):
            told = list(pool.map(lambda one: one.decide(one.process, sum), boards))
            assert told == n * [sum(range(n))], number
    assert {service.calls[str(process)] for process in range(1, n)} == {3}
    assert service.calls["answer"] == 3
    assert service.calls["deletes"] == 2
    # The others wait once for each answer, and process 0 for as many of them as it finds missing.
    assert service.calls["waits"] <= 3 * (n - 1) + service.calls["folders"]
    assert service.calls["folders"] <= 3 * n


def test_what_process_0_refuses_is_raised_on_all(service: Service) -> None:
    boards = [Coordination(process, 3) for process in range(3)]

    def refuse(facts: list[int]) -> None:
        raise RestartError(f"It cannot be {max(facts)}.", host=max(facts))

    def ask(one: Coordination) -> tuple[str, int | None]:
        with pytest.raises(RestartError) as caught:
            one.decide(one.process, refuse)
        return str(caught.value), caught.value.host

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, boards)) == 3 * [("It cannot be 2.", 2)]


def test_a_protocol_runs_to_its_end(service: Service) -> None:
    def count(mine: int) -> Protocol[int]:
        total = 0
        while total < 20:
            total += yield Question(mine, sum)
        return total

    boards = [Coordination(process, 3) for process in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda one: one.run(count(one.process + 1)), boards)) == [24, 24, 24]
    assert run_together([count(number) for number in (1, 2, 3)]).results == [24, 24, 24]


def test_what_one_process_sends_only_those_read_that_want_it(service: Service) -> None:
    boards = [Coordination(process, 4) for process in range(4)]
    made: list[int] = []

    def send(one: Coordination) -> bytes | None:
        def make() -> bytes:
            made.append(one.process)
            return b"plan"

        return one.send(2, make, wants=one.process in (0, 3))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(send, boards)) == [b"plan", None, None, b"plan"]
        assert (made, service.calls["content"], service.calls["waits"]) == ([2], 1, 2)
        list(pool.map(lambda one: one.exchange("next"), boards))
    assert not [key for key in service.values if key.endswith("content")], "it is forgotten"


def test_a_channel_forgets_what_the_last_one_has_told(service: Service) -> None:
    """Also if an exchange of it was never finished, as in a save that has failed on one process."""
    boards = [Coordination(process, 2, limit_s=0.5) for process in range(2)]

    def save(one: Coordination, fails: bool) -> None:
        channel = one.channel("save")
        channel.exchange("chunks")
        if fails and one.process == 0:
            with pytest.raises(RestartError, match=r"Process 0 has waited 0\.5 s for process 1, which"):
                channel.exchange("never answered")

    with ThreadPoolExecutor(2) as pool:
        for number in range(1, 11):
            list(pool.map(lambda one, fails=number == 5: save(one, fails), boards))
            told = sorted(service.values)
            assert told == [f"meshmend/save {number}/0/answer", f"meshmend/save {number}/0/facts/1"]


def test_a_dead_coordinator_is_reported_at_once(service: Service) -> None:
    waiting = Coordination(1, 2)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(waiting.exchange, "x")
        time.sleep(0.1)
        service.stop()
        with pytest.raises(RestartError, match=r"cannot reach .*: UNAVAILABLE: .* Process 0 is probably dead"):
            call.result()


def test_process_0_raises_its_own_error_where_nobody_can_be_told(service: Service) -> None:
    def refuse() -> None:
        service.stop()
        raise PlanError("auto", "4x4", "the survivors are not connected")

    with pytest.raises(PlanError, match="the survivors are not connected"):
        Coordination(0, 2).tell(refuse)


PARAMS = {"w": np.zeros((16, 16), np.float32)}
# Made here: with the service of these tests in place JAX could not find its devices.
FABRIC = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])


def sessions(n: int = 2) -> list[Session]:
    hosts = tuple(range(n))
    return [Session(FABRIC, Launch("x:1", n, i), None, hosts, Coordination(i, n), Timeline(None)) for i in hosts]


def together(all_of_them: list[Session], ask: Callable[[Session], Any]) -> list[Any]:
    def one(session: Session) -> Any:
        try:
            return ask(session)
        except (PlanError, RestartError, OSError) as error:
            return error

    with ThreadPoolExecutor(len(all_of_them)) as pool:
        return list(pool.map(one, all_of_them))


def make(cache: PlanCache) -> TrainingPlan:
    return mmj.plan(FABRIC, PARAMS, cache=cache)


@pytest.mark.usefixtures("service")
def test_survivors_wait_for_a_plan_that_process_0_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that all share, they find it there, and it is not sent."""
    made, auto = list[int](), Auto.make

    def slow(self: Auto, mesh: Any) -> Any:
        made.append(mesh.n_chips)
        time.sleep(1.0)
        return auto(self, mesh)

    monkeypatch.setattr(Auto, "make", slow)
    both = sessions()
    first, second = together(both, lambda session: session.agree_on_plan(make, tmp_path))
    assert first.digest == second.digest
    assert made == [12, 12], "the step's and that for scalars, on one process"
    events = [session.timeline.events[-1] for session in both]
    assert [event["from_cache"] for event in events] == [False, True]
    assert events[1]["seconds"] >= 0.8


@pytest.mark.parametrize("holders", others_slow([{}, {0}, {2}, {1, 3}, {0, 1, 2, 3}], quick=[{}, {1, 3}]))
def test_a_plan_that_any_process_has_in_its_own_cache_is_sent_to_those_that_lack_it(
    holders: set[int], tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / str(process) for process in range(4)]
    for process in holders:
        make(PlanCache(folders[process]))
    made, auto = list[Any](), Auto.make

    def count(self: Auto, mesh: Any) -> Any:
        made.append(mesh)
        return auto(self, mesh)

    monkeypatch.setattr(Auto, "make", count)
    four = sessions(4)
    asked = Question("a setting", lambda facts: facts)
    found = together(four, lambda session: session.ask_and_plan(asked, make, folders[session.launch.process]))
    assert [answer for answer, _ in found] == 4 * [4 * ["a setting"]]
    assert len({plan.digest for _, plan in found}) == 1
    assert len(made) == (0 if holders else 2)
    sender = min(holders, default=0)
    lacking = {0, 1, 2, 3} - (holders or {0})
    for process, session in enumerate(four):
        event = session.timeline.events[-1]
        assert event.get("from_process") == (sender if process in lacking else None)
        assert event["from_cache"] is (bool(holders) or process != 0)
        kept = PlanCache(folders[process], is_complete=True)
        assert make(kept).digest == found[0][1].digest, "at the next start it is in its own cache"
    assert service.calls["content"] == bool(lacking)


@pytest.mark.parametrize("n", [2, 100, 2240])
def test_the_first_plan_counts_whatever_others_have(n: int) -> None:
    def ask(process: int, has: str) -> Protocol[Any]:
        return (yield Question([process, has], partial(judge_plan, judge=sum, make=lambda: "made")))

    for holders, expected in (
        ({}, {"sender": 0, "digest": "made", "is_lacking": True}),
        (dict.fromkeys(range(n), "a"), {"sender": 0, "digest": "a", "is_lacking": False}),
        ({n - 1: "b"}, {"sender": n - 1, "digest": "b", "is_lacking": True}),
        (
            {n // 2: "c"} | dict.fromkeys(range(n // 2 + 1, n), "d"),
            {"sender": n // 2, "digest": "c", "is_lacking": True},
        ),
    ):
        spoken = run_together([ask(process, holders.get(process, "")) for process in range(n)])
        assert spoken.results == n * [{"answer": n * (n - 1) // 2} | expected]
        assert (spoken.n_questions, max(spoken.answer_bytes) < 100) == (1, True)


def test_nothing_is_planned_where_what_else_was_asked_is_refused() -> None:
    def refuse(_: Any) -> None:
        raise RestartError("different settings")

    with pytest.raises(RestartError, match="different settings"):
        judge_plan([("a", ""), ("b", "")], judge=refuse, make=lambda: pytest.fail("it plans"))


@pytest.mark.usefixtures("service")
def test_a_plan_that_cannot_be_made_is_the_same_error_everywhere(tmp_path: Path) -> None:
    def ask(session: Session) -> TrainingPlan:
        return session.agree_on_plan(lambda _: mmj.plan(FABRIC, PARAMS, planner="two-color"), tmp_path)

    first, second = together(sessions(), ask)
    assert isinstance(first, PlanError)
    assert isinstance(second, PlanError)
    assert (str(first), first.alternatives) == (str(second), second.alternatives)


@pytest.mark.usefixtures("service")
def test_a_planner_that_dies_of_something_else_is_reported(tmp_path: Path) -> None:
    def broken(cache: PlanCache) -> TrainingPlan:
        raise OSError("stale file handle")

    first, second = together(sessions(), lambda session: session.agree_on_plan(broken, tmp_path))
    assert str(first) == "stale file handle"
    assert str(second) == "Process 0 has failed: OSError: stale file handle. See its log."


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.usefixtures("service")
def test_a_process_that_would_run_another_plan_says_so_before_the_first_step(is_kept: bool, tmp_path: Path) -> None:
    """Whatever their caches hold: two caches, and another planner in one of them, as with another version."""

    def different(session: Session) -> Any:
        planner = ("hamiltonian", "row-pairs")[session.launch.process]
        folder = tmp_path / planner
        if is_kept:
            mmj.plan(FABRIC, PARAMS, planner=planner, cache=PlanCache(folder))
        return session.agree_on_plan(lambda cache: mmj.plan(FABRIC, PARAMS, planner=planner, cache=cache), folder)

    first, second = together(sessions(), different)
    assert first.schedule.planner == "hamiltonian"
    assert isinstance(second, RestartError)
    assert "Process 1 came to another plan than process 0" in str(second)


TWO = """
import os, sys, time
import jax
import numpy as np
import meshmend.jax as mmj
from meshmend.jax.session import initialize
from meshmend.launch import Launch

launch = Launch(sys.argv[1], 2, int(sys.argv[2]))
if sys.argv[5] == "by hand":
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    launch = None
with initialize("2x4", "2x2", host_index=int(sys.argv[2]), launch=launch, timeout_s=60) as session:
    assert session.host_of_process == (0, 1)

    def slow(cache):
        if not cache.is_complete:
            print("planning", flush=True)
            time.sleep(float(sys.argv[3]))
        return mmj.plan(session.fabric, {"w": np.zeros(64, np.float32)}, cache=cache)

    print(session.agree_on_plan(slow, sys.argv[4]).schedule.mesh.n_chips, flush=True)
"""


def two_processes(seconds: float, cache: Path, start: str) -> list[subprocess.Popen[str]]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    coordinator = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", TWO, coordinator, str(process), str(seconds), str(cache), start],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]


@pytest.mark.slow
def test_two_processes_of_which_one_plans_for_long(tmp_path: Path) -> None:
    both = two_processes(12.0, tmp_path, "by hand")
    outputs = [one.communicate(timeout=300) for one in both]
    assert [one.returncode for one in both] == [0, 0], outputs
    assert [stdout.splitlines()[-1] for stdout, _ in outputs] == ["8", "8"]


@pytest.mark.slow
def test_two_processes_of_which_the_planner_is_killed(tmp_path: Path) -> None:
    planner, survivor = two_processes(1000.0, tmp_path, "by job")
    assert planner.stdout is not None
    while "planning" not in planner.stdout.readline():
        assert planner.poll() is None
    time.sleep(1.0)
    planner.kill()
    killed_at = time.monotonic()
    stdout, stderr = survivor.communicate(timeout=300)
    planner.communicate()
    assert survivor.returncode != 0, (stdout, stderr)
    assert time.monotonic() - killed_at < 30
