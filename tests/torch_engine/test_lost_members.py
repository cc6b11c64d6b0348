"""A member that dies or freezes while others train: each survivor has an error that names its chip, and none crashes.

Every way in which torch hands a collective to the backend, in real processes. The futures of some are read by C++,
where a wrong one ends the process with a signal: the exit codes are checked.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from meshmend import Mesh

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
from meshmend.errors import LostChipError  # noqa: E402
from meshmend.torch import lost  # noqa: E402
from meshmend.torch.lost import Reports  # noqa: E402
from meshmend.torch.private import future_for_cpp  # noqa: E402
from torch_engine.processes import free_port, remembered  # noqa: E402

MESH = Mesh("2x2")
SIZE = MESH.n_chips
TIMEOUT_S = 3.0
STEPS, LAST_STEP = 12, 5
"""How many steps the survivors try; the lost member takes part in the first few."""


def world() -> mmt.MeshBackend:
    group = dist.group.WORLD
    assert isinstance(group, mmt.MeshBackend)
    return group


def data_parallel() -> Callable[[], Any]:
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    return lambda: model(torch.ones(8, 3)).sum().backward()


def sharded() -> Callable[[], Any]:
    model = fully_shard(torch.nn.Linear(12, 8), mesh=init_device_mesh("cpu", (SIZE,)))
    return lambda: model(torch.ones(8, 12)).sum().backward()


def in_background() -> Callable[[], Any]:
    def step() -> None:
        works = [dist.all_reduce(torch.ones(n), async_op=True) for n in (5, 5000)]
        for work in works:
            work.wait()

    return step


def torchs_hook() -> Callable[[], Any]:
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    model.register_comm_hook(None, allreduce_hook)
    return lambda: model(torch.ones(8, 3)).sum().backward()


WAYS = {
    "DDP": data_parallel,
    "FSDP2": sharded,
    "async_op": in_background,
    "torch's hook": torchs_hook,
}


def take_part(rank: int, way: str, lost_rank: int, how: int, port: int, folder: Path) -> None:
    """Train as one member; write down the error, and end as any Python program does."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "cpu:meshmend",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=TIMEOUT_S),
        # Ranks in another order than chips: a rank must not be taken for its chip.
        pg_options=mmt.MeshOptions(MESH.shape, MESH.chip(SIZE - 1 - rank), plan=remembered),
    )
    step = WAYS[way]()
    started = time.monotonic()
    try:
        for number in range(STEPS):
            if rank == lost_rank and number == LAST_STEP:
                os.kill(os.getpid(), how)
            started = time.monotonic()
            step()
    except RuntimeError as error:
        kept = getattr(world().error, "lost", None)
        facts = {"text": str(error), "seconds": time.monotonic() - started, "step": number, "kept": kept}
        (folder / str(rank)).write_text(json.dumps(facts))


def lose(way: str, lost_rank: int, how: int, folder: Path) -> tuple[list[int | None], dict[int, Any]]:
    """Let a member of a group be lost; return the exit codes, and the survivors' errors by rank."""
    for exponent in range(4):
        remembered(MESH, payload_bytes=512 * 4**exponent)
    port, fork = free_port(), multiprocessing.get_context("fork")
    processes = [fork.Process(target=take_part, args=(rank, way, lost_rank, how, port, folder)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    try:
        for rank, process in enumerate(processes):
            if rank != lost_rank:
                process.join(60)
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
            process.join()
    found = {int(path.name): json.loads(path.read_text()) for path in folder.iterdir()}
    return [process.exitcode for process in processes], found


@pytest.mark.parametrize(
    ("way", "how", "lost_rank"),
    [pytest.param(way, signal.SIGKILL, 2, id=f"{way}-dies") for way in WAYS]
    + [
        pytest.param(way, signal.SIGSTOP, 1, id=f"{way}-freezes", marks=[pytest.mark.slow] * (way != "DDP"))
        for way in WAYS
    ],
)
@pytest.mark.usefixtures("compiler")
def test_each_survivor_has_an_error_that_names_the_lost_chip(
    way: str, how: signal.Signals, lost_rank: int, tmp_path: Path
) -> None:
    codes, errors = lose(way, lost_rank, how, tmp_path)
    assert [code for rank, code in enumerate(codes) if rank != lost_rank] == [0] * (SIZE - 1)
    assert codes[lost_rank] == -signal.SIGKILL
    chip = MESH.chip(SIZE - 1 - lost_rank)
    assert set(errors) == set(range(SIZE)) - {lost_rank}
    for found in errors.values():
        assert f"chip ({chip[0]},{chip[1]}) is lost" in found["text"], found
        assert found["kept"] == list(chip)
        # A chip may finish one call that the lost one had already served.
        assert found["step"] in (LAST_STEP, LAST_STEP + 1)
        silence_s = TIMEOUT_S if how == signal.SIGSTOP else 0.0
        assert found["seconds"] < silence_s + 2 * lost.SILENCE_S + 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "freezes"])
@pytest.mark.usefixtures("compiler")
def test_the_member_that_keeps_the_store_is_named_too(how: signal.Signals, tmp_path: Path) -> None:
    _, errors = lose("DDP", 0, how, tmp_path)
    assert set(errors) == set(range(1, SIZE))
    for found in errors.values():
        assert "chip (1,1) is lost" in found["text"], found


def search(store: Any, waited: dict[tuple[int, ...], list[tuple[int, ...]]], first: Any = None) -> dict[Any, Any]:
    """Let chips look for the lost one, each of which waited for some; return what each found."""
    found: dict[Any, Any] = {}
    reports = {chip: Reports(store, chip, first) for chip in waited}
    threads = [
        threading.Thread(target=lambda chip=chip: found.update({chip: reports[chip].find(waited[chip])}))
        for chip in waited
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


A, B, C, D = (0, 0), (0, 1), (1, 0), (1, 1)


@pytest.mark.parametrize(
    ("waited", "named"),
    [
        ({A: [D], B: [A], C: [B]}, [D, D, D]),  # each waited for one that had given up
        ({A: [B], B: [A, D], C: [A]}, [D, D, D]),  # A gave up first, and B noticed that before its own time was over
        ({A: [B], B: [C], C: [A]}, [None, None, None]),  # all are alive: a cable broke
        ({A: [C, D], B: [D]}, [C, D]),  # two are lost: each names one
    ],
)
def test_the_way_from_report_to_report_leads_to_the_lost_chip(
    waited: dict[Any, Any], named: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost, "SILENCE_S", 0.2)
    assert search(dist.HashStore(), waited) == dict(zip(waited, named, strict=True))


def test_an_old_report_does_not_hide_that_its_chip_is_lost_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost, "SILENCE_S", 0.2)
    store, now = dist.HashStore(), time.time()
    monkeypatch.setattr(time, "time", lambda: now - 2 * lost.FRESH_S)
    again = Reports(store, A, None)
    assert again.find([B]) == B
    assert search(store, {B: [C]}) == {B: C}, "B reports, and goes on in another group"
    monkeypatch.setattr(time, "time", lambda: now)
    assert again.find([B]) == B
    assert search(store, {C: [A]}) == {C: B}, "the new report of A"


def test_a_report_of_the_attempt_before_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    store, started = dist.HashStore(), lost.STARTED
    monkeypatch.setattr(time, "time", lambda: started - 1)
    search(store, {B: [A]})
    monkeypatch.undo()
    assert search(store, {A: [B]}) == {A: B}, "B has died since, without a report"


def test_a_store_that_breaks_names_the_chip_that_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost, "LIMIT_S", 0.3)

    class Silent(dist.TCPStore):
        def set(self, *_: Any) -> None:
            time.sleep(1)

    store = Silent("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert search(store, {B: [C], C: [B]}, first=A) == {B: A, C: A}
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert search(store, {B: [C]}, first=A) == {B: None}


@pytest.mark.parametrize(
    ("host", "found", "known"),
    [
        # For documentation (RFC 5737): nobody answers there.
        ("192.0.2.7", None, "; the store at chip (0,0) does not answer: its host or the way there is lost"),
        ("::1", A, ""),  # which the probe cannot ask
        ("no-such-host.invalid", A, ""),
    ],
)
def test_a_store_that_no_route_leads_to_accuses_nobody(
    host: str, found: Any, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost, "LIMIT_S", 0.3)

    class Far(dist.TCPStore):
        __init__ = lambda self: dist.TCPStore.__init__(self, "127.0.0.1", 0, is_master=True, wait_for_workers=False)  # noqa: E731

        def set(self, *_: Any) -> None:
            time.sleep(1)

    monkeypatch.setattr(Far, "host", host, raising=False)
    reports = Reports(Far(), B, A)
    assert reports.find([C]) == found
    assert reports.known == known


def test_a_future_with_an_exception_is_an_error_for_cpp_too() -> None:
    future: Any = torch.futures.Future()
    handed_out = future_for_cpp(future)
    future.set_exception(LostChipError(A, B, "2x2", "no answer", lost=B))
    with pytest.raises(RuntimeError, match=r"LostChipError: Chip \(0,0\) gave up .* chip \(0,1\) is lost"):
        handed_out.wait()
    with pytest.raises(RuntimeError, match="chip"):  # C++ throws what `collect_all` of a future with an error ends with
        torch.futures.collect_all([handed_out]).wait()
