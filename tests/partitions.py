"""Every partition of a few things: what bounds on small meshes are compared with."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=2)
def partitions(n: int) -> NDArray[np.int8]:
    """Every partition of n things, one row each, as labels: each thing joins a part or opens the next."""
    rows = np.zeros((1, 1), dtype=np.int8)
    for _ in range(n - 1):
        choices = rows.max(axis=1).astype(np.int64) + 2
        grown = np.repeat(rows, choices, axis=0)
        last = np.arange(len(grown)) - np.repeat(np.cumsum(choices) - choices, choices)
        rows = np.column_stack([grown, last.astype(np.int8)])
    return rows
