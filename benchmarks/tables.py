"""What scripts that print a table share: `--chips`, which leaves out its large meshes, and the columns."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.table import Table

from meshmend import Mesh

SMALL = Mesh("8x8", failed=["2x2@2,2"])


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return the options of a script, with that of its size."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", type=int, help="only meshes of up to so many chips; 64 is the smallest size")
    return parser


def up_to(chips: int | None, meshes: Sequence[Mesh]) -> list[Mesh]:
    """Return the meshes that are not too large, or a small one where all of them are.

    >>> up_to(64, [Mesh("4x4"), Mesh("16x16")]), up_to(64, [Mesh("16x16")])
    ([Mesh('4x4')], [Mesh('8x8', failed=['2x2@2,2'])])
    """
    return [mesh for mesh in meshes if chips is None or mesh.size <= chips] or [SMALL]


def make_table(title: str, *headings: str) -> Table:
    """Return a table whose first column is of words, and the others of figures."""
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table
