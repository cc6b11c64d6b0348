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
import time
import traceback
from collections.abc import AsyncGenerator, Callable
from multiprocessing.connection import Connection
from typing import Any

from meshmend.errors import MeshmendError
from meshmend.studio import answers

MAX_WORKERS = 3
"""Processes at once: an answer, its alternatives and a simulation of one page."""
TIME_LIMIT_S = 180.0
WITH_ROWS: dict[str, Callable[..., Any]] = {"alternatives": answers.alternatives, "availability": answers.availability}
JOBS: dict[str, Callable[..., Any]] = {
    "answer": answers.answer,
    "steps": answers.steps,
    "plan_file": answers.plan_file,
    "read_plan": answers.read_plan,
    "read_machine": answers.read_machine,
    **WITH_ROWS,
}
PRELOAD = ["meshmend.studio.workers", "scipy.ndimage", "scipy.optimize", "scipy.sparse.csgraph", "scipy.special"]


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
        self._places = asyncio.Semaphore(MAX_WORKERS)

    async def run(self, job: str, **arguments: Any) -> AsyncGenerator[Any, None]:
        """Yield what a job tells and last its result, or raise `NoAnswerError`. Closing it ends the process."""
        async with self._places:
            ours, theirs = self._context.Pipe(duplex=False)
            process = self._context.Process(target=_work, args=(theirs, job, arguments), daemon=True)
            process.start()
            theirs.close()
            ends_at = time.monotonic() + TIME_LIMIT_S
            try:
                while True:
                    kind, value = await asyncio.wait_for(_receive(ours), ends_at - time.monotonic())
                    if kind == "error":
                        raise NoAnswerError(*value)
                    yield value
                    if kind == "result":
                        return
            except TimeoutError:
                raise NoAnswerError(
                    "TimeoutError",
                    f"This took longer than {TIME_LIMIT_S:.0f} s. Choose a smaller mesh or a shorter search.",
                ) from None
            finally:
                process.kill()
                await asyncio.to_thread(process.join)
                ours.close()


async def _receive(connection: Connection) -> tuple[str, Any]:
    """Wait for the next message without a thread that would wait for ever."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())
    try:
        kind, value = await asyncio.to_thread(connection.recv)
    except EOFError:
        return "error", ("MemoryError", "The process that looked for this answer ended: is this machine out of memory?")
    return kind, value


def _work(connection: Connection, job: str, arguments: dict[str, Any]) -> None:
    """Run a job in this process, and send what comes of it."""

    def tell(value: Any) -> None:
        connection.send(("row", value))

    more = {"tell": tell} if job in WITH_ROWS else {}
    with contextlib.suppress(BrokenPipeError):
        try:
            connection.send(("result", JOBS[job](**arguments, **more)))
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
