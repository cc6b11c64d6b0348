"""Exchange of small facts between all processes, without any collective.

They go through JAX's coordination service, so that processes can compare their configurations, and all raise the same
error, where a collective would hang.

A process may take long until it has its fact: planning a large mesh, or compiling without a cache, takes minutes. So a
fixed timeout is not enough: each process sends heartbeats while the session lasts, and the others wait for it as long
as they arrive.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from meshmend.errors import RestartError, TransientError
from meshmend.jax.engine.private import KeyValueStore, key_value_store

BEAT_S = 1.0
"""Interval between heartbeats of a process."""
LONGEST_WAIT_S = 3600.0
"""Limit for a process that is alive but never posts its fact."""


class Coordination:
    """Exchanges facts between a job's processes, through JAX's key-value store. Every process makes the same calls.

    The others wait for a process that has not posted its fact as long as its heartbeats arrive: it counts as dead when
    it has been silent for `timeout_s`, and as stuck after `limit_s`. `close` ends the heartbeat.
    """

    def __init__(
        self,
        process: int,
        n_processes: int,
        *,
        timeout_s: float = 60.0,
        limit_s: float = LONGEST_WAIT_S,
        beat_s: float = BEAT_S,
        channel: str = "",
    ) -> None:
        self.process = process
        self.n_processes = n_processes
        self.timeout_s = timeout_s
        self.limit_s = limit_s
        self.beat_s = beat_s
        self._keys = f"meshmend/{channel}/" if channel else "meshmend/"
        self.name = channel
        self._round = count()
        self._own_keys: list[str] = []
        """Of the facts that this process has posted and that are still there."""
        self._channels = count(1)
        self._channel: Coordination | None = None
        """The last one that was opened."""
        self._doing = "starting"
        self._closed = threading.Event()
        self._heart: threading.Thread | None = None
        if n_processes > 1 and not channel and key_value_store() is not None:
            self._heart = threading.Thread(target=self._beat, name="meshmend-heartbeat", daemon=True)
            self._heart.start()

    def channel(self, name: str) -> Coordination:
        """Return another one of the same processes, whose exchanges do not get mixed up with these: for a thread.

        Its name is new each time. Open one only when all processes are done with the last, whose facts go.
        """
        if self._channel is not None:
            self._channel.forget()
        limits: dict[str, float] = {"timeout_s": self.timeout_s, "limit_s": self.limit_s, "beat_s": self.beat_s}
        name = f"{name} {next(self._channels)}"
        self._channel = Coordination(self.process, self.n_processes, channel=name, **limits)
        return self._channel

    def exchange(self, fact: Any) -> list[Any]:
        """Send a fact (anything that JSON can encode) to all processes; return the facts of all, by process."""
        folder = self._send(fact).rpartition("/")[0]
        if self.n_processes == 1:
            return [json.loads(json.dumps(fact))]
        told = [json.loads(self._hear(f"{folder}/{process}", process)) for process in range(self.n_processes)]
        # All have told this fact, so all have read those before: a job that checks itself makes many of them.
        self.forget(but=1)
        return told

    def forget(self, *, but: int = 0) -> None:
        """Delete what this process has posted, but so many of the last facts: all processes have read the others."""
        while len(self._own_keys) > but:
            try:
                _store().delete(self._own_keys[0])
            except RuntimeError as error:
                raise self._unreachable(error) from error
            del self._own_keys[0]

    def send(self, fact: Any) -> None:
        """Take part in an exchange without waiting for the others: for a process that is about to give up."""
        self._send(fact)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Set what this process reports to others that wait for it, as in "planning"."""
        before, self._doing = self._doing, what
        try:
            yield
        finally:
            self._doing = before

    def close(self) -> None:
        """Stop the heartbeat, before JAX's coordination service ends."""
        self._closed.set()
        if self._heart is not None:
            self._heart.join(self.timeout_s)

    def _send(self, fact: Any) -> str:
        """Post a fact; return its key."""
        key = f"{self._keys}{next(self._round)}/{self.process}"
        if self.n_processes > 1:
            _store().set(key, json.dumps(fact))
            self._own_keys.append(key)
        return key

    def _hear(self, key: str, process: int) -> str:
        """Wait for a key of a process while it is alive."""
        started = heard = time.monotonic()
        beat = ""
        while True:
            try:
                fact = _store().wait_for(key, min(self.beat_s, self.timeout_s))
            except RuntimeError as error:
                raise self._unreachable(error) from error
            if fact is not None:
                return fact
            latest, now = self._beat_of(process), time.monotonic()
            if latest != beat:
                beat, heard = latest, now
            doing = json.loads(beat)[1] if beat else "starting"
            if now - heard > self.timeout_s:
                raise TransientError(
                    f"Process {process} has been silent for {now - heard:.0f} s (it was {doing}), expected a "
                    f"heartbeat every {self.beat_s:g} s: it is dead, frozen or cut off. The launcher will restart the "
                    "survivors."
                )
            if now - started > self.limit_s:
                raise TransientError(
                    f"Process {process} is alive (it is {doing}), but has kept the others waiting for "
                    f"{now - started:.0f} s, expected at most {self.limit_s:g} s. Look at what it is doing: a "
                    "plan or a compiled program that takes so long belongs in the cache before the job starts."
                )

    def _beat_of(self, process: int) -> str:
        try:
            return _store().get(f"meshmend/beat/{process}") or ""
        except RuntimeError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: RuntimeError) -> TransientError:
        return TransientError(
            f"Process {self.process} cannot reach the coordination service on process 0's host any more: "
            f"{str(error).splitlines()[0]}. Process 0 is probably dead. The launcher will restart the survivors."
        )

    def _beat(self) -> None:
        for number in count():
            try:
                beat = json.dumps([number, self._doing])
                _store().set(f"meshmend/beat/{self.process}", beat, overwrite=True)
            except RuntimeError:
                # The service is gone, which the next exchange reports, or only this beat is lost.
                if key_value_store() is None:
                    return
            if self._closed.wait(self.beat_s):
                return


def _store() -> KeyValueStore:
    store = key_value_store()
    if store is None:
        raise RestartError("Processes cannot communicate yet: call job.initialize() first.")
    return store
