"""Data-parallel training over a holed mesh: a train step for any loss function and optax optimizer.

Three ways to update the weights, chosen by how the program was installed:

- `update="replicated"`: gradients are all-reduced, and every chip updates all weights.
- `update="two-phase"`: gradients are reduce-scattered, each chip updates the weights that it owns, with its
  share of the optimizer's state, and the new weights are all-gathered. The same bytes travel, and the optimizer's
  memory and work are divided by the number of chips. Chips that own nothing (for example beside a hole) are supported.
- `update="fused"`: the same within one all-reduce: the owner updates a chunk between its way up and
  its way down. See `fused_update`.

The parts are plain functions of pytrees: jit them, donate to them, scan over them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from meshmend.jax.engine.collectives import (
    Group,
    Shards,
    Tree,
    all_gather,
    all_reduce,
    groups_of,
    reduce_scatter,
    shard_of,
    travel_dtype,
)
from meshmend.jax.engine.cpu_order import in_order
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.engine.tiles import TILE_AXIS, TiledFabric
from meshmend.jax.train.arguments import check_batch, check_data_parallel, check_microbatches, check_program, weights_of
from meshmend.jax.train.by_name import for_shards
from meshmend.jax.train.fused_update import FusedUpdate
from meshmend.jax.train.optimizer_check import Before, update_weights, with_steady_dtypes
from meshmend.jax.train.optimizers import inside_tile, sharded_layers
from meshmend.jax.train.part_sums import LossSums, PartLoss, Sums, count_of, divide_by_weight
from meshmend.jax.train.shardings import match_specs, shapes_inside, specs_of_state, stacked_specs
from meshmend.jax.train.value_and_grad import on_tiles, rows_by_tile, sum_over_tiles

LossFunction = Callable[[Tree, Tree], Tree]
"""From parameters and a batch to a scalar (or, with `has_aux`, to a scalar and a pytree of arrays).

With `per_example`, to one value for each example of the batch (and arrays whose first axis is the examples)."""
Mean = Callable[[jax.Array], jax.Array]
Specs = Any
"""PartitionSpecs in a tree, or in a prefix of one."""
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class TrainStep:
    """The two functions of a training loop, both to be jitted, and what they were made for. Made by `train_step`.

    Unpack it (`init, step = mmj.train_step(…)`) where the functions are all you need. `StateLayout.of` and
    `compile_train_step` take it whole: what they must know of it is said nowhere else.
    """

    init: Callable[[Tree, Program], Tree]
    """From parameters and a program to the optimizer's state."""
    step: Callable[..., tuple[Tree, ...]]
    """From parameters, state, a batch and a program to new parameters, state, loss (and aux).

    Keywords: `weights` (with `per_example`) and `scale`, by which the optimizer's updates are multiplied."""
    fabric: Fabric
    accumulate_dtype: DTypeLike | None
    specs: Callable[[Any, Program], tuple[Specs, Specs]] | None = None
    """From parameters and a program to the PartitionSpecs of parameters and state inside tiles; None without tiles."""
    is_fsdp: bool = False
    """Whether parameters are sharded by owner."""
    has_model_state: bool = False
    """Whether the state is a pair: the optimizer's, and the model's."""
    values: Callable[[Tree, Tree, Program], Tree] | None = None
    """From parameters, a batch and a program to what the loss returns, computed as in a step; for jobs, which check it
    before they train."""

    def __iter__(self) -> Iterator[Callable[..., Tree]]:
        return iter((self.init, self.step))


def train_step(
    loss: LossFunction,
    optimizer: optax.GradientTransformation,
    fabric: Fabric,
    *,
    shardings: Tree = None,
    has_aux: bool = False,
    microbatches: int = 1,
    accumulate_dtype: DTypeLike | None = jnp.float32,
    per_example: bool = False,
) -> TrainStep:
    """Return `init(params, program)` and `step(params, state, batch, program)` for data-parallel training.

    `loss(params, batch)` is the mean over its batch. A batch is a pytree of arrays whose first axis is split over all
    devices. `microbatches` cuts each device's part into so many equal pieces, whose gradients are added up before
    anything is sent. Gradients, the loss and (with `has_aux`) `aux` are averaged over devices, summed in
    `accumulate_dtype` where that is wider than their own dtype. With a replicated update, all that is summed in one
    dtype travels together. A few numbers in another dtype take `program.scalars`, as the loss and norms do in a sharded
    update. The loss and `aux` come back as means in float32 or wider, of integers and bools too.

    With `per_example`, `loss(params, batch)` has one value per example, and everything is a true mean over examples,
    however they are spread: `step(…, weights=w)` says how much each counts, such as 0 for padding (by default all
    count once): one real number per example, added up in float32. The mean of values v is Σ w·v / Σ w, for negative
    weights too. Where Σ w is 0 there is no mean, so that the loss and aux are NaN and the gradients are 0. Only sums
    travel, and they are divided once, so that integer-valued gradients give the same bits on any number of chips. The
    loss of an example must not depend on others in its batch, as batch normalisation does.

    `step(…, scale=factor)` multiplies the optimizer's updates, which scales the learning rate; the factor may
    change from step to step without compiling again. Optimizers that take the loss (`value`) get its mean.

    With an update of two phases the optimizer must be element-wise, as SGD, momentum, Adam and AdamW do, or get the
    norms of layers from here. Use `mmj.lars`, `mmj.lamb` and `mmj.clip_by_global_norm`. Masks and labels may go by the
    names of layers, as in `optax.masked`. Others are refused. With a fused update likewise, but without LARS and LAMB,
    which need their norms before the first update.

    On a fabric of tiles (`mmj.tile`) a batch is split over tiles, and `shardings` says how each parameter is split
    inside one, as in `value_and_grad`. The optimizer's state is split as its parameters are. Where the update is
    sharded, each chip updates its part of its own shards, for the chips in the same slot of all tiles.

    >>> import jax, jax.numpy as jnp, optax, meshmend as mm, meshmend.jax as mmj
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> program = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric, update="two-phase")
    >>> loss = lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> init, step = mmj.train_step(loss, optax.adam(0.1), fabric)
    >>> w = jnp.zeros((3, 1))
    >>> state = jax.jit(init)(w, program)
    >>> batch = {"x": jnp.ones((24, 3)), "y": jnp.ones((24, 1))}
    >>> w, state, value = jax.jit(step, donate_argnums=(0, 1))(w, state, batch, program)
    >>> float(value)
    1.0
    """
    if not isinstance(fabric, TiledFabric):
        check_data_parallel(fabric, shardings)
    return _WholeParams(
        loss, with_steady_dtypes(optimizer), fabric, has_aux, microbatches, accumulate_dtype, per_example, shardings
    ).train_step()


@dataclass(frozen=True, eq=False)
class Training(ABC):
    """A step: differentiate each part of the batch, then update the weights, in `jax.shard_map` over all devices.

    A part is differentiated by one device, inside that `shard_map`. On a fabric of tiles a part is a tile's, and XLA
    splits the work inside it: so it comes before, under `jax.vmap` over tiles.
    """

    is_fsdp: ClassVar[bool]
    """Whether parameters are sharded by owner: gradients then come out of the loss as shards of their sums."""

    loss: Callable[..., Tree]
    optimizer: optax.GradientTransformationExtraArgs
    fabric: Fabric
    has_aux: bool
    microbatches: int
    accumulate_dtype: DTypeLike | None
    per_example: bool

    @abstractmethod
    def specs(self, params: Tree, program: Program) -> tuple[Specs, Specs]:
        """Return how parameters and the optimizer's state are split; refuse what cannot be updated so."""

    @abstractmethod
    def loss_of(self, program: Program) -> PartLoss:
        """Return the loss as a function of parameters and examples."""

    @abstractmethod
    def cut(self, params: Tree, program: Program) -> Tree:
        """Return what of the parameters this device updates."""

    @abstractmethod
    def update(self, before: Before, gradients: Tree, mean: Mean, program: Program) -> tuple[Tree, Tree]:
        """Return new parameters and state; `mean` makes the mean of complete sums, which gradients may not be yet."""

    def optimizer_of(self, params: Tree, program: Program) -> optax.GradientTransformationExtraArgs:
        """Return the optimizer as it updates what `cut` returns of parameters that are whole."""
        del params, program
        return self.optimizer

    def train_step(self) -> TrainStep:
        """Return the two functions."""
        check_microbatches(self.microbatches)
        specs = self.specs if self.tiles is not None and not self.is_fsdp else None
        step = in_order(self.step, self.fabric)
        return TrainStep(self.init, step, self.fabric, self.accumulate_dtype, specs, self.is_fsdp, values=self.values)

    @property
    def tiles(self) -> TiledFabric | None:
        """The fabric, if it is one of tiles."""
        return self.fabric if isinstance(self.fabric, TiledFabric) else None

    def init(self, params: Tree, program: Program) -> Tree:
        """Return the optimizer's state."""
        params = jax.tree.map(jnp.asarray, params)
        of_params, of_state = self.specs(params, program)
        if self.tiles is not None and not program.is_sharded:
            return self._put(self.optimizer.init(params), of_state)

        optimizer = self.optimizer_of(params, program)

        def local(params: Tree, program: Program) -> Tree:
            return optimizer.init(self.cut(params, program))

        return self._mapped(local, (of_params, program.spec), of_state)(params, program)

    def step(
        self, params: Tree, state: Tree, batch: Tree, program: Program, *, weights: Any = None, scale: Any = None
    ) -> tuple[Tree, ...]:
        """Return new parameters, state, loss (and aux)."""
        params = jax.tree.map(jnp.asarray, params)
        of_params, of_state = self.specs(params, program)
        # A part of weighted examples may be filled up, by a device alone.
        pieces = 1 if self.per_example and self.tiles is None else self.microbatches
        check_batch(
            {"batch": batch}, self.fabric, pieces, instead="Repeat it for each example, or make it a parameter."
        )
        maker = "sharded_train_step" if self.is_fsdp else "train_step"
        weights = weights_of(weights, batch, maker, per_example=self.per_example)
        found: tuple[Tree, ...]
        if self.tiles is None:
            by_device = PartitionSpec(self.fabric.batch_axes)
            in_specs = of_params, of_state, by_device, WHOLE, program.spec
            local = self._mapped(partial(self._on_chip, params), in_specs, (of_params, of_state, WHOLE, WHOLE))
            found = local(params, state, (batch, weights), scale, program)
        else:
            rows = self._sums_by_tile(self.tiles, params, batch, weights, program)
            if program.is_sharded:
                in_specs = of_params, of_state, self._specs_of_sums(of_params), WHOLE, program.spec
                local = self._mapped(partial(self._on_tile, params), in_specs, (of_params, of_state, WHOLE, WHOLE))
                found = local(params, state, rows, scale, program)
            else:
                # Whole arrays, which XLA splits inside tiles: any optimizer may look at them.
                total = sum_over_tiles(rows, of_params, program, self.tiles)
                new, kept, *means = self._updated(Before(params, params, params, state, scale), total, program)
                found = self._put(new, of_params), self._put(kept, of_state), *means
        return found if self.has_aux else found[:3]

    def values(self, params: Tree, batch: Tree, program: Program) -> Tree:
        """Return what the loss returns for each example, from one device's or tile's part of the batch at a time."""

        def of_part(params: Tree, batch: Tree, program: Program) -> Tree:
            return self.loss_of(program)(params, batch, None)

        if self.tiles is None:
            by_device = PartitionSpec(self.fabric.batch_axes)
            in_specs = self.specs(params, program)[0], by_device, program.spec
            return self._mapped(of_part, in_specs, by_device)(params, batch, program)
        by_vmap = jax.vmap(of_part, in_axes=(None, 0, None), spmd_axis_name=TILE_AXIS)
        rows = by_vmap(params, rows_by_tile(batch, self.tiles), program)
        return on_tiles(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows), self.tiles)

    def _sums(self, params: Tree, batch: Tree, weights: jax.Array | None, program: Program) -> Sums:
        """Differentiate one part of the batch."""
        part = LossSums(
            self.has_aux,
            self.microbatches,
            self.accumulate_dtype,
            is_split_inside=self.tiles is not None,
            over_devices=self.is_fsdp,
            omits_unused=not self._omits_where_added(program),
        )
        return part.of(self.loss_of(program), params, batch, weights)

    def _sums_by_tile(
        self, tiles: TiledFabric, params: Tree, batch: Tree, weights: jax.Array | None, program: Program
    ) -> Sums:
        """Let each tile differentiate its part of the batch; return the sums, one row per tile."""
        # The shards of the gradients are the same for all tiles, or rather for none: they are split over all devices.
        row: Tree = 0
        out_axes = Sums(None if self.is_fsdp else row, row, row)
        by_vmap = jax.vmap(self._sums, in_axes=(None, 0, 0, None), out_axes=out_axes, spmd_axis_name=TILE_AXIS)
        parts, part_weights = rows_by_tile((batch, weights), tiles)
        return by_vmap(params, parts, part_weights, program)

    def _specs_of_sums(self, of_params: Specs) -> Specs:
        """Return how the sums of tiles are split."""
        by_tile: Specs = PartitionSpec(TILE_AXIS)
        return Sums(of_params if self.is_fsdp else stacked_specs(of_params), by_tile, by_tile)

    def _on_chip(
        self, whole: Tree, params: Tree, state: Tree, part: tuple[Tree, Any], scale: Any, program: Program
    ) -> tuple[Tree, Tree, Tree, Tree]:
        """Return new parameters, state, loss and aux of a device with its part of the batch, in `jax.shard_map`."""
        own = self.cut(params, program)
        if own is not params:
            # To be cut, parameters are packed. That is over, and its buffer free, before anything is made of the batch.
            own, part = lax.optimization_barrier((own, part))
        sums = self._sums(params, *part, program)
        before = Before(whole, params, own, state, scale)
        if program.is_sharded:
            return self._updated(before, _with_total_extras(sums, program), program)
        weights = part[1] if self._omits_where_added(program) else None
        counts = None if weights is None else jnp.any(weights != 0)
        return self._updated(before, all_reduce(sums, program, counts=counts), program)

    def _omits_where_added(self, program: Program) -> bool:
        """Whether the sums of a device without examples are left out when they are packed, where that is for free."""
        return self.tiles is None and self.microbatches == 1 and not program.is_sharded

    def _on_tile(
        self, whole: Tree, params: Tree, state: Tree, rows: Sums, scale: Any, program: Program
    ) -> tuple[Tree, Tree, Tree, Tree]:
        """Return the same of a device of a tile, of whose sums it has its own row."""
        gradients = rows.gradients if self.is_fsdp else _first(rows.gradients)
        sums = Sums(gradients, *_first((rows.extras, rows.weight)))
        before = Before(whole, params, self.cut(params, program), state, scale)
        return self._updated(before, _with_total_extras(sums, program), program)

    def _updated(self, before: Before, sums: Sums, program: Program) -> tuple[Tree, Tree, Tree, Tree]:
        """Return new parameters, state, loss and aux; of these sums only the gradients may still be incomplete."""
        count = count_of(sums.weight, self.fabric.n_parts * self.microbatches)
        value, aux = jax.tree.map(lambda x: divide_by_weight(x, count, empty=jnp.nan), sums.extras)
        if self.is_fsdp:
            # The loss takes the mean over devices, where it does not ask for their sum.
            count = count_of(sums.weight, self.microbatches)

        def mean(total: jax.Array) -> jax.Array:
            return divide_by_weight(total, count, empty=0.0).astype(total.dtype)

        before = replace(before, value=value)
        return *self.update(before, sums.gradients, mean, program), value, aux

    def _mapped(self, function: Callable[..., Tree], in_specs: Specs, out_specs: Specs) -> Callable[..., Tree]:
        # With check_vma JAX would itself sum the gradients of replicated weights.
        mesh = self.fabric.jax_mesh
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _put(self, tree: Tree, specs: Specs) -> Tree:
        def constrain(leaf: Any, spec: PartitionSpec) -> Any:
            return lax.with_sharding_constraint(leaf, NamedSharding(self.fabric.jax_mesh, spec))

        return jax.tree.map(constrain, tree, specs)


@dataclass(frozen=True, eq=False)
class _WholeParams(Training):
    """A step for parameters that are whole on every chip, or on every tile, where they are split inside it."""

    is_fsdp = False

    shardings: Tree
    checked: dict[Any, optax.GradientTransformationExtraArgs] = field(default_factory=dict, repr=False)
    """The optimizer as it updates shards, for parameters and layouts that have been traced."""

    def specs(self, params: Tree, program: Program) -> tuple[Specs, Specs]:
        check_program(program, self.fabric)
        inside = match_specs((self.shardings,), (params,), self.fabric)[0]
        if not program.is_sharded:
            if self.tiles is None:
                return inside, WHOLE
            return inside, specs_of_state(jax.eval_shape(self.optimizer.init, params), params, inside)

        by_device = PartitionSpec(self.fabric.axes)
        own = self._shards(self._groups(params, inside, program), program)
        state = jax.eval_shape(self.optimizer_of(params, program).init, own)
        return inside, jax.tree.map(lambda leaf: by_device if leaf.ndim else WHOLE, state)

    def optimizer_of(self, params: Tree, program: Program) -> optax.GradientTransformationExtraArgs:
        if not program.is_sharded:
            return self.optimizer
        leaves, structure = jax.tree.flatten(params)
        key = structure, tuple((x.shape, x.dtype) for x in leaves), program.layout, program.update
        if key not in self.checked:
            groups = self._groups(params, match_specs((self.shardings,), (params,), self.fabric)[0], program)
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
            wide = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, travel_dtype(x.dtype, self.accumulate_dtype)), params
            )
            self.checked[key] = for_shards(
                self.optimizer,
                self._shards(groups, program),
                [group.members for group in groups],
                wide,
                own=shapes,
                with_update=program.update == "fused",
            )
        return self.checked[key]

    def _groups(self, params: Tree, inside: Specs, program: Program) -> list[Group]:
        local = jax.tree.leaves(shapes_inside(params, inside, self.fabric.jax_mesh))
        return groups_of(local, program.layout, self.accumulate_dtype)

    @staticmethod
    def _shards(groups: Sequence[Group], program: Program) -> Shards:
        """Return what a chip owns of each group, as shapes and dtypes."""
        n_rows = program.owned.shape[-1]
        shapes: Any = tuple(jax.ShapeDtypeStruct(one.shard_shape(n_rows), one.dtype) for one in groups)
        found: Shards = shapes
        return found

    def loss_of(self, program: Program) -> PartLoss:
        del program
        return lambda params, batch, _: self.loss(params, batch)

    def cut(self, params: Tree, program: Program) -> Tree:
        return shard_of(params, program, accumulate_dtype=self.accumulate_dtype) if program.is_sharded else params

    def update(self, before: Before, gradients: Tree, mean: Mean, program: Program) -> tuple[Tree, Tree]:
        if not program.is_sharded:
            gradients = jax.tree.map(lambda x, like: mean(x).astype(like.dtype), gradients, before.params)
            return update_weights(self.optimizer, before, gradients)
        sums = self.accumulate_dtype
        tile = inside_tile(match_specs((self.shardings,), (before.whole,), self.fabric)[0], self.fabric)
        optimizer = self.optimizer_of(before.whole, program)
        if program.update == "fused":
            return FusedUpdate(optimizer, before, mean, program, sums, tile).of(gradients)
        own_gradients = jax.tree.map(mean, reduce_scatter(gradients, program, accumulate_dtype=sums))
        layers = sharded_layers(before, program, sums, tile)
        own, state = update_weights(optimizer, before, own_gradients, layers=layers)
        return all_gather(own, program, like=before.params, accumulate_dtype=sums), state


def _with_total_extras(sums: Sums, program: Program) -> Sums:
    """Return sums whose loss, aux and weight are of all devices; the gradients are as they are."""
    return Sums(sums.gradients, *all_reduce((sums.extras, sums.weight), program.for_scalars))


def _first(rows: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], rows)
