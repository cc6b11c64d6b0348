"""What a worker says of the error that ends it: its agent tells the store, and the launcher shows it once.

The agent gives its workers a file in memory that only they share. A worker that gives up writes its error there, and
then waits to be stopped: its devices go on meanwhile, so that the other hosts reach the line that it has reached. If
all of them raise there, too, a restart would not help; where only some do, the others start again with them. An error
of the traced step is every host's, though on some platforms only process 0 traces it, and ends the job at once.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
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
IN_CALLBACK = "Traceback (most recent call last):\n"
"""In an error of JAX's runtime: then a callback has raised it, as of `jax.debug.callback`, and no peer is gone."""
LEFT_OUT = "Frames of meshmend and JAX are left out: JAX_TRACEBACK_FILTERING=off shows them."

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
    if _is_of_jax(error):
        text = text.rstrip("\n").rpartition("\n")[2]
    trace = readable_trace(error)
    if len(trace) > MAX_BYTES:
        trace = f"{trace[: MAX_BYTES // 2]}\n…\n{trace[-MAX_BYTES // 2 :]}"
    return WorkerFailure(kind, text[:2000], trace)


def kind_of(error: BaseException) -> Kind:
    """Return what an error means for the job: final if it comes of what the script has asked for."""
    if isinstance(error, ParameterError | PlanError):
        return "final"
    passes = isinstance(error, TransientError | QuarantineError | TimeoutError | ConnectionError)
    passes = passes or (_is_of_jax(error) and IN_CALLBACK not in str(error))
    if passes or (isinstance(error, OSError) and error.errno in PASSING):
        return "transient"
    return "final" if getattr(error, "meshmend_repeats", False) else "lasting"


@contextmanager
def repeated_by_restarts() -> Iterator[None]:
    """Mark what is raised inside as an error that every host and every restart would raise: of shapes, not of values.

    Not that of a file, or of memory that others have taken: a host may be alone with it.
    """
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        error.meshmend_repeats = True  # type: ignore[attr-defined]
        raise


def _is_of_jax(error: BaseException) -> bool:
    """Whether the runtime raised it, as it does when a peer is gone; JAX is not imported for that."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError)


def readable_trace(error: BaseException) -> str:
    """Return an error's traceback with the script's lines, without the frames of meshmend and JAX between them.

    An error of meshmend's own says what to do. Any other that is raised in its code is a fault there: all of its frames
    stay. They do, too, where JAX is told to show all of its own.
    """
    found = traceback.TracebackException.from_exception(error)
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.jax_traceback_filtering == "off":
        return "".join(found.format())
    of_jax = () if jax is None else (str(Path(str(jax.__file__)).parent) + os.sep,)
    if _is_of_jax(error):  # the callback's traceback is in the message, and where the step was waited for says nothing
        lines = [IN_CALLBACK.strip(), *str(error).partition(IN_CALLBACK)[2].splitlines(), LEFT_OUT]
        hidden = tuple(f'  File "{folder}' for folder in (PACKAGE, *of_jax))
        return "".join(f"{line}\n" for line in lines if not line.startswith(hidden))
    is_told, is_left_out = isinstance(error, MeshmendError), False
    seen: traceback.TracebackException | None = found
    while seen is not None:
        frames = [frame for frame in seen.stack if not frame.filename.startswith(of_jax)]
        of_script = [frame for frame in frames if not frame.filename.startswith(PACKAGE)]
        if is_told or of_script[-1:] == frames[-1:]:
            is_left_out |= len(of_script) < len(seen.stack)
            seen.stack = traceback.StackSummary.from_list(of_script)
        seen = seen.__cause__ or seen.__context__
    if is_left_out and not is_told:
        notes = [note for note in found.__notes__ or () if "JAX_TRACEBACK_FILTERING" not in note]
        found.__notes__ = [*notes, LEFT_OUT]
    return "".join(found.format())


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
