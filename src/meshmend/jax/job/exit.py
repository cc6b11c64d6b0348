"""How a process of a job ends, in a script without a `with` block.

With a peer gone, an orderly shutdown would wait for it until some timeout, and the launcher can only restart what has
ended. So an error that nobody catches ends the process at once, and the end of the script waits for all processes. In a
job of one process such an error is shown as in a launched one: the script's lines, without the frames between them.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType

import jax

from meshmend.errors import RestartError
from meshmend.jax.session.session import Session, is_orderly
from meshmend.launch.failure import readable_trace


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
