"""A whole job in one object: plan, caches, feed, copies of the state, checkpoints and restarts, in one loop.

`Job` adds no mechanism of its own: it puts together what `job`, `compiling`, `state` and the feed provide. Each of them
can be used alone.
"""

from meshmend.jax.managed.checks import Checks
from meshmend.jax.managed.job import Job
from meshmend.jax.managed.step import JobStep

__all__ = ["Checks", "Job", "JobStep"]
