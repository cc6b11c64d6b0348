"""A hook of the site: writes every public name of a module into its page, from the module's `__all__`."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
PLACE = re.compile(r"^<!-- names of (\S+) -->$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marked place by an entry for each name, in the order of `__all__`."""
    return PLACE.sub(lambda found: "\n\n".join(f"::: {found[1]}.{name}" for name in names(found[1])), markdown)


def names(module: str) -> list[str]:
    """Return the public names of a module, read without running it."""
    path = SOURCE.joinpath(*module.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Name) and one.id == "__all__" for one in node.targets
        ):
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{module} has no __all__, which says what is public in it.")
