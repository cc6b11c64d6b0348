"""The plan that a training step runs, made from the fabric and the parameters in one place.

What travels is known here: the dtype of the sums, the shards that a chip has inside a tile, a layer where parameters
are sharded. So is what it travels over: the fabric's hardware as XLA drives it, between tiles where there are any.
Whatever trains on a fabric asks here (`mmj.plan`), for the chips that it has and for those that it may be left with, so
that no step runs a plan that was made for somebody else's payload.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from meshmend.cost import Hardware, between_tiles, find_hardware
from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree, travel_dtype
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Parts, Program, Update, abstract_program, install
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.jax.train.fsdp.params import ShardedParams, is_sharded
from meshmend.jax.train.shardings import match_specs, shapes_inside
from meshmend.planning import PlanCache, Planner, StepPlan, Workload, plan_step
from meshmend.schedule import Collective
from meshmend.schedule.lanes import MAX_UNROLLED

PlannedUpdate = Literal["replicated", "sharded", "fsdp"]
INSTALLED: dict[PlannedUpdate, Update] = {"replicated": "replicated", "sharded": "fused", "fsdp": "two-phase"}
"""Kinds of training, and the update that `install` knows each by."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(StepPlan):
    """A step's proven schedules, and what they were made for. Made by `plan`; `install` takes it to devices."""

    update: PlannedUpdate
    workload: Workload
    hardware: Hardware

    @property
    def digest(self) -> str:
        """A name for the content: processes whose digests differ would run different programs."""
        content = hashlib.sha256()
        for one in self.schedules:
            rows = one.template
            facts = (str(one.mesh), one.collective.value, one.total_chunks, one.repeats, one.period)
            content.update(repr(facts).encode())
            for column in (rows.step, rows.src, rows.dst, rows.first_chunk, rows.n_chunks, rows.op, rows.owners):
                content.update(np.ascontiguousarray(column).tobytes())
        return content.hexdigest()

    def install(self, fabric: Fabric) -> Program:
        """Put the tables on the fabric's devices."""
        return install(self.schedule, fabric, **self._parts)

    def abstract(self, fabric: Fabric) -> Program:
        """Return the shapes of what `install` would put there, to compile for devices that are not here."""
        return abstract_program(self.schedule, fabric, **self._parts)

    @property
    def _parts(self) -> Parts:
        return {
            "update": INSTALLED[self.update],
            "scatter": self.scatter,
            "gather": self.gather,
            "scalars": self.scalars,
        }


def plan(
    fabric: Fabric,
    params: Tree,
    *,
    update: PlannedUpdate = "replicated",
    shardings: Tree = None,
    accumulate_dtype: DTypeLike | None = jnp.float32,
    hardware: str | Hardware | None = None,
    planner: str | Planner = "auto",
    cache: PlanCache | None = None,
    budget_s: float | None = None,
    **parameters: Any,
) -> TrainingPlan:
    """Plan what a training step of these parameters sends on a fabric: proven, for the bytes that travel.

    `params` may be on any device or on none: shapes and dtypes count. `update`, `shardings` and `accumulate_dtype` are
    as in `Job.train` and `train_step`. With update="fsdp", `params` are `ShardedParams`, of which one layer travels at
    a time, or the parameters of one layer, as `jax.eval_shape(make_layer, key)` has them. `hardware` is a preset's
    name, a file of `measure`, or your own, as of a single chip; by default it is the fabric's. `planner`, `cache`,
    `budget_s` and further parameters are as in `meshmend.plan`. Payloads are rounded to a power of four
    (`Workload.rounded`), so that models of about the same size share their plans.

    >>> import jax, jax.numpy as jnp, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> small = mmj.plan(fabric, {"w": jnp.zeros((8, 8))})
    >>> small.schedule.planner, small.workload.payload_bytes, small.hardware.name
    ('latency', 512, 'cpu-xla')
    """
    if update not in INSTALLED:
        raise ParameterError(f"update is {update!r}, expected one of: {', '.join(map(repr, INSTALLED))}.")
    target = hardware_of(fabric, hardware)
    workload = workload_of(fabric, params, update=update, shardings=shardings, accumulate_dtype=accumulate_dtype)
    budget: dict[str, Any] = {} if budget_s is None else {"budget_s": budget_s}
    made = plan_step(
        fabric.mesh,
        workload,
        target,
        planner=planner,
        max_steps=max_steps_of(fabric),
        cache=cache,
        **budget,
        **parameters,
    )
    return TrainingPlan(**vars(made), update=update, workload=workload, hardware=target)


def max_steps_of(fabric: Fabric) -> int | None:
    """Return how many steps a plan may have that runs beside computing: XLA hides loops of TPUs only if written out."""
    return MAX_UNROLLED if fabric.platform == "tpu" else None


def any_pair(fabric: Fabric) -> Program:
    """Return the shapes of some two-phase program on a fabric, to find out what it cuts before it is planned."""
    made = plan_step(fabric.mesh, Workload(0, Collective.ALL_GATHER).rounded(), hardware_of(fabric))
    return abstract_program(
        None, fabric, update="two-phase", scatter=made.scatter, gather=made.gather, scalars=made.scalars
    )


def hardware_of(fabric: Fabric, hardware: str | Hardware | None = None) -> Hardware:
    """Return what plans on a fabric are made for: as given for a chip, or the fabric's own; between tiles if any."""
    if hardware is not None:
        chosen = find_hardware(hardware)
        return between_tiles(chosen, fabric.tiling) if isinstance(fabric, TiledFabric) else chosen
    if fabric.hardware is None:
        kind = fabric.jax_mesh.devices.flat[0].device_kind
        raise ParameterError(
            f"No preset describes {kind} devices, so nobody knows which plan is fast on them. Measure them, "
            "hardware=mmj.measure(fabric), or name a preset, as in hardware='tpu-v6e-xla'."
        )
    return find_hardware(fabric.hardware)


def workload_of(
    fabric: Fabric, params: Tree, *, update: PlannedUpdate, shardings: Tree, accumulate_dtype: DTypeLike | None
) -> Workload:
    """Return what a step of these parameters sends: bytes per device, in the dtype that travels."""
    if update == "fsdp":
        return Workload(_layer_bytes(params, fabric, accumulate_dtype), Collective.ALL_GATHER).rounded()
    if isinstance(fabric, TiledFabric):
        params = shapes_inside(params, match_specs((shardings,), (params,), fabric)[0], fabric.jax_mesh)
    by_dtype: dict[Any, int] = {}
    for leaf in jax.tree.leaves(params):
        dtype = travel_dtype(leaf.dtype, accumulate_dtype)
        by_dtype[dtype] = by_dtype.get(dtype, 0) + math.prod(np.shape(leaf)) * dtype.itemsize
    cores = fabric.jax_mesh.shape[fabric.core_axis] if fabric.core_axis else 1
    # Dtypes travel one after the other, the longest decides; where owners update chunks on their way, all go together.
    is_fused = update == "sharded"
    total = sum(by_dtype.values()) if is_fused else max(by_dtype.values(), default=0)
    collective = Collective.ALL_REDUCE_WITH_UPDATE if is_fused else Collective.ALL_REDUCE
    return Workload(total / cores, collective).rounded()


def _layer_bytes(params: Tree, fabric: Fabric, accumulate_dtype: DTypeLike | None) -> float:
    """Return the bytes per device of one layer, of those sharded trees that send most in a step."""
    trees: list[Any] = jax.tree.leaves(params, is_leaf=is_sharded)
    others = [one for one in trees if not isinstance(one, ShardedParams)]
    if not trees or 0 < len(others) < len(trees):
        raise ParameterError(
            f"With update='fsdp' params is a {type(others[0]).__name__ if others else 'tree without arrays'}, expected "
            "ShardedParams: cut it with mmj.fsdp.shard_params, or make it with mmj.fsdp.init_sharded."
        )

    def tree_bytes(leaves: list[Any], sums: DTypeLike | None) -> float:
        return float(sum(math.prod(x.shape) * travel_dtype(x.dtype, sums).itemsize for x in leaves))

    def layer_bytes(one: ShardedParams) -> float:
        return tree_bytes(jax.tree.leaves(one.outline.own_like), one.outline.accumulate_dtype)

    cores = fabric.jax_mesh.shape[fabric.core_axis] if fabric.core_axis else 1
    if others:
        return tree_bytes(others, accumulate_dtype) / cores
    most = max(trees, key=lambda one: layer_bytes(one) * (one.n_layers or 1))
    return layer_bytes(most) / cores
