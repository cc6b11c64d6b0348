from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for each test's copies in memory."""
    monkeypatch.setenv("MESHMEND_MEMORY", str(tmp_path / "memory"))
    return tmp_path / "memory"
