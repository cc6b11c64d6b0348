"""The blocks of all pages that run."""

from __future__ import annotations

from pages import ROOT, read

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


BLOCKS = [block for page in PAGES for block in read(page)]
