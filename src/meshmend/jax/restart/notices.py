"""Small facts that every process tells every other one, before and without any collective.

They go through JAX's coordination service, so that processes can compare what they are, and all raise the same error,
when a collective would hang.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from jax._src import distributed  # there is no public way to the coordination service's key-value store

from meshmend.errors import RestartError


class Notices:
    """A board where each process pins a fact and reads all others'. Every process must make the same calls."""

    def __init__(self, process: int, n_processes: int, *, timeout_s: float = 60.0) -> None:
        self.process = process
        self.n_processes = n_processes
        self.timeout_s = timeout_s
        self._round = count()

    def exchange(self, fact: Any) -> list[Any]:
        """Tell all processes a fact (anything that JSON can write); return everybody's, by process."""
        if self.n_processes == 1:
            return [json.loads(json.dumps(fact))]
        client = distributed.global_state.client
        if client is None:
            raise RestartError("Processes cannot talk yet: call restart.initialize() first.")
        folder = f"meshmend/{next(self._round)}"
        client.key_value_set(f"{folder}/{self.process}", json.dumps(fact))
        timeout_ms = int(self.timeout_s * 1000)
        return [json.loads(client.blocking_key_value_get(f"{folder}/{i}", timeout_ms)) for i in range(self.n_processes)]
