"""Joining a job: which hosts there are, where they are, which plan they run, and what happened when.

A launcher (torchrun, Slurm, Kubernetes) restarts the survivors. `initialize` reads the launcher's environment, performs
the rendezvous and returns the `Session`: the fabric of the hosts that joined, and the plan that all of them run.
"""

from meshmend.jax.job.alone import initialize_alone
from meshmend.jax.job.hosts import Hosts
from meshmend.jax.job.launch import Launch, read_launch
from meshmend.jax.job.session import Session, initialize
from meshmend.jax.job.timeline import Timeline, read_timeline

__all__ = ["Hosts", "Launch", "Session", "Timeline", "initialize", "initialize_alone", "read_launch", "read_timeline"]
