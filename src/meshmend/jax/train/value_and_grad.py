"""Gradients over tiles: `value_and_grad` in place of `jax.value_and_grad`, for a model that is split inside a tile.

Each tile differentiates the loss of its own part of the batch, under whatever sharding the model and XLA choose inside
it: `jax.vmap(…, spmd_axis_name="tile")` keeps tiles apart. The gradients are then averaged over tiles by the planned
schedule, in a `shard_map` that is manual over every axis, so that each chip packs only the shards that it holds and
nothing moves inside a tile. `docs/tiles.md` has the table of what works inside a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree, all_reduce
from meshmend.jax.engine.program import Program
from meshmend.jax.engine.tiles import TILE_AXIS, TiledFabric
from meshmend.jax.train.arguments import check_batch, check_microbatches, check_program, weights_of
from meshmend.jax.train.part_sums import LossSums, Sums, count_of, divide_by_weight
from meshmend.jax.train.shardings import match_specs, stacked_specs

LIST_IT = (
    "List it in shared_argnums if it is the same on all tiles, or in key_argnums if it is a random key; any other "
    "argument is a batch."
)


def value_and_grad(
    loss: Callable[..., Tree],
    fabric: TiledFabric,
    shardings: Tree,
    *,
    has_aux: bool = False,
    shared_argnums: int | Sequence[int] = (),
    key_argnums: int | Sequence[int] = (),
    microbatches: int = 1,
    per_example: bool = False,
    accumulate_dtype: DTypeLike | None = jnp.float32,
) -> Callable[..., tuple[Tree, Tree]]:
    """Return `f(*args, program=program)` with the value and the gradients of `loss(*args)`, averaged over tiles.

    Use it inside `jax.jit` as `jax.value_and_grad(loss)` is used; `program` is an argument of the jitted function. The
    loss sees one tile's part of the batch, and the model's sharding constraints name the axes inside a tile.

    `shardings` says how each parameter is split inside a tile, as PartitionSpecs or NamedShardings: a tree like the
    parameters, or a prefix of one. A wrong one costs communication inside tiles, never correctness.

    The first argument of the loss is the parameters, the same on all tiles. `shared_argnums` are the same on all tiles
    and are not differentiated: a step's number, model state that is averaged. `key_argnums` are random keys: each tile
    gets its own, `jax.random.fold_in(key, tile)`, and so does each microbatch. Everything else is a batch, whose first
    axis is split over tiles.

    With `has_aux` the loss returns (value, aux), and f returns ((value, aux), gradients), with the mean of aux over
    tiles (of integers in float32).

    `microbatches` cuts a tile's part into so many pieces, whose gradients are added up before anything is sent. With
    `per_example` the loss (and aux) has one value per example and everything is a true mean, Σ w·v / Σ w, with
    `f(…, weights=w)` as in `train_step`. Sums are formed in `accumulate_dtype` where that is wider. Gradients have
    their parameters' dtypes; the value and aux keep the dtype of their sums.

    >>> import jax, jax.numpy as jnp, meshmend as mm, meshmend.jax as mmj
    >>> from jax.sharding import PartitionSpec as P
    >>> fabric = mmj.tile(mmj.discover(jax.devices()[:16], shape="4x4", failed=["0,1"]), "2x2", model=4)
    >>> program = mmj.install(mm.plan(fabric.mesh), fabric)
    >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> step = jax.jit(mmj.value_and_grad(loss, fabric, P(None, "model")))
    >>> value, gradients = step(jnp.ones((2, 8)), jnp.ones((6, 2)), program=program)
    >>> float(value), gradients.sharding.spec
    (4.0, P(None, 'model'))
    """
    if not isinstance(fabric, TiledFabric):
        raise ParameterError(
            f"Expected a fabric of tiles, got a {type(fabric).__name__}: cut it with mmj.tile(fabric, '2x2', model=4), "
            "or with mmj.tile(fabric, '1x1') for data parallelism alone."
        )
    check_microbatches(microbatches)
    of_shared, of_keys = _numbers(shared_argnums), _numbers(key_argnums)
    part = LossSums(has_aux, microbatches, accumulate_dtype, is_split_inside=True)

    def of_tile(params: Tree, shared: Tree, keys: Tree, batch: Tree, weights: Any) -> Sums:
        def call(params: Tree, batch: Tree, number: jax.Array | None) -> Tree:
            own = keys if number is None else jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)
            args = {**shared, **own, **batch}
            return loss(params, *(args[i] for i in range(1, len(args) + 1)))

        return part.of(call, params, batch, weights)

    def mean_gradients(*args: Any, program: Program, weights: Any = None) -> tuple[Tree, Tree]:
        check_program(program, fabric)
        _check_whole(program)
        batch = _batch_of(args, of_shared, of_keys)
        check_batch({f"Argument {i}": arg for i, arg in batch.items()}, fabric, microbatches, instead=LIST_IT)
        weights = weights_of(weights, list(batch.values()), "value_and_grad", per_example=per_example)
        params, shared = args[0], {i: args[i] for i in of_shared}
        specs = match_specs((shardings,), (params,), fabric)[0]
        keys = on_tiles({i: _key_per_tile(args[i], fabric.mesh.n_chips) for i in of_keys}, fabric)
        by_vmap = jax.vmap(of_tile, in_axes=(None, None, 0, 0, 0), spmd_axis_name=TILE_AXIS)
        sums = by_vmap(params, shared, keys, *rows_by_tile((batch, weights), fabric))
        total = sum_over_tiles(sums, specs, program, fabric)
        count = count_of(total.weight, fabric.n_parts * microbatches)
        value, aux = jax.tree.map(lambda x: divide_by_weight(x, count, empty=jnp.nan), total.extras)
        gradients = jax.tree.map(
            lambda x, like: divide_by_weight(x, count, empty=0.0).astype(jnp.result_type(like)), total.gradients, params
        )
        return (value, aux) if has_aux else value, gradients

    return mean_gradients


def _batch_of(args: Sequence[Tree], shared: Sequence[int], keys: Sequence[int]) -> dict[int, Tree]:
    """Return the arguments that are split over tiles, by number; refuse numbers that are no argument's."""
    listed = [*shared, *keys]
    if len(set(listed)) < len(listed) or not all(0 < i < len(args) for i in listed):
        raise ParameterError(
            f"shared_argnums and key_argnums are {shared} and {keys}: expected numbers from 1 to {len(args) - 1}, each "
            f"in one of them, as the function was called with {len(args)} arguments."
        )
    found = {i: arg for i, arg in enumerate(args) if i and i not in listed}
    if not found:
        raise ParameterError("No argument of the loss is a batch to split over tiles: all are listed as others.")
    return found


def rows_by_tile(batch: Tree, fabric: TiledFabric) -> Tree:
    """Return a batch with one row per tile, each on its tile."""
    n_tiles = fabric.mesh.n_chips
    return on_tiles(jax.tree.map(lambda x: jnp.reshape(x, (n_tiles, -1, *jnp.shape(x)[1:])), batch), fabric)


def on_tiles(tree: Tree, fabric: TiledFabric) -> Tree:
    """Split the first axis over tiles, and leave the others as they are."""

    def constrain(x: Any) -> Any:
        free = [PartitionSpec.UNCONSTRAINED] * (jnp.ndim(x) - 1)
        return lax.with_sharding_constraint(x, NamedSharding(fabric.jax_mesh, PartitionSpec(TILE_AXIS, *free)))

    return jax.tree.map(constrain, tree)


def sum_over_tiles(sums: Sums, specs: Tree, program: Program, fabric: TiledFabric) -> Sums:
    """Add up what tiles have, one row per tile; each chip packs its own shards of the gradients, and only those."""

    def local(sums: Sums, program: Program) -> Tree:
        return all_reduce(jax.tree.map(lambda x: x[0], sums), program)

    by_tile, whole = PartitionSpec(TILE_AXIS), PartitionSpec()
    total: Sums = jax.shard_map(
        local,
        mesh=fabric.jax_mesh,
        in_specs=(Sums(stacked_specs(specs), by_tile, by_tile), program.spec),  # type: ignore[arg-type]
        out_specs=Sums(specs, whole, whole),  # type: ignore[arg-type]
        check_vma=False,
    )(sums, program)
    return total


def _key_per_tile(keys: Tree, n_tiles: int) -> Tree:
    """Return one key per tile for each key of a tree: typed keys, or raw ones (`jax.random.PRNGKey`)."""

    def fold(key: jax.Array) -> jax.Array:
        is_raw = not jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key)
        if is_raw and (jnp.ndim(key) != 1 or jnp.result_type(key) != jnp.uint32):
            raise ParameterError(
                f"An argument in key_argnums has dtype {jnp.result_type(key)} and shape {jnp.shape(key)}: expected "
                "random keys, as jax.random.key(0) makes."
            )
        return jax.vmap(lambda tile: jax.random.fold_in(key, tile))(jnp.arange(n_tiles))

    return jax.tree.map(fold, keys)


def _check_whole(program: Program) -> None:
    if program.is_sharded:
        raise ParameterError(
            f"Expected a program with update='replicated', as mmj.install makes, got update={program.update!r}: with "
            "that each tile has the sums of its own weights only. For an update that is sharded over tiles use "
            "mmj.train_step(loss, optimizer, fabric, shardings=…)."
        )


def _numbers(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)
