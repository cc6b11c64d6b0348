"""Sentences of the pages, as a reader sees them: without code, addresses and markup."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HIDDEN = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|^:::.*$|^ *\|[-:| ]+\|$|<[^>]+>|^---\n.*?\n---$", re.M | re.S)
MARKS = ((r"!?\[([^\]]*)\]\([^)]*\)", r"\1"), (r"`+[^`]*`+", "`code`"), (r"\*\*|\*|^ *(?:[-#>]+|\d+\.) +", ""))
END = re.compile(r"(?<=[.!?:])[)\"”]?\s+(?=[\"“(]?[A-Z0-9`…∎]|[\"“]\w)")
ABBREVIATED = re.compile(r"\b(?:e\.g|i\.e|et al|vs|cf|No|Fig)\.$")


@dataclass(frozen=True)
class Sentence:
    where: str
    text: str
    is_cell: bool = False
    """Whether it is in a table, whose cells are lists rather than sentences."""

    @property
    def n_words(self) -> int:
        return len(re.findall(r"[^\W_][\w'’.,×@/+-]*", self.text))


def blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def paragraphs(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield each paragraph, list item and table cell, with the number of its first line, and whether it is a cell."""
    begin, lines = 0, list[str]()
    for number, line in enumerate([*HIDDEN.sub(blank, text).splitlines(), ""], start=1):
        starts = not line.strip() or re.match(r" *(?:[-#>]|\d+\.) |\|", line)
        if starts and lines:
            yield begin, " ".join(lines), False
            lines = []
        if line.startswith("|"):
            yield from ((number, cell, True) for cell in re.split(r"(?<!\\)\|", line.strip("| ")))
        elif line.strip():
            begin, lines = (begin if lines else number), [*lines, line.strip()]


def sentences(path: Path, root: Path) -> Iterator[Sentence]:
    """Yield the sentences of a page, or of a notebook's cells of text."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    yield from sentences_of(text, str(path.relative_to(root)))


def sentences_of(page: str, where: str) -> Iterator[Sentence]:
    for number, text, is_cell in paragraphs(page):
        for pattern, instead in MARKS:
            text = re.sub(pattern, instead, text)
        pending = ""
        for part in END.split(text.strip()):
            pending = f"{pending} {part}".strip()
            if not ABBREVIATED.search(pending):
                yield Sentence(f"{where}:{number}", pending, is_cell)
                pending = ""
        if pending:
            yield Sentence(f"{where}:{number}", pending, is_cell)


def joined(node: ast.AST) -> str:
    """Return a string expression with … for each value that is put in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(joined(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return joined(node.left) + joined(node.right)
    return "…" if isinstance(node, ast.FormattedValue) else ""


def strings_of(path: Path, root: Path) -> Iterator[Sentence]:
    """Yield the strings of a source that have a blank in them, but for docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out: set[ast.AST] = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):  # from the outside in
        if isinstance(node, (ast.JoinedStr, ast.BinOp, ast.Constant)) and node not in left_out:
            text = joined(node)
            if " " in text:
                left_out.update(ast.walk(node))
                yield Sentence(f"{path.relative_to(root)}:{node.lineno}", text)
