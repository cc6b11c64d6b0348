"""Checks of a training job against chips that compute wrong numbers: `digests` of replicas, `checksums` of sums."""

from meshmend.jax.checks.checksums import BadSum, bad_sums, checked_all_reduce
from meshmend.jax.checks.digests import Disagreement, compare_replicas, replica_digests

__all__ = ["BadSum", "Disagreement", "bad_sums", "checked_all_reduce", "compare_replicas", "replica_digests"]
