"""The pages that need torch, each block alone, as its reader would run it."""

from __future__ import annotations

import pytest

from pages import ROOT, Block, read, run

PAGES = ("docs/torch.md", "docs/torch_devices.md", "docs/torch_engine.md", "docs/api/meshmend.torch.md")
BLOCKS = [
    pytest.param(block, id=block.name, marks=[pytest.mark.slow] * block.slow)
    for page in PAGES
    for block in read(ROOT / page)
    if block.kind != "text" and not block.needs_lab
]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_runs_alone(block: Block) -> None:
    run(block, {"JAX_PLATFORMS": "cpu"})
