"""The public names of every module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import meshmend

SOURCE = Path(meshmend.__file__).parent


CONTRIBUTING = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


PUBLIC = re.findall(
    r"`(meshmend[\w.]*)`", CONTRIBUTING.split("## What is public")[1].partition("Every other module")[0]
)


def names_in(path: Path) -> list[str] | None:
    """What a file's `__all__` lists, read without running it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return list(ast.literal_eval(node.value))
    return None
