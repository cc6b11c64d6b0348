"""A hook of the site: shows a file of the checkout's root as a page, with links that work there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"^<!-- (\w+\.md) -->$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marked place by the file, whose links begin at the root, and the page's in docs/."""
    return PLACE.sub(lambda found: (ROOT / found[1]).read_text(encoding="utf-8").replace("](docs/", "]("), markdown)
