"""Training as tests do it: on chips, in tiles, with every kind of update; and optax on one device as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax.engine.program import Update
from meshmend.jax.engine.tiles import TiledFabric

INSTALLED: dict[str, Update] = {
    "replicated": "replicated",
    "sharded": "two-phase",
    "fused": "fused",
    "fsdp": "two-phase",
}
"""Kinds of training, and the update that their programs are installed for."""
BOTH = ("replicated", "sharded")
"""The kinds that every chip, or every tile, can train in without more."""


@cache
def chips_of(shape: str, *failed: str) -> mmj.Fabric:
    return mmj.discover(jax.devices()[: mm.Mesh(shape).size], shape=shape, failed=failed)


@cache
def tiles_of(shape: str, *failed: str, side: str = "2x2", **inner: int) -> TiledFabric:
    return mmj.tile(chips_of(shape, *failed), side, **inner)


@cache
def program_of(fabric: mmj.Fabric, kind: str, planner: str = "weave", **more: Any) -> mmj.Program:
    """By default a plan with an odd number of chunks, each of which has one owner."""
    if planner == "weave":
        more = {"chunks": 2 * fabric.mesh.n_chips + 1, **more}
    if kind == "fused":
        more = {"collective": "all-reduce-with-update", **more}
    elif planner == "weave":
        more = {"owners": "even", **more}
    return mmj.install(mm.plan(fabric.mesh, planner, **more), fabric, update=INSTALLED[kind])


def in_tiles(program: mmj.Program) -> mmj.Program:
    """The program with chunks as on a TPU, in tiles of 8 × 128 elements, on devices of any kind."""
    more: dict[str, Any] = {
        name: in_tiles(part) for name in ("gather", "scalars") if (part := getattr(program, name)) is not None
    }
    return replace(program, layout=replace(program.layout, platform="tpu"), **more)


class Trained(NamedTuple):
    """What a run ends with."""

    losses: list[float]
    params: Any
    state: Any
    aux: list[Any]
    """Of each step, where the loss returns any."""


def matrices(params: Any) -> Any:
    """Choose layers as masks do."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def train(
    loss: Callable[..., Any],
    params: Any,
    optimizer: Any,
    fabric: mmj.Fabric,
    kind: str,
    batches: Sequence[Any],
    *,
    program: mmj.Program | None = None,
    shardings: Any = None,
    weights: Any = None,
    scale: Any = None,
    **options: Any,
) -> Trained:
    """Train with meshmend; with `kind` "fsdp" as one tree of sharded parameters, which is whole again at the end."""
    program = program_of(fabric, kind) if program is None else program
    split = {} if shardings is None else {"shardings": shardings}
    training: Any
    if kind == "fsdp":
        params = mmj.fsdp.shard_params(params, fabric, program, **split)
        training = mmj.fsdp.sharded_train_step(
            lambda params, batch, pair: loss(mmj.fsdp.gather_params(params, pair), batch), optimizer, fabric, **options
        )
    else:
        training = mmj.train_step(loss, optimizer, fabric, **split, **options)
    found = run(training, params, batches, program, weights=weights, scale=scale)
    if kind == "fsdp":
        return found._replace(params=mmj.fsdp.unshard_params(found.params, fabric, program))
    check_copies(found.params)
    return found


def run(training: Any, params: Any, batches: Sequence[Any], program: mmj.Program, **more: Any) -> Trained:
    """Call a train step on some batches, each of which gives up the parameters and the state that it was given."""
    init, step = training
    params = jax.tree.map(jnp.array, params)
    state, losses, auxes = jax.jit(init)(params, program), [], []
    step = jax.jit(step, donate_argnums=(0, 1))
    for batch in batches:
        params, state, value, *aux = step(params, state, batch, program, **more)
        losses.append(float(value))
        auxes.extend(aux)
    return Trained(losses, params, state, auxes)


def train_alone(
    loss: Callable[..., Any], params: Any, optimizer: optax.GradientTransformation, batches: Sequence[Any]
) -> Trained:
    """Optax's own way, on one device and nothing of meshmend's: the oracle."""
    state, losses = optimizer.init(params), []

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for batch in batches:
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return Trained(losses, params, state, [])


def check_copies(params: Any) -> None:
    """Hold all copies of an array, and of each of its parts inside a tile, to the same bits."""
    for leaf in jax.tree.leaves(params):
        by_slot: dict[str, Any] = {}
        for shard in leaf.addressable_shards:
            first = by_slot.setdefault(str(shard.index), np.asarray(shard.data))
            assert np.array_equal(first, shard.data, equal_nan=True), "all copies end with the same bits"


def check_close(got: Any, wanted: Any, rtol: float, atol: float = 0.0) -> None:
    """Compare two trees, name by name."""
    structures: list[Any] = [jax.tree.structure(got), jax.tree.structure(wanted)]
    assert structures[0] == structures[1]
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert jnp.shape(one) == jnp.shape(other)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def normal(shapes: dict[str, tuple[int, ...]], seed: int = 0, spread: float = 1.0) -> dict[str, Any]:
    """Random parameters of these shapes."""
    rng = np.random.default_rng(seed)
    return {name: np.float32(rng.normal(size=shape) * spread) for name, shape in shapes.items()}
