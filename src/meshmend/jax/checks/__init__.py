"""Checks of a training job against chips that compute wrong numbers: see `digests`."""

from meshmend.jax.checks.digests import Disagreement, compare_replicas, replica_digests

__all__ = ["Disagreement", "compare_replicas", "replica_digests"]
