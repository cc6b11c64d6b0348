"""A process group without processes: its members are threads of the test, its network a dictionary.

It does what the engine asks of Gloo: messages are matched by pair and tag, in order; nothing moves before both ends are
there; a wait blocks, and one that times out closes every connection of its member. It is stricter in two things: a work
may be waited for once, and a message must be as long as the buffer that it goes to.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch


class Network:
    """Connects `size` members; `closed` holds those whose connections are closed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.waiting: dict[tuple[int, int, int], tuple[deque[Work], deque[Work]]] = defaultdict(
            lambda: (deque(), deque())
        )
        self.closed: set[int] = set()
        self.tags: set[int] = set()

    def post(self, work: Work, key: tuple[int, int, int], is_send: bool) -> Work:
        with self.changed:
            if self.closed.intersection(key[:2]):
                raise RuntimeError("Connection closed by peer")
            self.tags.add(key[2])
            sends, receives = self.waiting[key]
            (sends if is_send else receives).append(work)
            if sends and receives:
                sent, received = sends.popleft(), receives.popleft()
                assert sent.tensor.nbytes == received.tensor.nbytes, "a message that its buffer was not made for"
                received.tensor.view(torch.uint8).copy_(sent.tensor.view(torch.uint8))
                sent.done = received.done = True
                self.changed.notify_all()
        return work


class Work:
    """A send or a receive under way."""

    def __init__(self, network: Network, member: int, peer: int, tensor: torch.Tensor) -> None:
        self.network, self.ends, self.tensor = network, (member, peer), tensor
        self.done = self.waited = False

    def wait(self, timeout: timedelta) -> bool:
        with self.network.changed:
            assert not self.waited, "a work that two threads wait for: Gloo wakes only one of them"
            self.waited = True
            broken = self.network.closed.intersection
            self.network.changed.wait_for(lambda: self.done or broken(self.ends), timeout.total_seconds())
            if self.done:
                return True
            reason = "Connection closed by peer" if broken(self.ends) else "Timed out waiting for a message"
            self.network.closed.add(self.ends[0])
            self.network.changed.notify_all()
            raise RuntimeError(reason)


class Group:
    """One member's view of a network, in the shape of a process group."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self._rank = network, rank
        self.posted: list[int] = []
        """The tags of all that this member has sent or received."""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.network.size

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.posted.append(tag)
        work = Work(self.network, self._rank, peer, tensors[0])
        return self.network.post(work, (self._rank, peer, tag), is_send=True)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.posted.append(tag)
        work = Work(self.network, self._rank, peer, tensors[0])
        return self.network.post(work, (peer, self._rank, tag), is_send=False)


def on_every_thread(size: int, main: Callable[[int, Group], Any], timeout_s: float = 60) -> list[Any]:
    """Run `main(rank, group)` in a thread for each member of a new network; return what each returned or raised."""
    network = Network(size)
    found: list[Any] = [None] * size

    def body(rank: int) -> None:
        try:
            found[rank] = main(rank, Group(network, rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a member hangs"
    return found
