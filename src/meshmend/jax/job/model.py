"""What a job trains: a loss with or without model state and random keys, and where its optimizer's state lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshmend.errors import ParameterError
from meshmend.jax.checks.recompute import Part
from meshmend.jax.data.example_keys import RandomKey
from meshmend.jax.engine.collectives import Tree, travel_dtype
from meshmend.jax.engine.fabric import Fabric
from meshmend.jax.engine.program import Program
from meshmend.jax.job.model_state import ModelState
from meshmend.jax.state import fetch, put
from meshmend.jax.train.by_name import for_shards
from meshmend.jax.train.fsdp.params import ShardedParams, is_sharded, joined
from meshmend.jax.train.fsdp.step import sharded_train_step
from meshmend.jax.train.part_sums import LossSums, Sums
from meshmend.jax.train.plan import any_pair
from meshmend.jax.train.step import TrainStep, train_step

Update = Literal["auto", "replicated", "sharded", "fsdp"]
SHARDED_FROM_BYTES = 1 << 28
"""Bytes of optimizer state from which "auto" shards it, for the price of the same all-reduce (a fused update). Less of
it fits beside the model on any accelerator: 256 MiB of the 8 GB and more that they have."""


@dataclass(frozen=True)
class Model:
    """A loss and all that it is called with besides parameters and a batch.

    `loss(params, batch)` returns one value per example. With `model_state` it is `loss(params, model_state, batch)`
    and returns (values, new state), each array of it with one row per example: their mean is the next state, or for
    whole numbers what is the same for all of them (`ModelState`). With `rng` it gets one key per example as its last
    argument. With `has_aux` it returns metrics, too, one row per example: (values, aux), or (values, (new state, aux)).

    Where parameters are sharded (FSDP), `params(fabric, pair)` makes them, and the loss is `loss(params, batch, pair)`.
    """

    loss: Callable[..., Any]
    optimizer: optax.GradientTransformation
    params: Tree
    model_state: Tree = None
    rng: RandomKey | None = None
    has_aux: bool = False
    microbatches: int = 1
    accumulate_dtype: DTypeLike | None = jnp.float32
    shardings: Any = None
    """How parameters are split inside tiles, where there are any."""
    independent: bool = True
    """Whether a new job checks that an example's loss depends on no other example."""

    @property
    def is_fsdp(self) -> bool:
        """Whether parameters are sharded: then they are made for a fabric and its programs."""
        return callable(self.params)

    def training(self, fabric: Fabric) -> TrainStep:
        """Return the train step, whose state is the optimizer's, and the model's beside it if there is one."""
        if self.is_fsdp:
            return sharded_train_step(
                self._call_with_pair,
                self.optimizer,
                fabric,
                has_aux=self.has_aux,
                microbatches=self.microbatches,
                accumulate_dtype=self.accumulate_dtype,
                per_example=True,
            )
        if self.model_state is None:
            return self._train_step(fabric, self._call, self.has_aux)
        kept = ModelState(self.model_state)
        plain = self._train_step(fabric, lambda params, data: self._call(params, data, kept.start), True)

        def init(params: Tree, program: Program) -> Any:
            start = jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, fabric.sharding()), kept.start)
            return plain.init(params, program), start

        def step(params: Tree, state: Tree, batch: Any, program: Program, **more: Any) -> tuple[Any, ...]:
            own, model_state = state

            def averaged(params: Tree, data: Any) -> Any:
                value, extra = self._call(params, data, model_state)
                new, aux = extra if self.has_aux else (extra, ())
                return value, (kept.averaged(new), aux)

            def new_state(params: Tree, model_state: Tree, data: Any) -> Any:
                _, extra = self._call(params, data, model_state)
                return extra[0] if self.has_aux else extra

            inner = self._train_step(fabric, averaged, True)
            new_params, own, value, (means, aux) = inner.step(params, own, batch, program, **more)
            new = kept.next(means, new_state, params, model_state, batch)
            return new_params, (own, new), value, *([aux] if self.has_aux else [])

        inner_specs = plain.specs
        if inner_specs is None:
            return TrainStep(init, step, fabric, self.accumulate_dtype, has_model_state=True, values=plain.values)

        def specs(params: Tree, program: Program) -> tuple[Tree, Tree]:
            inside, of_state = inner_specs(params, program)
            return inside, (of_state, jax.tree.map(lambda _: PartitionSpec(), kept.start))

        return TrainStep(init, step, fabric, self.accumulate_dtype, specs, has_model_state=True, values=plain.values)

    def values_and_state(self, found: Tree) -> tuple[Tree, Tree]:
        """Return the values and the new model state, None without one, from what the loss returns."""
        if self.model_state is None:
            return found[0] if self.has_aux else found, None
        values, extra = found
        return values, extra[0] if self.has_aux else extra

    def gradients(self, params: Tree, model_state: Tree, part: Part) -> Sums:
        """Return one device's sums over a part of its examples, for `Recompute`, without any collective.

        `model_state` is None for a model without one. A part is half of a device's examples, and is cut into half as
        many microbatches, so that it needs no more memory than a step.
        """
        self.check_recomputable()
        data = part.data if self.rng is None else (part.data, part.offsets)
        given = () if self.model_state is None else (model_state,)

        def loss(params: Tree, data: Any, _: Any) -> Any:
            return self._call(params, data, *given)

        has_aux = self.has_aux or bool(given)
        sums = LossSums(has_aux, -(-self.microbatches // 2), self.accumulate_dtype)
        return sums.of(loss, params, data, part.weights)

    def check_recomputable(self) -> None:
        """Raise `ParameterError` if no single chip could compute a gradient of this model."""
        if self.is_fsdp:
            raise ParameterError(
                "Gradients cannot be recomputed with update='fsdp': all chips compute them together, each from its "
                "shards of the parameters, so that no single chip could repeat another's part. Leave this check out."
            )

    def outline(self, fabric: Fabric) -> Any:
        """Return what a plan is made from: the parameters, or where they are sharded, shapes that any plan would give.

        Who makes sharded parameters needs programs that cut them; what they are cut from does not depend on these.
        """
        return self.like(fabric, any_pair(fabric)) if self.is_fsdp else self.params

    def like(self, fabric: Fabric, program: Program) -> Any:
        """Return the parameters as shapes and dtypes, or as they were given."""
        return jax.eval_shape(lambda pair: self.params(fabric, pair), program) if self.is_fsdp else self.params

    def put(self, fabric: Fabric, program: Program) -> Tree:
        """Return what a new job begins with, on the devices."""
        return self.params(fabric, program) if self.is_fsdp else put(self.params, fabric, self.shardings)

    def fetch(self, params: Tree, fabric: Fabric, program: Program) -> Tree:
        """Return parameters as NumPy arrays; shards are gathered, one layer at a time, so every process must ask."""
        return fetch_params(params, fabric, program) if self.is_fsdp else fetch(params)

    def is_sharded(self, update: Update) -> bool:
        """Whether each chip updates only its own share of the weights.

        "auto" decides by the model and the optimizer alone. It must not depend on the chips that are left: a state
        that was kept one way is not restored the other way.
        """
        if update not in ("auto", "replicated", "sharded", "fsdp"):
            raise ParameterError(f"update is {update!r}, expected 'auto', 'replicated', 'sharded' or 'fsdp'.")
        self._check_fsdp(update)
        if update in ("sharded", "fsdp") and self.model_state is not None:
            raise ParameterError(
                f"update={update!r} does not keep a model state yet. Use update='replicated', or put what the model "
                "remembers into its parameters."
            )
        if update != "auto" or self.model_state is not None:
            return update in ("sharded", "fsdp")
        whole = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), travel_dtype(leaf.dtype, self.accumulate_dtype)),
            self.params,
        )
        state = jax.eval_shape(self.optimizer.init, whole)
        n_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim)
        if n_bytes < SHARDED_FROM_BYTES:
            return False
        leaves = jax.tree.leaves(whole)
        members: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if math.prod(leaf.shape):
                members.setdefault(leaf.dtype, []).append(i)
        shards = tuple(
            jax.ShapeDtypeStruct((1, sum(math.prod(leaves[i].shape) for i in own)), dtype)
            for dtype, own in members.items()
        )
        try:
            for_shards(self.optimizer, shards, list(members.values()), whole, own=self.params, with_update=True)
        except ParameterError:
            return False
        return True

    def _train_step(self, fabric: Fabric, loss: Callable[..., Any], has_aux: bool) -> TrainStep:
        return train_step(
            loss,
            self.optimizer,
            fabric,
            has_aux=has_aux,
            microbatches=self.microbatches,
            accumulate_dtype=self.accumulate_dtype,
            per_example=True,
            shardings=self.shardings,
        )

    def _call(self, params: Tree, data: Any, *model_state: Tree) -> Any:
        if self.rng is None:
            return self.loss(params, *model_state, data)
        batch, offsets = data
        return self.loss(params, *model_state, batch, self.rng.of_examples(offsets))

    def _call_with_pair(self, params: Tree, data: Any, pair: Program) -> Any:
        if self.rng is None:
            return self.loss(params, data, pair)
        batch, offsets = data
        return self.loss(params, batch, pair, self.rng.of_examples(offsets))

    def _check_fsdp(self, update: Update) -> None:
        """Refuse whole parameters where they are to be sharded, and the reverse."""
        if (update == "fsdp") != self.is_fsdp:
            got = "a function" if self.is_fsdp else f"a {type(self.params).__name__}"
            raise ParameterError(
                f"update is {update!r} and params is {got}. Otherwise give a pytree of arrays. With update='fsdp', "
                "where parameters are never whole on a chip, give a function that makes sharded ones, as in "
                "params=lambda fabric, pair: mmj.fsdp.init_sharded(make, key, fabric, pair)."
            )
        if self.is_fsdp and self.shardings is not None:
            raise ParameterError(
                "With update='fsdp' the shardings inside tiles are given where parameters are made: "
                "mmj.fsdp.init_sharded(make, key, fabric, pair, shardings=…)."
            )


def fetch_params(tree: Tree, fabric: Fabric, program: Program) -> Any:
    """Return sharded parameters whole, as NumPy arrays, with one layer at a time on the chips. For every process."""

    def whole(params: ShardedParams) -> Any:
        join = joiner(params, fabric, program)
        layers = [fetch(join(np.int32(number), params, program)) for number in range(params.n_layers or 1)]
        return layers[0] if params.n_layers is None else jax.tree.map(lambda *leaves: np.stack(leaves), *layers)

    return jax.tree.map(whole, tree, is_leaf=is_sharded)


def joiner(params: ShardedParams, fabric: Fabric, program: Program) -> jax.stages.Wrapped:
    """Return the program from a layer's number, sharded parameters and programs to that layer's (or the one) tree."""
    join, is_tree = joined(params, fabric, program), params.n_layers is None
    return fabric.jit(lambda number, params, program: join(params.shards if is_tree else params.layer(number), program))
