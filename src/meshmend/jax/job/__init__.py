"""A whole job in one object: plan, caches, feed, copies of the state, checkpoints and restarts, in one loop.

`Job` adds no mechanism of its own: it puts together what `session`, `compile`, `state`, `checks` and the feed provide.
Each of them can be used alone.
"""

from meshmend.jax.job.job import Job
from meshmend.jax.job.step import JobStep

__all__ = ["Job", "JobStep"]
