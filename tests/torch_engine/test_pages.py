"""The page that needs torch, each block alone, as its reader would run it."""

from __future__ import annotations

import pytest

from lab.test_namespaces import needs_lab
from pages import ROOT, Block, read, run

BLOCKS = [block for block in read(ROOT / "docs/torch.md") if block.kind != "text"]


@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.slow], ids=lambda block: block.name)
def test_every_block_runs_alone(block: Block) -> None:
    run(block, {"JAX_PLATFORMS": "cpu"})


@pytest.mark.slow
@needs_lab
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.slow], ids=lambda block: block.name)
def test_every_measurement_runs(block: Block) -> None:
    run(block, {"JAX_PLATFORMS": "cpu"})
