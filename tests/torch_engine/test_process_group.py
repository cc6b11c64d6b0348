"""The process group that torchft uses: it finds the hole, plans round it, and refuses what cannot be right."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshmend import Hardware, Mesh, PlanError, plan
from meshmend.errors import DisagreementError, MachineError, MeshError, MeshmendError, PayloadError, WaitTimeoutError
from meshmend.machines import read_machine
from meshmend.planning import PlanCache

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
pytest.importorskip("torchft", reason="torchft is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402
from torch.distributed.distributed_c10d import AllreduceOptions, BarrierOptions, BroadcastOptions  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
from meshmend.planning.workload import LARGEST_BYTES  # noqa: E402
from meshmend.torch.plans import Plans  # noqa: E402
from torch_engine.processes import remembered, with_store  # noqa: E402

Members = list[tuple[int, ...]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    # How soon members give each other up is for the tests of failures: here nobody dies, and a machine may be slow.
    monkeypatch.setattr("meshmend.torch.rendezvous.FIRST_PATIENCE", timedelta(seconds=30))


def make(chip: tuple[int, ...], **options: Any) -> Any:
    torch.set_num_threads(1)
    return mmt.MeshProcessGroup((2, 4), chip, interface="lo", timeout=timedelta(seconds=20), **options)


def summed(group: Any, value: float, op: Any = dist.ReduceOp.SUM, size: int = 1000) -> list[float]:
    tensor = torch.full((size,), value)
    options = AllreduceOptions()
    options.reduceOp = op
    group.allreduce([tensor], options).wait()
    return [float(x) for x in tensor.unique()]


def test_it_plans_for_all_and_then_for_those_who_are_left() -> None:
    # Members come in another order than ranks do, as torchft's replica ids make them.
    members: Members = [Mesh("2x4").chip(rank) for rank in (5, 0, 7, 2, 1, 6, 3, 4)]
    left = [chip for chip in members if chip[1] >= 2]
    for mesh in (Mesh("2x4"), Mesh("2x4", failed=["2x2@0,0"])):
        for size in (512, 2048, 8192):
            remembered(mesh, payload_bytes=size)

    def main(chip: tuple[int, ...], number: int, address: str) -> Any:
        group = make(chip, plan=remembered)
        group.configure(f"{address}/1", f"chip{number}", number, len(members))
        found: dict[str, Any] = {"mesh": group.mesh, "sum": summed(group, number), "size": group.size()}
        found["max"] = summed(group, number, dist.ReduceOp.MAX)
        found["plain op"] = summed(group, 1.0)
        pair = [torch.full((3,), float(number)), torch.full((2, 2), 1.0)]
        group.allreduce_coalesced(pair, AllreduceOptions()).wait()
        found["pair"] = [t.unique().tolist() for t in pair]
        options = BroadcastOptions()
        options.rootRank = 2
        word = torch.full((4,), float(number))
        group.broadcast([word], options).wait()
        group.barrier(BarrierOptions()).wait()
        found["broadcast"] = word.unique().tolist()
        if chip in left:
            group.configure(f"{address}/2", f"chip{number}", left.index(chip), len(left))
            found |= {"hole": group.mesh, "left": summed(group, 1.0), "planner": group.schedule(4000).planner}
            found["errored"] = group.errored()
        return found

    for chip, found in with_store(members, main).items():
        assert found["mesh"] == Mesh("2x4")
        assert (found["sum"], found["max"], found["size"]) == ([28.0], [7.0], 8)
        assert found["pair"] == [[28.0], [8.0]]
        assert found["broadcast"] == [2.0]
        if chip in left:
            assert found["hole"] == Mesh("2x4", failed=["2x2@0,0"])
            assert found["left"] == [4.0]
            assert found["errored"] is None


def test_a_member_that_leaves_gives_the_others_an_error_until_they_configure_again() -> None:
    members: Members = [(0, 0), (0, 1), (1, 0), (1, 1)]

    def main(chip: tuple[int, ...], number: int, address: str) -> Any:
        group = mmt.MeshProcessGroup((2, 2), chip, interface="lo", timeout=timedelta(seconds=20))
        group.configure(f"{address}/1", "x", number, 4)
        assert summed(group, 1.0) == [4.0]
        if number == 3:
            group.abort()
        messages = []
        for _ in range(2):
            try:
                summed(group, 1.0)
            except Exception as error:
                messages.append(str(error))
        assert group.errored() is not None
        group.configure(f"{address}/2", "x", number, 4)
        assert group.errored() is None
        assert summed(group, 1.0) == [4.0]
        return messages

    for chip, messages in with_store(members, main).items():
        assert len(messages) == 2, chip
        wanted = "left the group" if chip == (1, 1) else "gave up a collective"
        assert all(wanted in message for message in messages)


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        ({"chip": (0, 0)}, {"chip": (0, 0)}, "2 members say that they are chip (0,0)"),
        ({"chip": (0, 0)}, {"chip": (0, 1), "shape": (4, 4)}, "Every member needs the same shape"),
        (
            {"chip": (0, 0)},
            {"chip": (0, 1), "plan": partial(plan, planner="hamiltonian")},
            "Every member needs the same shape",
        ),
        ({"chip": (0, 0)}, {"chip": (1, 3)}, "the survivors form 2 disconnected groups"),
    ],
)
def test_members_that_do_not_fit_together_are_refused(mine: Any, theirs: Any, message: str) -> None:
    def main(_: Any, number: int, address: str) -> str:
        terms = mine if number == 0 else theirs
        group = mmt.MeshProcessGroup(interface="lo", **({"shape": (2, 4)} | terms))
        with pytest.raises((MeshError, PlanError)) as caught:
            group.configure(address, "x", number, 2)
        return str(caught.value)

    told = with_store([(0,), (1,)], main)
    assert message in told[0,]
    assert message in told[1,]


MINE = """
meshmend: 1
shape: 2x4
chips: {north: [0, 0], south: [1, 0]}
failed: ["0,3", "0,0-0,1"]
rates: {"1,1-1,2": 1/2}
"""


def test_a_machine_brings_its_holes_cables_and_rates(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    known = Mesh("2x4", failed=["0,3"], failed_cables=["0,0-0,1"], cable_rates={"1,1-1,2": 0.5})
    members: Members = [known.chip(rank) for rank in (4, 0, 6, 2, 1, 5, 3)]
    left = [chip for chip in members if chip != (1, 3)]
    for mesh in (known, known.fail("1,3")):
        for size in (512, 2048, 8192):
            remembered(mesh, payload_bytes=size)

    def main(chip: tuple[int, ...], number: int, address: str) -> Any:
        named = "north" if chip == (0, 0) else "south" if chip == (1, 0) else chip
        machine = file if number % 2 else read_machine(file)
        options: dict[str, Any] = {"interface": "lo", "timeout": timedelta(seconds=20), "plan": remembered}
        group = mmt.MeshProcessGroup(machine=machine, chip=named, **options)
        group.configure(f"{address}/1", "x", number, len(members))
        found = {"mesh": group.mesh, "sum": summed(group, number), "planned": group.schedule(4000).mesh}
        if chip in left:
            group.configure(f"{address}/2", "x", left.index(chip), len(left))
            found |= {"hole": group.mesh, "left": summed(group, 1.0)}
        return found

    for chip, found in with_store(members, main).items():
        assert found["mesh"] == found["planned"] == known
        assert found["sum"] == [sum(range(7))]
        if chip in left:
            assert found["hole"] == known.fail("1,3")
            assert found["left"] == [6.0]


def test_machines_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    for options, message in (
        ({"chip": "noth"}, r"no chip is named 'noth'. Its chips are named north"),
        ({"chip": (0, 3)}, r"mine.yaml: Chip \(0,3\) has failed.*as it is now"),
        ({"chip": (5, 5)}, r"mine.yaml: Chip \(5,5\) lies outside the 2x4 mesh"),
        ({"chip": (0, 0), "shape": (2, 4)}, "leave out shape"),
        ({"chip": (0, 0), "wrap": True}, "leave out wrap"),
        ({}, "Say which chip this process is"),
        ({"chip": (0, 0), "machine": None}, "Nobody says which mesh this process's chip is in"),
        ({"chip": "north", "machine": None, "shape": (2, 4)}, "'north' is the name of a chip: give the machine"),
    ):
        with pytest.raises((MeshError, MachineError), match=message):
            mmt.MeshProcessGroup(**({"machine": file} | options))


def test_before_configure_there_is_no_mesh() -> None:
    group = make((0, 1))
    with pytest.raises(MeshError, match=r"Chip \(0,1\) has no mesh until torchft has formed its group"):
        _ = group.mesh
    with pytest.raises(MeshError, match="lies outside the 2x4 mesh"):
        make((5, 5))


def test_payloads_share_few_plans_and_prepared_ones_are_found() -> None:
    sizes = [1, 10**5, 10**6, 10**7, 10**8, 10**11]
    planned = [Plans.size(size) for size in sizes]
    assert planned == sorted(planned)
    assert (planned[0], planned[-1]) == (512, LARGEST_BYTES)
    # The nearest in proportion, so at most twice as much or half.
    assert all(0.5 <= ours / size <= 2 for ours, size in zip(planned[1:-1], sizes[1:-1], strict=True))
    plans, mesh = Plans(partial(plan, planner="hamiltonian"), hardware="ideal"), Mesh("4x4")
    plans.prepare(mesh, ["2x2@0,0", "2x2@2,2"], payload_bytes=1000)
    assert plans.get(mesh.fail("2x2@2,2"), 1000) is plans.get(mesh.fail("2x2@2,2"), 1001)
    with pytest.raises(PlanError, match="hamiltonian cannot plan for 4x4 minus 1x1@1,1"):
        plans.get(mesh.fail((1, 1)), 1000)


def test_members_compare_what_is_bound_to_their_plan_but_not_where_it_is_kept(tmp_path: Path) -> None:
    bound = partial(partial(plan, planner="weave", chunks=4), cache=PlanCache(tmp_path))
    told = [str(Plans(one, hardware="ideal")) for one in (bound, partial(plan, Mesh("2x2")))]
    words = [text.partition(" for ideal [")[0] for text in told]
    assert words == ["meshmend.planning.proven.plan chunks=4 planner=weave", "meshmend.planning.proven.plan Mesh"]
    # Hardware of one name may have other numbers.
    assert str(Plans(hardware="ideal")) != str(Plans(hardware=Hardware("ideal", 2e9)))


def test_a_wait_ends_after_its_timeout_and_the_all_reduce_goes_on() -> None:
    def main(chip: tuple[int, ...], number: int, address: str) -> Any:
        group = mmt.MeshProcessGroup((1, 2), chip, interface="lo", timeout=timedelta(seconds=40))
        group.configure(f"{address}/1", "x", number, 2)
        host, _, port = address.split("/")[0].partition(":")
        store = dist.TCPStore(host, int(port), is_master=False)
        tensor = torch.full((9,), number + 1.0)
        if number == 1:
            # Comes only after the other has given up its first wait.
            store.wait(["gave up"], timedelta(seconds=40))
        work = group.allreduce([tensor], AllreduceOptions())
        if number == 0:
            with pytest.raises(
                WaitTimeoutError, match=r"waited 0.2 s for its collective, which has not finished. It is still running"
            ) as caught:
                work.wait(timedelta(seconds=0.2))
            assert isinstance(caught.value, TimeoutError)
            assert not work.is_completed()
            store.set("gave up", "")
        work.wait(timedelta(seconds=40))
        work.wait(timedelta(0))
        group.shutdown()
        return tensor.tolist(), work.is_completed(), str(group.errored())

    for summed, completed, error in with_store([(0, 0), (0, 1)], main).values():
        assert summed == [3.0] * 9
        assert completed
        assert "left the group" in error


def test_members_with_different_payloads_get_an_error() -> None:
    def main(chip: tuple[int, ...], number: int, address: str) -> Any:
        group = mmt.MeshProcessGroup((1, 2), chip, interface="lo", timeout=timedelta(seconds=20))
        group.configure(f"{address}/1", "x", number, 2)
        with pytest.raises(PayloadError, match="A mean of integers is not an integer"):
            group.allreduce([torch.ones(3, dtype=torch.int64)], dist.ReduceOp.AVG)
        # A refused payload leaves the group as it was; and large integers do not pass through a real type.
        mixed = [torch.full((3,), 2**60 + 1), torch.ones(3)]
        group.allreduce(mixed, dist.ReduceOp.SUM).wait()
        # So different that they run different plans.
        with pytest.raises(DisagreementError) as caught:
            group.allreduce([torch.ones(300_000 if number else 3)], AllreduceOptions()).wait()
        return mixed[0].tolist(), mixed[1].tolist(), caught.value.calls

    for whole, real, told in with_store([(0, 0), (0, 1)], main).values():
        assert whole == [2**61 + 2] * 3
        assert real == [2.0] * 3
        assert [word.split(", plan")[0] for word in told] == [
            "call 2, SUM of float32 [3]",
            "call 2, SUM of float32 [300000]",
        ]


def test_abort_does_not_wait_for_a_plan_and_ends_the_thread() -> None:
    def main(chip: tuple[int, ...], _: int, address: str) -> None:
        group = mmt.MeshProcessGroup((1, 1), chip, interface="lo", timeout=timedelta(seconds=20))
        group.configure(f"{address}/1", "x", 0, 1)
        planning, go_on = threading.Event(), threading.Event()
        get = group._plans.get

        def slow(*args: Any) -> Any:
            planning.set()
            assert go_on.wait(30)
            return get(*args)

        group._plans.get = slow  # type: ignore[assignment,method-assign]
        caller = ThreadPoolExecutor(1)
        call = caller.submit(summed, group, 1.0, size=10**6)
        assert planning.wait(30)
        aborted = caller_of(group.abort)
        assert aborted.wait(20), "abort waits for the plan"
        go_on.set()
        with pytest.raises(MeshmendError, match="left"):
            call.result(20)
        caller.shutdown()
        # Formed anew many times: the thread of the group before ends each time, and in the end all do.
        group._plans.get = get  # type: ignore[method-assign]
        for update in range(2, 12):
            group.configure(f"{address}/{update}", "x", 0, 1)
            assert summed(group, 1.0) == [1.0]
            wait_for_threads(1)
        group.shutdown()
        wait_for_threads(0)

    with_store([(0, 0)], main)


def wait_for_threads(most: int) -> None:
    """Wait until no more threads of ours than this are left; on a busy machine those that end take their time."""
    deadline = time.monotonic() + 20
    while sum(thread.name.startswith("meshmend") for thread in threading.enumerate()) > most:
        assert time.monotonic() < deadline, "a thread is left"
        time.sleep(0.01)


def caller_of(call: Any) -> threading.Event:
    """Call something in a thread of its own; return what says that it has returned."""
    done = threading.Event()

    def body() -> None:
        call()
        done.set()

    threading.Thread(target=body, daemon=True).start()
    return done


def test_plans_are_kept_up_to_a_bound_and_the_least_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, mesh = Plans(partial(plan, planner="hamiltonian"), hardware="ideal"), Mesh("4x4")
    boards = [mesh.fail(board) for board in ("2x2@0,0", "2x2@0,2", "2x2@2,0", "2x2@2,2")]
    made = [plans.get(board, 1000) for board in boards[:3]]
    one = made[0]
    columns = (one.step, one.src, one.dst, one.first_chunk, one.n_chunks, one.op, one.phase, one.owners)
    monkeypatch.setattr("meshmend.torch.plans.MAX_KEPT_BYTES", 3 * sum(column.nbytes for column in columns))
    assert plans.get(boards[0], 1000) is made[0]
    fourth = plans.get(boards[3], 1000)
    # Board 1 is the one whose last use is longest ago.
    assert [plans.get(boards[i], 1000) is made[i] for i in (0, 2)] == [True, True]
    assert plans.get(boards[3], 1000) is fourth
    assert plans.get(boards[1], 1000) is not made[1]
    assert len(plans._made) == 3
    # One plan is always kept, however large.
    monkeypatch.setattr("meshmend.torch.plans.MAX_KEPT_BYTES", 1)
    last = plans.get(boards[0], 10**6)
    assert len(plans._made) == 1
    assert plans.get(boards[0], 10**6) is last
