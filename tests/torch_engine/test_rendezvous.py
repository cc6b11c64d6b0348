"""Members of a new quorum meet, and give up those who have died: soon, together, and never for good."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")

import torch.distributed as dist  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
from meshmend import Mesh  # noqa: E402
from meshmend.errors import DisagreementError, MeshError, RendezvousError  # noqa: E402
from meshmend.torch.membership import MemberInfo, compare, survivors  # noqa: E402
from meshmend.torch.rendezvous import FIRST_PATIENCE, Patience, check_store, exchange, fresh_store  # noqa: E402

SHORT = timedelta(seconds=0.4)
LONG = timedelta(seconds=2)
"""For tests that must not lose patience: a second of it is left where a busy machine does not run a member."""


def at_once(come: Callable[[int], None], ranks: Iterable[int]) -> None:
    """Call it with each rank, in a thread of its own, and wait for all of them."""
    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def meet(
    world_size: int, delays_s: dict[int, float], patience: timedelta = SHORT, store: dist.Store | None = None
) -> dict[int, tuple[Any, float]]:
    """Let each member come after its delay; return what it got or raised, and when, by rank."""
    store = store or dist.HashStore()
    found: dict[int, tuple[Any, float]] = {}
    started = time.monotonic()

    def come(rank: int) -> None:
        time.sleep(delays_s[rank])
        try:
            result: Any = exchange(store, rank, world_size, f"word {rank}", patience)
        except RendezvousError as error:
            result = str(error)
        found[rank] = (result, time.monotonic() - started)

    at_once(come, delays_s)
    return found


def test_everybody_gets_the_words_of_all_by_rank() -> None:
    found = meet(5, dict.fromkeys(range(5), 0.0))
    assert [result for result, _ in found.values()] == [[f"word {rank}" for rank in range(5)]] * 5


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_patience_counts_from_the_last_who_came(kind: str, tmp_path: Path) -> None:
    # The last comes after three times the patience, but never is it quiet for more than half of it.
    store = dist.HashStore() if kind == "memory" else dist.FileStore(str(tmp_path / "store"), 7)
    found = meet(7, {rank: rank * LONG.total_seconds() / 2 for rank in range(7)}, LONG, store)
    assert [result for result, _ in found.values()] == [[f"word {rank}" for rank in range(7)]] * 7


def test_those_who_are_missing_are_given_up_by_all_at_about_the_same_time() -> None:
    found = meet(5, {0: 0.0, 2: 0.1, 4: 0.0})
    for message, seconds in found.values():
        assert "died" in message or "has given up" in message
        assert SHORT.total_seconds() <= seconds < SHORT.total_seconds() + 2
    assert any("3 of the 5 members" in message for message, _ in found.values())


def test_who_comes_late_does_not_wait_for_those_who_have_left() -> None:
    late_s = 1.5 * LONG.total_seconds()
    found = meet(3, {0: 0.0, 1: 0.0, 2: late_s}, LONG)
    message, seconds = found[2]
    assert "has given up waiting" in message
    assert seconds < late_s + LONG.total_seconds()


def attempt(stores: list[Any], delays_s: dict[int, float], size: int = 3, word: str = "") -> dict[int, Any]:
    """Let members take a part of a store, and exchange words there; return those, or an error, by rank."""
    found: dict[int, Any] = {}

    def come(rank: int) -> None:
        time.sleep(delays_s[rank])
        try:
            found[rank] = exchange(fresh_store(stores[rank], rank, size, SHORT), rank, size, word, SHORT)
        except RendezvousError as error:
            found[rank] = str(error)

    at_once(come, delays_s)
    return found


@pytest.mark.parametrize("kind", ["memory", "file", "TCP"])
def test_a_group_reads_nothing_that_the_attempts_before_it_left(kind: str, tmp_path: Path) -> None:
    if kind == "TCP":  # a client waits for one thing at a time
        kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores: list[Any] = [kept, *(dist.TCPStore("127.0.0.1", kept.port, wait_for_workers=False) for _ in range(2))]
    else:
        stores = [dist.HashStore() if kind == "memory" else dist.FileStore(str(tmp_path / "store"), 3)] * 3
    first, second, third = [0.0, 0.0, 0.2], [0.2, 0.1, 0.0], [0.1, 0.0, 0.2]
    assert attempt(stores, dict(enumerate(first)), word="first") == {rank: ["first"] * 3 for rank in range(3)}
    assert attempt(stores, dict(enumerate(second)), word="second") == {rank: ["second"] * 3 for rank in range(3)}
    without_last = attempt(stores, {0: 0.0, 1: 0.1}, word="third")
    assert "2 of the 3 members" in without_last[0], "the words of a dead member are still in the store"
    assert "died" in without_last[1]
    (alone,) = attempt(stores, {2: 0.0}, word="fourth").values()
    assert "Rank 0 of the new group did not come within 0.4 s" in alone
    assert attempt(stores, dict(enumerate(third)), word="fifth") == {rank: ["fifth"] * 3 for rank in range(3)}


def test_groups_of_the_backend_form_again_in_the_same_store() -> None:
    store = dist.HashStore()

    def form(rank: int) -> mmt.MeshBackend:
        options = mmt.MeshOptions("1x2", chip=(0, rank), interface="lo")
        return mmt.MeshBackend(store, rank, 2, timedelta(seconds=20), options)

    with ThreadPoolExecutor(2) as threads:
        before = list(threads.map(form, range(2)))
        before[0].get_group_store().set("key", "of the first group")
        assert before[1].get_group_store().check(["key"])
        after = list(threads.map(form, range(2)))
        assert not any(group.get_group_store().check(["key"]) for group in after)
        sums = [torch.full((3,), float(rank)) for rank in range(2)]
        for work in [group.allreduce([own]) for group, own in zip(after, sums, strict=True)]:
            work.wait()
        assert all(own.tolist() == [1.0] * 3 for own in sums)


def test_patience_doubles_with_each_failure_in_a_row_and_has_an_end() -> None:
    patience = Patience(most=timedelta(seconds=3))
    seen = []
    for _ in range(5):
        seen.append(patience.now / FIRST_PATIENCE)
        patience.failed()
    assert seen == [1, 2, 4, 6, 6]
    patience.succeeded()
    assert patience.now == FIRST_PATIENCE


def test_a_store_whose_chip_has_died_is_noticed_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_store(f"127.0.0.1:{port}/torchft/3/0", timedelta(seconds=10))
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=rf"127\.0\.0\.1:{port} does not answer .*refused.*has died"):
        check_store(f"127.0.0.1:{port}/torchft/3/0", timedelta(seconds=10))
    assert time.monotonic() - started < 5
    with pytest.raises(RendezvousError, match=rf"quorum at \[::1\]:{port} does not answer"):
        check_store(f"[::1]:{port}/torchft/3/0", timedelta(seconds=10))


def test_members_leave_out_what_any_knows_and_refuse_other_terms() -> None:
    cable, other = ((0, 0), (0, 1)), ((1, 0), (2, 0))
    known = [frozenset({cable, other}), frozenset({other}), frozenset[Any]()]
    chips = [(0, 0), (1, 0), (0, 1)]
    said = [MemberInfo(chip, "terms | of all", cables, 5) for chip, cables in zip(chips, known, strict=True)]
    read = [MemberInfo.read(str(one)) for one in said]
    assert read == said
    compare(read[2], read)
    assert survivors(Mesh("3x2"), read) == Mesh("3x2", failed=["1,1", "1x2@2,0"], failed_cables=[cable])
    with pytest.raises(MeshError, match=r"chip \(1,1\) runs meshmend 0.1, 3x3\. Every member needs"):
        compare(read[0], [MemberInfo.read("17|1,1|meshmend 0.1, 3x3")])
    with pytest.raises(MeshError, match=r"2 members say that they are chip \(0,0\)"):
        compare(read[0], [read[0], read[0]])


def test_thousands_of_members_are_compared_once_each() -> None:
    n_compared = 0

    class Counted(tuple[int, ...]):
        __slots__ = ()
        __hash__ = tuple.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal n_compared
            n_compared += 1
            return tuple.__eq__(self, other)

    members = [MemberInfo(Counted((rank // 64, rank % 64)), "alike", frozenset(), 0) for rank in range(2048)]
    compare(members[0], members)
    assert n_compared <= 2 * len(members)


def test_thousands_of_calls_that_differ_are_compared_once_each() -> None:
    n_compared = 0

    class Counted(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal n_compared
            n_compared += 1
            return str.__eq__(self, other)

    error = DisagreementError([Counted(f"call {rank % 1500}") for rank in range(2048)])
    assert "ranks 0, 1500: call 0; ranks 1, 1501: call 1;" in str(error)
    assert n_compared <= 2 * 2048
