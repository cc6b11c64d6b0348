"""Gradients over tiles: `value_and_grad` in place of `jax.value_and_grad`, for a model that is split inside a tile.

Each tile differentiates the loss of its own part of the batch, under whatever sharding the model and XLA choose inside
it: `jax.vmap(…, spmd_axis_name="tile")` keeps tiles apart. The gradients are then averaged over tiles by the planned
schedule, in a `shard_map` that is manual over every axis, so that each chip packs only the shards that it holds and
nothing moves inside a tile. `docs/jax.md` has the table of what works inside a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.collectives import all_reduce, mean_dtype, travel_dtype
from meshmend.jax.program import Program
from meshmend.jax.shardings import match_specs
from meshmend.jax.tiles import TILE_AXIS, TiledFabric
from meshmend.jax.validation import check_microbatches, check_program, check_tile_batch, check_weights
from meshmend.jax.weighted import divide_by_weight, weighted_sums

TileSums = tuple[Any, Any, Any]
"""Sums of the gradients, of the loss and aux, and of the weights (None where all count alike)."""


def value_and_grad(
    loss: Callable[..., Any],
    fabric: TiledFabric,
    shardings: Any,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    shared_argnums: int | Sequence[int] = (),
    key_argnums: int | Sequence[int] = (),
    microbatches: int = 1,
    per_example: bool = False,
    accumulate_dtype: DTypeLike | None = jnp.float32,
) -> Callable[..., tuple[Any, Any]]:
    """Return `f(*args, program=program)` with the value and the gradients of `loss(*args)`, averaged over tiles.

    Use it inside `jax.jit` as `jax.value_and_grad(loss)` is used; `program` is an argument of the jitted function. The
    loss sees one tile's part of the batch, and the model's sharding constraints name the axes inside a tile.

    `shardings` says how each parameter is split inside a tile, as PartitionSpecs or NamedShardings: a tree like the
    parameters, or a prefix of one. A wrong one costs communication inside tiles, never correctness.

    What the arguments of the loss are: `argnums` (as in JAX) are parameters, the same on all tiles. `shared_argnums`
    are the same on all tiles and are not differentiated: a step's number, model state that is averaged. `key_argnums`
    are random keys: each tile gets its own, `jax.random.fold_in(key, tile)`, and so does each microbatch. Everything
    else is a batch, whose first axis is split over tiles.

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
    roles = Roles(_numbers(argnums), _numbers(shared_argnums), _numbers(key_argnums))
    part = TileLoss(loss, roles, has_aux, microbatches, per_example, accumulate_dtype)
    given = (shardings,) if isinstance(argnums, int) else tuple(shardings)

    def mean_gradients(*args: Any, program: Program, weights: Any = None) -> tuple[Any, Any]:
        check_program(program, fabric)
        _check_whole(program)
        params, specs, sums = sums_by_tile(part, fabric, given, args, weights)
        summed, extras, weight = _sum_over_tiles(sums, specs, program, fabric)
        count = weight_of(weight, fabric, microbatches)
        value, aux = jax.tree.map(lambda x: divide_by_weight(x, count, empty=jnp.nan), extras)
        gradients = jax.tree.map(
            lambda x, like: divide_by_weight(x, count, empty=0.0).astype(jnp.result_type(like)), summed, params
        )
        return (value, aux) if has_aux else value, gradients[0] if isinstance(argnums, int) else gradients

    return mean_gradients


@dataclass(frozen=True)
class Roles:
    """What each positional argument of a loss is, by number: what is not listed is a batch."""

    params: tuple[int, ...]
    shared: tuple[int, ...]
    keys: tuple[int, ...]

    def batch(self, args: Sequence[Any]) -> dict[int, Any]:
        """Return the arguments that are split over tiles, by number; refuse numbers that are no argument's."""
        listed = [*self.params, *self.shared, *self.keys]
        if len(set(listed)) < len(listed) or not all(0 <= i < len(args) for i in listed):
            raise ParameterError(
                f"argnums, shared_argnums and key_argnums are {self.params}, {self.shared} and {self.keys}: expected "
                f"numbers from 0 to {len(args) - 1}, each in one of them, as the function was called with {len(args)} "
                "arguments."
            )
        found = {i: arg for i, arg in enumerate(args) if i not in listed}
        if not found:
            raise ParameterError("No argument of the loss is a batch to split over tiles: all are listed as others.")
        return found


@dataclass(frozen=True)
class TileLoss:
    """A loss as one tile differentiates it."""

    loss: Callable[..., Any]
    roles: Roles
    has_aux: bool
    microbatches: int
    per_example: bool
    accumulate_dtype: DTypeLike | None

    def sums(self, same: tuple[Any, Any], own: tuple[Any, Any]) -> TileSums:
        """Return the sums over this tile's microbatches, in the dtypes that travel.

        `same` is (parameters, shared arguments), `own` is (keys, (batch, weights)).
        """
        keys, (batch, weights) = own
        if self.microbatches == 1:
            return self._piece(same, keys, batch, weights)

        def cut(x: jax.Array) -> jax.Array:
            # Every n-th example: a batch that is split inside the tile stays split as it is.
            return jnp.swapaxes(x.reshape(-1, self.microbatches, *x.shape[1:]), 0, 1)

        def piece(number: Any, part: Any) -> TileSums:
            return self._piece(same, jax.tree.map(lambda key: jax.random.fold_in(key, number), keys), *part)

        numbers, parts = jnp.arange(self.microbatches), jax.tree.map(cut, (batch, weights))
        shapes = jax.eval_shape(piece, *jax.tree.map(lambda x: x[0], (numbers, parts)))
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = lax.scan(lambda so_far, x: (jax.tree.map(jnp.add, so_far, piece(*x)), None), start, (numbers, parts))
        found: TileSums = total
        return found

    def _piece(self, same: tuple[Any, Any], keys: Any, batch: Any, weights: Any) -> TileSums:
        params, shared = same

        def with_aux(params: Any, batch: Any) -> tuple[Any, Any]:
            args = {**dict(zip(self.roles.params, params, strict=True)), **shared, **keys, **batch}
            found = self.loss(*(args[i] for i in range(len(args))))
            return found if self.has_aux else (found, ())

        if self.per_example:
            return tuple(weighted_sums(with_aux, params, batch, weights, 1, self.accumulate_dtype))
        extras, gradients = jax.value_and_grad(with_aux, has_aux=True)(params, batch)
        return *jax.tree.map(self._widened, (gradients, extras)), None

    def _widened(self, value: Any) -> jax.Array:
        x: jax.Array = jnp.asarray(value)
        return x.astype(travel_dtype(mean_dtype(x.dtype), self.accumulate_dtype))


class SumsByTile(NamedTuple):
    """What tiles have before anything is summed over them, one row per tile, and how parameters are split inside."""

    params: tuple[Any, ...]
    specs: Any
    sums: TileSums


def sums_by_tile(
    part: TileLoss, fabric: TiledFabric, shardings: tuple[Any, ...], args: Sequence[Any], weights: Any
) -> SumsByTile:
    """Check the arguments of a loss, and let each tile differentiate its part of the batch."""
    roles, n_tiles = part.roles, fabric.mesh.n_chips
    batch = roles.batch(args)
    check_tile_batch(batch, fabric, part.microbatches)
    if part.per_example:
        n_examples = jnp.shape(jax.tree.leaves(batch)[0])[0]
        weights = jnp.ones(n_examples) if weights is None else jnp.asarray(weights)
        check_weights(weights, list(batch.values()))
    elif weights is not None:
        raise ParameterError("This function does not take weights: make it with per_example=True.")
    params = tuple(args[i] for i in roles.params)
    specs = match_specs(shardings, params, fabric)
    keys = {i: _key_per_tile(args[i], n_tiles) for i in roles.keys}
    by_tile = _on_tiles((keys, _split((batch, weights), n_tiles)), fabric)
    shared = {i: args[i] for i in roles.shared}
    sums = jax.vmap(part.sums, in_axes=(None, 0), spmd_axis_name=TILE_AXIS)((params, shared), by_tile)
    return SumsByTile(params, specs, sums)


def rows_by_tile(batch: Any, fabric: TiledFabric) -> Any:
    """Return a batch with one row per tile, each on its tile."""
    return _on_tiles(_split(batch, fabric.mesh.n_chips), fabric)


def weight_of(weight: Any, fabric: TiledFabric, microbatches: int) -> jax.Array:
    """Return what sums over tiles are divided by: their weight, or the number of means that were added up."""
    return jnp.asarray(fabric.mesh.n_chips * microbatches, jnp.float32) if weight is None else weight


def stacked_specs(specs: Any) -> Any:
    """Return the specs of arrays that have one row per tile, each split inside its tile by `specs`."""
    return jax.tree.map(
        lambda spec: PartitionSpec(TILE_AXIS, *spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def _sum_over_tiles(sums: TileSums, specs: Any, program: Program, fabric: TiledFabric) -> TileSums:
    """Add up what tiles have, one row per tile; each chip packs its own shards of the gradients, and only those."""

    def local(sums: TileSums, program: Program) -> Any:
        return all_reduce(jax.tree.map(lambda x: x[0], sums), program)

    by_tile, whole = PartitionSpec(TILE_AXIS), PartitionSpec()
    total: TileSums = jax.shard_map(
        local,
        mesh=fabric.jax_mesh,
        in_specs=((stacked_specs(specs), by_tile, by_tile), program.spec),
        out_specs=(specs, whole, whole),
        check_vma=False,
    )(sums, program)
    return total


def _on_tiles(tree: Any, fabric: TiledFabric) -> Any:
    """Split the first axis over tiles, and leave the others as they are."""

    def constrain(x: Any) -> Any:
        free = [PartitionSpec.UNCONSTRAINED] * (jnp.ndim(x) - 1)
        return lax.with_sharding_constraint(x, NamedSharding(fabric.jax_mesh, PartitionSpec(TILE_AXIS, *free)))

    return jax.tree.map(constrain, tree)


def _split(tree: Any, n_tiles: int) -> Any:
    return jax.tree.map(lambda x: jnp.reshape(x, (n_tiles, -1, *jnp.shape(x)[1:])), tree)


def _key_per_tile(keys: Any, n_tiles: int) -> Any:
    """Return one key per tile for each key of a tree: typed keys, or raw ones (`jax.random.PRNGKey`)."""

    def fold(key: Any) -> Any:
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
