"""DDP on hosts that are wired to each other: network namespaces with cables, and the routes that meshmend prints."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
import test_lldp as wiring  # noqa: E402
from meshmend.launch.chips import Chips  # noqa: E402
from meshmend.machines import read_machine  # noqa: E402
from test_lldp import NAMES, address, folder, hosts  # noqa: E402
from torch_engine.processes import remembered  # noqa: E402

__all__ = ["folder", "hosts"]
CLONE_NEWNET = 0x40000000


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


def train(namespaces: dict[str, str], file: Path, port: int) -> list[Any]:
    """Train on every host; return the mesh and the weights of each."""
    machine = read_machine(file)
    remembered(machine.mesh, payload_bytes=512)

    def enter(place: tuple[int, ...]) -> None:
        with open(f"/run/netns/{namespaces[machine.chips[place].name]}") as handle:  # noqa: PTH123
            assert ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET) == 0

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

    with Chips(enter) as chips:
        for place, chip in machine.chips.items():
            chips.start(place, body, NAMES.index(chip.name))
        return list(chips.results(200).values())


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
    a, b = "node-c", "node-a"
    cables = wiring.wires()
    wiring.sh("ip", "-n", hosts[a], "link", "set", cables[a, b], "down")
    left = {ends: port for ends, port in cables.items() if set(ends) != {a, b}}
    for host in (a, b):
        (folder / f"{host}.json").write_text(wiring.neighbours(host, left), encoding="utf-8")
    today = wiring.described(folder, "today", intended="wired")
    assert wiring.reached(hosts, today) == 30
    for mesh, weights in train(hosts, today, 29501):
        assert mesh == str(read_machine(today).mesh)
        assert "1 cable" in mesh
        assert weights == pytest.approx(alone, rel=0, abs=1e-5)
