"""The house rules that a test can hold: imports run one way, extras stay outside, the public surface is small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import meshmend

SOURCE = Path(meshmend.__file__).parent
# From left to right: a part may import from its own place or from the left.
ORDER = [
    "errors",
    "topology",
    "routing",
    "schedule",
    "faults",
    "cost",
    "numpy",
    "planning",
    "study",
    "availability",
    "jax",
    "drawing",
    "",
    "lab",
    "torch",
    "bench",
    "doctor",
    "cli",
    "__main__",
]
# A planner makes schedules and knows nothing to the right of them; only what chooses and proves plans may.
PLANNERS_MAY = {"errors", "topology", "routing", "schedule", "planning"}
CHOOSERS = {"proven.py", "cache.py", "auto.py", "__init__.py"}


def part_of(path: Path) -> str:
    inside = path.relative_to(SOURCE)
    return "" if inside.name == "__init__.py" and len(inside.parts) == 1 else inside.parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Parts of meshmend that a file imports; '' stands for the package's own public names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "meshmend" else [f"meshmend.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0] == "meshmend":
                part = [*name.split("."), ""][1]
                found.add(part if part in ORDER else "")
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_one_way(path: Path) -> None:
    part = part_of(path)
    for other in imports_of(path):
        assert ORDER.index(other) <= ORDER.index(part), f"{path.name} reaches from {part!r} to {other!r}"
    if part == "planning" and path.name not in CHOOSERS:
        assert imports_of(path) <= PLANNERS_MAY


def test_the_verifier_imports_no_planner() -> None:
    for name in ("verify.py", "faults.py"):
        assert "planning" not in imports_of(SOURCE / name)


def test_drawing_imports_planners_only_for_the_figures_of_the_paper() -> None:
    knowing = {path.name for path in (SOURCE / "drawing").glob("*.py") if "planning" in imports_of(path)}
    assert knowing == {"paper.py"}


def test_importing_meshmend_brings_no_extra() -> None:
    code = (
        "import sys, meshmend, meshmend.cli, meshmend.drawing, meshmend.schedule.split, meshmend.numpy; "
        "extras = 'jax jaxlib optax flax grain torch matplotlib simgrid simpy'; "
        "print([m for m in extras.split() if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_surface_is_small_and_every_name_has_one_home() -> None:
    assert len(meshmend.__all__) <= 20
    assert sorted(meshmend.__all__) == list(meshmend.__all__)
    for name in meshmend.__all__:
        assert getattr(meshmend, name).__module__.startswith("meshmend.")


def test_no_file_is_two_ideas() -> None:
    long = {p.name: n for p in SOURCE.rglob("*.py") if (n := len(p.read_text(encoding="utf-8").splitlines())) > 500}
    assert not long
