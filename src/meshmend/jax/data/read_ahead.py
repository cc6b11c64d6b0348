"""Threads that read what will be asked for next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Submit = Callable[..., "Future[Any]"]
"""Begins a read, `submit(function, *arguments)`, and returns the future of its result."""


def read_ahead(
    begin: Callable[[int, Submit], Callable[[], T]], n_steps: int, *, threads: int, depth: int
) -> Generator[T]:
    """Begin to read the first `depth` steps, and return what all steps read, in order, always so many of them ahead.

    `begin(step, submit)` submits the reads of a step, and returns the function that waits for them. Without threads
    they happen where the step is asked for. The threads end with the last step, or when the generator is closed.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="meshmend-feed") if threads else None
    submit = _at_once if pool is None else pool.submit
    depth = min(depth, n_steps) if threads else 0
    begun = deque(begin(step, submit) for step in range(depth))

    def results() -> Generator[T]:
        try:
            for step in range(depth, n_steps + depth):
                if step < n_steps:
                    begun.append(begin(step, submit))
                yield begun.popleft()()
        finally:
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    return results()


def _at_once(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    done = Future[Any]()
    done.set_result(function(*arguments))
    return done
