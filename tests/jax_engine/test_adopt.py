"""The recipes of docs/jax.md: each script beside its plain-jit one, the losses equal, the difference as shown."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshmend as mm
import meshmend.jax as mmj
from meshmend.jax.engine.tiles import TiledFabric

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "jax" / "adopt"
PAIRS = [("nnx_plain", "nnx_tiles"), ("jit_plain", "jit_tiles"), ("data_parallel_plain", "data_parallel_tiles")]
SHARDED = ("nnx_tiles", "nnx_sharded")
SHOWN = [PAIRS[0], SHARDED, *PAIRS[1:]]
"""In the order of the page."""
OPTIMIZER = optax.adamw(1e-2)


@pytest.fixture(autouse=True)
def _beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    for name in ("transformer", "nnx_plain", "nnx_tiles", "nnx_sharded"):
        sys.modules.pop(name, None)


def train_of(script: str) -> Callable[..., list[float]]:
    if script.startswith("nnx"):
        pytest.importorskip("flax", reason="needs flax: pip install flax")
    train: Callable[..., list[float]] = importlib.import_module(script).train
    return train


def changed_lines(pair: tuple[str, str]) -> list[str]:
    plain, tiles = ((RECIPES / f"{script}.py").read_text(encoding="utf-8").splitlines() for script in pair)
    return [
        line
        for line in difflib.unified_diff(plain, tiles, lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1])
def test_losses_are_those_of_plain_jit(pair: tuple[str, str], steps: int) -> None:
    """NNX: 8×8 chips, 2×2 tiles, one lost. The batches are the same; the plain script has all chips."""
    plain, tiles = (train_of(script)(steps) for script in pair)
    assert plain[-1] < plain[0], "it learns"
    np.testing.assert_allclose(tiles, plain, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_losses_with_a_sharded_update_are_those_of_plain_jit() -> None:
    plain, sharded = train_of("nnx_plain")(20), train_of("nnx_sharded")(20)
    np.testing.assert_allclose(sharded, plain, rtol=0, atol=1e-6)


def test_few_lines_change_and_the_page_shows_them_all_and_no_others() -> None:
    page = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S)
    for pair, block in zip(SHOWN, blocks, strict=True):
        changed = changed_lines(pair)[2:]  # without the docstring's first line, which says what the script is
        assert [line for line in block.splitlines() if line != " …"] == changed
        n_new = len([line for line in changed if line.startswith("+")])
        assert n_new <= 15
        if pair != SHARDED:
            assert re.search(rf"`{pair[0]}.py`,\s`{pair[1]}.py`, {n_new} new lines", page)


def start_of(nnx: Any, make: Callable[[Any], Any], fabric: TiledFabric) -> tuple[Any, Any, Any]:
    """Return a model's graph, its first weights on the host, and how they are split inside a tile."""
    with jax.set_mesh(fabric.jax_mesh):
        graph, start = nnx.split(make(nnx.Rngs(0)))
    return graph, jax.tree.map(np.asarray, start), nnx.get_partition_spec(start)


def placed(start: Any, specs: Any, mesh: jax.sharding.Mesh) -> Any:
    """Split weights over the axes inside a tile (or over the same axes of another mesh)."""
    leaves, tree = jax.tree.flatten(start)
    split = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    both = zip(leaves, split, strict=True)
    return jax.tree.unflatten(tree, [jax.device_put(leaf, NamedSharding(mesh, spec)) for leaf, spec in both])


def step_of(differentiate: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, state: Any, *given: Any) -> Any:
        value, gradients = differentiate(params, *given)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step)


def losses_of(step: Callable[..., Any], start: Any, inputs: Iterable[tuple[Any, ...]]) -> list[float]:
    """Train for as many steps as there are inputs, which follow the parameters and the state as arguments."""
    params, state, found = start, OPTIMIZER.init(start), []
    for given in inputs:
        params, state, value = step(params, state, *given)
        found.append(float(value))
    return found


@pytest.mark.slow
def test_with_dropout_losses_differ_by_rounding_alone() -> None:
    """The NNX model with dropout for 20 steps: tiles are as near to plain jit as plain jit is to itself.

    Plain jit gets the same keys, one per tile's part of the batch. The same sums in another order are its noise: the
    parts permuted on one device; and the parts split over the devices of a mesh, and the model over four or two.
    """
    nnx = pytest.importorskip("flax.nnx", reason="needs flax: pip install flax")
    recipe: Any = importlib.import_module("transformer")
    steps, n_tiles = 20, 15

    class WithDropout(recipe.Transformer):  # type: ignore[misc]  # its base is imported as a script
        def __init__(self, rngs: Any) -> None:
            super().__init__(rngs)
            self.dropout = nnx.Dropout(0.2)

        def __call__(self, tokens: Any, rngs: Any) -> Any:
            x = self.dropout(self.embed(tokens), rngs=rngs)
            for block in self.blocks:
                x = self.dropout(block(x), rngs=rngs)
            return self.embed.attend(self.norm(x))

    fabric = mmj.tile(mmj.discover(shape="8x8", failed=["2x2@2,2"]), "2x2", model=4)
    program = mmj.install(mm.plan(fabric.mesh, "weave", chunks=32), fabric)
    graph, start, specs = start_of(nnx, WithDropout, fabric)

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        logits = nnx.merge(graph, params)(tokens[:, :-1], nnx.Rngs(dropout=key))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def of_parts(params: Any, parts: Any, keys: Any) -> Any:
        return jnp.mean(jax.vmap(loss, (None, 0, 0))(params, parts, keys))

    plain_step = step_of(jax.value_and_grad(of_parts))
    batches = list(recipe.batches(steps))
    keys = [jax.random.key(step) for step in range(steps)]

    def plain(order: Any, mesh: Any = None, keys: Sequence[Any] = keys) -> list[float]:
        sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec("data"))

        def inputs() -> Iterable[tuple[Any, Any]]:
            for tokens, key in zip(batches, keys, strict=True):
                parts = tokens.reshape(n_tiles, -1, tokens.shape[-1])[order]
                yield jax.device_put((parts, jnp.stack([jax.random.fold_in(key, tile) for tile in order])), sharding)

        return losses_of(plain_step, start if mesh is None else placed(start, specs, mesh), inputs())

    rng = np.random.default_rng(2)
    first = np.arange(n_tiles)
    orders = [first, first[::-1], *(rng.permutation(n_tiles) for _ in range(4))]
    runs = [plain(order) for order in orders]
    for shape in ((15, 4), (5, 2)):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("data", "model"))
        with jax.set_mesh(mesh):
            runs.append(plain(first, mesh))
    function = mmj.value_and_grad(loss, fabric, specs, key_argnums=2)
    with jax.set_mesh(fabric.jax_mesh):
        got = losses_of(
            step_of(lambda params, tokens, key, program: function(params, tokens, key, program=program)),
            placed(start, specs, fabric.jax_mesh),
            (
                (jax.device_put(tokens, fabric.sharding("tile")), key, program)
                for tokens, key in zip(batches, keys, strict=True)
            ),
        )
    noise = max(np.abs(np.subtract(a, b)).max() for a, b in combinations(runs, 2))
    assert noise < 1e-5, "rounding of float32, not other masks"
    assert all(np.abs(np.subtract(got, run)).max() <= noise for run in runs)
    other_keys = plain(first, keys=keys[::-1])
    assert np.abs(np.subtract(other_keys, runs[0])).max() > 1000 * noise, "dropout is on"
