"""The blocks of pages that use the laboratory, each alone, as a reader would run it. Those of lab.md: see mesh/."""

from __future__ import annotations

import pytest

from namespaces import needs_lab
from page_blocks import BLOCKS
from pages import Block, run

HERE = [
    pytest.param(block, id=block.name, marks=[pytest.mark.slow] * block.slow + [needs_lab] * ("sudo " in block.body))
    for block in BLOCKS
    if block.needs_lab and block.page.name != "lab.md" and block.kind not in ("text", "diff")
]


@pytest.mark.parametrize("block", HERE)
def test_every_block_runs_alone(block: Block) -> None:
    if block.page.name in ("torch.md", "torch_engine.md") or "lab bench allreduce" in block.body:
        pytest.importorskip("torch", reason="torch is not installed: pip install 'meshmend[torch]'")
    run(block, {"JAX_PLATFORMS": "cpu"})
