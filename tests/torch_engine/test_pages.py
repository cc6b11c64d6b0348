"""The page that needs torch, each block alone, as its reader would run it."""

from __future__ import annotations

import pytest

from pages import ROOT, Block, read, run

BLOCKS = [block for block in read(ROOT / "docs/torch.md") if block.kind != "text" and not block.needs_lab]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_every_block_runs_alone(block: Block) -> None:
    run(block, {"JAX_PLATFORMS": "cpu"})
