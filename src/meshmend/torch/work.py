"""A collective under way, as torch expects it."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch

from meshmend.errors import Coordinate, WaitTimeoutError, name_chip
from meshmend.torch.private import Work


class MeshWork(Work):
    """What torch expects of a started collective."""

    def __init__(self, future: torch.futures.Future[list[torch.Tensor]], chip: Coordinate) -> None:
        super().__init__()
        self._future = future
        self._chip = chip
        self._ended = threading.Event()
        future.add_done_callback(lambda _: self._ended.set())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, or for `timeout`; the group keeps its own deadline, so there is always one.

        After a `WaitTimeoutError` the collective is still running: do not touch its tensors until another wait or the
        future has ended, or `abort` the group. As elsewhere in torch, a timeout of zero is none.
        """
        if timeout and not self._ended.wait(timeout.total_seconds()):
            raise WaitTimeoutError(
                f"Chip {name_chip(self._chip)} waited {timeout.total_seconds():g} s for its collective, which has not "
                f"finished. It is still running: do not touch its tensors until another wait has ended, or abort the "
                "group.",
                waited_s=timeout.total_seconds(),
            )
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the future of the tensors."""
        return self._future

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
