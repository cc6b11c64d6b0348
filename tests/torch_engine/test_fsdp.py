"""Training on the backend with plain PyTorch: DDP, FSDP2 and HSDP on 12 of 16 chips, against one process alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from meshmend import Mesh

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import meshmend.torch as mmt  # noqa: E402
from meshmend.launch.chips import Chips  # noqa: E402
from torch_engine.processes import free_port, remembered  # noqa: E402

MESH = Mesh("4x4", failed=["2x2@2,2"])
WORDS, LENGTH = 31, 8


def transformer() -> Any:
    """Return two layers that predict the next token, all tokens in a row."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(24, 2, 40, dropout=0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(WORDS, 24), *layers, nn.Flatten(0, 1), nn.Linear(24, WORDS))


def batches(steps: int) -> Any:
    """Return tokens of all steps and samples, two samples per chip."""
    return torch.randint(0, WORDS, (steps, 24, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def losses(steps: int, wrap: Callable[[Any], Any], share: slice, mean: Callable[[Any], None]) -> list[float]:
    """Train on a share of each batch; return the loss of each step, averaged by `mean`."""
    model = wrap(transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for batch in batches(steps):
        tokens = batch[share]
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        mean(shown)
        found.append(float(shown))
    return found


def sharded(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model[1:3]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(chip: tuple[int, ...], rank: int, port: int, steps: int) -> dict[str, Any]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:meshmend",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=12,
        timeout=timedelta(seconds=100),
        pg_options=mmt.MeshOptions("4x4", chip, plan=remembered),
    )
    whole = init_device_mesh("cpu", (12,))
    tiles = DeviceMesh("cpu", mmt.tile_ranks("2x2"), mesh_dim_names=("replicate", "shard"))
    ways = {
        "DDP": DistributedDataParallel,
        "FSDP2": lambda model: sharded(model, whole),
        "HSDP": lambda model: sharded(model, tiles),
    }

    def mean(loss: Any) -> None:
        dist.all_reduce(loss, dist.ReduceOp.AVG)

    share = slice(2 * rank, 2 * rank + 2)
    found: dict[str, Any] = {name: losses(steps, wrap, share, mean) for name, wrap in ways.items()}
    found["meshes"] = [str(tiles.get_group(name).mesh) for name in ("replicate", "shard")]
    dist.barrier()
    return found


@pytest.mark.skipif(torch.__version__.startswith("2.7."), reason="HSDP of torch 2.7 needs an accelerator")
@pytest.mark.usefixtures("compiler")
def test_ddp_fsdp2_and_hsdp_learn_what_one_process_learns() -> None:
    steps = 3
    for mesh in (MESH, Mesh("2x2"), Mesh("2x2", failed=["1,1"])):
        for exponent in range(5):
            remembered(mesh, payload_bytes=512 * 4**exponent)
    port = free_port()
    with Chips() as chips:
        chips.start((9, 9), lambda _: losses(steps, lambda model: model, slice(None), lambda _: None))
        for rank in range(12):
            chips.start(MESH.chip(rank), train, rank, port, steps)
        results = chips.results(300)
    alone = results.pop((9, 9))
    assert len(alone) == steps
    assert len(set(alone)) == steps, "weights change"
    for found in results.values():
        assert found.pop("meshes") == ["2x2 minus 1x1@1,1", "2x2"]
        assert set(found) == {"DDP", "FSDP2", "HSDP"}
        for way, seen in found.items():
            assert seen == pytest.approx(alone, rel=0, abs=1e-5), way
