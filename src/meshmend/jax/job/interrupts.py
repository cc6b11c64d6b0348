"""Stop a training loop at SIGTERM or Ctrl-C, after a step that all processes agree on, so that its state is saved.

Schedulers end a job by SIGTERM, and give it a while: Slurm and Kubernetes 30 s. Processes that were joined by JAX agree
by its preemption service, which hears SIGTERM on any of them: the step after the last one that any of them has begun. A
process alone stops after the step that runs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from itertools import count
from types import FrameType

from jax.experimental import multihost_utils

from meshmend.jax.engine.private import joined_as

_CALLS = count(1)
"""Of JAX's preemption service, which counts on from one loop to the next: all processes make the same calls."""


class Interrupts:
    """Hears signals from `watch` to `end`. A second one of a kind does what it did before, as do a script's own."""

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        """The signal that the loop stops for."""
        self._is_joined = joined_as() is not None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int] = {}

    def watch(self) -> None:
        """Take the place of what ends Python: only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            is_jaxs = self._is_joined and number == signal.SIGTERM
            if before in (signal.SIG_DFL, signal.default_int_handler) and not is_jaxs:
                self._before[number] = before
                signal.signal(number, self._hear)

    def _hear(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, self._before.pop(number))
        self.heard = signal.Signals(number)
        if self._is_joined:
            signal.raise_signal(signal.SIGTERM)  # JAX tells the others
        elif number == signal.SIGINT:
            # Not by `print`: what this has interrupted may be in the middle of one.
            os.write(2, b"\nThe step that runs is finished and saved first. Ctrl-C again ends at once.\n")

    def is_due(self) -> bool:
        """Whether to stop before the next step. Ask before each, on every process."""
        if not self._is_joined:
            return self.heard is not None
        try:
            is_due = bool(multihost_utils.reached_preemption_sync_point(next(_CALLS)))
        except RuntimeError:  # whoever has joined the processes has switched that service off
            return False
        if is_due:
            self.heard = self.heard or signal.SIGTERM
        return is_due

    def end(self) -> None:
        """Leave signals to whoever had them before."""
        while self._before:
            signal.signal(*self._before.popitem())
