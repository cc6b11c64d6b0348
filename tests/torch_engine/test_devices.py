"""Tensors on an accelerator: every call gives the bits that it gives on the CPU, however late copies are.

The accelerator is our own (`accelerator`), with streams that are asynchronous. Three chips of a 2×2 mesh run the same
calls on both devices and compare them, with copies that take place at once and 20 ms late. Then one wait at a time is
taken out of meshmend, and a comparison has to fail.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from meshmend import Mesh

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
from meshmend.errors import CollectiveError, PayloadError  # noqa: E402
from meshmend.launch.chips import Chips  # noqa: E402
from meshmend.torch import staging  # noqa: E402
from meshmend.torch.staging import PinnedBuffer, Staged  # noqa: E402
from meshmend.torch.work import Worker  # noqa: E402
from torch_engine import accelerator  # noqa: E402
from torch_engine.processes import free_port, remembered  # noqa: E402

pytestmark = pytest.mark.skipif(bool(accelerator.MISSING), reason=accelerator.MISSING)

MESH = Mesh("2x2", failed=["1,1"])
N = MESH.n_chips
SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
MANY = 5_003
"""Elements of a payload of several pieces, which have 4 kB here."""

Call = Callable[[str], list[Any]]
"""A case: makes its tensors on a device, and returns those that hold results, on the CPU."""


@pytest.fixture(scope="module")
def library() -> Path:
    return accelerator.build()


def values(n: int, device: str, *, dtype: Any = torch.float32, seed: int = 0) -> Any:
    """Return numbers whose sums depend on the order, brought to the device by a copy that may still be under way."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    made = torch.randn(n, generator=generator).to(dtype)
    if device == "cpu" or n == 0:
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


def blank(n: int, device: str) -> Any:
    return torch.full((n,), -1.0).to(device)


def all_reduce(device: str) -> list[Any]:
    found = []
    for n, op in ((7, SUM), (MANY, SUM), (MANY, AVG), (MANY, MAX), (0, SUM)):
        tensor = values(n, device)
        dist.all_reduce(tensor, op)
        found.append(tensor)
    return found


def of_other_kinds(device: str) -> list[Any]:
    half = values(MANY, device, dtype=torch.bfloat16)
    columns = values(60 * 50, device).view(60, 50)[:, 3:40].t()
    for tensor in (half, columns):
        dist.all_reduce(tensor)
    return [half.float(), columns.contiguous()]


def in_the_background(device: str) -> list[Any]:
    """Two all-reduces and a broadcast under way at once, of which each needs the memory of the one before."""
    for _ in range(10):
        values(1, device)  # the caller's stream is busy for a while
    tensors = [values(MANY, device, seed=seed) for seed in range(3)]
    works = [dist.all_reduce(tensors[0], async_op=True), dist.broadcast(tensors[1], 1, async_op=True)]
    works.append(dist.all_reduce(tensors[2], AVG, async_op=True))
    future = works[2].get_future()
    for work in works[:2]:
        assert work.wait()
    assert works[0].is_success()
    future.wait()
    return tensors


def beside_a_cpu(device: str) -> list[Any]:
    """Rank 1 has its tensors on the CPU: what it sends is there before the others' last results are copied."""
    own = "cpu" if dist.get_rank() == 1 else device
    tensors = [values(MANY, own, seed=seed) for seed in range(2)]
    works = [dist.all_reduce(tensors[0], async_op=True), dist.broadcast(tensors[1], 1, async_op=True)]
    for work in works:
        work.wait()
    return [tensor.to(device) for tensor in tensors]


def coalesced(device: str) -> list[Any]:
    tensors = [values(n, device) for n in (9, MANY, 40)]
    options = dist.AllreduceCoalescedOptions()
    dist.group.WORLD.allreduce_coalesced(tensors, options).wait()
    return tensors


def sharded(device: str) -> list[Any]:
    output, whole = blank(MANY, device), blank(N * MANY, device)
    dist.reduce_scatter_tensor(output, values(N * MANY, device), AVG)
    dist.all_gather_into_tensor(whole, values(MANY, device))
    parts = [blank(50, device) for _ in range(N)]
    dist.all_gather(parts, values(50, device))
    one = blank(70, device)
    dist.reduce_scatter(one, [values(70, device, seed=other) for other in range(N)])
    return [output, whole, *parts, one]


def of_gloo(device: str) -> list[Any]:
    rank = dist.get_rank()
    here, there = values(30, device), blank(30, device)
    works = [dist.isend(here, (rank + 1) % N), dist.irecv(there, (rank - 1) % N)]
    for work in works:
        work.wait()
    mixed, held = blank(30, device), values(30, device, seed=1)
    dist.all_to_all_single(mixed, values(30, device, seed=2))
    dist.reduce(held, 2)
    gathered = [blank(4, device) for _ in range(N)] if rank == 1 else None
    dist.gather(values(4, device), gathered, 1)
    scattered = blank(4, device)
    dist.scatter(scattered, [values(4, device, seed=s) for s in range(N)] if rank == 0 else None, 0)
    dist.barrier(device_ids=[0] if device != "cpu" else None)
    found: list[Any] = [None] * N
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": r} for r in range(N)]
    return [there, mixed, *([held] if rank == 2 else []), *(gathered or []), scattered]


def of_a_group_without_a_mesh(device: str) -> list[Any]:
    """Chips (0, 1) and (1, 0) have no cable; DDP takes the future of Gloo's all-reduce."""
    apart = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    assert apart.mesh is None
    tensor, other = values(MANY, device), values(8, device)
    dist.all_reduce(tensor, group=apart)
    work = dist.all_reduce(other, group=apart, async_op=True)
    work.get_future().wait()
    return [tensor, other, *losses(device, lambda model: DistributedDataParallel(model, process_group=apart))]


def losses(device: str, wrap: Callable[[Any], Any]) -> list[Any]:
    """Train three steps; return the losses and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 70), nn.ReLU(), nn.Linear(70, 30), nn.ReLU(), nn.Linear(30, 1)).to(device)
    model = wrap(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    found = []
    for step in range(3):
        inputs = values(20 * 4, device, seed=step).view(4, 20)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        found.append(loss.detach())
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [*found, *(p.detach() for p in whole)]


def fsdp2(device: str) -> list[Any]:
    mesh = init_device_mesh(device, (N,))

    def shard(model: Any) -> Any:
        for layer in model[::2]:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return losses(device, shard)


def engine_alone(device: str) -> list[Any]:
    """An engine runs in the caller's thread, on the caller's stream."""
    engine = mmt.Engine(remembered(MESH, payload_bytes=512), dist.get_rank(), dist.group.WORLD)
    tensor, tree = values(MANY, device), {"a": values(9, device), "b": [values(MANY, device, seed=1)]}
    engine.all_reduce(tensor)
    mmt.all_reduce(tree, engine, mean=True)
    return [tensor, tree["a"], tree["b"][0]]


CASES: dict[str, Call] = {
    "all-reduce": all_reduce,
    "other kinds": of_other_kinds,
    "in the background": in_the_background,
    "beside a CPU": beside_a_cpu,
    "coalesced": coalesced,
    "sharded": sharded,
    "Gloo's": of_gloo,
    "no mesh": of_a_group_without_a_mesh,
    "DDP": lambda device: losses(device, DistributedDataParallel),
    "FSDP2": fsdp2,
    "an engine alone": engine_alone,
}

OF_DDP = ["no mesh", "DDP", "FSDP2"]
"""Cases in which torch itself also copies, from memory that is not pinned."""


def run_all(main: Callable[[], Any], library: Path, delay_ms: float) -> list[Any]:
    """Run `main()` on three chips, each with a default group for the CPU and the accelerator."""
    for exponent in range(5):
        remembered(MESH, payload_bytes=512 * 4**exponent)
    port = free_port()

    def body(chip: tuple[int, ...], rank: int) -> Any:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # of names that are new in torch, and of a group without a mesh
        staging.PIECE_BYTES = 4096
        accelerator.Accelerator(library, delay_ms=delay_ms)
        dist.init_process_group(
            "cpu:meshmend,fake:meshmend",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=N,
            timeout=timedelta(seconds=60),
            pg_options=mmt.MeshOptions("2x2", chip, plan=remembered),
        )
        result = main()
        dist.barrier()
        return result

    with Chips() as chips:
        for rank in range(N):
            chips.start(MESH.chip(rank), body, rank)
        return list(chips.results(240).values())


def differing(names: Iterator[str] | list[str]) -> list[str]:
    """Return the cases that have not the same bits on both devices."""
    found = []
    for name in names:
        wanted, got = CASES[name]("cpu"), CASES[name]("fake")
        assert all(tensor.device.type == "fake" for tensor in got)
        on_host = [tensor.cpu() for tensor in got]  # on the stream of the caller, which has waited
        if len(wanted) != len(got) or not all(map(torch.equal, wanted, on_host)):
            found.append(name)
    return found


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("delay_ms", [pytest.param(0, marks=pytest.mark.slow), 20])
def test_every_call_gives_the_bits_that_it_gives_on_the_cpu(library: Path, delay_ms: float) -> None:
    def main() -> Any:
        device = torch.fake
        ours = [name for name in CASES if name not in OF_DDP]
        wrong = differing(ours)
        unpinned = device.unpinned
        wrong += differing(OF_DDP)
        copies = device.queued
        # What has been needed before is pinned once: the same call again makes copies and no memory.
        held = torch.zeros(MANY, device="fake")
        blocks = device.pinned
        dist.all_reduce(held)
        return wrong, device.queued - copies, device.pinned - blocks, unpinned

    for wrong, copies, blocks, unpinned in run_all(main, library, delay_ms):
        assert wrong == []
        assert copies == 2 * -(-4 * MANY // 4096), "a piece goes down and comes back"
        assert blocks == 0
        assert unpinned == 0


BUSY, MIXED = "in the background", "beside a CPU"
WITHOUT: dict[str, tuple[str, Any, str, str, str]] = {
    "a wait for what arrives from the device": (BUSY, Staged, "wait", "arrivals[-1].synchronize()", "pass"),
    "a wait for the caller's stream": (BUSY, Worker, "start", "stream.wait_event(queued)", "pass"),
    "a wait for what returns": (BUSY, Worker, "start", "devices=None if device is None else [device]", ""),
    "a wait for the memory": (MIXED, PinnedBuffer, "take", "self.last_copy.synchronize()", "pass"),
}


@pytest.mark.parametrize("what", WITHOUT)
def test_a_missing_wait_is_caught(library: Path, what: str) -> None:
    case, owner, name, old, new = WITHOUT[what]

    def main() -> Any:
        source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        assert source.count(old) == 1, source
        broken: dict[str, Any] = {}
        code = compile(f"from __future__ import annotations\n{source.replace(old, new)}", "<broken>", "exec")
        exec(code, vars(sys.modules[owner.__module__]), broken)  # noqa: S102
        setattr(owner, name, broken[name])
        return differing([case])

    assert [case] in run_all(main, library, delay_ms=20)


def test_tensors_of_several_devices_are_refused_before_anything_is_sent(library: Path) -> None:
    def main() -> Any:
        pair = [torch.ones(3), torch.ones(3, device="fake")]
        with pytest.raises(CollectiveError, match="needs tensors on one device, got tensors on cpu, fake:0"):
            dist.group.WORLD.allreduce_coalesced(pair, dist.AllreduceCoalescedOptions())
        with pytest.raises(CollectiveError, match="tensors on cpu, fake:0"):
            dist.all_gather_into_tensor(torch.ones(9, device="fake"), torch.ones(3))
        engine = mmt.Engine(remembered(MESH, payload_bytes=512), dist.get_rank(), dist.group.WORLD)
        with pytest.raises(PayloadError, match="tensors on cpu, fake:0"):
            mmt.all_reduce(pair, engine)
        # Members may have theirs on different devices: the bits are the same.
        tensor = torch.full((50,), 2.0, device="cpu" if dist.get_rank() else "fake")
        dist.all_reduce(tensor)
        return tensor.cpu().unique().tolist()

    assert run_all(main, library, 0) == [[2.0 * N]] * N


def test_the_script_of_the_page_finds_the_bits_of_the_cpu(library: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "torch_devices.md").read_text(encoding="utf-8")
    (script,) = (block for block in page.split("```") if "current_accelerator()" in block)
    port = free_port()

    def body(chip: tuple[int, ...], rank: int) -> Any:
        torch.set_num_threads(1)
        accelerator.Accelerator(library)
        os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{N}", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": f"{port}", "MESHMEND_SHAPE": "2x2", "MESHMEND_FAILED": "1,1"}
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(script.removeprefix("python"), {})  # noqa: S102
        return said.getvalue().splitlines()

    with Chips() as chips:
        for rank in range(N):
            chips.start(MESH.chip(rank), body, rank)
        for rank, lines in enumerate(chips.results(120).values()):
            assert lines == [f"rank {rank}, {n} elements on fake: True" for n in (10, 300_000, 3_000_000)]


def test_a_job_under_torchft_reduces_a_devices_gradients(library: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: pip install 'meshmend[torch]'")
    port = free_port()

    def body(chip: tuple[int, ...], rank: int) -> Any:
        torch.set_num_threads(1)
        staging.PIECE_BYTES = 4096
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        accelerator.Accelerator(library, delay_ms=20)
        group = mmt.MeshProcessGroup("2x2", chip, interface="lo", plan=remembered, timeout=timedelta(seconds=30))
        group.configure(f"127.0.0.1:{port}/quorum", f"chip{rank}", rank, N)
        found = []
        for device in ("cpu", "fake"):
            tensors = [(torch.arange(n) / 7 + rank).to(device) for n in (MANY, 3)]
            group.allreduce(tensors, dist.AllreduceOptions()).wait()
            found.append([tensor.cpu() for tensor in tensors])
        store.set(f"done/{rank}", "")
        if rank == 0:
            store.wait([f"done/{other}" for other in range(N)])
        return all(map(torch.equal, *found))

    with Chips() as chips:
        for rank in range(N):
            chips.start(MESH.chip(rank), body, rank)
        assert list(chips.results(120).values()) == [True] * N
