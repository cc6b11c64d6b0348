"""The launcher: `meshmend run` on every host, `meshmend store` between them, and what both need to know of a job.

Nothing here imports JAX, except in the workers. torch, whose elastic agent starts and restarts them, is imported by
`agent` only: the store, and whatever merely reads a job's hosts or its timeline, needs neither.
"""

from meshmend.launch.hosts import Hosts
from meshmend.launch.local import LocalJob
from meshmend.launch.timeline import Timeline, read_timeline

__all__ = ["Hosts", "LocalJob", "Timeline", "read_timeline"]
