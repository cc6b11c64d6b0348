"""A job of one process that no launcher started: a first try on a laptop, or one slice that a single host drives."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import jax

from meshmend.errors import RestartError
from meshmend.jax.engine.fabric import Fabric, discover
from meshmend.jax.engine.private import joined_as
from meshmend.jax.session.compile_cache import use_compile_cache, use_no_compile_cache
from meshmend.jax.session.coordination import Coordination
from meshmend.jax.session.session import Session
from meshmend.jax.session.survivors import agree_on_quarantine, check_connected, leave_out
from meshmend.launch.environment import Launch
from meshmend.launch.events import note_quarantined
from meshmend.launch.signing import file_key
from meshmend.launch.timeline import Timeline

SIZES = ("WORLD_SIZE", "JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS")
"""Where torchrun, scripts for JAX and `srun` say how many processes they have started."""


@dataclass(frozen=True)
class SingleProcessSession(Session):
    """The session of a process without peers: an error is raised, because there is nobody to wait for in vain."""

    _ended_with: list[BaseException] = field(default_factory=list, repr=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave everything as it is: nobody waits for this process."""

    def give_up(self, error: BaseException) -> NoReturn:
        """Record an error and raise it."""
        self.timeline.note("gave up", why=f"{type(error).__name__}: {error}"[:300])
        raise error

    def stop(self, number: signal.Signals) -> NoReturn:
        """Raise what Python raises at Ctrl-C, or end as SIGTERM does."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def end_with(self, error: BaseException) -> None:
        """Have the next `check` raise an error: an exception in a thread would end only that thread."""
        self._ended_with.append(error)

    def check(self) -> None:
        """Raise what a thread has ended the job with."""
        if self._ended_with:
            raise self._ended_with.pop(0)


def is_launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process is one of a job's: `meshmend run` started it, or JAX's processes have joined by hand.

    >>> is_launched({"MESHMEND_ROUND": "{}"}), is_launched({"HOME": "/home/ada"})
    (True, False)
    """
    return "MESHMEND_ROUND" in (os.environ if environment is None else environment) or joined_as() is not None


def initialize_alone(
    fabric: Fabric | None = None,
    *,
    job: str = "job",
    compile_cache: str | Path | None = None,
    timeline: str | Path | None = None,
    quarantine: str | Path | None = None,
) -> Session:
    """Return the session of a job that is this process alone, on all of its devices or on `fabric`.

    Suspects on the quarantine list in the folder `quarantine` are left out (by default in MESHMEND_SHARED).

    Devices that report no coordinates form the mesh that MESHMEND_SHAPE names (with its MESHMEND_FAILED), or the one of
    the description in MESHMEND_MACHINE. Else it is the one closest to a square: on virtual chips any will do.

    >>> initialize_alone(discover(jax.devices()[:6], shape="2x3")).fabric.mesh
    Mesh(2x3: 6 chips)
    """
    check_alone(os.environ)
    use_compile_cache(compile_cache)
    if fabric is None:
        n_devices = len(jax.devices())
        described = {"MESHMEND_SHAPE", "MESHMEND_MACHINE"} & {*os.environ}
        is_known = bool(described) or getattr(jax.devices()[0], "coords", None) is not None
        fabric = discover(shape=None if is_known else squarest(n_devices))
    if fabric.platform == "cpu" and file_key():
        use_no_compile_cache()
    launch = Launch("", 1, 0, launcher="no launcher", job=job)
    notes = Timeline(timeline or os.environ.get("MESHMEND_TIMELINE"), job=job, round=0, process=0, host=0)
    coordination = Coordination(0, 1)
    quarantined, _ = agree_on_quarantine(quarantine, coordination)
    if quarantined:
        fabric = leave_out(fabric, quarantined, None)
        check_connected(fabric, (0,))
    notes.note("fabric", chips=fabric.mesh.n_chips, hosts=[0])
    for entry in quarantined:
        note_quarantined(notes, entry, None)
    return SingleProcessSession(fabric, launch, None, (0,), coordination, notes, quarantined=quarantined)


def check_alone(environment: Mapping[str, str]) -> None:
    """Raise if a launcher has started other processes, too: each would train by itself, over the others' files."""
    started = [name for name in SIZES if environment.get(name, "1") not in ("", "1")]
    if started:
        raise RestartError(
            f"{started[0]}={environment[started[0]]}: this is one of several processes, but they have not joined. "
            "Start `meshmend run` in their place, or call jax.distributed.initialize() before anything else."
        )


def squarest(n_chips: int) -> tuple[int, int]:
    """Return the sides of the mesh of so many chips that is closest to a square.

    >>> squarest(1), squarest(7), squarest(8), squarest(36)
    ((1, 1), (1, 7), (2, 4), (6, 6))
    """
    short = max(side for side in range(1, int(n_chips**0.5) + 1) if n_chips % side == 0)
    return short, n_chips // short
