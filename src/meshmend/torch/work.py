"""Collectives under way: as torch expects them, and the background thread that runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch

from meshmend.errors import Coordinate, MeshmendError, WaitTimeoutError, name_chip
from meshmend.torch.channel import Channel
from meshmend.torch.private import Work, fail_future, future_for_cpp

T = TypeVar("T")


class Worker:
    """Runs calls on a channel in the background, one after the other, in a thread that is made when it is needed."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._guard = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def start(self, call: Callable[[], T], device: torch.device | None = None) -> torch.futures.Future[T]:
        """Return a future of what a call returns; one that the channel's error has come before ends with that.

        A call with tensors of a device runs on a stream of this worker's, after what the caller's stream has to do by
        now. Whoever waits for the future has what it returns on the stream that is then the current one.
        """
        future: torch.futures.Future[T] = torch.futures.Future(devices=None if device is None else [device])
        queued: torch.Event | None = None
        if device is not None:
            queued = torch.Event(device=device)
            queued.record(torch.accelerator.current_stream(device))

        def work() -> None:
            try:
                if self._channel.error is not None:
                    raise self._channel.error
                if device is not None and queued is not None:
                    if device not in self._streams:
                        self._streams[device] = torch.Stream(device=device)
                    stream = self._streams[device]
                    torch.accelerator.set_stream(stream)
                    stream.wait_event(queued)
                with torch.no_grad():
                    result = call()
            except Exception as error:
                fail_future(future, error)
            else:
                future.set_result(result)

        with self._guard:
            if self._channel.error is not None:
                fail_future(future, self._channel.error)
                return future
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="meshmend")
            try:
                self._thread.submit(work)
            except RuntimeError as error:  # the interpreter is shutting down
                self._channel.fail(error)
                raise
        return future

    def close(self, why: MeshmendError, *, abort: bool = True) -> None:
        """Take no more calls; with `abort`, also close all connections, so that those under way end with an error."""
        with self._guard:
            self._channel.fail(why)
            thread, self._thread = self._thread, None
        if abort:
            self._channel.close()
        if thread is not None:
            # What is queued is not dropped: it ends with the error, and so do those who wait for it.
            thread.shutdown(wait=False)


class MeshWork(Work):
    """What torch expects of a started collective."""

    def __init__(self, future: torch.futures.Future[list[torch.Tensor]], chip: Coordinate) -> None:
        super().__init__()
        self._future = future
        self._chip = chip

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, or for `timeout`; the group keeps its own deadline, so there is always one.

        After a `WaitTimeoutError` the collective is still running: do not touch its tensors until another wait or the
        future has ended, or `abort` the group. As elsewhere in torch, a timeout of zero is none.
        """
        if timeout and not self._ends_within(timeout):
            raise WaitTimeoutError(
                f"Chip {name_chip(self._chip)} waited {timeout.total_seconds():g} s for its collective, which has not "
                f"finished. It is still running: do not touch its tensors until another wait has ended, or abort the "
                "group.",
                waited_s=timeout.total_seconds(),
            )
        self._future.wait()
        return True

    def _ends_within(self, timeout: timedelta) -> bool:
        ended = threading.Event()
        self._future.add_done_callback(lambda _: ended.set())
        return ended.wait(timeout.total_seconds())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the future of the tensors. After an error it raises a `RuntimeError` with that error's text."""
        return future_for_cpp(self._future)

    def is_completed(self) -> bool:
        """Return whether the collective has ended, successfully or not."""
        return bool(self._future.done())

    def is_success(self) -> bool:
        """Return whether the collective has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error that the collective ended with, if any."""
        if self.is_completed():
            try:
                self._future.wait()
            except Exception as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        """Wait for the end, and return the tensors that hold the result."""
        tensors: list[torch.Tensor] = self._future.wait()
        return tensors
