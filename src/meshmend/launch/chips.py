"""One process per chip, on one machine: started, killed, started again, and never left behind.

Chips are forked from the process that starts them, so that imports (torch takes seconds) are paid for once.
It must not start threads, nor use torch beyond importing it, before the last fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from meshmend.errors import Coordinate, LaunchError, name_chip
from meshmend.launch.processes import die_with_parent

QUICK_NAMES = "timeout:1 attempts:1"
"""torch looks up the name of every address that it connects to, even of loopback's. A name server that does not
answer would cost five seconds each time, enough to miss a rendezvous."""

Main = Callable[..., Any]


class Chips:
    """The processes of a mesh, one per chip, each of which can be killed.

    Leaving the `with` block kills all that still run. A chip also dies with the process that started it. With `enter`,
    each new process calls `enter(chip)` before anything else, for instance to move into a network namespace.

    >>> def main(chip, base):
    ...     return base + sum(chip)
    >>> with Chips() as chips:
    ...     for chip in ((0, 0), (0, 1)):
    ...         chips.start(chip, main, 10)
    ...     chips.results(timeout_s=20)
    {(0, 0): 10, (0, 1): 11}
    """

    def __init__(self, enter: Callable[[Coordinate], object] | None = None) -> None:
        self._enter = enter
        self._context = multiprocessing.get_context("fork")
        self._running: dict[Coordinate, tuple[Any, Connection]] = {}

    def __enter__(self) -> Chips:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(list(self._running))

    @property
    def alive(self) -> list[Coordinate]:
        """Chips whose process is running."""
        return [chip for chip, (process, _) in self._running.items() if process.is_alive()]

    def start(self, chip: Coordinate, main: Main, *args: Any) -> None:
        """Start `main(chip, *args)` in a new process."""
        if chip in self._running:
            raise LaunchError(f"Chip {name_chip(chip)} is already running: kill it before you start it again.")
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run, args=(theirs, os.getpid(), self._enter, main, chip, args))
        process.start()
        theirs.close()
        self._running[chip] = (process, ours)

    def kill(self, chips: Iterable[Coordinate]) -> None:
        """Send SIGKILL to all of them at once, then wait until they have ended."""
        processes = [self._running.pop(chip) for chip in chips]
        for process, _ in processes:
            if process.is_alive():
                process.kill()
        for process, pipe in processes:
            process.join()
            pipe.close()

    def poll(self) -> dict[Coordinate, Any]:
        """Return what the chips that finished since the last call have returned; raise if one failed."""
        done = {}
        for chip, (process, pipe) in list(self._running.items()):
            if pipe.poll() or not process.is_alive():
                done[chip] = self._collect(chip, process, pipe)
        return done

    def results(self, timeout_s: float) -> dict[Coordinate, Any]:
        """Wait for every running chip, and return what each returned."""
        deadline = time.monotonic() + timeout_s
        found: dict[Coordinate, Any] = {}
        while self._running:
            found |= self.poll()
            if time.monotonic() > deadline:
                late = ", ".join(name_chip(chip) for chip in self._running)
                raise LaunchError(f"No result within {timeout_s:g} s from {late}.")
            time.sleep(0.005)
        return dict(sorted(found.items()))

    def _collect(self, chip: Coordinate, process: Any, pipe: Connection) -> Any:
        try:
            value, why, trace = pipe.recv()
            process.join()
        except EOFError:
            process.join()
            value, why, trace = None, f"its process ended with code {process.exitcode} and no result", ""
        self.kill([chip])
        if why:
            error = LaunchError(f"Chip {name_chip(chip)} failed: {why}")
            if trace:
                error.add_note(trace)
            raise error
        return value


def _run(pipe: Connection, parent: int, enter: Main | None, main: Main, chip: Coordinate, args: Any) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("RES_OPTIONS", QUICK_NAMES)
    try:
        if enter is not None:
            enter(chip)
        result = (main(chip, *args), "", "")
    except BaseException as error:
        why = "".join(traceback.format_exception_only(error))
        result = (None, " ".join(why.split()), traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        pipe.send(result)
    # Threads of libraries may still run; there is no need to wait for them.
    os._exit(0)
