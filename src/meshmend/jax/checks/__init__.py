"""Checks of a training job against chips that compute wrong numbers.

`digests` of replicas, and gradients that other chips `recompute`.
"""

from meshmend.jax.checks.digests import Disagreement, compare_replicas, replica_digests
from meshmend.jax.checks.recompute import Part, Recompute

__all__ = [
    "Disagreement",
    "Part",
    "Recompute",
    "compare_replicas",
    "replica_digests",
]
