"""`meshmend_lab.export.torch_tpu`: the hooks on CPU processes, and the op under torch_tpu where an environment has it.

No TPU is here. The tests with processes put a stand-in in the place of torch_tpu's op: it collects every rank's payload
*and every rank's rows of the tables*, runs the very JAX function that torch_tpu would be given over as many CPU
devices, and gives each rank its row back. That shows that the rows which ranks hold make up the tables, that those who
stand by add nothing, and that the hooks return what DDP and FSDP2 expect. It does not show how torch_tpu runs the op:
the slow test shows that torch_tpu takes it, as far as it goes without a chip.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'meshmend[torch]'")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshmend as mm
from meshmend.errors import MissingExtraError, ParameterError
from meshmend.launch.chips import Chips
from meshmend.schedule.lanes import Lowered
from meshmend_lab.export import torch_tpu as tpu
from meshmend_lab.export.bystanders import inputs_of
from torch_engine.processes import free_port

ROOT = Path(__file__).parents[3]
WORLD = 6
HOLED = mm.Mesh("2x3", failed=["2x1@0,2"])
"""Its live chips are ranks 0, 1, 3 and 4 of six; 2 and 5 stand by. Four divide exactly."""
TRAINING = [0, 1, 3, 4]

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None or importlib.util.find_spec("optax") is None,
    reason="needs JAX beside torch: pip install 'meshmend[jax,torch]'",
)


def stand_in(lowered: Lowered) -> tpu.Op:
    """An op that collects payloads and rows at rank 0, which runs all of them with JAX on CPU devices."""

    def run(payload: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        is_first = dist.get_rank() == 0
        collected: list[list[torch.Tensor]] = []
        for tensor in (payload, *rows):
            parts = [torch.empty_like(tensor) for _ in range(WORLD)] if is_first else None
            dist.gather(tensor.contiguous(), parts, dst=0)
            collected.append(parts or [])
        mine = torch.empty_like(payload)
        back = None
        if is_first:
            sums = on_cpu_devices(lowered, [torch.cat(parts).numpy() for parts in collected])
            back = [torch.from_numpy(row[None].copy()) for row in sums]
        dist.scatter(mine, back, src=0)
        return mine

    return run


def on_cpu_devices(lowered: Lowered, arrays: list[np.ndarray]) -> np.ndarray:
    import jax

    from meshmend_lab.export.exporting import summing

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:WORLD]), ("chip",))
    return np.asarray(jax.jit(summing(lowered, mesh))(arrays[0], arrays[1:]))


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float32))


def model() -> torch.nn.Sequential:
    """Two layers whose gradients are whole numbers if inputs are: no bias, weights of ones."""
    layers = torch.nn.Sequential(torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 3, bias=False))
    for parameter in layers.parameters():
        torch.nn.init.ones_(parameter)
    return layers


def gradients(trained: torch.nn.Module, rank: int) -> list[np.ndarray]:
    trained(whole_numbers(4, 5, seed=rank)).sum().backward()
    found = []
    for parameter in trained.parameters():
        grad: Any = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found.append(grad.numpy().copy())
    return found


def as_rank(chip: tuple[int, ...], main: Any, port: int) -> Any:
    (rank,) = chip
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "JAX_PLATFORMS": "cpu"}
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={WORLD}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        found = main(rank)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


def on_six_ranks(main: Any) -> dict[int, Any]:
    port = free_port()
    with Chips() as chips:
        for rank in range(WORLD):
            chips.start((rank,), as_rank, main, port)
        return {rank: found for (rank, *_), found in chips.results(120).items()}


@needs_jax
def test_ddp_with_the_hook_is_ddp(compiler: None) -> None:
    """Bit for bit on the four ranks that take part: DDP with our hook in a world of six, and plain DDP of the four."""
    lowered = tpu.over_ranks(mm.plan(HOLED), None, WORLD)

    def main(rank: int) -> Any:
        part = tpu.part_of(lowered, rank, stand_in(lowered), "cpu")
        hooked = DistributedDataParallel(model())
        hooked.register_comm_hook(part, tpu.comm_hook)
        ours = gradients(hooked, rank)
        four = dist.new_group(TRAINING)
        plain = gradients(DistributedDataParallel(model(), process_group=four), rank) if rank in TRAINING else None
        return part.stands_by, ours, plain

    found = on_six_ranks(main)
    expected = [sum(whole.astype(np.float64) for whole in ones) / 4 for ones in zip(*map(alone, TRAINING), strict=True)]
    for rank, (stands_by, ours, plain) in found.items():
        assert stands_by == (rank not in TRAINING)
        for i, mine in enumerate(ours):
            if stands_by:
                assert not mine.any(), "its replica does not move"
            else:
                assert mine.tobytes() == plain[i].tobytes(), (rank, i)
                assert np.array_equal(mine, expected[i]), "and that is the mean"
                assert mine.any()


def alone(rank: int) -> list[np.ndarray]:
    return gradients(model(), rank)


@needs_jax
def test_fsdp2_with_the_hook_averages_over_its_groups(compiler: None) -> None:
    """Groups of two ranks shard the parameters; the plan joins two of three groups, and the third stands by."""
    groups = [[0, 1], [2, 3]]
    lowered = tpu.over_ranks(mm.plan(mm.Mesh("1x3", failed=["0,2"])), groups, WORLD)

    def main(rank: int) -> Any:
        part = tpu.part_of(lowered, rank, stand_in(lowered), "cpu")
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("group", "shard"))
        sharded: Any = fully_shard(model(), mesh=mesh["shard"])
        sharded.set_all_reduce_hook(part.all_reduce_)
        return part.stands_by, gradients(sharded, rank)

    found = on_six_ranks(main)
    expected = [sum(ones) / 4 for ones in zip(*map(alone, range(4)), strict=True)]
    for rank, (stands_by, ours) in found.items():
        assert stands_by == (rank > 3)
        for mine, mean in zip(ours, expected, strict=True):
            assert np.array_equal(mine, np.zeros_like(mean) if stands_by else mean), rank


def test_each_rank_has_its_own_rows() -> None:
    lowered = tpu.over_ranks(mm.plan(HOLED), [5, 4, 2, 1], WORLD)

    def never(payload: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        raise AssertionError("not called")

    parts = [tpu.part_of(lowered, rank, never, "cpu") for rank in range(WORLD)]
    assert [part.stands_by for part in parts] == [True, False, False, True, False, False]
    for i, table in enumerate(inputs_of(lowered).values()):
        together = torch.cat([part.rows[i] for part in parts]).numpy()
        assert np.array_equal(together, table)
        assert together.dtype == table.dtype
    with pytest.raises(ParameterError, match=r"A mean of torch\.int64 is none"):
        parts[0].mean(torch.arange(3))


def test_narrow_numbers_are_summed_in_float32() -> None:
    def twice(payload: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        assert payload.dtype == torch.float32
        assert payload.shape == (1, 6)
        return 2 * payload

    part = tpu.RankPart(twice, (), 4, stands_by=False)
    given = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert part.mean(given).equal(given / 2)
    assert part.mean(given).dtype == torch.bfloat16


def test_which_ranks_is_asked_for_where_it_is_not_clear() -> None:
    schedule = mm.plan(HOLED)
    assert tpu.over_ranks(schedule, None, 4).loops[0].send.shape[0] == 4
    with pytest.raises(ParameterError, match=r"4 live of 6 chips, but the world has 5 ranks: say which rank"):
        tpu.over_ranks(schedule, None, 5)
    with pytest.raises(ParameterError, match="places should be 4 different numbers from 0 to 5"):
        tpu.over_ranks(schedule, [0, 1, 2, 6], 6)
    with pytest.raises(ParameterError, match="Expected an all-reduce, got a schedule of a reduce-scatter"):
        tpu.over_ranks(mm.plan(HOLED, collective="reduce-scatter"), None, 6)


@pytest.mark.skipif(importlib.util.find_spec("torch_tpu") is not None, reason="torch_tpu is here")
def test_what_is_missing_is_named() -> None:
    with pytest.raises(MissingExtraError, match=r"needs torch_tpu.*pip install 'torch_tpu==0\.2\.\*'"):
        tpu.tpu_op(tpu.over_ranks(mm.plan(HOLED), None, WORLD), mesh=None)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(
    "MESHMEND_TORCH_TPU_PYTHON" not in os.environ,
    reason="needs MESHMEND_TORCH_TPU_PYTHON, a Python 3.12 with torch_tpu 0.2: torch_tpu_op.py says how to make one",
)
def test_torch_tpu_takes_the_op() -> None:
    script = Path(__file__).with_name("torch_tpu_op.py")
    env = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}/lab/src", "PYTHONWARNINGS": "ignore"}
    command = [os.environ["MESHMEND_TORCH_TPU_PYTHON"], str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["python"][:2] >= [3, 12]
    assert facts["torch_tpu"].startswith("0.2.")
    assert facts["world"] == 64, "of which four stand by"
    assert (facts["shape"], facts["dtype"], facts["device"]) == ([1, 1 << 20], "torch.float32", "meta")
    assert facts["nodes"] == 1, facts["graph"]
    assert facts["schema"].startswith("meshmend::all_reduce_")
    assert facts["schema"].endswith("(Tensor payload, Tensor[] tables) -> Tensor")
    # There is no TPU, so a call with numbers must not pretend to sum.
    assert "tpu" in facts["real_call"].lower()
