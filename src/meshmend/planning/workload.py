"""The workload: what is asked of a plan, apart from the mesh and its hardware.

Whoever trains knows it: how many bytes travel, in which collective. A planner takes a mesh, a workload and hardware,
and none of them has a default below the public functions: what is forgotten does not run, instead of running slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshmend.schedule import Collective

SMALLEST_BYTES = 512
LARGEST_BYTES = SMALLEST_BYTES * 4**12


@dataclass(frozen=True)
class Workload:
    """Bytes per chip that travel, and the collective.

    >>> Workload(1_000_000).rounded()
    Workload(payload_bytes=524288, collective=<Collective.ALL_REDUCE: 'all-reduce'>)
    """

    payload_bytes: float
    collective: Collective = Collective.ALL_REDUCE

    def rounded(self) -> Workload:
        """Return the workload that plans are made and kept for, so that few plans serve all payloads."""
        return replace(self, payload_bytes=round_payload(self.payload_bytes))


def round_payload(payload_bytes: float) -> int:
    """Return the nearest of 512, 2,048, 8,192 … 8.6 thousand million bytes.

    The best number of chunks grows with the square root of the payload: from one of these to the next it doubles.

    >>> [round_payload(size) for size in (0, 1_500, 102_000_000, 1e9)]
    [512, 2048, 134217728, 536870912]
    """
    exponent = round(math.log2(max(payload_bytes / SMALLEST_BYTES, 1)) / 2)
    return min(SMALLEST_BYTES << 2 * exponent, LARGEST_BYTES)
