"""A stack of equal layers whose communication hides behind its computing: `scan_layers`.

While a layer computes, the weights of the next one are gathered, and in the backward pass the gradients of the layer
before (the one above it) are summed. Only the layers' inputs are kept for the backward pass, which computes each layer
again (full remat) and, where parameters are sharded, gathers its weights again. So a chip has its shards of all layers,
two whole layers at a time, and the gradients of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.engine.collectives import Tree, all_reduce
from meshmend.jax.engine.program import Program
from meshmend.jax.train.fsdp.params import ShardedParams, count_layers, is_sharded
from meshmend.schedule.lanes import MAX_UNROLLED

Layer = Callable[[Tree, Tree], Tree]
"""From the weights of one layer and its input to its output, which is the next layer's input."""


def scan_layers(
    layer: Layer,
    params: Tree,
    x: Tree,
    program: Program,
    *,
    mean: bool = True,
    accumulate_dtype: DTypeLike | None = jnp.float32,
    hide: bool = True,
    unroll: bool | None = None,
) -> Tree:
    """Return `x` after all layers, `x = layer(weights, x)` in sequence, with communication behind the computing.

    Call it inside `jax.shard_map`, with the program as an argument, as `all_reduce`. The form of `params` says how:

    - `ShardedParams` of a stack, with the two-phase program that cut them: each layer's weights are gathered while the
      one before it computes, and their gradients are reduce-scattered one layer later. `jax.grad` returns shards.
    - A tree of arrays whose first axis is the layers, the same on all chips, with a replicated program: gradients are
      all-reduced one layer later. Do not average them again.

    Gradients are means over all devices, or sums without `mean`. Those of replicated parameters are summed in
    `accumulate_dtype` where that is wider, those of sharded ones in the dtype of their shards. The gradient of `x`, and
    of whatever the layer closes over, is this device's own. Only layers' inputs are kept for the backward pass.

    `x` is any tree; a layer returns one of the same shapes and dtypes. Without `hide` each layer is gathered when it is
    needed and its gradients are summed at once. Nothing hides, and a chip needs the memory of one layer's weights and
    one layer's gradients less. `unroll` writes the steps of the plan out one by one, so that the TPU's scheduler sees
    each permute. It is the default on TPUs where there is something to hide, for plans of at most 96 steps. Compile
    with `fabric.overlap_options`.

    >>> import jax, jax.numpy as jnp, meshmend as mm, meshmend.jax as mmj
    >>> from jax.sharding import PartitionSpec as P
    >>> fabric = mmj.discover(jax.devices()[:16], shape="4x4", failed=["2x2@0,0"])
    >>> pair = mmj.install(mm.plan(fabric.mesh, "hamiltonian"), fabric, update="two-phase")
    >>> params = mmj.fsdp.shard_params({"w": jnp.full((6, 8, 8), 0.1)}, fabric, pair, stacked=True)
    >>> def gradients(params, x, pair):
    ...     layer = lambda w, x: x + jnp.tanh(x @ w["w"])
    ...     return jax.grad(lambda params: jnp.mean(mmj.fsdp.scan_layers(layer, params, x, pair) ** 2))(params)
    >>> specs = mmj.fsdp.sharded_specs(params, fabric)
    >>> step = jax.jit(jax.shard_map(gradients, mesh=fabric.jax_mesh, check_vma=False,
    ...                              in_specs=(specs, P("chip"), pair.spec), out_specs=specs))
    >>> step(params, jnp.ones((24, 8)), pair)
    ShardedParams(6 layers, 384 parameters in shards of float32)
    """
    stack: _Sharded | _Replicated
    if is_sharded(params):
        params.check(program, stacked=True)
        stack = _Sharded(params, mean, _unrolls(program, hide, unroll))
    else:
        _check_replicated(params, program)
        stack = _Replicated(params, mean, accumulate_dtype, _unrolls(program, hide, unroll))
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, x))
    one, outer = _pure(layer, stack.like, jax.tree.unflatten(structure, leaves))
    found = _scan(one, params, leaves, outer, program, stack, hide)
    return jax.tree.unflatten(structure, found)


@dataclass(frozen=True)
class _Sharded:
    """A stack whose weights are gathered, one layer at a time, and whose gradients are reduce-scattered."""

    params: ShardedParams
    mean: bool
    unroll: bool

    @property
    def n_layers(self) -> int:
        return self.params.n_layers or 0

    @property
    def like(self) -> Tree:
        """One layer's weights, as shapes and dtypes."""
        return self.params.outline.like

    def fetch(self, params: ShardedParams, number: jax.Array | int, program: Program) -> Tree:
        """Begin to make a layer's weights available; what is returned is held until it computes."""
        return params.gather(params.layer(number), program, unroll=self.unroll)

    def weights(self, held: Tree, params: ShardedParams, number: jax.Array | int) -> Tree:
        """Return a layer's weights of what was fetched."""
        del params, number
        return held

    def send(self, gradients: Tree, program: Program) -> ShardedParams:
        """Return the gradients of one layer, over all devices."""
        shards = self.params.scatter(gradients, program, mean=self.mean, unroll=self.unroll)
        return ShardedParams(shards, self.params.outline)


@dataclass(frozen=True)
class _Replicated:
    """A stack whose weights are whole on every chip, and whose gradients are all-reduced."""

    params: Tree
    mean: bool
    accumulate_dtype: DTypeLike | None
    unroll: bool

    @property
    def n_layers(self) -> int:
        return count_layers(self.params)

    @property
    def like(self) -> Tree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), self.params)

    def fetch(self, params: Tree, number: jax.Array | int, program: Program) -> None:
        del params, number, program

    def weights(self, held: None, params: Tree, number: jax.Array | int) -> Tree:
        del held
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, number, keepdims=False), params)

    def send(self, gradients: Tree, program: Program) -> Tree:
        return all_reduce(
            gradients, program, mean=self.mean, accumulate_dtype=self.accumulate_dtype, unroll=self.unroll
        )


Flat = list[Any]
OneLayer = Callable[[Tree, Flat, Flat], Flat]
"""From a layer's weights, its input and what it closes over, the latter two as lists, to its output as a list."""


def _scan(
    one: OneLayer, params: Tree, x: Flat, outer: Flat, program: Program, stack: _Sharded | _Replicated, hide: bool
) -> Flat:
    """Run the layers, with a backward pass that is written out."""
    n_layers = stack.n_layers

    def ahead(params: Tree, number: jax.Array | int, program: Program) -> Tree:
        """Fetch a layer before it is its time; without `hide`, nothing."""
        return stack.fetch(params, jnp.clip(number, 0, n_layers - 1), program) if hide else None

    def weights(held: Tree, params: Tree, number: jax.Array | int, program: Program) -> Tree:
        return stack.weights(held if hide else stack.fetch(params, number, program), params, number)

    @jax.custom_vjp
    def run(params: Tree, x: Flat, outer: Flat, program: Program) -> Flat:
        return forward(params, x, outer, program)[0]

    def forward(params: Tree, x: Flat, outer: Flat, program: Program) -> tuple[Flat, Any]:
        def layer(carry: Tree, number: jax.Array | int) -> Tree:
            x, held = carry
            y = one(weights(held, params, number, program), x, outer)
            # Nothing follows the last layer, which is fetched again: the backward pass begins with it.
            return (y, ahead(params, number + 1, program)), x

        (y, held), inputs = lax.scan(layer, (x, ahead(params, 0, program)), jnp.arange(n_layers))
        return y, (params, inputs, held, outer, program)

    def backward(kept: Tree, dy: Flat) -> tuple[Tree, Flat, Flat, None]:
        params, inputs, held, outer, program = kept
        x_parts, outer_parts = _Parts(inputs), _Parts(outer)
        fixed_outer = outer_parts.fixed(outer)

        def layer(carry: Tree, number: jax.Array | int) -> Tree:
            dx, held, waiting, d_outer, sums = carry
            x = [lax.dynamic_index_in_dim(leaf, number, keepdims=False) for leaf in inputs]
            fixed_x = x_parts.fixed(x)

            def varied(w: Tree, x: Flat, outer: Flat) -> Flat:
                y = one(w, x_parts.join(x, fixed_x), outer_parts.join(outer, fixed_outer))
                return x_parts.varied(y)

            w = weights(held, params, number, program)
            dw, dx, more = jax.vjp(varied, w, x_parts.varied(x), outer_parts.varied(outer))[1](dx)
            d_outer = jax.tree.map(jnp.add, d_outer, more)
            if not hide:
                return (dx, None, None, d_outer, _put(sums, stack.send(dw, program), number)), None
            # The layer above is summed while this one computes. In the first round there is none: what is written to
            # the last place then is replaced in the second.
            summed = stack.send(waiting, program)
            return (dx, ahead(params, number - 1, program), dw, d_outer, _put(sums, summed, number + 1)), None

        none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), stack.like) if hide else None
        start = (x_parts.varied(dy), held, none, _zeros(outer_parts.varied(outer)), _zeros(params))
        (dx, _, first, d_outer, sums), _ = lax.scan(layer, start, jnp.arange(n_layers), reverse=True)
        if hide:
            sums = _put(sums, stack.send(first, program), 0)
        return sums, x_parts.join(dx, None), outer_parts.join(d_outer, None), None

    run.defvjp(forward, backward)
    return run(params, x, outer, program)


class _Parts:
    """Which arrays of a list are real (or complex) numbers, that a derivative can vary; the others stay as they are."""

    def __init__(self, leaves: Flat) -> None:
        self.is_varied = [bool(jnp.issubdtype(leaf.dtype, jnp.inexact)) for leaf in leaves]

    def varied(self, leaves: Flat) -> Flat:
        return [leaf for leaf, yes in zip(leaves, self.is_varied, strict=True) if yes]

    def fixed(self, leaves: Flat) -> Flat:
        return [leaf for leaf, yes in zip(leaves, self.is_varied, strict=True) if not yes]

    def join(self, varied: Flat, fixed: Flat | None) -> Flat:
        """Return the list again; without what is fixed, None in its places, as a derivative has."""
        ours = {True: iter(varied), False: iter(fixed or ())}
        return [None if not yes and fixed is None else next(ours[yes]) for yes in self.is_varied]


def _pure(layer: Layer, like: Tree, x: Tree) -> tuple[OneLayer, Flat]:
    """Return a layer as a function of all that it depends on, and those values that it closes over.

    A value that is traced (a mask, a key, something to be differentiated by) may not be closed over by a function with
    a backward pass of its own: its gradient would be lost, or JAX would refuse.
    """
    closed, out = jax.make_jaxpr(layer, return_shape=True)(like, x)
    expected, got = (jax.tree.map(lambda leaf: (jnp.shape(leaf), leaf.dtype), tree) for tree in (x, out))
    if expected != got:
        raise ParameterError(
            f"A layer returned (shape, dtype) {got} for an input of {expected}: expected the same, because its output "
            "is the next layer's input."
        )
    is_traced = [isinstance(value, jax.core.Tracer) for value in closed.consts]
    outer = [value for value, traced in zip(closed.consts, is_traced, strict=True) if traced]

    def one(w: Tree, x: Flat, outer: Flat) -> Flat:
        theirs = iter(outer)
        consts = [next(theirs) if traced else value for value, traced in zip(closed.consts, is_traced, strict=True)]
        found: Flat = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*jax.tree.leaves(w), *x)
        return found

    return one, outer


def _put(sums: Tree, one: Tree, number: jax.Array | int) -> Tree:
    """Write one layer's gradients to its place; a place after the last is the last."""
    return jax.tree.map(
        lambda all_layers, layer: lax.dynamic_update_index_in_dim(
            all_layers, layer.astype(all_layers.dtype), number, axis=0
        ),
        sums,
        one,
    )


def _zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf)), tree)


def _unrolls(program: Program, hide: bool, unroll: bool | None) -> bool:
    if unroll is not None:
        return unroll
    return hide and all(one.layout.platform == "tpu" and one.n_steps <= MAX_UNROLLED for one in program.phases)


def _check_replicated(params: Tree, program: Program) -> None:
    if program.is_sharded:
        raise ParameterError(
            f"The parameters are whole on every chip, and the program has update={program.update!r}. Give one from "
            "mmj.install(schedule, fabric), or shard the parameters with mmj.fsdp.shard_params(…, stacked=True) and "
            "give one with update='two-phase'."
        )
    count_layers(params)
    whole = [str(leaf.dtype) for leaf in jax.tree.leaves(params) if not jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if whole:
        raise ParameterError(
            f"A parameter has dtype {whole[0]}, which has no gradient. Close over it, or make it part of x."
        )
