"""Which rows of a parametrized test `.ci/run` takes. `.ci/nightly` takes the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def others_slow(rows: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Return the rows for `parametrize`, all but the quick ones marked slow; a quick one that is no row is an error.

    >>> [len(one.marks) for one in others_slow(["a", "b", "c"], quick="b")]
    [1, 0, 1]
    """
    rows, chosen = list(rows), list(quick)
    if unknown := [row for row in chosen if row not in rows]:
        raise ValueError(f"{unknown} are no rows of {rows}.")
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=() if row in chosen else pytest.mark.slow)
        for row in rows
    ]
