"""Checks of a training job against chips that compute wrong numbers.

`digests` of replicas, `checksums` of sums, and gradients that other chips `recompute`.
"""

from meshmend.jax.checks.checksums import BadSum, bad_sums, checked_all_reduce
from meshmend.jax.checks.digests import Disagreement, compare_replicas, replica_digests
from meshmend.jax.checks.recompute import Part, Recompute

__all__ = [
    "BadSum",
    "Disagreement",
    "Part",
    "Recompute",
    "bad_sums",
    "checked_all_reduce",
    "compare_replicas",
    "replica_digests",
]
