"""What a worker says of the error that ends it: its agent tells the store, and the launcher shows it once.

The agent gives its workers a file in memory that only they share. A worker that gives up writes its error there, and
then waits to be stopped: its devices go on meanwhile, so that the other hosts reach the line that it has reached. If
all of them raise there, too, a restart would not help; where only some do, the others start again with them.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from meshmend.errors import MeshmendError, ParameterError, PlanError, QuarantineError, TransientError

FAILURE_FILE = "MESHMEND_FAILURE_FILE"
"""Where a worker finds the descriptor of the file."""
LINGER_S = 20.0
"""How long a worker waits to be stopped, before it ends by itself."""
MAX_BYTES = 64 << 10
"""Of a traceback: its beginning and its end are kept."""
PASSING = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EINTR)
"""Errors of a disk or a network that may be gone at the next start."""
PACKAGE = str(Path(__file__).parents[1]) + os.sep

Kind = Literal["final", "lasting", "transient"]


@dataclass(frozen=True)
class WorkerFailure:
    """Why a worker has given up."""

    kind: Kind
    """ "final" ends the job; "lasting" does if every host has such an error; after "transient" all start again."""
    error: str
    """Its type and its message."""
    trace: str
    """The traceback; empty where only the message matters."""


def describe_failure(error: BaseException) -> WorkerFailure:
    """Return what an error means for the job.

    >>> describe_failure(ValueError("no such layer")).kind, describe_failure(TimeoutError()).kind
    ('lasting', 'transient')
    """
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    kind = kind_of(error)
    if isinstance(error, QuarantineError):  # it says what a check has found, not where in our code that was
        return WorkerFailure(kind, str(error), "")
    if kind == "transient" and _is_of_jax(error):
        return WorkerFailure(kind, f"lost a peer: {str(error).splitlines()[0]}" if "Gloo" in str(error) else text, "")
    found = traceback.TracebackException.from_exception(error)
    if isinstance(error, MeshmendError):
        _leave_out_own(found)
    trace = "".join(found.format())
    if len(trace) > MAX_BYTES:
        trace = f"{trace[: MAX_BYTES // 2]}\n…\n{trace[-MAX_BYTES // 2 :]}"
    return WorkerFailure(kind, text[:2000], trace)


def kind_of(error: BaseException) -> Kind:
    """Return what an error means for the job: final if it comes of what the script has asked for."""
    if isinstance(error, ParameterError | PlanError):
        return "final"
    passes = isinstance(error, TransientError | QuarantineError | TimeoutError | ConnectionError) or _is_of_jax(error)
    return "transient" if passes or (isinstance(error, OSError) and error.errno in PASSING) else "lasting"


def _is_of_jax(error: BaseException) -> bool:
    """Whether the runtime raised it, as it does when a peer is gone; JAX is not imported for that."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError)


def _leave_out_own(found: traceback.TracebackException) -> None:
    """Leave out the frames of this package: the message says what to do, and the script's own lines where."""
    seen: traceback.TracebackException | None = found
    while seen is not None:
        seen.stack = traceback.StackSummary.from_list(
            [frame for frame in seen.stack if not frame.filename.startswith(PACKAGE)]
        )
        seen = seen.__cause__ or seen.__context__


def report_failure(error: BaseException) -> bool:
    """Write an error for this worker's agent; return whether there is one that reads it."""
    number = os.environ.get(FAILURE_FILE, "")
    if not number:
        return False
    try:
        os.pwrite(int(number), json.dumps(asdict(describe_failure(error))).encode() + b"\n", 0)
    except (OSError, ValueError):
        return False
    sys.stdout.flush()
    sys.stderr.flush()
    return True


def await_stop() -> None:
    """Wait for the agent, which ends this process as soon as it is decided how the job goes on."""
    time.sleep(LINGER_S)


class FailureFile:
    """The agent's end."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("meshmend-failure")
        os.set_inheritable(self.descriptor, True)

    def clear(self) -> None:
        """Forget what the last worker has said."""
        os.ftruncate(self.descriptor, 0)

    def read(self) -> WorkerFailure | None:
        """Return what the worker has said, None if it has said nothing."""
        data = os.pread(self.descriptor, 8 * MAX_BYTES, 0)
        if not data.endswith(b"\n"):
            return None
        try:
            return WorkerFailure(**json.loads(data))
        except (TypeError, ValueError):
            return None  # the script has written to a descriptor that is not its own

    def close(self) -> None:
        """Release it."""
        os.close(self.descriptor)
