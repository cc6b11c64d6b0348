"""Exchange of small facts between all processes, without any collective.

They go through JAX's coordination service, so that processes can compare their configurations, and all raise the same
error, where a collective would hang.

A process may take long until it has its fact: planning a large mesh, or compiling without a cache, takes minutes. So
there is no short timeout. The launcher ends those who wait for a host that has failed, and JAX's own heartbeats end
those who wait for a process that is dead, frozen or cut off.
"""

from __future__ import annotations

import json
import time
from itertools import count
from typing import Any

from meshmend.errors import RestartError, TransientError
from meshmend.jax.engine.private import KeyValueStore, key_value_store

LONGEST_WAIT_S = 3600.0
"""Limit for a process that is alive but never posts its fact."""
LOOK_S = 60.0
"""How long one call to JAX's service waits, at most."""


class Coordination:
    """Exchanges facts between a job's processes, through JAX's key-value store. Every process makes the same calls."""

    def __init__(self, process: int, n_processes: int, *, limit_s: float = LONGEST_WAIT_S, channel: str = "") -> None:
        self.process = process
        self.n_processes = n_processes
        self.limit_s = limit_s
        self._keys = f"meshmend/{channel}/" if channel else "meshmend/"
        self.name = channel
        self._round = count()
        self._own_keys: list[str] = []
        """Of the facts that this process has posted and that are still there."""
        self._channels = count(1)
        self._channel: Coordination | None = None
        """The last one that was opened."""

    def channel(self, name: str) -> Coordination:
        """Return another one of the same processes, whose exchanges do not get mixed up with these: for a thread.

        Its name is new each time. Open one only when all processes are done with the last, whose facts go.
        """
        if self._channel is not None:
            self._channel.forget()
        name = f"{name} {next(self._channels)}"
        self._channel = Coordination(self.process, self.n_processes, limit_s=self.limit_s, channel=name)
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

    def _send(self, fact: Any) -> str:
        """Post a fact; return its key."""
        key = f"{self._keys}{next(self._round)}/{self.process}"
        if self.n_processes > 1:
            _store().set(key, json.dumps(fact))
            self._own_keys.append(key)
        return key

    def _hear(self, key: str, process: int) -> str:
        """Wait for a key of a process."""
        until = time.monotonic() + self.limit_s
        while (left := until - time.monotonic()) > 0:
            try:
                fact = _store().wait_for(key, min(LOOK_S, left))
            except RuntimeError as error:
                raise self._unreachable(error) from error
            if fact is not None:
                return fact
        raise TransientError(
            f"Process {process} has kept the others waiting for {self.limit_s:g} s. Look at what it is doing: a plan "
            "or a compiled program that takes so long belongs in the cache before the job starts."
        )

    def _unreachable(self, error: RuntimeError) -> TransientError:
        return TransientError(
            f"Process {self.process} cannot reach the coordination service on process 0's host any more: "
            f"{str(error).splitlines()[0]}. Process 0 is probably dead. The launcher will restart the survivors."
        )


def _store() -> KeyValueStore:
    store = key_value_store()
    if store is None:
        raise RestartError("Processes cannot communicate yet: call job.initialize() first.")
    return store
