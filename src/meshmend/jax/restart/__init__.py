"""Jobs that come back by themselves: the restarted job finds the hole, its plan and its state, and goes on.

A launcher (torchrun, Slurm, Kubernetes) restarts the survivors; what a job needs from there on is here. Needs the
`restart` extra for checkpoints on disk.
"""

from meshmend.jax.restart.ahead import CompileAhead, Steps, compile_steps
from meshmend.jax.restart.elements import place
from meshmend.jax.restart.fetch import fetch
from meshmend.jax.restart.hosts import Hosts
from meshmend.jax.restart.keeper import Keeper, Resumed
from meshmend.jax.restart.launch import Launch, read_launch
from meshmend.jax.restart.session import Session, initialize
from meshmend.jax.restart.timeline import Timeline, read_timeline

__all__ = [
    "CompileAhead",
    "Hosts",
    "Keeper",
    "Launch",
    "Resumed",
    "Session",
    "Steps",
    "Timeline",
    "compile_steps",
    "fetch",
    "initialize",
    "place",
    "read_launch",
    "read_timeline",
]
