"""The README, its tables and figures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


README = (ROOT / "README.md").read_text(encoding="utf-8")


NUMBERS = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Row:
    phrase: str
    kind: str
    command: str
    where: str


def rows() -> list[Row]:
    lines = [line for line in NUMBERS.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]
    return [Row(*(row + [""] * (4 - len(row)))) for row in cells]


def prose(text: str) -> str:
    """What a page says in words: no code, no addresses, and none of the numbers that only name something."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`|!\[[^\]]*\]\([^)]*\)|<[^>]+>", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    names = [
        r"\d+(?:×\d+)+ (?:blocks|minus \d+(?:×\d+)+)",  # a shape
        r"figures? \d[\d–, ]*",
        r"\((?:ISCA|HPCA|MLSys) \d{4}\)|, \d{4}\]",  # a year of publication
        r"\bv\d\w?\b|\bn-D\b|\bc10d\b|\bFSDP2\b|Apache-2\.0",  # a chip, a library, a licence
        r"2\(P−1\)",  # a formula
        r"version \d+\.\d+\.\d+",
    ]
    return re.sub("|".join(names), "", text)


ON_ITS_PAGE_ONLY = ("optical cubes", "dynamic slices", "elastic slices")
"""Answers that need other machines: the README has those of a mesh, the page all."""


def goodputs_said() -> list[float]:
    return sorted(float(found) for found in re.findall(r"(\d\d\.\d)(?= %)", prose(README)))
