"""Tensors of an accelerator: the engine sends and adds up in pinned host memory, and copies there and back.

Copies are queued on the current stream of the thread that runs the engine, cut into pieces. A message leaves when its
own pieces have arrived from the device, and a piece returns after the last message that changes it, so copies overlap
with messages. A group's worker has a stream of its own, which waits for the caller's (`meshmend.torch.work`).

`torch.accelerator` is all that is known of the device.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import torch

from meshmend.torch.payload import Flat

PIECE_BYTES = 2**22

Range = tuple[int, int]
"""Elements of a payload, from the first to the one after the last."""


class PinnedBuffer:
    """Pinned host memory for one payload at a time; it grows with the largest and is used again."""

    def __init__(self) -> None:
        self._held: torch.Tensor | None = None
        self.last_copy: torch.Event | None = None
        """What marks the end of the last copy that was queued, to or from this memory."""

    def take(self, like: Flat) -> Flat:
        """Return memory for a payload, once the copies of the one before have been made."""
        if self.last_copy is not None:
            self.last_copy.synchronize()
        if self._held is None or self._held.numel() < like.nbytes:
            self._held = torch.empty(like.nbytes, dtype=torch.uint8, pin_memory=True)
        return self._held[: like.nbytes].view(like.dtype)


class Staged:
    """A payload on a device, and `host`, its copy in pinned memory that one run of a program works on.

    The elements of `down` are copied to the host from now on. Those of `up` are copied back in `written`, once it was
    told what to `expect`, or in `divide`.
    """

    def __init__(self, payload: Flat, buffer: PinnedBuffer, down: Iterable[Range], up: Iterable[Range]) -> None:
        self.payload, self._buffer = payload, buffer
        self.host = buffer.take(payload)
        self._stream = torch.accelerator.current_stream(payload.device)
        self._down, self._up = self._pieces(down), self._pieces(up)
        self._arrivals = [self._copy(self.host, payload, piece) for piece in self._down]
        self._n_writes = [0] * len(self._up)
        self._guard = threading.Lock()

    def _pieces(self, ranges: Iterable[Range]) -> list[Range]:
        size = max(1, PIECE_BYTES // self.payload.element_size())
        return [(at, min(at + size, last)) for first, last in ranges for at in range(first, last, size)]

    def _copy(self, to: Flat, source: Flat, piece: Range) -> torch.Event:
        """Queue a copy, from whichever thread; return the event of its end."""
        torch.accelerator.set_stream(self._stream)
        to[slice(*piece)].copy_(source[slice(*piece)], non_blocking=True)
        copied = torch.Event(device=self.payload.device)
        copied.record(self._stream)
        self._buffer.last_copy = copied
        return copied

    @property
    def is_one_piece(self) -> bool:
        """Whether nothing is still to arrive once the first piece is here."""
        return len(self._down) <= 1

    def wait(self, last: int | None = None) -> None:
        """Wait for what was copied from the device of the elements before `last`, by default for the first piece."""
        n_pieces = 1 if last is None else bisect_left(self._down, (last, 0))
        if arrivals := self._arrivals[:n_pieces]:
            arrivals[-1].synchronize()  # one stream: the others were before it

    def expect(self, writes: Iterable[Range]) -> None:
        """Say what messages will be written: after the last of them a piece returns to the device at once."""
        for write in writes:
            for number in self._overlapping(write):
                self._n_writes[number] += 1

    def written(self, first: int, last: int) -> None:
        """Note that one of these messages has been written."""
        with self._guard:
            for number in self._overlapping((first, last)):
                self._n_writes[number] -= 1
                if self._n_writes[number] == 0:
                    self._copy(self.payload, self.host, self._up[number])

    def _overlapping(self, part: Range) -> range:
        """Return the numbers of the pieces to go up that share elements with some."""
        if part[0] == part[1]:
            return range(0)
        return range(
            bisect_right(self._up, part[0], key=lambda p: p[1]), bisect_left(self._up, part[1], key=lambda p: p[0])
        )

    def divide(self, n: int) -> None:
        """Divide what goes up, and copy it back."""
        for piece in self._up:
            self.host[slice(*piece)] /= n
            self._copy(self.payload, self.host, piece)
