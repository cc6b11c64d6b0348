"""Whoever has something planned says what for: bytes and hardware. What is forgotten would run, and run slowly."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import meshmend

SOURCE = Path(meshmend.__file__).parent
ASKED = {"plan", "make_planner", "plan_broadcast", "plan_halves", "plan_shards"}
"""Functions of `meshmend.planning` that take `payload_bytes` and `hardware`, and have defaults for a first look."""
CHECKS_ONLY = {
    "doctor/probes.py": "small plans that show whether an engine adds up; their time counts for nothing",
    "planning/shards.py": "a number of chunks, that is given, is all that gather has to choose",
}
PLANNING = ("meshmend.planning", "meshmend.planning.proven", "meshmend.planning.shards")
SAID = {"payload_bytes", "hardware"}


def callers(path: Path) -> list[ast.Call]:
    """Calls of what a module imports from planning, or of `mm.plan`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "") in ("meshmend", *PLANNING)
        for alias in node.names
        if alias.name in ASKED
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            is_name = isinstance(node.func, ast.Name) and node.func.id in names
            is_mm = (
                isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("mm", "meshmend")
                and node.func.attr in ASKED
            )
            if is_name or is_mm:
                found.append(node)
    return found


def says_what_for(call: ast.Call) -> bool:
    """Whether a call passes bytes and hardware: by name, in a mapping, or within a planner that was made with them."""
    given = {keyword.arg for keyword in call.keywords}
    return given >= SAID or None in given or _has_planner(call)


def _has_planner(call: ast.Call) -> bool:
    """Whether the second argument is a planner and no name of one: planners that choose cannot be made without both."""
    planner = call.args[1] if len(call.args) > 1 else None
    return planner is not None and not isinstance(planner, ast.Constant) and not ast.unparse(planner).endswith(".name")


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SOURCE.rglob("*.py")) if callers(path)],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_no_caller_forgets_what_it_plans_for(path: Path) -> None:
    forgetful = [f"line {call.lineno}: {ast.unparse(call)}" for call in callers(path) if not says_what_for(call)]
    if str(path.relative_to(SOURCE)) in CHECKS_ONLY:
        assert forgetful, f"{path.name} need not be excused any more"
        return
    assert not forgetful, forgetful


def test_the_test_finds_a_caller_that_forgets(tmp_path: Path) -> None:
    file = tmp_path / "forgets.py"
    file.write_text(
        "import meshmend as mm\nfrom meshmend.planning import plan, plan_shards as shards\n"
        "plan(mesh)\nmm.plan(mesh, 'weave')\nshards(mesh, hardware=h)\n"
        "plan(mesh, payload_bytes=1, hardware=h)\nplan(mesh, planner)\nplan(mesh, **target)\nother.plan(mesh)\n"
    )
    assert [says_what_for(call) for call in callers(file)] == [False, False, False, True, True, True]


def test_planners_that_choose_cannot_be_made_without() -> None:
    with pytest.raises(TypeError, match="payload_bytes"):
        meshmend.planning.Auto()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="payload_bytes"):
        meshmend.planning.Tuned(meshmend.planning.Weave())  # type: ignore[call-arg]
