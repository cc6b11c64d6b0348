"""A train step of a transformer's layers, compiled for a slice: what a chip needs, and how much communication hides.

The model is a stack of equal layers with Adam and nothing else, so that the numbers are those of `scan_layers`. Its
weights are whole on every chip, or the optimizer's state is sharded, or everything is (ZeRO-3, FSDP).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from hidden import Overlap, bodies_with_permutes
from meshmend.errors import ParameterError
from meshmend.jax.compile.for_topology import Compiled, compile_step
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program, abstract_program
from meshmend.jax.train.fsdp.layer_scan import scan_layers
from meshmend.jax.train.fsdp.params import shard_params, sharded_specs
from meshmend.jax.train.fsdp.step import sharded_train_step
from meshmend.jax.train.step import train_step
from meshmend.schedule import Schedule

HEAD = 64
"""Elements of an attention head."""


class Shard(StrEnum):
    """What is sharded over the chips."""

    NONE = "none"
    """Nothing: gradients are all-reduced, layer by layer where they are to hide."""
    UPDATE = "update"
    """The optimizer's state: gradients are reduce-scattered after the backward pass, new weights gathered."""
    FSDP = "fsdp"
    """Weights, gradients and state: `scan_layers` gathers a layer when it needs it."""


@dataclass(frozen=True)
class StackPlans:
    """The schedules of a step: an all-reduce and, where they were planned as such, the halves of a pair."""

    whole: Schedule
    scatter: Schedule | None = None
    gather: Schedule | None = None


@dataclass(frozen=True)
class Transformer:
    """The sizes of a stack of layers; the batch is a chip's own. The default compiles in seconds."""

    layers: int = 4
    width: int = 256
    sequence: int = 128
    batch: int = 1
    dtype: str = "float32"
    wide_sums: bool = False
    """Sums in float32 and, where weights are sharded, float32 shards; else as the weights."""

    def __post_init__(self) -> None:
        if self.width < HEAD or self.width % HEAD:
            raise ParameterError(f"A layer's width is {self.width}: expected a multiple of {HEAD}, an attention head.")

    @property
    def weights(self) -> dict[str, jax.ShapeDtypeStruct]:
        """All layers' weights, as shapes."""
        width = self.width
        shapes = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
            "norm1": (width,),
            "norm2": (width,),
        }
        return {
            name: jax.ShapeDtypeStruct((self.layers, *shape), jnp.dtype(self.dtype)) for name, shape in shapes.items()
        }

    @property
    def n_params(self) -> int:
        """Parameters, of all layers."""
        return sum(prod(leaf.shape) for leaf in self.weights.values())

    @property
    def sums(self) -> Any:
        """The dtype to sum in, None for the weights' own."""
        return jnp.float32 if self.wide_sums else None

    def loss(self, y: Any, x: Any) -> Any:
        """Return how far the last layer's output is from the input of the place before."""
        return jnp.mean((y - jnp.roll(x, 1, axis=1)).astype(jnp.float32) ** 2)


def layer(w: Any, x: Any) -> Any:
    """Apply attention and a perceptron, each with a norm before it."""

    def norm(x: Any, scale: Any) -> Any:
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (1 + scale)

    n_heads = x.shape[-1] // HEAD
    q, k, v = jnp.split((norm(x, w["norm1"]) @ w["qkv"]).reshape(*x.shape[:2], n_heads, -1), 3, axis=-1)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x, w["norm2"]) @ w["up"]) @ w["down"]


def compile_stack(
    topology: str,
    model: Transformer,
    plans: StackPlans,
    fabric: Fabric,
    *,
    shard: Shard = Shard.FSDP,
    hide: bool = True,
    gradients_only: bool = False,
) -> tuple[Compiled, list[Overlap]]:
    """Compile a train step, or only its gradients, and say how much computing lies beside permutes.

    Without `hide`, layers are gathered when they are needed and gradients are summed at once or, where nothing is
    sharded, after the backward pass.
    """
    program = _program(plans, fabric, shard)
    params, specs = _params(model, fabric, program, shard)
    by_chip = PartitionSpec(fabric.axes)
    n_chips = fabric.mesh.n_chips
    batch = jax.ShapeDtypeStruct((n_chips * model.batch, model.sequence, model.width), jnp.dtype(model.dtype))
    x = _placed(batch, by_chip, fabric)

    def scanned(params: Any, x: Any, program: Any) -> Any:
        y = scan_layers(layer, params, x, program, accumulate_dtype=model.sums, hide=hide)
        return model.loss(y, x)

    def plain(params: Any, x: Any) -> Any:
        y, _ = lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, params)
        return model.loss(y, x)

    optimizer = optax.adam(1e-2)
    is_scanned = shard is Shard.FSDP or (shard is Shard.NONE and hide)
    arguments: tuple[Any, ...]
    if gradients_only:
        if not is_scanned:
            raise ParameterError("Gradients alone are compiled for scan_layers: shard by fsdp, or none with hide.")
        function = _mapped(jax.grad(scanned), fabric, (specs, by_chip), specs, program)
        jitted, arguments = fabric.jit(function, overlap=True), (params, x)
    elif shard is Shard.NONE and hide:
        state = _placed(jax.eval_shape(optimizer.init, params), PartitionSpec(), fabric)

        def step(params: Any, state: Any, x: Any, program: Any) -> Any:
            updates, state = optimizer.update(jax.grad(scanned)(params, x, program), state, params)
            return optax.apply_updates(params, updates), state

        whole = PartitionSpec()
        mapped = _mapped(step, fabric, (whole, whole, by_chip), whole, program)
        jitted, arguments = fabric.jit(mapped, overlap=True, donate_argnums=(0, 1)), (params, state, x)
    else:
        training: Any = (
            sharded_train_step(scanned, optimizer, fabric, accumulate_dtype=model.sums)
            if shard is Shard.FSDP
            else train_step(plain, optimizer, fabric, accumulate_dtype=model.sums)
        )
        made = jax.eval_shape(training.init, params, program)
        split = (
            sharded_specs(made, fabric)
            if shard is Shard.FSDP
            else jax.tree.map(lambda x: by_chip if shard is Shard.UPDATE and x.ndim else PartitionSpec(), made)
        )
        jitted = fabric.jit(training.step, overlap=True, donate_argnums=(0, 1))
        arguments = (params, _placed(made, split, fabric), x)
    report, compiled = compile_step(topology, jitted, fabric, *arguments, program)
    return report, bodies_with_permutes(str(compiled.as_text()))


def _program(plans: StackPlans, fabric: Fabric, shard: Shard) -> Any:
    if shard is Shard.NONE:
        return abstract_program(plans.whole, fabric)
    return abstract_program(plans.whole, fabric, scatter=plans.scatter, gather=plans.gather, update="two-phase")


def _params(model: Transformer, fabric: Fabric, program: Any, shard: Shard) -> tuple[Any, Any]:
    """Return the weights as a step takes them, and how they are split."""
    if shard is not Shard.FSDP:
        return _placed(model.weights, PartitionSpec(), fabric), PartitionSpec()

    def cut(tree: Any, program: Program) -> Any:
        return shard_params(tree, fabric, program, stacked=True, accumulate_dtype=model.sums)

    made = jax.eval_shape(cut, model.weights, program)
    specs = sharded_specs(made, fabric)
    return _placed(made, specs, fabric), specs


def _placed(tree: Any, specs: Any, fabric: Fabric) -> Any:
    specs = jax.tree.broadcast(specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=fabric.sharding(*spec)), tree, specs
    )


def _mapped(function: Any, fabric: Fabric, in_specs: tuple[Any, ...], out_specs: Any, program: Any) -> Any:
    return jax.shard_map(
        function, mesh=fabric.jax_mesh, in_specs=(*in_specs, program.spec), out_specs=out_specs, check_vma=False
    )
