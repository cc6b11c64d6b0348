"""What the launcher provides: how many processes there are, which one this is, and where they meet.

Nothing here needs JAX.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshmend.errors import RestartError


@dataclass(frozen=True)
class Launch:
    """One process among those that the launcher started. Made by `read_launch`, or by hand.

    `coordinator` is "address:port", on the machine of process 0, and empty if jax.distributed.initialize() was called
    before; `attempt` counts the launcher's restarts; `job` names the job, the same in all of them.
    """

    coordinator: str
    n_processes: int
    process: int
    attempt: int = 0
    launcher: str = "by hand"
    job: str = "job"
    hosts: tuple[int, ...] = field(default=(), repr=False)
    """Number of each process's host, in order, where the launcher knows: then there is nothing left to find out."""

    def __post_init__(self) -> None:
        if not 0 <= self.process < self.n_processes:
            raise RestartError(
                f"This is process {self.process} of {self.n_processes}, expected a number from 0 to "
                f"{self.n_processes - 1}. Look at what {self.launcher} has set."
            )
        name, _, port = self.coordinator.rpartition(":")
        if self.coordinator and (not name or not port.isdecimal() or not 0 < int(port) < 1 << 16):
            raise RestartError(
                f"The coordinator is {self.coordinator!r}, expected an address and a port from 1 to 65535, as in "
                f"10.0.0.7:8476. Look at what {self.launcher} has set."
            )


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Return what `meshmend run` has put into the environment; raise `RestartError` if it has not started this process.

    >>> round_ = '{"number": 2, "coordinator": "10.0.0.7:5000", "hosts": [0, 2], "process": 1}'
    >>> read_launch({"MESHMEND_ROUND": round_, "MESHMEND_JOB": "train"})
    Launch(coordinator='10.0.0.7:5000', n_processes=2, process=1, attempt=2, launcher='meshmend run', job='train')
    """
    env = os.environ if environment is None else environment
    if "MESHMEND_ROUND" not in env:
        raise RestartError(
            "No launcher is recognised: there is no MESHMEND_ROUND in the environment. Start the script with `meshmend "
            "run` (under Slurm, Kubernetes or any other launcher, too), or call jax.distributed.initialize() first."
        )
    try:
        found = json.loads(env["MESHMEND_ROUND"])
        hosts = tuple(int(host) for host in found["hosts"])
        facts = str(found["coordinator"]), len(hosts), int(found["process"]), int(found["number"])
    except (KeyError, TypeError, ValueError) as error:
        raise RestartError(
            f"MESHMEND_ROUND is {env['MESHMEND_ROUND']!r} in the environment, expected what `meshmend run` puts there."
        ) from error
    return Launch(*facts, "meshmend run", env.get("MESHMEND_JOB", "job"), hosts=hosts)
