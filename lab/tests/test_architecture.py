"""The house rules of the laboratory: what it is installed with, how its parts depend on each other, their size."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import meshmend_lab

SOURCE = Path(meshmend_lab.__file__).parent
ROOT = Path(__file__).parents[2]
# From left to right: a part may import from its own place or from the left. All may import meshmend.
ORDER = [
    "errors",
    "extras",
    "mesh",
    "simgrid",
    "availability",
    "simulation",
    "paper",
    "tenstorrent",
    "export",
    "pallas",
    "bench",
    "timing",
    "studio",
    "probes",
    "cli",
]
PATHS = sorted(SOURCE.rglob("*.py"))


def parts_imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "meshmend_lab":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshmend_lab."):
            found.add(str(node.module).split(".")[1])
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path: Path) -> None:
    if path.parent == SOURCE and path.name == "__init__.py":
        assert not parts_imported(path)
        return
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for other in parts_imported(path):
        assert ORDER.index(other) <= ORDER.index(part), f"{path.name} reaches from {part!r} to {other!r}"


def test_files_and_functions_are_short() -> None:
    for path in PATHS:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 600, path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 100, f"{path.name}: {node.name}"


def test_both_distributions_say_the_same_of_themselves() -> None:
    own, product = (
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (ROOT / "lab", ROOT)
    )
    for key in ("requires-python", "license", "dynamic"):
        assert own[key] == product[key]
    assert (ROOT / "lab/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    needed = [*own["dependencies"], *(text for extra in own["optional-dependencies"].values() for text in extra)]
    for extras in re.findall(r"^meshmend\[([\w,]+)\]$", "\n".join(needed), re.M):
        assert set(extras.split(",")) <= set(product["optional-dependencies"])
