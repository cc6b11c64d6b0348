"""A thread that makes what will be asked for next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
JOIN_S = 5.0
"""How long the end waits for the item that the thread is making."""


class ReadAhead(Generic[T]):
    """The items of an iterator, made in a thread up to `depth` items ahead. What making one raises, `next` raises.

    The thread ends with the items, at `close`, once nothing refers to this object any more, and when Python exits: a
    daemon that still runs then would be killed wherever it is, which C++ code answers by aborting the process.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._made: SimpleQueue[Future[T]] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        closed = threading.Event()
        # Neither the thread nor the finalizer refers to this object, which would otherwise never be collected.
        parts = items, self._made, self._room, closed
        thread = threading.Thread(target=_make, args=parts, name="meshmend-feed", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, thread, self._room, closed)

    def __next__(self) -> T:
        made = self._made.get()
        self._room.release()
        if made.exception() is not None:
            self._made.put(made)  # asked again, it raises again
        return made.result()

    def close(self) -> None:
        """End the thread, when it has made the item that it is at."""
        self._end()


def _make(items: Iterator[T], made: SimpleQueue[Future[T]], room: threading.Semaphore, closed: threading.Event) -> None:
    item: Future[T] = Future()
    try:
        while room.acquire() and not closed.is_set():
            item.set_result(next(items))
            made.put(item)
            item = Future()
        item.set_exception(StopIteration())
    except BaseException as error:  # whoever asks for the item gets it: a StopIteration after the last one
        item.set_exception(error)
    made.put(item)


def _end(thread: threading.Thread, room: threading.Semaphore, closed: threading.Event) -> None:
    closed.set()
    room.release()
    if thread is not threading.current_thread():  # which may be collecting garbage
        thread.join(JOIN_S)
