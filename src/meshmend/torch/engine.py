"""The PyTorch engine: one process a chip runs its part of a schedule over point-to-point sends and receives.

A chip waits only for the data that it needs: one thread for each neighbour takes what arrives from there, adds or
copies it into place and sends on whatever that made ready. Receives are posted ahead into buffers that are kept from
one run to the next; sends read the payload itself, which is reduced in place, or a copy where the schedule writes in
the same step what it sends.

Made for Gloo. Any group will do whose `send` and `recv` match messages by tag and whose `wait` blocks the caller.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshmend.errors import LostChipError, ScheduleError
from meshmend.schedule import Collective, Schedule
from meshmend.torch.program import Program, Receive, compile_program

DEFAULT_TIMEOUT = timedelta(seconds=60)

AHEAD_BYTES = 32 * 2**20
"""Receives posted ahead from one neighbour. Gloo sends nothing before its receiver is ready, and says that it is
ready behind whatever else is queued on the way back: too few, and links idle."""

CLOSE_TAG = 2**31 - 1
"""A tag that no message has."""

_COMBINE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.AVG: torch.Tensor.add_,
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
    dist.ReduceOp.MIN: lambda held, arriving: torch.minimum(held, arriving, out=held),
    dist.ReduceOp.MAX: lambda held, arriving: torch.maximum(held, arriving, out=held),
}


class Engine:
    """Runs one schedule on one rank, any number of times.

    `group` is a process group; `group_ranks[r]` is the group's number for the schedule's rank r (the same number
    where it is left out). After an error the group's connections are closed, so that every other chip learns of it
    within milliseconds: the engine is then of no more use, and says so.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        group: Any,
        *,
        group_ranks: Sequence[int] | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        if schedule.collective is not Collective.ALL_REDUCE:
            raise ScheduleError(f"The engine runs all-reduce schedules: got {schedule.collective}.")
        self.schedule = schedule
        self.rank = rank
        self.timeout = timeout
        self.error: LostChipError | None = None
        self._group = group
        self._group_ranks = list(range(schedule.mesh.n_chips)) if group_ranks is None else list(group_ranks)
        if len(self._group_ranks) != schedule.mesh.n_chips:
            raise ScheduleError(
                f"{schedule!r} needs a group rank for each of {schedule.mesh.n_chips} chips: "
                f"got {len(self._group_ranks)}."
            )
        self._program = compile_program(schedule, rank)
        self._buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None

    def all_reduce(self, payload: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce a contiguous tensor in place over all chips; every chip ends with the same bits.

        Raises `LostChipError` within the engine's timeout if a chip does not answer; the payload is then of no use.
        """
        combine = _COMBINE.get(op)
        if combine is None:
            raise ScheduleError(f"The engine reduces by SUM, AVG, PRODUCT, MIN or MAX: got {op}.")
        if not payload.is_contiguous():
            raise ScheduleError(f"The payload must be contiguous: got strides {payload.stride()}.")
        with self._lock:
            if self.error is not None:
                raise self.error
            run = _Run(self, payload.view(-1), combine)
            try:
                run.go()
            except LostChipError as error:
                self.error = error
                raise
        if op == dist.ReduceOp.AVG:
            payload /= self.schedule.mesh.n_chips

    def start(self, payload: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.futures.Future[torch.Tensor]:
        """Start `all_reduce` and return a future of the payload. Starts are served in order, on every chip alike."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def work() -> None:
            try:
                self.all_reduce(payload, op)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(payload)

        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="meshmend")
        self._worker.submit(work)
        return future

    def close(self) -> None:
        """Close the group's connections: every pending wait ends at once, here and at the neighbours."""
        # Gloo has no call for this, but a wait that times out closes every connection of its group. On a connection
        # that is closed already the receive itself fails, and another has to do.
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in self._program.peers:
            with suppress(RuntimeError):
                work = self._group.recv([nothing], self._group_ranks[peer], CLOSE_TAG)
                work.wait(timedelta(milliseconds=1))

    def _buffer(self, peer: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        held = self._buffers.get((peer, dtype))
        if held is None or held.numel() < size:
            held = self._buffers[peer, dtype] = torch.empty(size, dtype=dtype)
        return held


class _Inbox:
    """Receives from one neighbour: posted ahead, in order, each in its own slot of a ring of buffers."""

    def __init__(self, run: _Run, peer: int, numbers: list[int]) -> None:
        self._run = run
        self._peer = peer
        self._numbers = numbers
        self._slot_size = max(run.size(run.program.receives[number]) for number in numbers)
        slot_bytes = self._slot_size * run.flat.element_size()
        self._depth = min(len(numbers), max(2, AHEAD_BYTES // max(slot_bytes, 1)))
        self._buffer = run.engine._buffer(peer, self._depth * self._slot_size, run.flat.dtype)
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()
        self._next = 0
        for _ in range(self._depth):
            self._post()

    def _post(self) -> None:
        if self._next == len(self._numbers):
            return
        message = self._run.program.receives[self._numbers[self._next]]
        if message.direct:
            slot = self._run.part(message.first, message.last)
        else:
            start = (self._next % self._depth) * self._slot_size
            slot = self._buffer[start : start + self._run.size(message)]
        self._posted.append((self._run.receive(slot, message), slot))
        self._next += 1

    def take(self) -> None:
        """Take every message in turn and put it where it belongs. Runs in a thread of its own."""
        try:
            for number in self._numbers:
                work, slot = self._posted.popleft()
                if work is not None:
                    work.wait(self._run.time_left())
                self._run.write(number, slot)
                self._post()
        except Exception as error:
            self._run.fail(error, self._peer)


class _Outbox:
    """Sends to one neighbour, in order of step.

    A link is a queue. Whatever is sent on it early, because it happens to be ready, holds up what the schedule wants
    there first: sums of late chunks would keep back the results of early ones.
    """

    def __init__(self, run: _Run, numbers: list[int]) -> None:
        self._run = run
        self._numbers = numbers
        self._ready: set[int] = set()
        self._next = 0
        self._turn = threading.Lock()

    def add(self, number: int) -> list[int]:
        """Note that a message is ready, and send those whose turn it is; return which."""
        with self._turn:
            self._ready.add(number)
            first = self._next
            while self._next < len(self._numbers) and self._numbers[self._next] in self._ready:
                self._run.send(self._numbers[self._next])
                self._next += 1
            return self._numbers[first : self._next]


class _Run:
    """One all-reduce of one payload: which messages are still to come, and who waits for them."""

    def __init__(
        self, engine: Engine, flat: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        self.engine = engine
        self.program: Program = engine._program
        self.flat = flat
        self._n_elements = int(flat.numel())
        self._combine = combine
        self._group = engine._group
        self._ranks = engine._group_ranks
        self._deadline = time.monotonic() + engine.timeout.total_seconds()
        sends, receives = self.program.sends, self.program.receives
        self._send_waits = [len(send.after_receives) for send in sends]
        self._receive_waits = [len(receive.after_receives) + len(receive.after_sends) for receive in receives]
        self._works: list[Any] = [None] * len(sends)
        self._work_locks = [threading.Lock() for _ in sends]
        numbers: dict[int, list[int]] = {}
        for number, send in enumerate(sends):
            numbers.setdefault(send.peer, []).append(number)
        self._outboxes = {peer: _Outbox(self, own) for peer, own in numbers.items()}
        self._state = threading.Condition()
        self._error: tuple[Exception, int] | None = None

    def go(self) -> None:
        """Run to the end, or raise."""
        inboxes = []
        try:
            numbers: dict[int, list[int]] = {}
            for number, receive in enumerate(self.program.receives):
                numbers.setdefault(receive.peer, []).append(number)
            inboxes = [_Inbox(self, peer, own) for peer, own in numbers.items()]
            self._send([number for number, waits in enumerate(self._send_waits) if waits == 0])
        except Exception as error:
            self.fail(error, self.program.peers[0])
        threads = [threading.Thread(target=inbox.take, daemon=True) for inbox in inboxes[1:]]
        for thread in threads:
            thread.start()
        if inboxes:
            inboxes[0].take()
        for thread in threads:
            thread.join()
        if self._error is None:
            for number, send in enumerate(self.program.sends):
                try:
                    self._finish(number)
                except Exception as error:
                    self.fail(error, send.peer)
                    break
        if self._error is not None:
            cause, peer = self._error
            mesh = self.engine.schedule.mesh
            raise LostChipError(mesh.chip(self.program.rank), mesh.chip(peer), str(mesh), str(cause)) from cause

    def size(self, message: Receive) -> int:
        """Return the number of elements in a message."""
        return self._bound(message.last) - self._bound(message.first)

    def _bound(self, chunk: int) -> int:
        """Where a chunk starts: chunks of one payload differ by at most one element, and nothing is padded."""
        return self._n_elements * chunk // self.program.total_chunks

    def part(self, first: int, last: int) -> torch.Tensor:
        """Return chunks of the payload."""
        return self.flat[self._bound(first) : self._bound(last)]

    def time_left(self) -> timedelta:
        """Return the time to the deadline."""
        # Gloo takes a zero for "no limit".
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))

    def receive(self, slot: torch.Tensor, message: Receive) -> Any:
        """Post a receive; None where the message is empty, which no one sends."""
        return self._group.recv([slot], self._ranks[message.peer], message.tag) if slot.numel() else None

    def write(self, number: int, arrived: torch.Tensor) -> None:
        """Put what arrived into its place, and send what that made ready."""
        message = self.program.receives[number]
        if not message.direct:
            self._place(number, message, arrived)
        ready, freed = [], False
        sends, receives = self.program.waiting_for_receive[number]
        with self._state:
            for send in sends:
                self._send_waits[send] -= 1
                if self._send_waits[send] == 0:
                    ready.append(send)
            for receive in receives:
                self._receive_waits[receive] -= 1
                freed |= self._receive_waits[receive] == 0
            if freed:
                self._state.notify_all()
        if ready:
            self._send(ready)

    def _place(self, number: int, message: Receive, arrived: torch.Tensor) -> None:
        """Add or copy what arrived, once nothing needs the old value any more."""
        with self._state:
            clear = self._state.wait_for(
                lambda: self._error is not None or self._receive_waits[number] == 0, self.time_left().total_seconds()
            )
            if not clear or self._error is not None:
                raise TimeoutError(f"no answer within {self.engine.timeout.total_seconds():g} s")
        for send in message.after_sends:
            if not self.program.sends[send].staged:
                self._finish(send)
        if arrived.numel():
            held = self.part(message.first, message.last)
            if message.adds:
                self._combine(held, arrived)
            else:
                held.copy_(arrived)

    def _finish(self, send: int) -> None:
        """Wait until a send has arrived.

        Several writes may wait for one send, each in its own thread, but of two threads that wait for one of Gloo's
        works only one is woken: the first waits for the work, the others for the first.
        """
        with self._work_locks[send]:
            work, self._works[send] = self._works[send], None
            if work is not None:
                work.wait(self.time_left())

    def _send(self, numbers: list[int]) -> None:
        """Send what is ready now, and what was ready but had to wait for its turn on the link."""
        freed, sent = False, []
        for number in numbers:
            sent += self._outboxes[self.program.sends[number].peer].add(number)
        with self._state:
            for number in sent:
                for receive in self.program.waiting_for_send[number]:
                    self._receive_waits[receive] -= 1
                    freed |= self._receive_waits[receive] == 0
            if freed:
                self._state.notify_all()

    def send(self, number: int) -> None:
        """Hand a message to the group."""
        message = self.program.sends[number]
        part = self.part(message.first, message.last)
        if part.numel():
            if message.staged:
                part = part.clone()
            self._works[number] = self._group.send([part], self._ranks[message.peer], message.tag)

    def fail(self, error: Exception, peer: int) -> None:
        """Note the first error and wake everyone who waits."""
        with self._state:
            first = self._error is None
            if first:
                self._error = (error, peer)
            self._state.notify_all()
        if first:
            self.engine.close()
