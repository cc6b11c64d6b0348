"""What the launcher provides: how many processes there are, which one this is, and where the rendezvous is.

Read from the environment that `meshmend run`, torchrun, Slurm (`srun`) or Kubernetes (JobSet) set. Nothing here needs
JAX.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshmend.errors import RestartError

DEFAULT_PORT = 8476
"""Port of the rendezvous if the launcher provides none."""


@dataclass(frozen=True)
class Launch:
    """One process among those that the launcher started. Made by `read_launch`, or by hand.

    `coordinator` is "address:port", on the machine of process 0; `attempt` counts the launcher's restarts; `job` names
    the job, the same in all of them. `secret` is a text that only the job's processes have: at the rendezvous they
    prove that to each other without sending it.
    """

    coordinator: str
    n_processes: int
    process: int
    attempt: int = 0
    launcher: str = "by hand"
    job: str = "job"
    secret: str = field(default="", repr=False)
    hosts: tuple[int, ...] = field(default=(), repr=False)
    """Number of each process's host, in order, where the launcher knows: then there is nothing left to find out."""

    def __post_init__(self) -> None:
        if not 0 <= self.process < self.n_processes:
            raise RestartError(
                f"This is process {self.process} of {self.n_processes}, expected a number from 0 to "
                f"{self.n_processes - 1}. Look at what {self.launcher} has set."
            )
        name, _, port = self.coordinator.rpartition(":")
        if not name or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise RestartError(
                f"The coordinator is {self.coordinator!r}, expected an address and a port from 1 to 65535, as in "
                f"10.0.0.7:{DEFAULT_PORT}. Look at what {self.launcher} has set."
            )


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read the launcher's environment variables; raise `RestartError` if no launcher is recognised.

    MESHMEND_JOB names the job, by default the launcher does. MESHMEND_SECRET is the job's secret, by default none.

    - `meshmend run`: MESHMEND_ROUND, with the hosts of the round in order.
    - torchrun: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. The port is a fresh one in every round, found free on the
      machine of rank 0, if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; otherwise torchrun listens there itself, and after
      the loss of rank 0 still names the lost machine (torch 2.13), which is refused here.
    - anything that sets JAX's own names (JobSet manifests do it by hand): JAX_COORDINATOR_ADDRESS,
      JAX_NUM_PROCESSES, JAX_PROCESS_ID; JOBSET_RESTART_ATTEMPT is the attempt.
    - Slurm: SLURM_PROCID, SLURM_NTASKS; the first node of SLURM_STEP_NODELIST, and a port from the numbers of
      the job and its step.

    >>> read_launch({"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29555"})
    Launch(coordinator='10.0.0.7:29555', n_processes=4, process=2, attempt=0, launcher='torchrun', job='job')
    """
    env = os.environ if environment is None else environment
    if "MESHMEND_ROUND" in env:
        return _read_round(env)
    if "JAX_COORDINATOR_ADDRESS" in env and "JAX_PROCESS_ID" in env:
        address = env["JAX_COORDINATOR_ADDRESS"]
        return Launch(
            address if ":" in address else f"{address}:{DEFAULT_PORT}",
            _number(env, "JAX_NUM_PROCESSES"),
            _number(env, "JAX_PROCESS_ID"),
            _number(env, "JOBSET_RESTART_ATTEMPT", "0"),
            "JAX's environment",
            _job(env, "JOBSET_NAME"),
            env.get("MESHMEND_SECRET", ""),
        )
    if "RANK" in env and "MASTER_ADDR" in env:
        if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            raise RestartError(
                "torchrun listens on MASTER_PORT itself and names it again after the machine of rank 0 is lost. "
                "Start every torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment."
            )
        return Launch(
            f"{env['MASTER_ADDR']}:{_number(env, 'MASTER_PORT')}",
            _number(env, "WORLD_SIZE"),
            _number(env, "RANK"),
            _number(env, "TORCHELASTIC_RESTART_COUNT", "0"),
            "torchrun",
            _job(env, "TORCHELASTIC_RUN_ID"),
            env.get("MESHMEND_SECRET", ""),
        )
    if "SLURM_PROCID" in env:
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "localhost"))
        return Launch(
            f"{_first_node(nodes)}:{_slurm_port(env)}",
            _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"),
            _number(env, "SLURM_PROCID"),
            _number(env, "SLURM_RESTART_COUNT", "0"),
            "Slurm",
            _job(env, "SLURM_JOB_ID"),
            env.get("MESHMEND_SECRET", ""),
        )
    raise RestartError(
        "No launcher is recognised: expected torchrun's RANK and MASTER_ADDR, JAX_COORDINATOR_ADDRESS and "
        "JAX_PROCESS_ID, or Slurm's SLURM_PROCID in the environment. Start the script with `meshmend run`, or pass "
        "launch=Launch(coordinator='127.0.0.1:8476', n_processes=1, process=0)."
    )


def _read_round(env: Mapping[str, str]) -> Launch:
    try:
        found = json.loads(env["MESHMEND_ROUND"])
        hosts = tuple(int(host) for host in found["hosts"])
        facts = str(found["coordinator"]), len(hosts), int(found["process"]), int(found["number"])
    except (KeyError, TypeError, ValueError) as error:
        raise RestartError(
            f"MESHMEND_ROUND is {env['MESHMEND_ROUND']!r} in the environment, expected what `meshmend run` puts there."
        ) from error
    return Launch(*facts, "meshmend run", _job(env, ""), hosts=hosts)


def _number(env: Mapping[str, str], name: str, default: str = "") -> int:
    text = env.get(name, default)
    if not text.isdecimal():
        raise RestartError(f"{name} is {text!r} in the environment, expected a whole number from the launcher.")
    return int(text)


def _job(env: Mapping[str, str], launchers_name: str) -> str:
    return env.get("MESHMEND_JOB", env.get(launchers_name, "job"))


def _slurm_port(env: Mapping[str, str]) -> int:
    """Return the same port for all tasks of a step, a different one for each job and step."""
    return 61000 + (_number(env, "SLURM_JOB_ID", "0") + 97 * _number(env, "SLURM_STEP_ID", "0")) % 4000


def _first_node(nodes: str) -> str:
    """Return the first name of a Slurm node list, as in tpu-[003-006,9],login → tpu-003."""
    head = nodes.split(",")[0]
    if "[" not in head:
        return head
    prefix, rest = head.split("[", 1)
    return prefix + rest.rstrip("]").split("-")[0]
