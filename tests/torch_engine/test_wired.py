"""DDP on hosts that are wired to each other: network namespaces with cables, and the routes that meshmend prints."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
import time
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rows import others_slow

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
import test_lldp as wiring  # noqa: E402
from meshmend import Mesh  # noqa: E402
from meshmend.launch.chips import Chips  # noqa: E402
from meshmend.machines import read_machine  # noqa: E402
from meshmend.schedule import Collective, Schedule  # noqa: E402
from meshmend.torch import slow  # noqa: E402
from meshmend.torch.plans import Plans  # noqa: E402
from test_lldp import NAMES, address, folder, hosts  # noqa: E402
from torch_engine.processes import remembered  # noqa: E402

__all__ = ["folder", "hosts"]
CLONE_NEWNET = 0x40000000
PULLED = ("node-c", "node-a")
"""The ends of the cable that is pulled."""
WIDTH, STEPS_AFTER = 200, 20


def losses(wrap: Any, share: slice) -> list[float]:
    torch.manual_seed(0)
    inputs = torch.randn(60, 5)
    targets = inputs.sum(dim=1, keepdim=True)
    model = wrap(torch.nn.Linear(5, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        sgd.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[share]), targets[share]).backward()
        sgd.step()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as handle:  # noqa: PTH123
        assert ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET) == 0


def train(namespaces: dict[str, str], file: Path, port: int) -> list[Any]:
    """Train on every host; return the mesh and the weights of each."""
    machine = read_machine(file)
    remembered(machine.mesh, payload_bytes=512)

    def body(place: tuple[int, ...], rank: int) -> Any:
        torch.set_num_threads(1)
        os.environ |= {"MESHMEND_MACHINE": str(file), "MESHMEND_CHIP": machine.chips[place].name}
        os.environ["GLOO_SOCKET_IFNAME"] = "mesh0"
        store = dist.TCPStore(address(NAMES[0]), port, is_master=NAMES[rank] == NAMES[0], wait_for_workers=False)
        options = mmt.MeshOptions(plan=remembered, hardware="gloo-loopback")
        dist.init_process_group(
            "cpu:meshmend", store=store, rank=rank, world_size=6, timeout=timedelta(seconds=60), pg_options=options
        )
        found = losses(DistributedDataParallel, slice(10 * rank, 10 * rank + 10))
        dist.barrier()
        return str(dist.group.WORLD.mesh), found

    with Chips(lambda place: enter(namespaces[machine.chips[place].name])) as chips:
        for place, chip in machine.chips.items():
            chips.start(place, body, NAMES.index(chip.name))
        return list(chips.results(200).values())


def pull(hosts: dict[str, str]) -> None:
    a, b = PULLED
    wiring.sh("ip", "-n", hosts[a], "link", "set", wiring.wires()[a, b], "down")


def lay_anew(folder: Path, hosts: dict[str, str]) -> Path:
    """Describe the machine without the cable, and set the routes of that; return the file."""
    left = {ends: port for ends, port in wiring.wires().items() if set(ends) != set(PULLED)}
    for host in PULLED:
        (folder / f"{host}.json").write_text(wiring.neighbours(host, left), encoding="utf-8")
    today = wiring.described(folder, "today", intended="wired")
    assert wiring.reached(hosts, today) == 30
    return today


def sent() -> Counter[str]:
    """Return how many bytes each interface has sent, by the kernel's account."""
    rows = (line.split() for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:])
    return Counter({row[0].removesuffix(":"): int(row[9]) for row in rows})


def pieces(rank: int | None) -> tuple[Any, Any, Any]:
    """Return a model, its optimizer and its loss, of a host's own samples or of all."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(60, WIDTH)
    targets = inputs.flip(1)
    own = slice(None) if rank is None else slice(10 * rank, 10 * rank + 10)
    module = torch.nn.Linear(WIDTH, WIDTH)
    sgd = torch.optim.SGD(module.parameters(), lr=0.5)
    return module, sgd, lambda model: torch.nn.functional.mse_loss(model(inputs[own]), targets[own])


def weights(module: Any) -> list[float]:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return [float(value) for parameter in whole for value in parameter.detach().flatten()]


def train_on(_: tuple[int, ...], way: str, rank: int, name: str, file: Path, folder: Path) -> Any:
    """Train until the plan has changed, and for some steps more; return what happened."""
    warnings.simplefilter("ignore")  # both ends warn of the cable, and torchft of other things
    torch.set_num_threads(1)
    os.environ |= {"MESHMEND_MACHINE": str(file), "MESHMEND_CHIP": name, "GLOO_SOCKET_IFNAME": "mesh0"}
    module, optimizer, loss = pieces(rank)
    model: Any
    timeout = timedelta(seconds=60)
    if way != "torchft":
        store = dist.TCPStore(address(NAMES[0]), 29500, is_master=rank == 0, wait_for_workers=False)
        options = mmt.MeshOptions(plan=remembered, hardware="gloo-loopback")
        dist.init_process_group(
            "cpu:meshmend", store=store, rank=rank, world_size=6, timeout=timeout, pg_options=options
        )
        group: Any = dist.group.WORLD
        if way == "ddp":
            model = DistributedDataParallel(module)
        else:
            model = fully_shard(module, mesh=init_device_mesh("cpu", (6,)))
            optimizer = torch.optim.SGD(model.parameters(), lr=optimizer.param_groups[0]["lr"])
    else:
        import torchft
        from torchft.coordination import LighthouseServer

        if rank == 0:
            server = LighthouseServer(
                bind="0.0.0.0:29510",
                min_replicas=6,
                join_timeout_ms=60000,
                quorum_tick_ms=20,
                heartbeat_timeout_ms=30000,
            )
            (folder / "lighthouse").touch()
        while not (folder / "lighthouse").exists():
            time.sleep(0.05)
        socket.gethostname = lambda: address(name)  # where torchft serves its state
        group = mmt.MeshProcessGroup(plan=remembered, hardware="gloo-loopback", timeout=timeout)
        manager = mmt.Manager(
            group,
            lambda saved: module.load_state_dict(saved),
            module.state_dict,
            lighthouse_addr=f"http://{address(NAMES[0])}:29510",
        )
        model, optimizer = mmt.DistributedDataParallel(manager, module), torchft.Optimizer(manager, optimizer)
    n_done, changed = 0, 0
    meshes: list[str] = []
    losses: list[float] = []
    before: Counter[str] = Counter()
    while not changed or n_done < changed + STEPS_AFTER:
        optimizer.zero_grad()
        own = loss(model)
        own.backward()
        optimizer.step()
        assert way != "torchft" or manager.current_step() == n_done + 1, f"a step was lost: {manager.errored()}"
        n_done += 1
        losses.append(own.item())
        if not meshes or str(group.mesh) != meshes[-1]:
            meshes.append(str(group.mesh))
        if "cable" in meshes[-1] and not changed:
            changed = n_done
        if n_done == changed + 2:
            before = sent()
        (folder / f"at-{rank}").write_text(str(n_done))
    after = sent()
    after.subtract(before)
    if way != "torchft":
        learned = weights(module)
        dist.barrier()
    else:
        learned = weights(module)
        manager.shutdown()
        if rank == 0:
            server.shutdown()
    return n_done, meshes, losses, learned, dict(after)


@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(bool(wiring.WHY_NO_HOSTS), reason=wiring.WHY_NO_HOSTS)
def test_ddp_learns_on_wired_hosts_what_one_process_learns(folder: Path, hosts: dict[str, str]) -> None:
    alone = losses(lambda model: model, slice(None))
    file = wiring.described(folder)
    assert wiring.reached(hosts, file) == 30
    for mesh, weights in train(hosts, file, 29500):
        assert mesh == "2x3"
        assert weights == pytest.approx(alone, rel=0, abs=1e-5)
    # A cable is pulled: both ends lose sight of it, and of nothing else.
    pull(hosts)
    today = lay_anew(folder, hosts)
    for mesh, weights in train(hosts, today, 29501):
        assert mesh == str(read_machine(today).mesh)
        assert "1 cable" in mesh
        assert weights == pytest.approx(alone, rel=0, abs=1e-5)


@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(bool(wiring.WHY_NO_HOSTS), reason=wiring.WHY_NO_HOSTS)
@pytest.mark.parametrize("way", others_slow(["ddp", "fsdp", "torchft"], quick=["ddp"]))
def test_a_cable_is_pulled_while_a_job_trains(
    way: str, tmp_path: Path, folder: Path, hosts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on in place: no step is lost, and each cable then carries what a plan without the pulled one says."""
    if way == "torchft" and importlib.util.find_spec("torchft") is None:
        pytest.skip("torchft is not installed: pip install 'meshmend[torch]'")
    file = wiring.described(folder)
    assert wiring.reached(hosts, file) == 30
    machine = read_machine(file)
    gradient_bytes = 8 * (WIDTH * WIDTH + WIDTH)
    place_of = {chip.name: place for place, chip in machine.chips.items()}
    left = machine.mesh.with_failures(failed_cables=[(place_of[PULLED[0]], place_of[PULLED[1]])])
    # These cables have no rate of their own but share the cores, and what measuring sends would be counted.
    monkeypatch.setattr(slow, "FIRST_S", 1e9)
    plans = Plans(remembered, hardware="gloo-loopback")  # made here, so that no host needs time for them

    def schedules(mesh: Mesh) -> list[tuple[Schedule, int]]:
        """Return what a step runs for its gradients, and the bytes of each payload."""
        if way != "fsdp":
            return [(plans.get(mesh, gradient_bytes), gradient_bytes)]
        rows = -(-WIDTH // 6)  # of the weights and the biases in a shard, padded
        n_bytes, order = 6 * 8 * rows * (WIDTH + 1), tuple(range(6))
        kinds = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        return [(plans.shards(mesh, kind, order, Plans.size(n_bytes)), n_bytes) for kind in kinds]

    for mesh in (machine.mesh, left):
        plans.get(mesh, 512)
        schedules(mesh)
    with Chips(lambda place: enter(hosts[machine.chips[place].name])) as chips:
        for place, chip in machine.chips.items():
            chips.start(place, train_on, way, NAMES.index(chip.name), chip.name, file, tmp_path)
        at = tmp_path / "at-0"
        deadline = time.monotonic() + 120
        while not at.exists() or int(at.read_text() or 0) < 5:
            assert not chips.poll()
            assert time.monotonic() < deadline, "nobody trains"
            time.sleep(0.05)
        pull(hosts)
        time.sleep(1)
        lay_anew(folder, hosts)
        found = chips.results(240)
    module, sgd, loss = pieces(None)
    torch.set_default_dtype(torch.float64)
    (n_steps,) = {steps for steps, *_ in found.values()}
    alone = []
    for _ in range(n_steps):
        sgd.zero_grad()
        own = loss(module)
        own.backward()
        sgd.step()
        alone.append(own.item())
    torch.set_default_dtype(torch.float32)
    assert n_steps > 5 + STEPS_AFTER
    together = [sum(losses) / 6 for losses in zip(*(losses for _, _, losses, *_ in found.values()), strict=True)]
    assert together == pytest.approx(alone, rel=1e-9)

    def carried(mesh: Mesh) -> Counter[tuple[int, int]]:
        """Return how many bytes of a step each host sends to each other one."""
        found: Counter[tuple[int, int]] = Counter()
        for schedule, n_bytes in schedules(mesh):
            rows = (column.tolist() for column in (schedule.src, schedule.dst, schedule.n_chunks))
            for src, dst, n in zip(*rows, strict=True):
                found[src, dst] += n / schedule.total_chunks * n_bytes
        return found

    planned, ends = carried(left), [machine.mesh.rank(place_of[host]) for host in PULLED]
    detour_bytes = sum(n for pair, n in carried(machine.mesh).items() if {*pair} == {*ends})
    assert detour_bytes > 100_000, "what the old plan would send over a detour would be seen"
    for place, (_, meshes, _, learned, bytes_sent) in found.items():
        assert meshes == ["2x3", str(left)]
        assert learned == pytest.approx(weights(module), rel=0, abs=1e-12)
        for other, port in machine.chips[place].ports.items():
            pair = left.rank(place), left.rank(place_of[other])
            expected = planned[pair] * (STEPS_AFTER - 2)
            # Headers, acknowledgements, agreements and torchft's own messages come on top.
            besides = (20_000 if way == "torchft" else 8000 if way == "fsdp" else 4000) * (STEPS_AFTER - 2)
            assert expected <= bytes_sent[port] <= 1.1 * expected + besides
            if {machine.chips[place].name, other} == set(PULLED):
                assert bytes_sent[port] == 0
