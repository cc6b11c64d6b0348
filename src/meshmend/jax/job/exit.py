"""How the loop of a job stops for a signal, and how its process ends, in a script without a `with` block.

Schedulers end a job by SIGTERM, and give it a while: Slurm and Kubernetes 30 s. The loop stops after a step that all
processes agree on, so that its state is saved. Those that were joined by JAX agree by its preemption service, which
hears SIGTERM on any of them: the step after the last one that any of them has begun. A process alone stops after the
step that runs.

With a peer gone, an orderly shutdown would wait for it until some timeout, and the launcher can only restart what has
ended. So an error that nobody catches ends the process at once, and the end of the script waits for all processes. In a
job of one process such an error is shown as in a launched one: the script's lines, without the frames between them.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from itertools import count
from types import FrameType, TracebackType

import jax
from jax.experimental import multihost_utils

from meshmend.errors import RestartError
from meshmend.jax.engine.private import joined_as
from meshmend.jax.session.session import Session, is_orderly
from meshmend.launch.failure import readable_trace

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


class Ending:
    """Ends a session when its script ends. `is_training` says whether a loop over steps is under way."""

    def __init__(self, session: Session, is_training: Callable[[], bool]) -> None:
        self.session = session
        self.is_training = is_training
        self._is_over = False
        self._hook = sys.excepthook
        if session.launch.n_processes > 1 or sys.excepthook is sys.__excepthook__:
            sys.excepthook = self._on_error
        atexit.register(self.close)

    def close(self, error: BaseException | None = None) -> None:
        """Wait for the other processes, and leave the job; or end at once, if an error ends it."""
        if self._is_over:
            return
        self._is_over = True
        atexit.unregister(self.close)
        if sys.excepthook == self._on_error and (error is None or self.session.launch.n_processes > 1):
            sys.excepthook = self._hook  # where a `with` block was left by an error, that is still to be shown
        if self.session.launch.n_processes > 1:
            if error is not None and not is_orderly(error):
                self.session.give_up(error)
            if self.is_training():
                self.session.give_up(
                    RestartError(
                        "The script ended in the middle of training, so this process leaves the job, and the launcher "
                        "restarts it. To stop early, break out of the loop at the same step on every process."
                    )
                )
            # What follows the loop may take longer on one process, such as writing a model.
            self.session.coordination.wait_for_all()
        jax.distributed.shutdown()

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self.session.launch.n_processes > 1:
            self.session.give_up(error)
        elif isinstance(error, Exception):
            sys.stderr.write(readable_trace(error))
        else:
            self._hook(kind, error, trace)
