"""The backend "meshmend" of torch.distributed, held against Gloo: the same calls on the same data.

Twelve processes are forked once for all quick cases and once for the slow ones: forming the groups takes longer than
most cases do. Values are small whole numbers, so that sums are exact in every dtype and in every order.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest

from meshmend import Mesh

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
from meshmend.errors import (  # noqa: E402
    DisagreementError,
    LostChipError,
    MeshError,
    ParameterError,
    WaitTimeoutError,
)
from meshmend.launch.chips import Chips  # noqa: E402
from torch_engine.processes import free_port, remembered  # noqa: E402

MESH = Mesh("4x4", failed=["2x2@2,2"])
CHIPS = [MESH.chip(rank) for rank in range(MESH.n_chips)]
# Ranks in no order that the mesh knows: the backend must not take a member's number for its chip's.
ORDER = [7, 2, 9, 0, 11, 4, 5, 1, 10, 3, 8, 6]
MEMBERS = [CHIPS[i] for i in ORDER]
TILE = sorted(MEMBERS.index(chip) for chip in ((0, 0), (0, 1), (1, 0), (1, 1)))
ACROSS = sorted(MEMBERS.index(chip) for chip in ((0, 1), (0, 3), (2, 1)))
DIAGONAL = sorted(MEMBERS.index(chip) for chip in ((0, 0), (1, 1), (2, 1)))

MiB = 2**20
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "bool": torch.bool,
}
OPS = {
    "SUM": dist.ReduceOp.SUM,
    "AVG": dist.ReduceOp.AVG,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "PRODUCT": dist.ReduceOp.PRODUCT,
}


def run_all(main: Callable[[int], Any], *, timeout_s: float = 240) -> list[Any]:
    """Run `main(rank)` in a process per chip, each with a default group of the backend; return what each returned."""
    for mesh in (MESH, Mesh("2x2"), Mesh("2x2", failed=["1,1"])):
        for exponent in range(7):
            remembered(mesh, payload_bytes=512 * 4**exponent)
    port = free_port()

    def body(chip: tuple[int, ...], rank: int) -> Any:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        warnings.simplefilter("ignore", FutureWarning)
        dist.init_process_group(
            "cpu:meshmend",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=12,
            timeout=timedelta(seconds=timeout_s),
            pg_options=mmt.MeshOptions("4x4", chip, plan=remembered),
        )
        result = main(rank)
        dist.barrier()
        return result

    with Chips() as chips:
        for rank, chip in enumerate(MEMBERS):
            chips.start(chip, body, rank)
        found = chips.results(timeout_s)
    return [found[chip] for chip in MEMBERS]


def values(n: int, dtype: Any, rank: int) -> Any:
    """Return elements that differ from rank to rank and from place to place, and whose sums and products are exact."""
    found = (torch.arange(n) * 7 + rank * 5) % 4 - 1
    return found.to(dtype) if dtype != torch.bool else found > 0


def legal(op: str, dtype: str) -> bool:
    """Return whether a dtype can be reduced so: no sums of bools, no means of whole numbers."""
    return dtype != "bool" if op in ("SUM", "PRODUCT") else dtype not in ("bool", "int64") if op == "AVG" else True


def waited(work: Any, is_async: bool) -> None:
    assert (work is not None) == is_async
    if is_async:
        assert work.wait()  # True, or the tensors where torch gives a future


def all_reduce(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    tensor = values(n, dtype, dist.get_rank())
    waited(dist.all_reduce(tensor, op, group, async_op=is_async), is_async)
    return [tensor]


def all_reduce_coalesced(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    tensors = [values(n, dtype, dist.get_rank()), values(n // 2 + 1, dtype, dist.get_rank() + 1)]
    waited(dist.all_reduce_coalesced(tensors, op, group, async_op=is_async), is_async)
    return tensors


def reduce_scatter(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    shards = [values(n, dtype, dist.get_rank() + 3 * member) for member in range(group.size())]
    output = torch.empty(n, dtype=dtype)
    waited(dist.reduce_scatter(output, shards, op, group, async_op=is_async), is_async)
    return [output, *shards]


def reduce_scatter_single(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    shards = values(group.size() * n, dtype, dist.get_rank())
    output = torch.empty(n, dtype=dtype)
    waited(dist.reduce_scatter_tensor(output, shards, op, group, async_op=is_async), is_async)
    return [output, shards]


def reduce_scatter_coalesced(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    inputs = [values(group.size() * n, dtype, dist.get_rank()), values(group.size() * 3, dtype, dist.get_rank() + 1)]
    outputs = [torch.empty(n, dtype=dtype), torch.empty(3, dtype=dtype)]
    with dist._coalescing_manager(group, async_ops=is_async) as works:
        for output, shards in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, shards, op, group)
    if is_async:
        works.wait()
    return outputs


def all_gather(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    outputs = [torch.empty(n, dtype=dtype) for _ in range(group.size())]
    waited(dist.all_gather(outputs, values(n, dtype, dist.get_rank()), group, async_op=is_async), is_async)
    return outputs


def all_gather_single(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    output = torch.empty(group.size() * n, dtype=dtype)
    shard = values(n, dtype, dist.get_rank())
    waited(dist.all_gather_into_tensor(output, shard, group, async_op=is_async), is_async)
    return [output]


def all_gather_coalesced(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    shards = [values(n, dtype, dist.get_rank()), values(3, dtype, dist.get_rank() + 1)]
    outputs = [torch.empty(group.size() * shard.numel(), dtype=dtype) for shard in shards]
    with dist._coalescing_manager(group, async_ops=is_async) as works:
        for output, shard in zip(outputs, shards, strict=True):
            dist.all_gather_into_tensor(output, shard, group)
    if is_async:
        works.wait()
    return outputs


def broadcast(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    tensor = values(n, dtype, dist.get_rank())
    root = dist.get_process_group_ranks(group)[group.size() - 2]
    waited(dist.broadcast(tensor, root, group, async_op=is_async), is_async)
    return [tensor]


def all_to_all(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    output = torch.empty(group.size() * n, dtype=dtype)
    shards = values(group.size() * n, dtype, dist.get_rank())
    waited(dist.all_to_all_single(output, shards, group=group, async_op=is_async), is_async)
    return [output]


def to_one(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    """Gather, scatter and reduce, whose roots are the group's first member."""
    root = dist.get_process_group_ranks(group)[0]
    mine = dist.get_rank() == root
    tensor, summed, taken = (
        values(n, dtype, dist.get_rank()),
        values(n, dtype, dist.get_rank()),
        torch.empty(n).to(dtype),
    )
    outputs = [torch.empty(n, dtype=dtype) for _ in range(group.size())] if mine else None
    waited(dist.gather(tensor, outputs, root, group, async_op=is_async), is_async)
    waited(dist.reduce(summed, root, op, group, async_op=is_async), is_async)
    waited(dist.scatter(taken, outputs, root, group, async_op=is_async), is_async)
    return [*(outputs or []), taken, *([summed] if mine else [])]


def passing_on(n: int, dtype: Any, op: Any, group: Any, is_async: bool) -> list[Any]:
    """Send to the next member, receive from the one before."""
    ranks = dist.get_process_group_ranks(group)
    at = ranks.index(dist.get_rank())
    arrived = torch.empty(n, dtype=dtype)
    works = [
        dist.isend(values(n, dtype, dist.get_rank()), ranks[(at + 1) % len(ranks)], group, tag=3),
        dist.irecv(arrived, ranks[at - 1], group, tag=3),
    ]
    for work in works:
        work.wait()
    dist.barrier(group)
    return [arrived]


REDUCING = [all_reduce, all_reduce_coalesced, reduce_scatter, reduce_scatter_single, reduce_scatter_coalesced]
MOVING = [all_gather, all_gather_single, all_gather_coalesced, broadcast, all_to_all, passing_on]
SIZES = (0, 1, 777)


Case = tuple[Callable[..., list[Any]], int, str, str, bool]


def differing(groups: dict[str, tuple[Any, Any]], cases: list[Case]) -> list[str]:
    """Run cases on groups of ours and of Gloo's with the same members; return those whose results differ."""
    found = []
    for name, (ours, theirs) in groups.items():
        for case, n, dtype, op, is_async in cases:
            arguments = n, DTYPES[dtype], OPS[op]
            wanted, got = case(*arguments, theirs, is_async), case(*arguments, ours, is_async)
            if not all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(wanted, got, strict=True)):
                found.append(f"{name}: {case.__name__} {n} {dtype} {op} {is_async}")
    return found


def pairs(rank: int) -> dict[str, tuple[Any, Any]]:
    """Return this process's groups, each beside one of Gloo's with the same members."""
    made = {}
    for name, ranks in (("all", list(range(12))), ("tile", TILE), ("across", ACROSS)):
        both = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
        if rank in ranks:
            made[name] = both
    return made


def quick_cases() -> list[Case]:
    """Return each collective once or twice, with dtypes, sizes and operations in turn; the slow test has them all."""
    cases: list[Case] = []
    for i, case in enumerate(REDUCING):
        cases += [(case, 777, [*DTYPES][i % 4], "SUM", True), (case, 1, "float32", "AVG", False)]
    for i, case in enumerate(MOVING):
        cases.append((case, 13, [*DTYPES][i % 5], "SUM", bool(i % 2)))
    cases += [(all_reduce, 5, "int64", op, False) for op in ("MIN", "MAX", "PRODUCT")]
    cases += [(reduce_scatter_single, 5, "bool", "MAX", False)]
    cases += [(case, 0, "float32", "SUM", False) for case in (all_reduce, all_gather_single, broadcast)]
    cases += [(to_one, 777, "float32", "SUM", False), (all_reduce, MiB // 2, "bfloat16", "SUM", False)]
    return cases


def mistakes(group: Any) -> dict[str, Callable[[], Any]]:
    """Return calls that a process group refuses, alike on every member."""
    one, n = torch.ones(4), group.size()
    premultiplied = dist._make_nccl_premul_sum(2.0)
    return {
        "BAND of floats": lambda: dist.all_reduce(one, dist.ReduceOp.BAND, group),
        "PREMUL_SUM": lambda: dist.all_reduce(one, premultiplied, group),
        # Gloo writes these two to standard error as well.
        "shards of another size": lambda: dist.reduce_scatter_tensor(one, torch.ones(4 * n + 1), group=group),
        "shards of another dtype": lambda: dist.reduce_scatter_tensor(one, torch.ones(4 * n).double(), group=group),
        "too many shards": lambda: dist.reduce_scatter(one, [one] * (n + 1), group=group),
        "a short output": lambda: dist.all_gather_into_tensor(torch.ones(4 * n - 1), one, group=group),
        "an output of another dtype": lambda: dist.all_gather_into_tensor(torch.ones(4 * n).double(), one, group=group),
        "too few outputs": lambda: dist.all_gather([one] * (n - 1), one, group=group),
        "outputs of several sizes": lambda: dist.all_gather([torch.ones(4 + i) for i in range(n)], one, group=group),
        "outputs of several dtypes": lambda: dist.all_gather([one, one.int()] * (n // 2), one, group=group),
        "no such root": lambda: group.broadcast(one, n),
        "a sparse broadcast": lambda: dist.broadcast(torch.eye(3).to_sparse(), 0, group=group),
    }


def kinds(group: Any) -> dict[str, type]:
    """Return which builtin exception each mistake raises."""
    found: dict[str, type] = {}
    for name, call in mistakes(group).items():
        try:
            call()
        except Exception as error:
            found[name] = next(kind for kind in (ValueError, TypeError, RuntimeError) if isinstance(error, kind))
    return found


def special(group: Any, rank: int) -> dict[str, Any]:
    """Return what tensors that are not plain and contiguous become, and what a work says."""
    found: dict[str, Any] = {}
    columns = torch.full((3, 4), float(rank)).t()
    dist.all_reduce(columns, group=group)
    every_second = torch.full((6,), float(rank))
    dist.broadcast(every_second[::2], 1, group=group)
    leaf = torch.full((2,), float(rank), requires_grad=True)
    dist.all_reduce(leaf * 1, group=group)
    with torch.inference_mode():
        inference = torch.empty(24)
        dist.all_gather_into_tensor(inference, torch.full((2,), float(rank)), group=group)
    found["tensors"] = columns.tolist(), every_second.tolist(), inference.tolist()
    own = torch.full((24,), -1.0)
    own[2 * rank : 2 * rank + 2] = rank
    dist.all_gather_into_tensor(own, own[2 * rank : 2 * rank + 2], group=group)
    found["in place"] = own.tolist()
    work = dist.all_reduce(torch.full((3,), float(rank)), async_op=True, group=group)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    found["future"] = doubled.wait().tolist(), work.result()[0].tolist(), work.is_success(), work.exception()
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse, group=group)
    found["sparse"] = sparse.to_dense().diagonal().tolist()
    # What traced programs call, from C++; torch's own functions for it import its compiler, which takes seconds.
    ops, name = torch.ops._c10d_functional, group.group_name
    traced = (
        ops.all_reduce(torch.full((2,), float(rank)), "max", name),
        ops.all_gather_into_tensor(torch.tensor([float(rank)]), 12, name),
        ops.reduce_scatter_tensor(torch.arange(12.0), "sum", 12, name),
        ops.broadcast(torch.full((2,), float(rank)), 4, name),
    )
    found["traced"] = [ops.wait_tensor(tensor).tolist() for tensor in traced]
    objects: list[Any] = [None] * 12
    dist.all_gather_object(objects, {"rank": rank}, group)
    found["objects"] = objects
    return found


def sub_groups(rank: int) -> dict[str, Any]:
    """Return the meshes of groups that are made in other ways, and sums over them."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        made = [dist.new_group(DIAGONAL), dist.new_group(DIAGONAL)]
    if rank in DIAGONAL:
        total = torch.full((2,), float(rank))
        dist.all_reduce(total, group=made[0])
        found["diagonal"] = made[0].mesh, total.tolist()
        found["warnings"] = [str(one.message) for one in said if "form no mesh" in str(one.message)]
    part = dist.group.WORLD.split_group(TILE)
    if part is not None:
        total = torch.full((2,), float(rank))
        part.allreduce(total).wait()
        found["split"] = str(part.mesh), part.rank(), total.tolist()
    tiles = mmt.tile_ranks("2x2")
    mesh = DeviceMesh("cpu", tiles, mesh_dim_names=("replicate", "shard"))
    found["tiles"] = tiles, str(mesh["replicate"].get_group().mesh), str(mesh["shard"].get_group().mesh)
    return found


def errors_of_members(rank: int) -> dict[str, Any]:
    """Return what happens where members do not call the same thing, and where one does not call in time."""
    found: dict[str, Any] = {}
    group = dist.new_group(TILE, timeout=timedelta(seconds=2))
    if rank not in TILE:
        return found
    try:
        dist.all_reduce(torch.ones(3 + (rank == TILE[0])), group=group)
    except DisagreementError as error:
        found["disagreement"] = len(error.calls)
    again = torch.ones(3)
    dist.all_reduce(again, group=group)
    found["after it"] = again.tolist()
    if rank != TILE[0]:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        try:
            work.wait(timedelta(milliseconds=50))
        except WaitTimeoutError as error:
            found["wait"] = isinstance(error, RuntimeError)
        try:
            work.wait()
        except LostChipError as error:
            found["lost"] = isinstance(error, RuntimeError)
        found["error"] = type(work.exception()).__name__, work.is_success()
    return found


def quick(rank: int) -> dict[str, Any]:
    groups = pairs(rank)
    world, gloo = groups["all"]
    return {
        "meshes": {name: str(ours.mesh) for name, (ours, _) in groups.items()},
        "backend": (dist.get_backend(), world.name(), isinstance(dist.group.WORLD, mmt.MeshBackend)),
        "differing": differing(groups, quick_cases()),
        "kinds": (kinds(world), kinds(gloo)),
        **special(world, rank),
        **sub_groups(rank),
        **errors_of_members(rank),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    if torch.__version__.startswith("2.7."):
        pytest.skip("Gloo of torch 2.7, which results are held to, has no reduce-scatter and no means")
    return run_all(quick)


def test_every_collective_gives_what_gloo_gives(results: list[dict[str, Any]]) -> None:
    assert {name for result in results for name in result["differing"]} == set()
    meshes = {"all": "4x4 minus 2x2@2,2", "tile": "2x2", "across": "2x2 minus 1x1@1,1"}
    assert {**results[TILE[0]]["meshes"], **results[ACROSS[0]]["meshes"]} == meshes
    assert {result["backend"] for result in results} == {("cpu:meshmend", "meshmend", True)}


def test_mistakes_raise_what_gloo_raises(results: list[dict[str, Any]]) -> None:
    ours, theirs = results[0]["kinds"]
    assert len(ours) == 12
    for result in results:
        assert result["kinds"] == (ours, theirs)
    assert ours == theirs


def test_tensors_of_every_form_and_works(results: list[dict[str, Any]]) -> None:
    ranks = [float(rank) for rank in range(12)]
    twice = sorted(ranks * 2)
    for rank, result in enumerate(results):
        columns, every_second, inference = result["tensors"]
        assert columns == [[66.0] * 3] * 4
        assert every_second == [1.0, float(rank)] * 3
        assert inference == result["in place"] == twice
        assert result["future"] == ([132.0] * 3, [66.0] * 3, True, None)
        assert result["sparse"] == [12.0] * 3
        assert result["traced"] == [[11.0] * 2, ranks, [12.0 * rank], [4.0] * 2]
        assert result["objects"] == [{"rank": other} for other in range(12)]


def test_groups_that_are_parts_of_the_mesh_and_others(results: list[dict[str, Any]]) -> None:
    total = float(sum(DIAGONAL))
    for position, rank in enumerate(DIAGONAL):
        assert results[rank]["diagonal"] == (None, [total] * 2)
        assert len(results[rank]["warnings"]) == (position == 0), "one warning, from one process"
    for position, rank in enumerate(TILE):
        assert results[rank]["split"] == ("2x2", position, [float(sum(TILE))] * 2)
    tiles, across, inside = results[0]["tiles"]
    assert (across, inside) == ("2x2 minus 1x1@1,1", "2x2")
    assert [[MEMBERS[rank] for rank in tile] for tile in tiles] == [
        [(y, x), (y, x + 1), (y + 1, x), (y + 1, x + 1)] for y, x in ((0, 0), (0, 2), (2, 0))
    ]


def test_members_that_disagree_or_do_not_call(results: list[dict[str, Any]]) -> None:
    for rank in TILE:
        assert (results[rank]["disagreement"], results[rank]["after it"]) == (4, [4.0] * 3)
    for rank in TILE[1:]:
        assert (results[rank]["wait"], results[rank]["lost"]) == (True, True)
        assert results[rank]["error"] == ("LostChipError", False)


@pytest.mark.slow
def test_every_collective_dtype_and_size_gives_what_gloo_gives() -> None:
    cases: list[Case] = [
        (case, n, dtype, "MAX" if dtype == "bool" else "SUM", is_async)
        for case, n, dtype, is_async in product(REDUCING + MOVING, SIZES, DTYPES, (False, True))
    ]
    cases += [
        (case, n, dtype, op, False)
        for case, n, dtype, op in product((all_reduce, reduce_scatter_single), SIZES, DTYPES, OPS)
        if legal(op, dtype)
    ]
    cases += [(to_one, n, dtype, "MAX", a) for n, dtype, a in product((1, 777), ("float32", "int64"), (False, True))]
    for dtype, is_async in product(DTYPES, (False, True)):
        n, op = 10 * MiB // DTYPES[dtype].itemsize, "MAX" if dtype == "bool" else "SUM"
        cases += [(case, n, dtype, op, is_async) for case in (all_reduce, broadcast)]
        cases += [(case, n // 12, dtype, op, is_async) for case in (reduce_scatter_single, all_gather_single)]
    assert len(cases) > 480
    found = run_all(lambda rank: differing(pairs(rank), cases), timeout_s=3000)
    assert {name for result in found for name in result} == set()


def test_a_process_says_where_its_chip_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MESHMEND_SHAPE", "MESHMEND_CHIP", "MESHMEND_WRAP", "MESHMEND_MACHINE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeshError, match="MESHMEND_SHAPE=4x4"):
        mmt.MeshOptions().position()
    with pytest.raises(MeshError, match=r"Chip \(4,0\) lies outside"):
        mmt.MeshOptions("4x4", (4, 0)).position()
    monkeypatch.setenv("MESHMEND_SHAPE", "4x8")
    monkeypatch.setenv("MESHMEND_CHIP", "1,2")
    monkeypatch.setenv("MESHMEND_WRAP", "1")
    assert mmt.MeshOptions().position() == (Mesh("4x8", wrap=(False, True)), (1, 2))
    assert mmt.MeshOptions(chip=(3, 3)).position()[1] == (3, 3)
    with pytest.raises(ParameterError, match="init_process_group"):
        mmt.tile_ranks("2x2")
