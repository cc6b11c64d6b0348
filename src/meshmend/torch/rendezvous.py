"""The rendezvous of a new quorum: its members exchange words through a store, and those who do not come are given up.

torchft's lighthouse forms a quorum of whoever has asked for one and sent a heartbeat in the last second. A chip that
died while it waited is still in it, and the store may be its own. Only silence tells the others: what they spend
listening, they add to every such recovery. Giving up too early is safe: it costs one more quorum.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import torch.distributed as dist

from meshmend.errors import RendezvousError

FIRST_PATIENCE = timedelta(seconds=0.5)
"""Live members publish their words within milliseconds of each other, on a busy machine within tenths of a second."""
LOOKS = 5
"""How often to look for news while patience lasts."""

ARRIVED = "arrived"
GIVEN_UP = "given up"


class Patience:
    """How long to wait without news of another member: briefly, and twice as long after each failure in a row.

    So a network on which half a second is too short delays the first steps of a job, and prevents none.
    """

    def __init__(self, most: timedelta) -> None:
        self._most = most
        self._failures = 0

    @property
    def now(self) -> timedelta:
        """How long to wait this time."""
        return min(FIRST_PATIENCE * (1 << self._failures), self._most)

    def succeeded(self) -> None:
        """Start again from the shortest."""
        self._failures = 0

    def failed(self) -> None:
        """Wait longer next time."""
        self._failures = min(self._failures + 1, 16)


def check_store(address: str, timeout: timedelta) -> None:
    """Raise `RendezvousError` if nobody listens at `host:port/…`.

    torch's own client would try again until its timeout is over, and does so twice. A store listens before its chip
    asks for a quorum: a connection that is refused means that the chip has died.
    """
    host, _, port = address.partition("/")[0].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout.total_seconds()).close()
    except OSError as error:
        raise RendezvousError(
            f"The store of the new quorum at {host}:{port} does not answer ({error}): the chip that serves it has died "
            f"since it asked for the quorum. torchft forms the next one without it."
        ) from None


def exchange(store: dist.Store, rank: int, world_size: int, word: str, patience: timedelta) -> list[str]:
    """Publish a word and return those of all members, by rank.

    Raises `RendezvousError` when nobody has come for as long as `patience`, and at once when another member has
    given up: whoever comes late must not wait for those who have left.
    """
    store.set(f"member/{rank}", word)
    n_arrived = store.add(ARRIVED, 1)
    keys = [f"member/{member}" for member in range(world_size)]
    started = heard = time.monotonic()
    while True:
        try:
            store.wait(keys, patience / LOOKS)
            break
        except RuntimeError as error:
            # Stores in files say it without an error of their own.
            if not isinstance(error, dist.DistStoreError) and "Wait timeout" not in str(error):
                raise
            n_before, n_arrived, now = n_arrived, store.add(ARRIVED, 0), time.monotonic()
        if n_arrived > n_before:
            heard = now
        elif now - heard >= patience.total_seconds():
            store.set(GIVEN_UP, str(rank))
            raise RendezvousError(
                f"{n_arrived} of the {world_size} members of the new group came within {now - started:.1f} s, and "
                f"nobody for the last {now - heard:.1f} s: the others have died, or were never started. Under "
                "torchft the next group forms without them."
            )
    if store.check([GIVEN_UP]):
        raise RendezvousError(
            f"Member {store.get(GIVEN_UP).decode()} of the new group has given up waiting for the others. Under "
            "torchft the next group forms without them."
        )
    return [bytes(told).decode() for told in store.multi_get(keys)]
