"""Stragglers in a JAX job: what each host spends between two steps, and, if asked for, what a chip takes for a probe.

All chips begin a collective together, so the step takes equally long on every host, whoever is slow. What a host can
measure of itself is the time that it does *not* wait for its devices: for data, for the caller's own code, for Python.
That is what makes the others wait. `HostClock` takes it.

A chip that is slow itself shows only where its devices are timed one by one. The probe is a fixed computation of about
two milliseconds, on each local device in turn, when the step has been settled. Per step it costs these two milliseconds
for each device of a host, and that steps do not overlap any more: the next one cannot be dispatched before this one has
ended. So it is off unless it is asked for.

Every eighth step the processes exchange these times, without a collective, and all of them come to the same signs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshmend.errors import Coordinate, ParameterError
from meshmend.jax.fabric import Fabric
from meshmend.jax.job.session import Session
from meshmend.jax.tiles import TiledFabric
from meshmend.quarantine import Sign, Stragglers
from meshmend.topology import Mesh

EVERY = 8
"""Steps between two exchanges of times."""
PROBE_S = 2e-3
"""What the probe shall take on a device: many times what it takes to start it."""
PROBE_SIDE = 128
TRIAL_ROUNDS = 64

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
    """Collects the times of a job's hosts, and of its chips if they are probed; every process makes the same calls.

    ```
    watch, clock = LagWatch.of(session, probe=False), HostClock()
    for number in steps:
        batch = next(batches)             # the host's own time, as is the caller's loop body
        with clock.waiting():
            … = step(params, state, batch)
            loss.block_until_ready()      # with probe=True: this very step's
        signs = watch.add(number, *clock.lap())
    ```

    `process_of_chip` says by rank of `mesh` whose chips they are, `hosts` which chips each host of the machine has, by
    its number. `probes` holds what times each local chip, by its rank. A host is named if all of its chips are slow,
    and one of a single chip by its chip.
    """

    def __init__(
        self,
        mesh: Mesh,
        exchange: Exchange,
        process_of_chip: Sequence[int],
        *,
        hosts: Sequence[Sequence[Coordinate]] = (),
        probes: Mapping[int, Callable[[], float]] | None = None,
        every: int = EVERY,
    ) -> None:
        if len(process_of_chip) != mesh.n_chips:
            raise ParameterError(f"{mesh!r} needs a process for each chip: got {len(process_of_chip)}.")
        if every < 1:
            raise ParameterError(f"Times are exchanged every {every} steps: expected at least 1.")
        self._exchange = exchange
        self._process_of_chip = list(process_of_chip)
        self._probes = probes
        self._every = every
        self._n_chips = mesh.n_chips
        self._rows: list[dict[str, Any]] = []
        self._host_lag = Stragglers(mesh, hosts)
        self._chip_lag = Stragglers(mesh, hosts)

    @classmethod
    def of(cls, session: Session, *, probe: bool = False) -> LagWatch:
        """Return the watch of a session. With `probe`, all processes first agree on how long the probe is."""
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
        exchange = session.coordination.exchange
        probes = make_probes(fabric, session.launch.process, exchange) if probe else None
        return cls(fabric.mesh, exchange, processes, hosts=hosts, probes=probes)

    def add(self, step: int, host_s: float, step_s: float = 0.0) -> tuple[Sign, ...]:
        """Take in a step's times, probing the local chips if that was asked for; return signs, the same everywhere.

        `host_s` is what this host spent by itself, `step_s` how long the whole step took: a host that makes it less
        than 5 % longer is not late.
        """
        row: dict[str, Any] = {"step": step, "host": _rounded(host_s), "whole": _rounded(step_s)}
        if self._probes is not None:
            row["chips"] = {str(rank): _rounded(probe()) for rank, probe in self._probes.items()}
        self._rows.append(row)
        if len(self._rows) < self._every:
            return ()
        rows, self._rows = self._rows, []
        told = self._exchange(rows)
        return tuple(sign for number in range(len(rows)) for sign in self._judge([of[number] for of in told]))

    def _judge(self, told: Sequence[Mapping[str, Any]]) -> Iterator[Sign]:
        """Return the signs of one step, from what each process says of it."""
        step = int(told[0]["step"])
        if any(row["step"] != step for row in told):
            raise ParameterError(
                f"Processes add different steps to their times: {sorted({int(row['step']) for row in told})}. Every "
                "process calls add once for each step."
            )
        step_s = float(np.median([row["whole"] for row in told]))
        hosts = [told[process]["host"] for process in self._process_of_chip]
        named = {sign.suspects: sign for sign in self._host_lag.add(step, hosts, step_s=step_s)}
        if self._probes is not None:
            chips = np.full(self._n_chips, math.nan)
            for row in told:
                for rank, seconds in row["chips"].items():
                    chips[int(rank)] = seconds
            named |= {sign.suspects: sign for sign in self._chip_lag.add(step, chips)}
        yield from named.values()


@dataclass(frozen=True)
class Probe:
    """A computation of some rounds on one device, which returns how long it took."""

    device: Any
    rounds: int
    compute: Callable[..., jax.Array]
    now: Callable[[], float] = time.perf_counter

    @cached_property
    def _given(self) -> Any:
        side = np.eye(PROBE_SIDE, dtype=np.float32)
        return jax.device_put((side, np.int32(self.rounds)), self.device)

    def __call__(self) -> float:
        """Compute, and return the seconds."""
        given = self._given
        began = self.now()
        self.compute(*given).block_until_ready()
        return self.now() - began


def _compute(x: jax.Array, rounds: jax.Array) -> jax.Array:
    found: jax.Array = jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ x), x)
    return found


def make_probes(
    fabric: Fabric, process: int, exchange: Exchange, now: Callable[[], float] = time.perf_counter
) -> dict[int, Probe]:
    """Return what times each chip of a process, by rank: equally much work on every chip of the job.

    How much that is follows from how long a trial takes on the median process.
    """
    devices = fabric.jax_mesh.devices.reshape(fabric.mesh.n_chips, -1)[:, 0]
    local = {rank: device for rank, device in enumerate(devices) if device.process_index == process}
    compute = fabric.jit(_compute)
    trials = [Probe(device, TRIAL_ROUNDS, compute, now) for device in local.values()]
    for trial in trials:
        trial()  # compiles
    own_s = min((trial() for trial in trials for _ in range(3)), default=None)
    typical_s = float(np.median([found for found in exchange(own_s) if found is not None]))
    rounds = max(1, round(TRIAL_ROUNDS * PROBE_S / max(typical_s, 1e-6)))
    return {rank: Probe(device, rounds, compute, now) for rank, device in local.items()}


def _rounded(seconds: float) -> float:
    """Return microseconds' accuracy: these are sent as text."""
    return round(float(seconds), 6)
