"""The notebook runs from top to bottom and still says what it says on the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

PAGE = Path(__file__).parent.parent / "docs" / "walkthrough.ipynb"


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def test_every_cell_has_been_run_from_top_to_bottom() -> None:
    cells = [cell for cell in nbformat.read(PAGE, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        compile(cell.source, PAGE.name, "exec")
        assert not [output for output in cell.outputs if output.output_type == "error"], cell.source
        assert bool(printed(cell)) == ("print(" in cell.source), cell.source


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Proactor event loop", "ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_every_cell_runs_and_prints_what_is_kept(tmp_path: Path) -> None:
    kept = nbformat.read(PAGE, as_version=4)
    run = nbformat.read(PAGE, as_version=4)
    NotebookClient(run, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = 0
    for before, after in zip(kept.cells, run.cells, strict=True):
        if after.cell_type == "code":
            assert printed(after) == printed(before), after.source
            shown = [output for output in after.outputs if "image/svg+xml" in output.get("data", {})]
            pictures += len(shown)
            assert bool(shown) == ("show(" in after.source and "def show" not in after.source)
    assert pictures == 4
