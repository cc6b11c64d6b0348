"""A channel: a range of tags on a process group, calls in one order, and agreement before any data moves.

Messages of a group are distinguished by their tags only. Tags from 2³⁰ upwards are meshmend's; each channel has its own
range there, so that engines that share a group, and whatever else is sent on it, cannot take each other's messages.
Channels are numbered in the order in which a process makes them, which must be the same for all members.

A tag says nothing about a message's content. So every call begins with `agree`: each member sends a digest of what it
is about to do, ⌈log₂ n⌉ small messages in all, and learns those of all others. If they differ, every member raises the
same `DisagreementError`, and nothing else has been sent. A digest comes with a flag, for news of a member's cables.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist

from meshmend.errors import Coordinate, DisagreementError, LostChipError, ParameterError
from meshmend.topology import Cable, name_cable
from meshmend.torch.lost import Reports
from meshmend.torch.private import Transport, Work, cpu_backend
from meshmend.torch.staging import PinnedBuffer

FIRST_TAG = 2**30
TAGS_PER_CHANNEL = 2**20
N_CHANNELS = FIRST_TAG // TAGS_PER_CHANNEL
"""Torch's tags end at 2³¹ − 1."""

MAX_ROUNDS = 32
FIRST_MESSAGE = 2 * MAX_ROUNDS
"""Within a range: the tags of digests, one per round, those of descriptions, and then those of data."""
MAX_MESSAGES = TAGS_PER_CHANNEL - FIRST_MESSAGE - 1
CLOSE_TAG = 2**31 - 1
"""The last tag of the last range: no message has it."""

DIGEST_BYTES = 32
QUIET, FLAGGED = b"\0", b"\1"
"""What follows a member's digest: it has no news, or news."""
DESCRIPTION_BYTES = 512
CLOSE_TIMEOUT = timedelta(milliseconds=1)
DEAD_CABLE = "cable {0} does not answer any more, so renew the routes around it, or start again without it"

Post = Callable[[list[torch.Tensor], int, int], Work]
"""A group's `send` or `recv`."""


class TransportError(Exception):
    """The group could not move a message to or from `member`, which the engine treats as a lost chip.

    `others` are members that a message was still to come from.
    """

    def __init__(self, member: int, why: object) -> None:
        self.member = member
        self.others: list[int] = []
        super().__init__(str(why))


class NewsError(Exception):
    """A member has news that all are to hear before this call begins. Raised on all members alike; nothing was sent."""


class Deadline:
    """A moment by which a call must have ended."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._at = time.monotonic() + timeout.total_seconds()

    def left(self) -> timedelta:
        """Return the time that is left, which is never zero: Gloo takes that for "no limit"."""
        return timedelta(seconds=max(self._at - time.monotonic(), 0.001))


class Channel:
    """Messages between the members of a process group, isolated from everything else on that group.

    After `close` the group's connections are gone and `error` says why; every later call raises it. `chips` says which
    chip each member is, and `reports` finds the one that is lost.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Transport | None,
        chips: Mapping[int, Coordinate] | None = None,
        reports: Reports | None = None,
    ) -> None:
        self._group = _transport_of(group)
        self.rank = int(self._group.rank())
        self.size = int(self._group.size())
        self.error: Exception | None = None
        self._chips = {} if chips is None else chips
        self._reports = reports
        self._first_tag = _claim_number(self) * TAGS_PER_CHANNEL + FIRST_TAG
        self._queue = threading.Condition()
        self._n_tickets = 0
        self._n_served = 0
        self._buffers: dict[int, torch.Tensor] = {}
        self.pinned = PinnedBuffer()
        self.has_news: Callable[[], bool] = lambda: False
        """Whether this member has news for the others."""
        self.dead_cables: Callable[[], Collection[Cable]] = tuple
        """This chip's cables that do not answer any more."""
        self._digests = _Exchange(self.rank, self.size, DIGEST_BYTES + len(QUIET))

    def ticket(self) -> int:
        """Return a call's place in the queue: calls run in the order in which they were made, on every member alike."""
        with self._queue:
            self._n_tickets += 1
            return self._n_tickets - 1

    @contextmanager
    def in_order(self, ticket: int) -> Iterator[None]:
        """Wait for the calls with earlier tickets; raise the channel's error if one of them has broken it."""
        with self._queue:
            self._queue.wait_for(lambda: self._n_served == ticket or self.error is not None)
        if self.error is not None:
            raise self.error
        try:
            yield
        finally:
            with self._queue:
                self._n_served = ticket + 1
                self._queue.notify_all()

    def fail(self, error: Exception) -> None:
        """Record what broke the channel; the first error stays."""
        with self._queue:
            self.error = self.error or error
            self._queue.notify_all()

    def lose(self, error: TransportError, mesh_name: str) -> LostChipError:
        """Return the error of a call that the network failed, and keep it for later calls. Connections are closed."""
        waited = [self._chips.get(member, (member,)) for member in (error.member, *error.others)]
        own = self._chips.get(self.rank, (self.rank,))
        is_ours = self.error is not None  # whoever closes a group on purpose has lost no chip
        found = None if self._reports is None or is_ours else self._reports.find(waited)
        dead = "".join(f"; {DEAD_CABLE.format(name_cable(cable))}" for cable in sorted(self.dead_cables()))
        known = "" if self._reports is None else self._reports.known
        lost = LostChipError(own, waited[0], mesh_name, f"{error}{dead}{known}", lost=found)
        self.fail(lost)
        return lost

    def send(self, tensor: torch.Tensor, member: int, message: int) -> Work:
        """Start to send, as the message of that number among those of this call to this member."""
        return self._post(self._group.send, tensor, member, FIRST_MESSAGE + message)

    def recv(self, tensor: torch.Tensor, member: int, message: int) -> Work:
        """Start to receive."""
        return self._post(self._group.recv, tensor, member, FIRST_MESSAGE + message)

    def _post(self, what: Post, tensor: torch.Tensor, member: int, tag: int) -> Work:
        try:
            return what([tensor], member, self._first_tag + tag)
        except RuntimeError as error:
            raise TransportError(member, error) from error

    def wait(self, work: Work, member: int, deadline: Deadline) -> None:
        """Wait for a send or a receive, once: of two threads that wait for one of Gloo's works one never wakes."""
        try:
            work.wait(deadline.left())
        except RuntimeError as error:
            raise TransportError(member, error) from error

    def buffer(self, member: int, n_bytes: int) -> torch.Tensor:
        """Return memory for what arrives from a member. It is reused: calls run one at a time, so one is enough."""
        held = self._buffers.get(member)
        if held is None or held.numel() < n_bytes:
            held = self._buffers[member] = torch.empty(n_bytes, dtype=torch.uint8)
        return held[:n_bytes]

    def agree(self, description: str, deadline: Deadline, *, hears_news: bool = False) -> None:
        """Return once every member has called this with the same words; raise `DisagreementError` if they differ.

        With `hears_news`, raise `NewsError` if they are the same and a member has news.
        """
        words = description.encode()
        own = hashlib.blake2b(words, digest_size=DIGEST_BYTES).digest()
        flag = FLAGGED if self.has_news() else QUIET
        shared = self._digests.share(self, own + flag, 0, deadline)
        if shared == (own + QUIET) * self.size:
            return
        size = DIGEST_BYTES + len(flag)
        if all(shared[at : at + DIGEST_BYTES] == own for at in range(0, len(shared), size)):
            if hears_news:
                raise NewsError
            return
        # Every member has seen that they differ: now they exchange how.
        padded = words[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES, b"\0")
        told = self._gather(padded, MAX_ROUNDS, deadline)
        raise DisagreementError([word.rstrip(b"\0").decode(errors="ignore") for word in told])

    def gather(self, description: str, own: bytes, deadline: Deadline) -> list[bytes]:
        """Return what each member passed, by rank: as many bytes from each, of what `description` says."""
        self.agree(f"{description}, {len(own)} bytes", deadline)
        return self._gather(own, 0, deadline)

    def _gather(self, own: bytes, first_tag: int, deadline: Deadline) -> list[bytes]:
        words, n = _Exchange(self.rank, self.size, len(own)).share(self, own, first_tag, deadline), len(own)
        places = [(rank - self.rank) % self.size for rank in range(self.size)]
        return [words[place * n : (place + 1) * n] for place in places]

    def close(self) -> None:
        """Close the group's connections: every pending wait ends at once, here and at the other end."""
        # torch 2.13 has `abort` and `shutdown` on every backend, but Gloo inherits those that do nothing: pending waits
        # go on, here and at the other end (tests/torch_engine/test_private.py). A wait that times out, however,
        # closes every connection of its group. On a connection that is closed already the receive itself fails, and
        # another has to do: all members are tried, as those that are still connected may be waiting for this one.
        nothing = torch.empty(1, dtype=torch.uint8)
        for distance in range(1, self.size):
            with suppress(RuntimeError):
                self._group.recv([nothing], (self.rank + distance) % self.size, CLOSE_TAG).wait(CLOSE_TIMEOUT)


class _Exchange:
    """Bruck's all-gather of words of one length: in round k a member forwards the 2ᵏ words that it has to the member 2ᵏ
    places before. Its memory is used again: every collective begins with one.
    """

    def __init__(self, rank: int, size: int, n_bytes: int) -> None:
        held = torch.empty((size, n_bytes), dtype=torch.uint8)
        self._words = held.numpy()
        distances = [2**k for k in range(MAX_ROUNDS) if 2**k < size]
        self._arriving = [((rank + d) % size, held[d : 2 * d]) for d in distances]
        self._leaving = [((rank - d) % size, held[: min(d, size - d)]) for d in distances]

    def share(self, channel: Channel, own: bytes, first_tag: int, deadline: Deadline) -> bytes:
        """Return what each member passed, this one's own word first and then those of the ranks after it."""
        group = channel._group
        self._words[0] = np.frombuffer(own, dtype=np.uint8)
        receives = [
            (member, channel._post(group.recv, words, member, tag))
            for tag, (member, words) in enumerate(self._arriving, first_tag)
        ]
        sends = []
        for number, (member, words) in enumerate(self._leaving):
            try:
                sends.append((member, channel._post(group.send, words, member, first_tag + number)))
                channel.wait(receives[number][1], receives[number][0], deadline)
            except TransportError as error:
                error.others = [other for other, _ in receives[number:]]
                raise
        for member, work in sends:
            channel.wait(work, member, deadline)
        found: bytes = self._words.tobytes()
        return found


_counting = threading.Lock()
_channels: WeakKeyDictionary[Transport, tuple[Iterator[int], WeakValueDictionary[int, Channel]]] = WeakKeyDictionary()
"""Of each process group: numbers for its channels, and those that are in use."""


def _claim_number(channel: Channel) -> int:
    """Return the number of a new channel. Numbers come round again when all have been used."""
    with _counting:
        numbers, live = _channels.setdefault(channel._group, (count(), WeakValueDictionary()))
        number = next(numbers) % N_CHANNELS
        if number in live:
            raise ParameterError(
                f"A process group has room for {N_CHANNELS:,} engines, and the one made {N_CHANNELS:,} engines ago "
                f"is still in use. Keep one engine for each plan, or make another group."
            )
        live[number] = channel
    return number


_transports: WeakKeyDictionary[dist.ProcessGroup, Transport] = WeakKeyDictionary()
"""Kept for as long as the group is: channels are counted by transport, whichever of the two an engine was given."""


def _transport_of(group: dist.ProcessGroup | Transport | None) -> Transport:
    """Return what moves messages between CPUs for a group."""
    if type(group) is dist.ProcessGroup:
        try:
            return _transports.setdefault(group, cpu_backend(group))
        except RuntimeError as error:
            raise ParameterError(
                f"The engine moves messages between CPUs, and this process group cannot: {error}. "
                f'Make one that can: torch.distributed.new_group(backend="gloo").'
            ) from error
    if group is None or not all(hasattr(group, name) for name in ("rank", "size", "send", "recv")):
        raise ParameterError(
            f"Expected a process group that this process is a member of, got {group!r}. Call "
            f"torch.distributed.init_process_group first, and pass torch.distributed.group.WORLD or a new_group."
        )
    return group
