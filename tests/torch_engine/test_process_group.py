"""The process group that torchft uses: it finds the hole, plans round it, and refuses what cannot be right."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from meshmend import Mesh, PlanError
from meshmend.errors import MeshError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
pytest.importorskip("torchft", reason="torchft is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402
from torch.distributed.distributed_c10d import AllreduceOptions, BarrierOptions, BroadcastOptions  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
from meshmend.torch.plans import MAX_CHUNKS, Plans  # noqa: E402
from torch_engine.processes import with_store  # noqa: E402

Members = list[tuple[int, ...]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    # How soon members give each other up is for the tests of failures: here nobody dies, and a machine may be slow.
    monkeypatch.setattr("meshmend.torch.process_group.MEETING_TIMEOUT", timedelta(seconds=30))


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

    def main(chip: tuple[int, ...], number: int, address: str) -> Any:
        group = make(chip)
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
        wanted = "left the group" if chip == (1, 1) else "gave up an all-reduce"
        assert all(wanted in message for message in messages)


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        ({"chip": (0, 0)}, {"chip": (0, 0)}, "2 members say that they are chip (0,0)"),
        ({"chip": (0, 0)}, {"chip": (0, 1), "shape": (4, 4)}, "Every member needs the same shape"),
        ({"chip": (0, 0)}, {"chip": (0, 1), "planner": "hamiltonian"}, "Every member needs the same shape"),
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


def test_before_configure_there_is_no_mesh() -> None:
    group = make((0, 1))
    with pytest.raises(MeshError, match=r"Chip \(0,1\) knows its mesh once torchft has called configure"):
        _ = group.mesh
    with pytest.raises(MeshError, match="lies outside the 2x4 mesh"):
        make((5, 5))


def test_payloads_share_few_plans_and_prepared_ones_are_found() -> None:
    sizes = [1, 10**5, 10**6, 10**7, 10**8, 10**11]
    chunks = [Plans.chunks(size) for size in sizes]
    assert chunks == sorted(chunks)
    assert chunks[0] == 1
    assert chunks[-1] == MAX_CHUNKS
    plans, mesh = Plans("hamiltonian"), Mesh("4x4")
    plans.prepare(mesh, ["2x2@0,0", "2x2@2,2"], payload_bytes=1000)
    assert plans.get(mesh.fail("2x2@2,2"), 1000) is plans.get(mesh.fail("2x2@2,2"), 1001)
    with pytest.raises(PlanError, match="hamiltonian cannot plan for 4x4 minus 1x1@1,1"):
        plans.get(mesh.fail((1, 1)), 1000)
