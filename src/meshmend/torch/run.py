"""One all-reduce of one payload, on one chip: which messages are still to come, and what waits for them.

A chip waits only for the data that it needs: one thread per neighbour receives its messages, adds or copies them into
place and sends whatever that made ready; where messages are few and short, one thread does so for all neighbours.
Receives are posted ahead into buffers that are kept from one run to the next; sends read the payload itself, which is
reduced in place, or a copy where the schedule writes in the same step what it sends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from meshmend.torch.channel import Channel, Deadline, TransportError
from meshmend.torch.payload import Combine
from meshmend.torch.private import Work
from meshmend.torch.program import ChipProgram, Receive
from meshmend.torch.staging import Staged

AHEAD_BYTES = 32 * 2**20
"""Receives posted ahead from one neighbour. Gloo sends nothing before its receiver is ready, and the
readiness message queues behind other traffic: with too few, links idle."""

SHORT_MESSAGES = 16
SHORT_BYTES = 2**18
"""Up to here one thread takes the messages of all neighbours: another costs a tenth of a millisecond."""


class ProgramRun:
    """Runs a program on `flat`, the payload's elements in a row. `members[r]` is the group's number for rank r.

    Elements on a device are `staged`: the program runs in host memory, and waits for what it reads there.
    """

    def __init__(
        self,
        program: ChipProgram,
        channel: Channel,
        members: Sequence[int],
        flat: torch.Tensor,
        combine: Combine,
        deadline: Deadline,
        staged: Staged | None = None,
    ) -> None:
        self.program = program
        self.channel = channel
        self.members = members
        self.flat = flat if staged is None else staged.host
        self._staged = staged
        self.deadline = deadline
        self._n_elements = int(flat.numel())
        self._combine = combine
        sends, receives = program.sends, program.receives
        self._send_waits = [len(send.after_receives) for send in sends]
        self._receive_waits = [len(receive.after_receives) + len(receive.after_sends) for receive in receives]
        self._works: list[Work | None] = [None] * len(sends)
        self._work_locks = [threading.Lock() for _ in sends]
        numbers: dict[int, list[int]] = {}
        for number, send in enumerate(sends):
            numbers.setdefault(send.peer, []).append(number)
        self._outboxes = {peer: _Outbox(self, own) for peer, own in numbers.items()}
        self._state = threading.Condition()
        self._error: BaseException | None = None
        self._inboxes: list[_Inbox] = []

    def go(self) -> None:
        """Run to the end, or raise. After an error the group's connections are closed."""
        arriving: list[int] = []
        try:
            numbers: dict[int, list[int]] = {}
            for number, receive in enumerate(self.program.receives):
                numbers.setdefault(receive.peer, []).append(number)
            self._inboxes = [_Inbox(self, peer, own) for peer, own in numbers.items()]
            first = [number for number, waits in enumerate(self._send_waits) if waits == 0]
            if self._staged is None or self._staged.is_one_piece:
                self._send(first)
            else:
                arriving = first
        except BaseException as error:
            self.fail(error)
        if self._error is None and not arriving and self._is_short():
            self._take_in_order()
        else:
            self._take_side_by_side(arriving)
        if self._error is None:
            try:
                for number in range(len(self.program.sends)):
                    self._finish(number)
            except BaseException as error:
                self.fail(error)
        if self._error is not None:
            raise self._error

    def _is_short(self) -> bool:
        return (
            len(self.program.receives) <= SHORT_MESSAGES
            and self.flat.nbytes <= SHORT_BYTES
            and all(inbox.is_posted for inbox in self._inboxes)
        )

    def _take_in_order(self) -> None:
        """Take all messages in order of step, in this thread.

        A message depends on none of a later step, and all are posted: so what this chip does with later ones nobody
        needs in order to send the one that it waits for.
        """
        inboxes = {inbox.member: inbox for inbox in self._inboxes}
        for message in self.program.receives:
            if not inboxes[self.members[message.peer]].take(1):
                return

    def _take_side_by_side(self, arriving: Sequence[int]) -> None:
        """Take what each neighbour sends in a thread of its own; another sends what arrives from the device."""
        threads = [threading.Thread(target=inbox.take, daemon=True) for inbox in self._inboxes[1:]]
        if arriving:
            threads.append(threading.Thread(target=self._send_each, args=(arriving,), daemon=True))
        for thread in threads:
            thread.start()
        if self._inboxes:
            self._inboxes[0].take()
        for thread in threads:
            thread.join()

    def _send_each(self, numbers: Sequence[int]) -> None:
        try:
            for number in numbers:
                self._send([number])
        except BaseException as error:
            self.fail(error)

    def size(self, message: Receive) -> int:
        """Return the number of elements in a message."""
        return self._bound(message.last) - self._bound(message.first)

    def _bound(self, chunk: int) -> int:
        return self.program.bound(chunk, self._n_elements)

    def part(self, first: int, last: int) -> torch.Tensor:
        """Return chunks of the payload."""
        return self.flat[self._bound(first) : self._bound(last)]

    def _need(self, last: int) -> None:
        """Wait until the chunks before `last` have arrived from the device, if the payload is on one."""
        if self._staged is not None:
            self._staged.wait(self._bound(last))

    def receive(self, slot: torch.Tensor, message: Receive) -> Work | None:
        """Post a receive; None where the message is empty, which no one sends."""
        return self.channel.recv(slot, self.members[message.peer], message.tag) if slot.numel() else None

    def write(self, number: int, arrived: torch.Tensor) -> None:
        """Put what arrived into its place, and send what that made ready."""
        message = self.program.receives[number]
        if not message.direct:
            self._place(number, message, arrived)
        if self._staged is not None:
            self._staged.written(self._bound(message.first), self._bound(message.last))
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
                lambda: self._error is not None or self._receive_waits[number] == 0,
                self.deadline.left().total_seconds(),
            )
        if not clear or self._error is not None:
            within = f"no answer within {self.deadline.timeout.total_seconds():g} s"
            raise TransportError(self.members[message.peer], within)
        for send in message.after_sends:
            if not self.program.sends[send].staged:
                self._finish(send)
        if arrived.numel():
            self._need(message.last)
            held = self.part(message.first, message.last)
            if message.adds:
                self._combine(held, arrived)
            else:
                held.copy_(arrived)

    def _finish(self, send: int) -> None:
        """Wait until a send has arrived.

        Several writes may wait for one send, each in its own thread, but a work may be waited for only once: the
        first waits for the work, the others for the first.
        """
        with self._work_locks[send]:
            work, self._works[send] = self._works[send], None
            if work is not None:
                self.channel.wait(work, self.members[self.program.sends[send].peer], self.deadline)

    def _send(self, numbers: list[int]) -> None:
        """Send what is ready now, and what was ready but had to wait for the link."""
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
        """Pass a message to the group."""
        message = self.program.sends[number]
        self._need(message.last)
        part = self.part(message.first, message.last)
        if part.numel():
            if message.staged:
                part = part.clone()
            self._works[number] = self.channel.send(part, self.members[message.peer], message.tag)

    def fail(self, error: BaseException) -> None:
        """Record the first error, wake all waiting threads and close the connections, so that other chips detect it."""
        with self._state:
            first = self._error is None
            if first:
                self._error = error
                if isinstance(error, TransportError):
                    error.others = [inbox.member for inbox in self._inboxes if inbox.is_waiting]
            self._state.notify_all()
        if first:
            self.channel.close()


class _Inbox:
    """Receives from one neighbour: posted ahead, in order, each in its own slot of a ring of buffers."""

    def __init__(self, run: ProgramRun, peer: int, numbers: list[int]) -> None:
        self._run = run
        self.member = run.members[peer]
        self._n_taken = 0
        self._numbers = numbers
        self._slot_size = max(run.size(run.program.receives[number]) for number in numbers)
        element_bytes = run.flat.element_size()
        self._depth = min(len(numbers), max(2, AHEAD_BYTES // max(self._slot_size * element_bytes, 1)))
        n_bytes = self._depth * self._slot_size * element_bytes
        self._buffer = run.channel.buffer(self.member, n_bytes).view(run.flat.dtype)
        self._posted: deque[tuple[Work | None, torch.Tensor]] = deque()
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

    @property
    def is_posted(self) -> bool:
        """Whether all receives are posted."""
        return self._next == len(self._numbers)

    @property
    def is_waiting(self) -> bool:
        """Whether messages are still to come."""
        return self._n_taken < len(self._numbers)

    def take(self, n_messages: int | None = None) -> bool:
        """Receive messages in turn, by default all, and put them where they belong; return whether that worked."""
        try:
            for number in self._numbers[self._n_taken :][:n_messages]:
                work, slot = self._posted.popleft()
                if work is not None:
                    self._run.channel.wait(work, self.member, self._run.deadline)
                self._run.write(number, slot)
                self._n_taken += 1
                self._post()
        except BaseException as error:
            self._run.fail(error)
            return False
        return True


class _Outbox:
    """Sends to one neighbour, in order of step.

    A link is a queue. A message that is sent early, because it happens to be ready, delays what the schedule puts
    there first: sums of late chunks would delay the results of early ones.
    """

    def __init__(self, run: ProgramRun, numbers: list[int]) -> None:
        self._run = run
        self._numbers = numbers
        self._ready: set[int] = set()
        self._next = 0
        self._update = threading.Lock()

    def add(self, number: int) -> list[int]:
        """Mark a message as ready, and send those that are next; return which."""
        with self._update:
            self._ready.add(number)
            first = self._next
            while self._next < len(self._numbers) and self._numbers[self._next] in self._ready:
                self._run.send(self._numbers[self._next])
                self._next += 1
            return self._numbers[first : self._next]
