"""Whole train steps to be compiled: the paper's ResNet-50 with LARS and BERT-large with LAMB, a small GPT with AdamW.

Forward, backward, the plan's all-reduce of the gradients, and the optimizer, as one jitted function. On a fabric of
tiles the weights and the optimizer's state are split inside a tile. The GPT is split by heads and hidden units, and a
tile's devices work on the same examples. Of the others each array is split along its longest axis that divides, and the
batch over all devices, so that XLA gathers weights inside tiles as it needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshmend.jax.compile.for_topology import Compiled, compile_step
from meshmend.jax.engine.collectives import all_reduce
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program, abstract_program
from meshmend.jax.engine.tiles import TiledFabric
from meshmend.jax.train.plan import workload_of
from meshmend.jax.train.shardings import specs_of_state
from meshmend.jax.train.value_and_grad import value_and_grad
from meshmend.schedule import Schedule
from workloads import bert, gpt, resnet

__all__ = ["WORKLOADS", "ModelWorkload", "abstract_arguments", "compile_workload", "payload_of", "train_step"]


@dataclass(frozen=True)
class ModelWorkload:
    """A model, its loss and its optimizer. Batches are a device's own."""

    name: str
    example: Callable[[int], Any]
    init: Callable[[Any], Any]
    loss: Callable[[Any, Any, Any], tuple[Any, Any]]
    optimizer: optax.GradientTransformation
    split: Callable[[tuple[str, ...]], Any] | None = None
    """From the axes inside a tile to how weights are split over them, all examples of a tile on each of its devices."""

    def variables(self, batch: int) -> tuple[Any, Any]:
        """Return the shapes of the weights and of the running statistics."""
        found = jax.eval_shape(self.init, self.example(batch))
        return found["params"], found.get("batch_stats", {})


def _layers_only(params: Any) -> Any:
    """Leave biases and normalisations out of weight decay and of layer-wise scaling, as MLPerf does."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


WORKLOADS = {
    workload.name: workload
    for workload in (
        ModelWorkload(
            "resnet-50",
            resnet.example,
            resnet.init,
            resnet.loss,
            optax.lars(
                10.0, weight_decay=2e-4, weight_decay_mask=_layers_only, trust_ratio_mask=_layers_only, momentum=0.9
            ),
        ),
        ModelWorkload(
            "bert-large",
            bert.example,
            bert.init,
            bert.loss,
            optax.lamb(4e-3, weight_decay=0.01, mask=_layers_only),
        ),
        ModelWorkload("gpt-small", gpt.example, gpt.init, gpt.loss, optax.adamw(3e-4, weight_decay=0.1), gpt.split),
    )
}
"""By name. What a step costs does not depend on the learning rates."""


def train_step(
    workload: ModelWorkload, fabric: Fabric, *, accumulate_dtype: DTypeLike | None = None
) -> Callable[..., Any]:
    """Return `step(params, statistics, state, batch, program)`; without a program nothing is sent.

    The latter is what a chip computes, to be counted apart from what it communicates.
    """
    if isinstance(fabric, TiledFabric):
        return _tiled_step(workload, fabric, accumulate_dtype)
    none, every = PartitionSpec(), PartitionSpec(fabric.axes)

    def local(params: Any, statistics: Any, state: Any, batch: Any, program: Program | None) -> Any:
        differentiate = jax.value_and_grad(workload.loss, has_aux=True)
        (value, statistics), gradients = differentiate(params, statistics, batch)
        if program is not None:
            gradients, statistics, value = all_reduce(
                (gradients, statistics, value), program, mean=True, accumulate_dtype=accumulate_dtype
            )
        updates, state = workload.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), statistics, state, value

    def step(params: Any, statistics: Any, state: Any, batch: Any, program: Program | None) -> Any:
        mapped = jax.shard_map(
            local,
            mesh=fabric.jax_mesh,
            in_specs=(none, none, none, every, PartitionSpec(fabric.axis)),
            out_specs=none,
            check_vma=False,
        )
        return mapped(params, statistics, state, batch, program)

    return step


def _tiled_step(workload: ModelWorkload, fabric: TiledFabric, accumulate_dtype: DTypeLike | None) -> Callable[..., Any]:
    def step(params: Any, statistics: Any, state: Any, batch: Any, program: Program) -> Any:
        specs = _specs_inside(workload, params, fabric)
        differentiate = value_and_grad(
            workload.loss, fabric, specs, shared_argnums=1, has_aux=True, accumulate_dtype=accumulate_dtype
        )
        (value, statistics), gradients = differentiate(params, statistics, batch, program=program)
        updates, state = workload.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), statistics, state, value

    return step


def payload_of(workload: ModelWorkload, fabric: Fabric, *, batch: int) -> float:
    """Return the bytes per device that a step sends, rounded as plans are made for them; sums are float32."""
    params, _ = workload.variables(batch)
    split = _specs_inside(workload, params, fabric)
    found = workload_of(fabric, params, update="replicated", shardings=split, accumulate_dtype=jnp.float32)
    return found.payload_bytes


def _specs_inside(workload: ModelWorkload, params: Any, fabric: Fabric) -> Any:
    """Return how the weights are split inside a tile."""
    if workload.split is None or not fabric.inner_axes:
        return jax.tree.map(lambda leaf: _split_longest(leaf.shape, fabric), params)
    return workload.split(fabric.inner_axes)


def _split_longest(shape: tuple[int, ...], fabric: Fabric) -> PartitionSpec:
    """Return how an array is split inside a tile: along its longest axis that divides, or not at all."""
    if not isinstance(fabric, TiledFabric):
        return PartitionSpec()
    axes = [axis for axis, n in enumerate(shape) if n % fabric.devices_per_tile == 0]
    if not axes or not fabric.inner_axes:
        return PartitionSpec()
    longest = max(axes, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * longest, fabric.inner_axes)


def abstract_arguments(workload: ModelWorkload, fabric: Fabric, *, batch: int) -> tuple[Any, Any, Any, Any]:
    """Return shapes of the weights, statistics, optimizer state and global batch, placed on the fabric."""
    params, statistics = workload.variables(batch)
    state = jax.eval_shape(workload.optimizer.init, params)
    split = fabric.sharding(fabric.axes if workload.split is None else fabric.batch_axes)
    n_devices = int(fabric.jax_mesh.devices.size)
    specs = _specs_inside(workload, params, fabric)

    def placed(leaf: Any, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=fabric.sharding(*spec))

    def global_batch(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct((n_devices * leaf.shape[0], *leaf.shape[1:]), leaf.dtype, sharding=split)

    state = jax.tree.map(placed, state, specs_of_state(state, params, specs))
    statistics = jax.tree.map(lambda leaf: placed(leaf, _split_longest(leaf.shape, fabric)), statistics)
    params = jax.tree.map(placed, params, specs)
    return params, statistics, state, jax.tree.map(global_batch, workload.example(batch))


def compile_workload(
    topology: str, workload: ModelWorkload, schedule: Schedule | None, fabric: Fabric, *, batch: int
) -> Compiled:
    """Compile a workload's train step over a plan, or, without one, what each device computes by itself."""
    program = None if schedule is None else abstract_program(schedule, fabric)
    arguments = abstract_arguments(workload, fabric, batch=batch)
    jitted = fabric.jit(train_step(workload, fabric), donate_argnums=(0, 1, 2))
    with jax.set_mesh(fabric.jax_mesh):
        return compile_step(topology, jitted, fabric, *arguments, program)[0]
