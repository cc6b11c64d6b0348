"""The plan that a step runs is the one for its bytes on its fabric's hardware, in every kind of update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import meshmend as mm
import meshmend.jax as mmj
from meshmend.cost import between_tiles
from meshmend.errors import ParameterError
from meshmend.jax.session import initialize_alone
from meshmend.jax.train.plan import any_pair, hardware_of
from meshmend.planning import PlanCache, StepDemands
from meshmend.schedule import Collective


def fabric_of(hardware: str | None, shape: str = "4x4", failed: tuple[str, ...] = ("2x2@0,0",)) -> mmj.Fabric:
    n_devices = mm.Mesh(shape).size
    return replace(mmj.discover(jax.devices()[:n_devices], shape=shape, failed=failed), hardware=hardware)


def floats(n_bytes: int, dtype: Any = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    return {"w": jax.ShapeDtypeStruct((n_bytes // jnp.dtype(dtype).itemsize,), dtype)}


@pytest.mark.parametrize(
    ("hardware", "n_bytes", "planner"),
    [
        ("tpu-v3-xla", 2**29, "hamiltonian"),
        ("tpu-v6e-xla", 2**29, "weave"),
        ("tpu-v3-xla", 4096, "latency"),
        ("tpu-v6e-xla", 4096, "latency"),
        ("cpu-xla", 4096, "latency"),
    ],
)
def test_a_replicated_update_gets_what_plan_prints_for_its_payload(hardware: str, n_bytes: int, planner: str) -> None:
    fabric = fabric_of(hardware, "8x8", ("2x2@2,2",))
    planned = mmj.plan(fabric, floats(n_bytes), budget_s=2.0)
    assert planned.workload.payload_bytes == {4096: 8192}.get(n_bytes, n_bytes)  # 512 times a power of four
    expected = mm.plan(fabric.mesh, payload_bytes=planned.workload.payload_bytes, hardware=hardware, budget_s=2.0)
    assert planned.schedule == expected
    assert expected.planner == planner


def test_a_sharded_update_gets_a_plan_with_at_least_a_chunk_per_chip() -> None:
    fabric = fabric_of("tpu-v6e-xla", "8x8", ("2x2@2,2",))
    for n_bytes in (4096, 2**27):
        planned = mmj.plan(fabric, floats(n_bytes), update="sharded", budget_s=2.0)
        assert planned.schedule is not None
        assert planned.schedule.collective is Collective.ALL_REDUCE_WITH_UPDATE
        # Rings leave chips beside a hole without a chunk; no chip has more than twice its share of the state.
        owned = np.bincount(planned.schedule.owners, minlength=fabric.n_chips)
        assert planned.schedule.total_chunks >= fabric.n_chips
        assert owned.max() / planned.schedule.total_chunks <= 2 / fabric.n_chips
        expected = mm.plan(
            fabric.mesh,
            collective="all-reduce-with-update",
            payload_bytes=planned.workload.payload_bytes,
            hardware="tpu-v6e-xla",
            budget_s=2.0,
        )
        assert planned.schedule == expected


def sharded(fabric: mmj.Fabric, width: int, layers: int) -> Any:
    def make(pair: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), layers)
        return mmj.fsdp.init_sharded(
            lambda key: {"w": jax.random.normal(key, (width, width))}, keys, fabric, pair, stacked=True
        )

    return jax.eval_shape(make, any_pair(fabric))


def test_fsdp_plans_halves_for_one_layer_and_every_chip_owns_something() -> None:
    fabric = fabric_of("cpu-xla")
    planned = mmj.plan(fabric, sharded(fabric, 64, 8), update="fsdp")
    assert planned.workload.payload_bytes == 8192  # a layer has 16 KiB; 512 times 4² and 4³ are equally far from it
    scatter, gather = planned.scatter, planned.gather
    assert scatter is not None
    assert gather is not None
    # By hand: 12 chips with one chunk each take 9 steps on this mesh; the plan for 100 MB takes over ninety.
    assert scatter.n_steps <= 9
    assert gather.n_steps <= 9
    assert np.bincount(gather.owners, minlength=12).min() >= 1
    assert (scatter.owners == gather.owners).all()


def test_tiles_plan_for_a_chip_s_shard_over_what_it_gets_of_the_links() -> None:
    chips = fabric_of("tpu-v6e-xla", "8x8", ("2x2@2,2",))
    fabric = mmj.tile(chips, "2x2")
    params = {"a": jax.ShapeDtypeStruct((1024, 2**15), jnp.float32)}
    planned = mmj.plan(fabric, params, shardings={"a": PartitionSpec(None, "model")}, budget_s=2.0)
    assert planned.workload.payload_bytes == 1024 * 2**15 * 4 // 4  # a quarter of 128 MiB per chip
    assert planned.hardware == between_tiles("tpu-v6e-xla", fabric.tiling)
    given = mmj.plan(fabric, params, shardings={"a": PartitionSpec(None, "model")}, hardware="tpu-v3-xla", budget_s=2.0)
    assert given.hardware == between_tiles("tpu-v3-xla", fabric.tiling)
    assert planned.schedule == mm.plan(
        fabric.mesh, payload_bytes=2**25, hardware=between_tiles("tpu-v6e-xla", fabric.tiling), budget_s=2.0
    )


def test_bytes_are_counted_in_the_dtype_that_travels() -> None:
    fabric = fabric_of("cpu-xla")
    half = {"w": jax.ShapeDtypeStruct((2**17,), jnp.bfloat16)}
    assert mmj.plan(fabric, half).workload.payload_bytes == 2**19  # summed in float32
    assert mmj.plan(fabric, half, accumulate_dtype=None).workload.payload_bytes == 2**17  # of 2^18, rounded
    both = half | {"n": jax.ShapeDtypeStruct((2**21,), jnp.float32)}
    # Replicated, dtypes travel one after the other; a fused update takes them along together.
    assert mmj.plan(fabric, both, accumulate_dtype=None).workload.payload_bytes == 2**23
    many = {"a": half["w"], "b": jax.ShapeDtypeStruct((3 * 2**16,), jnp.float32)}  # 2^18 and 3 · 2^18 bytes
    assert mmj.plan(fabric, many, accumulate_dtype=None).workload.payload_bytes == 2**19
    assert mmj.plan(fabric, many, accumulate_dtype=None, update="sharded").workload.payload_bytes == 2**21


def test_a_scalar_takes_as_many_steps_in_every_kind_of_program() -> None:
    fabric = fabric_of("cpu-xla")
    plans = [mmj.plan(fabric, floats(2**20), update=update) for update in ("replicated", "sharded")]
    plans.append(mmj.plan(fabric, sharded(fabric, 64, 2), update="fsdp"))
    programs = [planned.install(fabric).scalars for planned in plans]
    steps = {program.n_steps for program in programs if program is not None}
    assert None not in programs
    assert len(steps) == 1
    assert steps.pop() <= 6  # by hand: 12 chips are 8 and 4 that fold into them, so 3 levels and 2 folds, or fewer


def test_devices_that_no_preset_describes_are_not_planned_for_by_accident() -> None:
    fabric = fabric_of(None)
    with pytest.raises(ParameterError, match=r"No preset describes cpu devices.*mmj\.measure\(fabric\)"):
        mmj.plan(fabric, floats(4096))
    with pytest.raises(ParameterError, match="update is 'fused', expected one of"):
        mmj.plan(fabric, floats(4096), update="fused")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"params is a tree without arrays, expected ShardedParams: cut it"):
        mmj.plan(fabric_of("cpu-xla"), {}, update="fsdp")
    assert hardware_of(fabric, "tpu-v3").name == "tpu-v3"


def test_plans_are_found_again_for_payloads_of_about_the_same_size(tmp_path: Path) -> None:
    fabric, cache = fabric_of("cpu-xla"), PlanCache(tmp_path)
    first = mmj.plan(fabric, floats(200_000), cache=cache)
    made = len(cache)
    assert mmj.plan(fabric, floats(180_000), cache=cache).digest == first.digest
    assert len(cache) == made
    assert mmj.plan(fabric, floats(20_000_000), cache=cache).digest != first.digest


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_a_job_runs_that_plan_and_writes_down_what_it_is_for(update: Any, tmp_path: Path) -> None:
    session = initialize_alone(mmj.discover(jax.devices()[:12], shape="3x4"))
    x = np.arange(64, dtype=np.float32)
    params = {"w": np.zeros((32, 32), np.float32)}
    with mmj.Job(tmp_path, global_batch=12, session=session, disk_every=0, hardware="tpu-v6e-xla") as job:
        for _ in job.train(lambda w, b: (w["w"].sum() - b) ** 2, optax.sgd(0.1), params, x, steps=2, update=update):
            pass
        planned = job._run.plan  # type: ignore[union-attr]
    assert planned.digest == mmj.plan(job.fabric, params, update=update, budget_s=2.0).digest
    assert job.fabric.hardware == mm.cost.find_hardware("tpu-v6e-xla")
    noted = StepDemands.read(tmp_path)
    assert noted == StepDemands(planned.workload, mm.cost.find_hardware("tpu-v6e-xla"))
    assert noted.workload.payload_bytes == 8192
    again = noted.plan(job.fabric.mesh, cache=None, budget_s=2.0)
    assert again.schedules == planned.schedules
