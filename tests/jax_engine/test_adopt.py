"""The recipes of docs/adopt.md: each script beside its plain-jit one, the losses equal, the difference as shown."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshmend as mm
import meshmend.jax as mmj

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "jax" / "adopt"
PAIRS = [("nnx_plain", "nnx_tiles"), ("jit_plain", "jit_tiles"), ("data_parallel_plain", "data_parallel_tiles")]
SHARDED = ("nnx_tiles", "nnx_sharded")


@pytest.fixture(autouse=True)
def _beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    for name in ("transformer", "nnx_plain", "nnx_tiles", "nnx_sharded"):
        sys.modules.pop(name, None)


def train_of(script: str) -> Callable[..., list[float]]:
    if script.startswith("nnx"):
        pytest.importorskip("flax", reason="needs flax: pip install 'meshmend[workloads]'")
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


@pytest.mark.parametrize("pair", [*PAIRS, SHARDED], ids=lambda pair: pair[1])
def test_few_lines_change_and_the_page_shows_them(pair: tuple[str, str]) -> None:
    changed = changed_lines(pair)
    assert len([line for line in changed if line.startswith("+")]) <= 17
    page = (ROOT / "docs" / "adopt.md").read_text(encoding="utf-8")
    for line in changed[2:]:  # without the docstring's first line, which says what the script is
        assert f"\n{line}\n" in page, f"docs/adopt.md does not show: {line}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "inner", "n_examples"),
    [("4x2", {"model": 8}, 56), ("2x2", {"data": 2, "model": 2}, 60)],
    ids=["4x2 tiles", "two inner axes"],
)
def test_other_tiles_train_the_same(side: str, inner: dict[str, int], n_examples: int) -> None:
    """The NNX model for 20 steps, against one device that has the whole batch."""
    nnx = pytest.importorskip("flax.nnx", reason="needs flax: pip install 'meshmend[workloads]'")
    import optax

    recipe: Any = importlib.import_module("transformer")
    fabric = mmj.tile(mmj.discover(shape="8x8", failed=["2x2@2,2"]), side, **inner)
    program = mmj.install(mm.plan(fabric.mesh, "weave", chunks=32), fabric)
    optimizer = optax.adamw(3e-3)
    with jax.set_mesh(fabric.jax_mesh):
        graph, start = nnx.split(nnx.eval_shape(lambda: recipe.Transformer(nnx.Rngs(0))))
    specs = nnx.get_partition_spec(start)
    rng = np.random.default_rng(1)
    start = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), start)

    def loss(params: Any, tokens: Any) -> Any:
        return recipe.loss(nnx.merge(graph, params), tokens)

    def losses(differentiate: Callable[..., Any], place: Callable[[Any], Any], *more: Any) -> list[float]:
        def step(params: Any, state: Any, tokens: Any, *more: Any) -> Any:
            value, gradients = differentiate(params, tokens, *more)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        jitted, params, state, found = jax.jit(step), start, optimizer.init(start), []
        for tokens in recipe.batches(20):
            params, state, value = jitted(params, state, place(tokens[:n_examples]), *more)
            found.append(float(value))
        return found

    want = losses(jax.value_and_grad(loss), lambda tokens: tokens)
    function = mmj.value_and_grad(loss, fabric, specs)
    batch_axes = ("tile", "data") if "data" in inner else "tile"
    by_tile = NamedSharding(fabric.jax_mesh, PartitionSpec(batch_axes))
    with jax.set_mesh(fabric.jax_mesh):
        got = losses(
            lambda params, tokens, program: function(params, tokens, program=program),
            lambda tokens: jax.device_put(tokens, by_tile),
            program,
        )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
