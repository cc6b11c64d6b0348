"""The recipes of docs/tiles.md: each script beside its plain-jit one, the losses equal, the difference as shown."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "jax" / "adopt"
PAIRS = [("nnx_plain", "nnx_tiles"), ("jit_plain", "jit_tiles"), ("data_parallel_plain", "data_parallel_tiles")]
SHARDED = ("nnx_tiles", "nnx_sharded")
SHOWN = [PAIRS[0], SHARDED, *PAIRS[1:]]
"""In the order of the page."""


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


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 20])
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
    page = (ROOT / "docs" / "tiles.md").read_text(encoding="utf-8").partition("\n## A model that is split inside")[0]
    blocks = re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S)
    for pair, block in zip(SHOWN, blocks, strict=True):
        changed = changed_lines(pair)[2:]  # without the docstring's first line, which says what the script is
        assert [line for line in block.splitlines() if line != " …"] == changed
        n_new = len([line for line in changed if line.startswith("+")])
        assert n_new <= 15
        if pair != SHARDED:
            assert re.search(rf"`{pair[0]}.py`,\s`{pair[1]}.py`, {n_new} new lines", page)
