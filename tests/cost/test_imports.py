"""Cost reads schedules; it must not know who makes them, so that a planner may ask it for prices."""

import ast
from pathlib import Path

import meshmend.cost


def test_cost_imports_no_planner() -> None:
    allowed = {"cost", "errors", "files", "routing", "schedule", "topology"}
    for file in Path(meshmend.cost.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name == "meshmend" and isinstance(node, ast.ImportFrom):
                    assert {alias.name for alias in node.names} <= allowed, f"{file.name} imports from meshmend"
                elif name and name.startswith("meshmend."):
                    assert name.split(".")[1] in allowed, f"{file.name} imports {name}"
