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
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import meshmend.jax as mmj
from meshmend.errors import PlanError, RestartError
from meshmend.jax.session import Session
from meshmend.jax.session.coordination import Coordination, Protocol, Question
from meshmend.jax.train.plan import TrainingPlan
from meshmend.launch import Launch, Timeline
from meshmend.launch.processes import free_port
from meshmend.planning import PlanCache
from protocols import run_together


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


@pytest.mark.parametrize(
    ("contents", "expected", "n_reads"),
    [
        ([None, b"plan", None], b"plan", 2),
        ([b"mine", b"plan", None], b"mine", 2),
        ([b"plan", b"plan", b"plan"], b"plan", 0),
        ([None, None, None], None, 0),
    ],
)
def test_what_one_process_has_all_others_get(
    contents: list[bytes | None], expected: bytes | None, n_reads: int, service: Service
) -> None:
    boards = [Coordination(process, 3) for process in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda one: one.share(contents[one.process]), boards)) == 3 * [expected]
        assert service.calls["content"] == bool(n_reads)
        list(pool.map(lambda one: one.exchange("next"), boards))
    assert sorted(service.values) == ["meshmend/2/answer", "meshmend/2/facts/1", "meshmend/2/facts/2"], (
        "it is forgotten"
    )


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


def sessions() -> list[Session]:
    return [Session(FABRIC, Launch("x:1", 2, i), None, (0, 1), Coordination(i, 2), Timeline(None)) for i in range(2)]


def together(both: list[Session], ask: Callable[[Session], Any]) -> list[Any]:
    def one(session: Session) -> Any:
        try:
            return ask(session)
        except (PlanError, RestartError, OSError) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, both))


@pytest.mark.usefixtures("service")
def test_survivors_wait_for_a_plan_that_another_makes(tmp_path: Path) -> None:
    made: list[str] = []

    def slow(session: Session) -> Any:
        def make(cache: PlanCache) -> TrainingPlan:
            if not made:
                made.append("slowly")
                time.sleep(1.0)
            return mmj.plan(session.fabric, PARAMS, cache=cache)

        return session.agree_on_plan(make, tmp_path)

    both = sessions()
    first, second = together(both, slow)
    assert first.digest == second.digest
    assert [session.timeline.events[-1]["from_cache"] for session in both] == [False, True]
    assert both[1].timeline.events[-1]["seconds"] >= 0.8


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


@pytest.mark.usefixtures("service")
def test_processes_that_come_to_different_plans_say_so_before_the_first_step(tmp_path: Path) -> None:
    """Whatever their caches hold: two caches, and another planner in one of them, as with another version."""

    def different(session: Session) -> Any:
        planner = ("hamiltonian", "row-pairs")[session.launch.process]
        return session.agree_on_plan(lambda _: mmj.plan(FABRIC, PARAMS, planner=planner), tmp_path / planner)

    for error in together(sessions(), different):
        assert isinstance(error, RestartError)
        assert "Process 1 came to another plan than process 0" in str(error)


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
        if sys.argv[2] == "0":
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
