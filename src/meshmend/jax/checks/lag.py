"""Stragglers in a JAX job: what each host spends between two steps.

All chips begin a collective together, so the step takes equally long on every host, whoever is slow. What a host can
measure of itself is the time that it does *not* wait for its devices: for data, for the caller's own code, for Python.
That is what makes the others wait. `HostClock` takes it.

Every eighth step the processes exchange these times, without a collective, and all of them come to the same
observations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshmend.errors import Coordinate, ParameterError
from meshmend.jax.job.session import Session
from meshmend.jax.tiles import TiledFabric
from meshmend.quarantine import Observation, Stragglers
from meshmend.topology import Mesh

EVERY = 8
"""Steps between two exchanges of times."""

Exchange = Callable[[Any], list[Any]]


class HostClock:
    """Times what a host does by itself: all that is not inside `waiting`.

    >>> clock = HostClock()
    >>> with clock.waiting():
    ...     pass  # the step, and its loss
    >>> host_s, step_s = clock.lap()
    >>> 0 <= host_s <= step_s
    True
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_at = now()
        self._waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for the devices or for other hosts: a step's dispatch, its loss, copies of the state."""
        began = self._now()
        try:
            yield
        finally:
            self._waited_s += self._now() - began

    def lap(self) -> tuple[float, float]:
        """End a step; return the seconds of the host itself, and of the whole step."""
        now = self._now()
        step_s = now - self._began_at
        host_s, self._waited_s, self._began_at = step_s - self._waited_s, 0.0, now
        return max(host_s, 0.0), step_s


class LagWatch:
    """Collects the times of a job's hosts; every process makes the same calls.

    ```
    watch, clock = LagWatch.of(session), HostClock()
    for number in steps:
        batch = next(batches)             # the host's own time, as is the caller's loop body
        with clock.waiting():
            … = step(params, state, batch)
            loss.block_until_ready()
        observations = watch.add(number, *clock.lap())
    ```

    `process_of_chip` says by rank of `mesh` whose chips they are, `hosts` which chips each host of the machine has, by
    its number. A host of a single chip is named by its chip.
    """

    def __init__(
        self,
        mesh: Mesh,
        exchange: Exchange,
        process_of_chip: Sequence[int],
        *,
        hosts: Sequence[Sequence[Coordinate]] = (),
        every: int = EVERY,
    ) -> None:
        if len(process_of_chip) != mesh.n_chips:
            raise ParameterError(f"{mesh!r} needs a process for each chip: got {len(process_of_chip)}.")
        if every < 1:
            raise ParameterError(f"Times are exchanged every {every} steps: expected at least 1.")
        self._exchange = exchange
        self._process_of_chip = list(process_of_chip)
        self._every = every
        self._rows: list[dict[str, Any]] = []
        self._lag = Stragglers(mesh, hosts)

    @classmethod
    def of(cls, session: Session) -> LagWatch:
        """Return the watch of a session."""
        fabric = session.fabric.chips if isinstance(session.fabric, TiledFabric) else session.fabric
        devices = fabric.jax_mesh.devices.reshape(fabric.mesh.n_chips, -1)[:, 0]
        processes = [int(device.process_index) for device in devices]
        if session.hosts is not None:
            hosts = [session.hosts.chips(number) for number in range(len(session.hosts))]
        else:
            hosts = [
                [fabric.mesh.chip(rank) for rank, owner in enumerate(processes) if owner == process]
                for process in range(session.launch.n_processes)
            ]
        return cls(fabric.mesh, session.coordination.exchange, processes, hosts=hosts)

    def add(self, step: int, host_s: float, step_s: float = 0.0) -> tuple[Observation, ...]:
        """Take in a step's times; return observations, the same everywhere.

        `host_s` is what this host spent by itself, `step_s` how long the whole step took: a host that makes it less
        than 5 % longer is not late.
        """
        self._rows.append({"step": step, "host": _rounded(host_s), "whole": _rounded(step_s)})
        if len(self._rows) < self._every:
            return ()
        rows, self._rows = self._rows, []
        told = self._exchange(rows)
        return tuple(
            observation for number in range(len(rows)) for observation in self._judge([of[number] for of in told])
        )

    def _judge(self, told: Sequence[Mapping[str, Any]]) -> tuple[Observation, ...]:
        """Return the observations of one step, from what each process says of it."""
        step = int(told[0]["step"])
        if any(row["step"] != step for row in told):
            raise ParameterError(
                f"Processes add different steps to their times: {sorted({int(row['step']) for row in told})}. Every "
                "process calls add once for each step."
            )
        step_s = float(np.median([row["whole"] for row in told]))
        hosts = [told[process]["host"] for process in self._process_of_chip]
        return self._lag.add(step, hosts, step_s=step_s)


def _rounded(seconds: float) -> float:
    """Return microseconds' accuracy: these are sent as text."""
    return round(float(seconds), 6)
