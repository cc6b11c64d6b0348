"""Members that disagree: each of them gets an error, and no wrong sum is made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshmend import Collective, Mesh, Op, Schedule, plan
from meshmend.errors import DisagreementError, LostChipError, ParameterError, ScheduleError, WrongSumError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
from meshmend.torch import channel as channels  # noqa: E402
from meshmend.torch.channel import (  # noqa: E402
    CLOSE_TAG,
    FIRST_MESSAGE,
    FIRST_TAG,
    TAGS_PER_CHANNEL,
    Channel,
    Deadline,
    TransportError,
)
from meshmend.torch.engine import digest_of  # noqa: E402
from meshmend.torch.private import gloo_backend  # noqa: E402
from torch_engine.processes import on_every_chip, with_store  # noqa: E402
from torch_engine.threads import Group, Network, on_every_thread  # noqa: E402

PATIENCE = timedelta(seconds=30)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def line(n_chips: int) -> Schedule:
    return plan(Mesh((1, n_chips)), "weave", chunks=2)


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["one", "two", "two and a bit"]), min_size=1, max_size=17))
def test_everybody_learns_what_everybody_brought(brought: list[str]) -> None:
    def main(rank: int, group: Group) -> Any:
        own = Channel(group)
        first = outcome(lambda: own.agree(brought[rank], Deadline(PATIENCE)))
        # A disagreement breaks nothing: the next call is in step again.
        own.agree("the same", Deadline(PATIENCE))
        return first

    found = on_every_thread(len(brought), main)
    if len(set(brought)) == 1:
        assert found == [None] * len(brought)
    else:
        for error in found:
            assert isinstance(error, DisagreementError)
            assert error.calls == tuple(brought)
        assert len({str(error) for error in found}) == 1


def test_a_disagreement_names_ranks_and_what_differs() -> None:
    error = DisagreementError(["a [3]", "b [4]", "a [3]"] + ["c [5]"] * 10)
    assert "ranks 3, 4, 5, 6, 7, 8, 9, 10 and 2 others: c [5]; ranks 0, 2: a [3]; rank 1: b [4]." in str(error)


def test_one_member_with_another_plan() -> None:
    ours, theirs = plan(Mesh("2x2"), "weave", chunks=2), plan(Mesh("2x2"), "hamiltonian")
    assert digest_of(ours, range(4)) != digest_of(theirs, range(4))

    def main(rank: int, group: Group) -> Any:
        error = outcome(lambda: mmt.Engine(theirs if rank == 2 else ours, rank, group, timeout=PATIENCE))
        payload = torch.full((10,), float(rank))
        mmt.Engine(ours, rank, group, timeout=PATIENCE).all_reduce(payload)
        return error, payload.tolist()

    for error, summed in on_every_thread(4, main):
        assert isinstance(error, DisagreementError)
        assert "ranks 0, 1, 3: Schedule(weave" in str(error)
        assert "rank 2: Schedule(hamiltonian" in str(error)
        assert summed == [6.0] * 10


def test_one_member_whose_plan_is_refused() -> None:
    good = line(3)
    wrong = Schedule(Mesh((1, 3)), total_chunks=1, step=[0], src=[0], dst=[1], op=[Op.REDUCE], owners=[0])

    def main(rank: int, group: Group) -> Any:
        return mmt.Engine(wrong if rank == 1 else good, rank, group, timeout=PATIENCE)

    found = on_every_thread(3, main)
    assert isinstance(found[1], WrongSumError)
    for error in (found[0], found[2]):
        assert isinstance(error, DisagreementError)
        assert error.calls[1].startswith(f"refused, {found[1]}"[:200])


def test_ranks_that_do_not_fit() -> None:
    def refused(match: str, *args: Any, size: int = 1, **options: Any) -> None:
        for error in on_every_thread(size, lambda rank, group: mmt.Engine(args[0], args[1](rank), group, **options)):
            assert isinstance(error, ScheduleError), error
            assert match in str(error)

    found = on_every_thread(2, lambda rank, group: mmt.Engine(line(2), 1 - rank, group))
    assert "Rank 1 of the schedule is not rank 0 of the group, which this process is. Expected rank 0" in str(found[0])
    refused("is for 2 chips, but the process group has 1 members", line(2), lambda r: r)
    refused("needs a group rank for each of 2 chips: got 1", line(2), lambda r: r, size=2, group_ranks=[0])
    refused("Expected each group rank from 0 to 1 once, got [0, 0]", line(2), lambda r: r, size=2, group_ranks=[0, 0])
    with pytest.raises(ParameterError, match="Expected a process group that this process is a member of, got None"):
        mmt.Engine(line(2), 0, None)
    with pytest.raises(ParameterError, match="expected more than 0"):
        mmt.Engine(line(2), 0, Group(Network(2), 0), timeout=timedelta(0))


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        pytest.param((torch.ones(64),), (torch.ones(65),), "SUM of float32 [65]", id="size"),
        pytest.param((torch.ones(6),), (torch.ones(2, 3),), "SUM of float32 [2, 3]", id="shape"),
        pytest.param((torch.ones(6),), (torch.ones(6, dtype=torch.int32),), "SUM of int32 [6]", id="dtype"),
        pytest.param((torch.ones(6),), (torch.ones(6), dist.ReduceOp.MAX), "MAX of float32 [6]", id="operation"),
        pytest.param((torch.ones(0),), (torch.ones(6),), "SUM of float32 [6]", id="nothing"),
    ],
)
@pytest.mark.parametrize("n_chips", [2, 5])
def test_calls_that_differ(ours: Any, theirs: Any, told: str, n_chips: int) -> None:
    schedule = line(n_chips)

    def main(rank: int, group: Group) -> Any:
        engine = mmt.Engine(schedule, rank, group, timeout=PATIENCE)
        # Both kinds of call were agreed on before: only their order differs now.
        for call in (ours, theirs):
            engine.all_reduce(call[0].clone(), *call[1:])
        group.network.tags.clear()
        call = theirs if rank == 1 else ours
        payload = call[0].clone()
        error = outcome(lambda: engine.all_reduce(payload, *call[1:]))
        untouched = bool(torch.equal(payload, call[0]))
        tags = set(group.network.tags)
        after = torch.ones(7)
        engine.all_reduce(after)
        return error, untouched, tags, after.tolist(), engine.error

    for error, untouched, tags, after, broken in on_every_thread(n_chips, main):
        assert isinstance(error, DisagreementError)
        assert f"rank 1: call 3, {told}, plan " in str(error)
        assert untouched
        assert all(tag % TAGS_PER_CHANNEL < FIRST_MESSAGE for tag in tags)
        assert after == [n_chips] * 7
        assert broken is None


def test_trees_that_were_filled_in_another_order() -> None:
    def main(rank: int, group: Group) -> Any:
        engine = mmt.Engine(line(2), rank, group, timeout=PATIENCE)
        names = ["w", "b"] if rank else ["b", "w"]
        tree = {name: torch.full((3,), float(ord(name))) for name in names}
        return outcome(lambda: mmt.all_reduce(tree, engine))

    for error in on_every_thread(2, main):
        assert isinstance(error, DisagreementError)
        assert "SUM of 2 float32 tensors, 6 elements, names and shapes" in str(error)


def test_a_member_that_never_comes_is_a_lost_chip() -> None:
    def main(rank: int, group: Group) -> Any:
        engine = mmt.Engine(line(3), rank, group, timeout=PATIENCE)
        engine.timeout = timedelta(seconds=0.5)
        if rank == 2:
            return None
        errors = [outcome(lambda: engine.all_reduce(torch.ones(3))) for _ in range(2)]
        return [*errors, engine.error]

    for first, second, kept in on_every_thread(3, main)[:2]:
        assert isinstance(first, LostChipError)
        assert second is first
        assert kept is first
        assert "gave up a collective on 1x3" in str(first)


def test_a_failure_that_is_not_the_networks_is_no_lost_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr("meshmend.torch.engine.combine_of", lambda _: out_of_memory)

    def main(rank: int, group: Group) -> Any:
        engine = mmt.Engine(line(2), rank, group, timeout=PATIENCE)
        return [outcome(lambda: engine.all_reduce(torch.ones(30))) for _ in range(2)]

    found = on_every_thread(2, main)
    # Each chip adds once in this plan; one that failed second has lost its neighbour instead.
    assert any(isinstance(first, MemoryError) for first, _ in found)
    for first, second in found:
        assert isinstance(first, MemoryError | LostChipError)
        wanted = "ended half-way: MemoryError" if isinstance(first, MemoryError) else "gave up a collective"
        assert wanted in str(second)


def test_two_engines_and_a_users_own_messages_on_one_group() -> None:
    # All at once, each in a thread of its own on every chip, with the tags that the program's own messages begin with.
    mesh = Mesh("2x2")
    schedule = plan(mesh, "weave", chunks=8)

    def main(chip: Any, mesh: Mesh, group: Any) -> list[Any]:
        rank = mesh.rank(chip)
        one, two = (mmt.Engine(schedule, rank, group, timeout=PATIENCE) for _ in range(2))
        wrong = []
        for update in range(8):
            a, b = torch.full((50_000,), 1.0), torch.full((50_000,), 100.0)
            c, d = torch.full((50_000,), 77.0 + rank), torch.zeros(50_000)
            calls = [threading.Thread(target=engine.all_reduce, args=(own,)) for engine, own in ((one, a), (two, b))]
            for call in calls:
                call.start()
            sent = group.send([c], (rank + 1) % 4, update)
            group.recv([d], (rank - 1) % 4, update).wait()
            sent.wait()
            for call in calls:
                call.join()
            if not ((a == 4).all() and (b == 400).all() and (d == 77.0 + (rank - 1) % 4).all()):
                wrong.append((update, a.unique().tolist(), b.unique().tolist(), d.unique().tolist()))
        return wrong

    assert on_every_chip(mesh, main) == {mesh.chip(rank): [] for rank in range(4)}


def test_a_closed_engine_says_so() -> None:
    def main(rank: int, group: Group) -> Any:
        engine = mmt.Engine(line(2), rank, group, timeout=PATIENCE)
        engine.close()
        return outcome(lambda: engine.all_reduce(torch.ones(3)))

    for error in on_every_thread(2, main):
        assert "This engine was closed" in str(error)


def test_channels_have_tags_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "N_CHANNELS", 3)
    group = Group(Network(1), 0)
    made = [Channel(group) for _ in range(3)]
    starts = [own._first_tag for own in made]
    assert starts == [FIRST_TAG + number * TAGS_PER_CHANNEL for number in range(3)]
    assert Channel(Group(Network(1), 0))._first_tag == FIRST_TAG
    with pytest.raises(ParameterError, match="room for 3 engines"):
        Channel(group)
    # The refused one took number 0; its next ones are free once nobody holds them.
    del made[1:]
    assert Channel(group)._first_tag == starts[1]
    last = FIRST_TAG + channels.FIRST_TAG // TAGS_PER_CHANNEL * TAGS_PER_CHANNEL - 1
    assert last == CLOSE_TAG == 2**31 - 1
    assert FIRST_MESSAGE + channels.MAX_MESSAGES < TAGS_PER_CHANNEL


def test_a_group_and_its_backend_share_their_channels() -> None:
    def main(chip: Any, mesh: Mesh, _: Any, port: int) -> list[int]:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        world: Any = dist.group.WORLD
        both = (world, world._get_backend(torch.device("cpu")))
        return [Channel(group)._first_tag for group in (*both, *both)]

    from torch_engine.processes import free_port

    (found,) = on_every_chip(Mesh((1, 1)), main, free_port()).values()
    assert found == [FIRST_TAG + number * TAGS_PER_CHANNEL for number in range(4)]


def test_a_digest_covers_all_that_decides_what_is_sent() -> None:
    facts: dict[str, Any] = {
        "mesh": Mesh((2, 3)),
        "total_chunks": 2,
        "step": [0, 1],
        "src": [1, 0],
        "dst": [0, 1],
        "first_chunk": [0, 0],
        "n_chunks": [1, 1],
        "op": [Op.REDUCE, Op.COPY],
    }
    others: dict[str, Any] = {
        "mesh": Mesh((2, 3), wrap=True),
        "total_chunks": 3,
        "step": [0, 0],
        "src": [1, 3],
        "dst": [0, 2],
        "first_chunk": [0, 1],
        "n_chunks": [2, 1],
        "op": [Op.REDUCE, Op.REDUCE],
    }

    def digest(changed: dict[str, Any], members: Any = range(6)) -> str:
        own = facts | changed
        mesh = own.pop("mesh")
        return digest_of(Schedule(mesh, owners=np.zeros(own["total_chunks"], dtype=int), **own), members)

    digests = (
        {digest({})} | {digest({name: other}) for name, other in others.items()} | {digest({}, [1, 0, 2, 3, 4, 5])}
    )
    assert len(digests) == 10
    assert digest({}) == digest({"mesh": Mesh("2x3")})


def test_members_agree_on_owners_where_they_matter() -> None:
    facts: dict[str, Any] = {"total_chunks": 1, "step": [0, 1], "src": [0, 1], "dst": [1, 0], "op": [0, 1]}

    def digest(owner: int, collective: Collective) -> str:
        return digest_of(Schedule(Mesh("1x2"), owners=[owner], collective=collective, **facts), [0, 1])

    assert digest(0, Collective.ALL_REDUCE) == digest(1, Collective.ALL_REDUCE)
    assert digest(0, Collective.REDUCE_SCATTER) != digest(1, Collective.REDUCE_SCATTER)


@pytest.mark.parametrize("collective", ["reduce-scatter", "all-gather"])
def test_an_engine_of_another_collective_makes_no_sums(collective: str) -> None:
    def main(rank: int, group: Group) -> Any:
        engine = mmt.Engine(plan(Mesh("1x2"), "weave", collective=collective, chunks=2), rank, group, timeout=PATIENCE)
        one = torch.ones(4)
        return [outcome(call) for call in (lambda: engine.all_reduce(one), lambda: mmt.all_reduce([one, one], engine))]

    for refused in on_every_thread(2, main):
        for error in refused:
            assert isinstance(error, ScheduleError)
            assert "which is no all-reduce. Make an engine with meshmend.plan(mesh)" in str(error)


def test_closing_reaches_members_that_are_no_partners_when_all_partners_are_gone() -> None:
    # Of four members, 0 receives from 1 and 2 when they agree. They have died, and 3 waits for 0 alone.
    def main(chip: tuple[int, ...], number: int, address: str) -> float:
        host, _, port = address.partition("/")[0].rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False)
        channel = Channel(gloo_backend(store, number, 4, timeout=PATIENCE, interface="lo"))
        if number == 3:
            pending = channel.recv(torch.zeros(1), 0, 0)
            store.set("waits", "")
            started = time.monotonic()
            with pytest.raises(TransportError):
                channel.wait(pending, 0, Deadline(PATIENCE))
            store.set("ended", "")
            return time.monotonic() - started
        store.wait(["waits"])
        if number in (1, 2):
            channel.close()
            store.set(f"closed/{number}", "")
        else:
            store.wait(["closed/1", "closed/2"])
            for member in (1, 2):
                with pytest.raises(TransportError):  # its connection breaks
                    channel.wait(channel.recv(torch.zeros(1), member, 0), member, Deadline(PATIENCE))
            channel.close()
        store.wait(["ended"], PATIENCE)  # a group that is let go would close its connections by itself
        return 0.0

    found = with_store([(number,) for number in range(4)], main)
    assert found[3,] < 10
