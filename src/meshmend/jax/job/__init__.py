"""Joining a job: which hosts there are, where they are, and which plan they run.

A launcher (`meshmend run`, or Slurm or Kubernetes by themselves) restarts the survivors. `initialize` reads its
environment and returns the `Session`: the fabric of the hosts that joined, and the plan that all of them run.
"""

from meshmend.jax.job.alone import initialize_alone
from meshmend.jax.job.launch import Launch, read_launch
from meshmend.jax.job.session import Session, initialize

__all__ = ["Launch", "Session", "initialize", "initialize_alone", "read_launch"]
