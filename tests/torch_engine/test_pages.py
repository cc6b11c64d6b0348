"""The pages that need torch, run as a reader would run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import ROOT, run_in


@pytest.mark.parametrize("name", ["torch.md"])
def test_every_block_runs(name: str, tmp_path: Path) -> None:
    run_in(tmp_path, ROOT / "docs" / name)
