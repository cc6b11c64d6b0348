"""Exchange of small facts between all processes, without any collective.

Each process sends its fact to process 0, which judges all of them and sends one answer back, through the key-value
store of JAX's coordination service. So an exchange costs each process two messages and process 0 a few per process,
whatever their number, and all processes act on the same answer, or raise the same error, where a collective would hang.

A *protocol* says what is exchanged: a generator that yields a `Question` and is sent process 0's answer, until it
returns. It knows nothing of JAX or of this transport, so that a test can run thousands of its participants in a loop.

A process may take long until it has its fact: planning a large mesh, or compiling without a cache, takes minutes. The
others wait for it, because a dead process is not theirs to find: the launcher's store and JAX's own heartbeats do that.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar

import meshmend.errors
from meshmend.errors import MeshmendError, RestartError, TransientError
from meshmend.jax.engine.private import KeyValueStore, key_value_store

LONGEST_WAIT_S = 3600.0
"""Limit for a process that is alive but never sends its fact."""
LOOK_S = 10.0
"""Interval at which a process that waits looks whether it has waited too long."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
"""Between two times that process 0 asks for all facts: it grows while facts are missing."""

PLAIN = (str, int, float, list, tuple, type(None))
"""Kinds of an error's fields that other processes are told."""

P = ParamSpec("P")
T = TypeVar("T")
Facts = list[Any]
"""The facts of all processes, in their order."""


@dataclass(frozen=True)
class Question:
    """One exchange of a protocol: a fact of this process, and how process 0 answers the facts of all.

    Both the fact and the answer are anything that JSON can encode. What `judge` raises is raised on every process.
    """

    fact: Any
    judge: Callable[[Facts], Any]


Protocol = Generator[Question, Any, T]
"""What a process asks, one question after the other, and what it has learnt in the end."""


class Coordination:
    """Exchanges facts between a job's processes, through JAX's key-value store. Every process makes the same calls."""

    def __init__(self, process: int, n_processes: int, *, limit_s: float = LONGEST_WAIT_S, channel: str = "") -> None:
        self.process = process
        self.n_processes = n_processes
        self.limit_s = limit_s
        self.name = channel
        self._keys = f"meshmend/{channel}/" if channel else "meshmend/"
        self._numbers = count()
        self._answered: list[int] = []
        """Of the answers that process 0 has sent, those that some process may still have to read."""
        self._channels = count(1)
        self._channel: Coordination | None = None
        """The last one that was opened."""

    @property
    def _leads(self) -> bool:
        return self.process == 0 or self.n_processes == 1

    def channel(self, name: str) -> Coordination:
        """Return another one of the same processes, whose exchanges do not get mixed up with these: for a thread.

        Its name is new each time. Open one only when all processes are done with the last, whose facts go.
        """
        if self._channel is not None:
            self._channel.close()
        name = f"{name} {next(self._channels)}"
        self._channel = Coordination(self.process, self.n_processes, limit_s=self.limit_s, channel=name)
        return self._channel

    def run(self, protocol: Protocol[T]) -> T:
        """Run a protocol to its end, and return what it returns. Every process runs the same one."""
        try:
            question = next(protocol)
            while True:
                try:
                    answer = self.decide(question.fact, question.judge)
                except MeshmendError as error:
                    question = protocol.throw(error)
                else:
                    question = protocol.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def decide(self, fact: Any, judge: Callable[[Facts], Any]) -> Any:
        """Send a fact to process 0; return what it makes of the facts of all. What `judge` raises, all raise."""
        number = next(self._numbers)
        if not self._leads:
            self._post(f"{number}/facts/{self.process}", _sealed(fact))
            return self._hear(number)
        facts = self._collect(number, fact)
        for answered in self._answered:  # all have sent this fact, so all have read the answers before it
            _reach(0, KeyValueStore.delete, f"{self._keys}{answered}/")
        self._answered.clear()
        return self._answer(number, lambda: judge(facts))

    def exchange(self, fact: Any) -> Facts:
        """Send a fact to all processes; return the facts of all.

        For small facts: all of them go to every process. `decide` sends each process only what it needs.
        """
        told: Facts = self.decide(fact, list)
        return told

    def wait_for_all(self) -> None:
        """Return when all processes have come to this point."""
        self.decide(None, lambda _: None)

    def tell(self, make: Callable[[], Any]) -> Any:
        """Return what process 0 makes, on every process. What it raises, all raise."""
        number = next(self._numbers)
        return self._answer(number, make) if self._leads else self._hear(number)

    def send(self, sender: int, make: Callable[[], bytes], *, wants: bool) -> bytes | None:
        """Send what one process makes to those that want it, and return it there; None on all others.

        For what a few processes have and an answer is too short for, such as a plan.
        """
        number, content = next(self._numbers), None
        if self.process == sender:
            self._post(f"{number}/content", make())
        elif wants:
            whom = f"process {sender}, which sends what it has"
            content = self._wait_for(f"{self._keys}{number}/content", time.monotonic(), whom)
        self._answered += [number] * self._leads
        return content

    def close(self) -> None:
        """Delete what is left of these exchanges, when all processes are done with them."""
        if self._leads and self.n_processes > 1:
            _reach(0, KeyValueStore.delete, self._keys)

    def _answer(self, number: int, make: Callable[[], Any]) -> Any:
        """Make process 0's answer and send it; return it as the others read it."""
        try:
            answer = _sealed({"answer": make()})
        except MeshmendError as error:
            fields = {name: value for name, value in vars(error).items() if isinstance(value, PLAIN)}
            self._post_error(number, type(error).__name__, str(error), fields)
            raise
        except BaseException as error:
            self._post_error(number, "TransientError", f"Process 0 has failed: {describe(error)}. See its log.")
            raise
        self._post(f"{number}/answer", answer)
        self._answered += [number] * (self.n_processes > 1)
        return _opened(answer)

    def _post_error(self, number: int, kind: str, message: str, fields: dict[str, Any] | None = None) -> None:
        with suppress(TransientError):  # where nobody can be told, this process still raises the error itself
            self._post(f"{number}/answer", _sealed({"error": kind, "message": message, "fields": fields or {}}))

    def _hear(self, number: int) -> Any:
        key = f"{self._keys}{number}/answer"
        return _opened(self._wait_for(key, time.monotonic(), "process 0, or one that process 0 waits for"))

    def _post(self, key: str, value: bytes) -> None:
        if self.n_processes > 1:
            _reach(self.process, KeyValueStore.set, f"{self._keys}{key}", value)

    def _collect(self, number: int, fact: Any) -> Facts:
        """Return the facts of all processes, when they are there."""
        folder, found = f"{self._keys}{number}/facts/", {0: json.loads(json.dumps(fact))}
        since, pause_s = time.monotonic(), SHORTEST_PAUSE_S
        while len(found) < self.n_processes:
            for key, sealed in _reach(self.process, KeyValueStore.folder, folder):
                process = int(key.rpartition("/")[2])
                if process not in found:
                    found[process] = read_fact(sealed)
            if missing := [process for process in range(self.n_processes) if process not in found]:
                # The service answers as soon as the first of them is there, and most others are then there, too.
                more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
                whom = f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing[:3]))}{more}"
                self._wait_for(f"{folder}{missing[0]}", since, whom)
                time.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        return [found[process] for process in range(self.n_processes)]

    def _wait_for(self, key: str, since: float, whom: str) -> bytes:
        """Wait for a key for as long as a process may take."""
        while True:
            left = since + self.limit_s - time.monotonic()
            sealed = _reach(self.process, KeyValueStore.wait_for, key, max(0.0, min(LOOK_S, left)))
            if sealed is not None:
                return sealed
            if left <= 0:
                raise TransientError(
                    f"Process {self.process} has waited {self.limit_s:g} s for {whom}, which JAX takes to be alive. "
                    "Look at what it is doing: a plan or a compiled program that takes so long belongs in the cache "
                    "before the job starts."
                )


def _reach(process: int, use: Callable[Concatenate[KeyValueStore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Use the job's key-value store; raise a `TransientError` if it cannot be reached."""
    store = key_value_store()
    if store is None:
        raise RestartError("Processes cannot communicate yet: call job.initialize() first.")
    try:
        return use(store, *args, **kwargs)
    except RuntimeError as error:
        raise TransientError(
            f"Process {process} cannot reach the coordination service on process 0's host any more: "
            f"{str(error).splitlines()[0]}. Process 0 is probably dead. The launcher will restart the survivors."
        ) from error


def describe(error: BaseException) -> str:
    """Return an error's kind and its message, shortened, as other processes are told."""
    return f"{type(error).__name__}: {error}"[:2000]


def _sealed(fact: Any) -> bytes:
    return zlib.compress(json.dumps(fact, separators=(",", ":")).encode(), 1)


def read_fact(sealed: bytes) -> Any:
    """Return a fact or an answer, given as it travels."""
    return json.loads(zlib.decompress(sealed))


def _opened(sealed: bytes) -> Any:
    told = read_fact(sealed)
    if "error" not in told:
        return told["answer"]
    kind = getattr(meshmend.errors, str(told["error"]), RestartError)
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in told["fields"].items()}
    raise meshmend.errors.made_again(kind, (str(told["message"]),), fields)
