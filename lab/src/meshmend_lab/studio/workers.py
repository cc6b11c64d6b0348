"""Workers: one process per answer, stopped as soon as nobody waits for it.

Planning cannot be interrupted from outside, and a page asks anew with every click. So each answer is found out in a
process of its own, which is ended when the page has moved on. The processes are forked from one that has imported
everything and does nothing else, so that they start in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from meshmend.errors import MeshmendError
from meshmend_lab.studio import answers
from meshmend_lab.studio.state import State

MAX_WORKERS = 3
"""Processes at once: an answer, its alternatives and its steps on one page."""
TIME_LIMIT_S = 180.0
JOBS: dict[str, Callable[[State], Any]] = {
    "answer": answers.answer,
    "alternatives": answers.alternatives,
    "steps": answers.steps,
    "plan_file": answers.plan_file,
}
PRELOAD = ["meshmend_lab.studio.workers", "scipy.ndimage", "scipy.optimize", "scipy.sparse.csgraph"]


class NoAnswerError(Exception):
    """An answer that is an error: its kind and its message, as the page shows them."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class AnswerProcesses:
    """Starts a process for every job, at most `MAX_WORKERS` at once; further jobs wait for their place."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._slots = asyncio.Semaphore(MAX_WORKERS)

    async def run(self, job: str, state: State) -> AsyncGenerator[Any, None]:
        """Yield what a job finds out about a state, or raise `NoAnswerError`. Closing it ends the process."""
        async with self._slots:
            ours, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(target=_work, args=(theirs, job, state), daemon=True)
            process.start()
            theirs.close()
            messages: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def put(message: tuple[str, Any]) -> None:
                loop.call_soon_threadsafe(messages.put_nowait, message)

            threading.Thread(target=_read, args=(ours, process, put), name="meshmend-answer", daemon=True).start()
            ends_at = time.monotonic() + TIME_LIMIT_S
            try:
                while True:
                    async with asyncio.timeout(ends_at - time.monotonic()):
                        kind, value = await messages.get()
                    if kind == "error":
                        raise NoAnswerError(*value)
                    if kind == "end":
                        return
                    yield value
            except TimeoutError:
                raise NoAnswerError(
                    "TimeoutError",
                    f"This took longer than {TIME_LIMIT_S:.0f} s. Choose a smaller mesh or a shorter search.",
                ) from None
            finally:
                process.kill()  # and the thread that reads comes to the end of the pipe


def _read(connection: Connection, process: BaseProcess, put: Callable[[tuple[str, Any]], Any]) -> None:
    """Pass on what a process sends until it ends. Only this thread reads and closes the connection.

    Closed by anybody else, its number could by then be that of a visitor's connection.
    """
    with connection, contextlib.suppress(RuntimeError):  # the loop is closed: the studio has ended
        with contextlib.suppress(EOFError, OSError):
            while True:
                put(connection.recv())
        put(("error", ("MemoryError", "The process that looked for this answer ended: is this machine out of memory?")))
    process.join()


def _work(connection: Connection, job: str, state: State) -> None:
    """Run a job in this process, and send what comes of it."""
    with contextlib.suppress(BrokenPipeError):
        try:
            found = JOBS[job](state)
            for value in found if isinstance(found, Iterator) else [found]:
                connection.send(("value", value))
            connection.send(("end", None))
        except MeshmendError as error:
            connection.send(("error", (type(error).__name__, str(error))))
        except MemoryError:
            connection.send(("error", ("MemoryError", "This needs more memory than this machine has.")))
        except BrokenPipeError:
            raise
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            kind = type(error).__name__
            connection.send(("error", (kind, f"meshmend failed with {kind}: the terminal of the studio says where.")))
