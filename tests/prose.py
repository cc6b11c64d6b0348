"""Sentences of the pages, as a reader sees them: without code, addresses and markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HIDDEN = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|^:::.*$|^ *\|[-:| ]+\|$|<[^>]+>|^---\n.*?\n---$", re.M | re.S)
MARKS = ((r"!?\[([^\]]*)\]\([^)]*\)", r"\1"), (r"`+[^`]*`+", "`code`"), (r"\*\*|\*|^ *(?:[-#>]+|\d+\.) +", ""))
END = re.compile(r"(?<=[.!?:])[)\"”]?\s+(?=[\"“(]?[A-Z0-9`…∎])")
ABBREVIATED = re.compile(r"\b(?:e\.g|i\.e|et al|vs|cf|No|Fig)\.$")


@dataclass(frozen=True)
class Sentence:
    where: str
    text: str

    @property
    def n_words(self) -> int:
        return len(re.findall(r"[^\W_][\w'’.,×@/+-]*", self.text))


def blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph, list item and table cell, with the number of its first line."""
    begin, lines = 0, list[str]()
    for number, line in enumerate([*HIDDEN.sub(blank, text).splitlines(), ""], start=1):
        starts = not line.strip() or re.match(r" *(?:[-#>]|\d+\.) |\|", line)
        if starts and lines:
            yield begin, " ".join(lines)
            lines = []
        if line.startswith("|"):
            yield from ((number, cell) for cell in re.split(r"(?<!\\)\|", line.strip("| ")))
        elif line.strip():
            begin, lines = (begin if lines else number), [*lines, line.strip()]


def sentences(path: Path, root: Path) -> Iterator[Sentence]:
    for number, text in paragraphs(path.read_text(encoding="utf-8")):
        for pattern, instead in MARKS:
            text = re.sub(pattern, instead, text)
        pending = ""
        for part in END.split(text.strip()):
            pending = f"{pending} {part}".strip()
            if not ABBREVIATED.search(pending):
                yield Sentence(f"{path.relative_to(root)}:{number}", pending)
                pending = ""
        if pending:
            yield Sentence(f"{path.relative_to(root)}:{number}", pending)
