"""The launcher: `meshmend run` on every host, `meshmend store` between them, and what both need to know of a job.

    meshmend run        job: starts hosts, shows their lines
      host              host: one process per host, in which
        agent             agent: starts the worker in every round, and stops it
        member            member: the connection to the store <---> meshmend store: store, membership
        warm            warm: has JAX imported, and forks
          worker        the script, one process per round

Each dies with its parent. Nothing here imports JAX, except in the workers. A job on one machine (`local`) forks its
hosts from a process that has imported it (`nursery`).
"""

from meshmend.launch.chips import Chips
from meshmend.launch.environment import Launch, read_launch
from meshmend.launch.hosts import Hosts
from meshmend.launch.local import LocalJob
from meshmend.launch.timeline import Timeline, read_timeline

__all__ = ["Chips", "Hosts", "Launch", "LocalJob", "Timeline", "read_launch", "read_timeline"]
