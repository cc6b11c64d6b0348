"""The rendezvous of a new quorum: its members exchange words through a store, and those who do not come are given up.

torchft's lighthouse forms a quorum of whoever has asked for one and sent a heartbeat in the last second. A chip that
died while it waited is still in it, and the store may be its own. Only silence tells the others: what they spend
listening, they add to every such recovery. Giving up too early is safe: it costs one more quorum.

torchrun keeps one store for all attempts of a job, with every key of the attempts before: each group first takes a
part of the store that nobody has written to.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import torch.distributed as dist

from meshmend.errors import RendezvousError
from meshmend.launch.addresses import join_address, split_address

FIRST_PATIENCE = timedelta(seconds=0.5)
"""Live members publish their words within milliseconds of each other, on a busy machine within tenths of a second."""
LOOKS = 5
"""How often to look for news while patience lasts."""

FIRST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.05
"""How often rank 0 looks for members that it has not admitted: rarely while they import, at once when all are here."""

ARRIVED = "arrived"
GIVEN_UP = "given up"
ADMITTED = "admitted"


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
    host, port = split_address(address.partition("/")[0])
    try:
        socket.create_connection((host, port), timeout.total_seconds()).close()
    except OSError as error:
        raise RendezvousError(
            f"The store of the new quorum at {join_address(host, port)} does not answer ({error}): the chip that "
            "serves it has died since it asked for the quorum. torchft forms the next one without it."
        ) from None


def fresh_store(store: dist.Store, rank: int, world_size: int, patience: timedelta) -> dist.Store:
    """Return a part of a store that the members of a new group share and that nobody has written to before.

    Whoever arrives gets a number that nobody had, and waits for a key with that number; rank 0 writes them, each with
    its own number, which names the part. So a member follows a rank 0 that was alive after it had arrived, whatever
    earlier groups have left in the store. (torchrun also counts its attempts, but each host counts its own.)
    """
    number = store.add(ARRIVED, 1)
    if rank == 0:
        fresh = dist.PrefixStore(f"{number}/", store)
        _admit(store, fresh, number, world_size, patience)
        return fresh
    key = f"{ADMITTED}/{number}"
    try:
        store.wait([key], patience)
    except RuntimeError as error:
        if not _is_timeout(error):
            raise
        raise RendezvousError(
            f"Rank 0 of the new group did not come within {patience.total_seconds():.1f} s: it has died, or was never "
            f"started. Start all {world_size} members again."
        ) from None
    fresh = dist.PrefixStore(f"{store.get(key).decode()}/", store)
    fresh.add(ADMITTED, 1)
    return fresh


def _admit(store: dist.Store, fresh: dist.Store, number: int, world_size: int, patience: timedelta) -> None:
    """Give everybody who has arrived the number of the part, until all members have come there."""
    n_told, n_here, pause_s = 0, 1, FIRST_PAUSE_S
    heard = time.monotonic()
    while n_here < world_size:
        n_arrived = store.add(ARRIVED, 0)
        if n_arrived > n_told:
            keys = [f"{ADMITTED}/{other}" for other in range(n_told + 1, n_arrived + 1)]
            store.multi_set(keys, [str(number)] * len(keys))  # type: ignore[attr-defined]  # not annotated
            n_told, heard = n_arrived, time.monotonic()
        if time.monotonic() - heard >= patience.total_seconds():
            raise RendezvousError(
                f"{n_here} of the {world_size} members of the new group came, and nobody for the last "
                f"{patience.total_seconds():.1f} s: the others have died, or were never started. Start all members "
                "again."
            )
        time.sleep(pause_s)
        pause_s, n_here = min(2 * pause_s, MOST_PAUSE_S), 1 + fresh.add(ADMITTED, 0)


def _is_timeout(error: RuntimeError) -> bool:
    """Return whether a wait ended without its keys; stores in files say it without an error of their own."""
    return isinstance(error, dist.DistStoreError) or "Wait timeout" in str(error)


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
            if not _is_timeout(error):
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
