"""States that were trained for two steps, in every way in which a state can lie on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

import meshmend as mm
import meshmend.jax as mmj
from jax_engine.training_cases import in_tiles
from meshmend.jax.state.disk.orbax import names_of
from meshmend.jax.state.disk.write import copy_to_host
from meshmend.jax.state.layout.state_layout import StateLayout, put

SPECS = {"matrix": P(None, "model"), "pair": [P("model"), P()], "none": P()}
OPTIMIZER = optax.chain(optax.trace(0.5), optax.scale_by_schedule(lambda count: -0.25 * (count + 1)))


def params_tree(matrix: tuple[int, int] = (13, 8)) -> Any:
    """Two dtypes, a scalar, an array without elements, and sizes that no number of chips divides."""
    rng = np.random.default_rng(0)
    return {
        "matrix": rng.integers(-8, 8, matrix).astype(np.float32),
        "pair": [jnp.asarray(rng.integers(-8, 8, 6), jnp.bfloat16), np.float32(3)],
        "none": np.zeros((0, 3), np.float32),
    }


def stacked_tree(matrix: tuple[int, int] = (13, 8)) -> Any:
    return jax.tree.map(lambda leaf: np.stack([leaf, leaf + 1, leaf - 2]), params_tree(matrix))


def weighted(params: Any) -> Any:
    """A number whose derivative by any element is the number of its array, from 1."""
    return sum(jnp.sum(x.astype(jnp.float32) * (i + 1)) for i, x in enumerate(jax.tree.leaves(params)))


class Trained:
    """A state after two steps, on chips without those that failed, or on tiles of them.

    `kind` is "replicated", "two-phase", "fused" or "fsdp", or one of these on tiles: "tiled", "tiled fused", ….
    `matrix` is the shape of the largest array, and `stored` is how chunks are: "flat", or "in tiles" as on a TPU.
    """

    def __init__(
        self,
        kind: str,
        failed: Sequence[Any],
        shape: str = "4x4",
        planner: str = "weave",
        *,
        matrix: tuple[int, int] = (13, 8),
        stored: str = "flat",
    ) -> None:
        self.kind = kind
        chips = mmj.discover(jax.devices()[: mm.Mesh(shape).n_chips], shape=shape, failed=failed)
        self.fabric = mmj.tile(chips, "1x2", model=2) if "tiled" in kind else chips
        update: Any = {"tiled": "replicated", "tiled fused": "fused"}.get(kind, kind)
        update = "two-phase" if "fsdp" in kind else update
        owners: dict[str, Any] = {"collective": "all-reduce-with-update"} if update == "fused" else {}
        if planner == "weave":
            owners["chunks"] = 2 * self.fabric.mesh.n_chips + 1
        schedule = mm.plan(self.fabric.mesh, planner, **owners)
        self.program = mmj.install(schedule, self.fabric, update=update)
        if stored == "in tiles":
            self.program = in_tiles(self.program)
        specs = SPECS if "tiled" in kind else None
        self.training: Any
        params: Any
        if "fsdp" in kind:
            self.training = mmj.fsdp.sharded_train_step(_sharded_loss, OPTIMIZER, self.fabric)
            params = {
                "ends": mmj.fsdp.shard_params(params_tree(matrix), self.fabric, self.program, shardings=specs),
                "layers": mmj.fsdp.shard_params(
                    stacked_tree(matrix), self.fabric, self.program, stacked=True, shardings=specs
                ),
            }
        else:
            self.training = mmj.train_step(_loss, OPTIMIZER, self.fabric, shardings=specs)
            params = put(params_tree(matrix), self.fabric, specs)
        self.fresh: Any = params, jax.jit(self.training.init)(params, self.program)
        self.layout = StateLayout.of(self.training, self.program, params)

    def after_two_steps(self) -> tuple[Any, Any]:
        params, state = self.fresh
        n = self.fabric.n_chips
        for i in (1, 2):
            batch = jnp.full((n, 1), i, jnp.float32)
            params, state, _ = jax.jit(self.training.step)(params, state, batch, self.program)
        return params, state

    def arrays(self, tree: Any) -> dict[str, NDArray[Any]]:
        """The user's arrays, by name, from what all devices own."""
        users = self.layout.users
        found = [np.zeros(user.shape, user.dtype) for user in users]
        for run in copy_to_host(self.layout, *tree):
            for user, box, values in self.layout.values(*run):
                found[user][tuple(slice(*ends) for ends in box)] = values
        return dict(zip(names_of(self.layout.tree), found, strict=True))


def _loss(params: Any, batch: Any) -> Any:
    return jnp.mean(batch) * weighted(params)


def _sharded_loss(params: Any, batch: Any, pair: mmj.Program) -> Any:
    ends = mmj.fsdp.gather_params(params["ends"], pair)
    x = mmj.fsdp.scan_layers(lambda w, x: x + weighted(w), params["layers"], jnp.zeros(()), pair)
    return jnp.mean(batch) * (weighted(ends) + x)
