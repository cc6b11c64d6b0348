"""Check a training job for chips that compute wrong numbers.

Replicas must have the same `digests`, and gradients are those that other chips `recompute`; the `settings` of a job say
how often.
"""

from meshmend.jax.checks.settings import Checks

__all__ = ["Checks"]
