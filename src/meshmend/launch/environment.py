"""Where this host is, and where its store is: said by the user, or found in the environment of a scheduler.

And what `meshmend run` tells a worker: how many there are, which one it is, and where they meet.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshmend.errors import LaunchError, RestartError
from meshmend.launch.addresses import join_address, split_address
from meshmend.launch.messages import DEFAULT_PORT

LEAST_HOSTS = "MESHMEND_LEAST_HOSTS"
"""Where a worker finds how many hosts a round needs at least."""
START_OVER = "MESHMEND_START_OVER"
STATE_WAIT_S = "MESHMEND_STATE_WAIT_S"
LAUNCHER = "meshmend run"
DOMAIN = "MESHMEND_DOMAIN"
"""Where a worker finds the failure domain of its host."""
SHARED = "shared"
"""The folder of a job on this machine alone, where none is given."""
HOST_VARIABLES = {
    "MESHMEND_HOST": "the environment",
    "SLURM_NODEID": "Slurm",
    "JOB_COMPLETION_INDEX": "Kubernetes",
    "JOBSET_JOB_INDEX": "JobSet",
    "TPU_WORKER_ID": "the TPU's environment",
}
"""Variables that have a host's number, in the order in which they are looked for, and who sets them."""


def find_host_index(given: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Return which host this is: a number, or the coordinate of its first chip.

    >>> find_host_index(None, {"SLURM_NODEID": "3"})
    '3'
    """
    # In a JobSet of one Job per host every pod has the completion index 0; the number of its Job tells them apart.
    names = [name for name in HOST_VARIABLES if not (name == "JOB_COMPLETION_INDEX" and "JOBSET_JOB_INDEX" in env)]
    found = [given] if given is not None else [env[name] for name in names if env.get(name)]
    if not found:
        raise LaunchError(
            f"Which host is this? None of {', '.join(HOST_VARIABLES)} is in the environment. On a cluster, give its "
            "number, or the coordinate of its first chip, as in --host-index 5 or --host-index 4,2. For a job on this "
            "machine alone, give --local before the script, as in --local 4x4 --host 2x2, or start it with python."
        )
    return found[0]


def find_domain(given: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Return the failure domain of this host, the name of what fails with it (a rack, a power feed); "" if unknown.

    >>> find_domain(None, {"SLURM_TOPOLOGY_ADDR": "row1.rack7.node3"})
    'row1.rack7'
    """
    found = given or env.get(DOMAIN)
    # The last part is the node itself; where Slurm knows no topology, there is no other.
    return found or env.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]


def find_store(given: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Return the address and port of the store.

    >>> find_store("10.0.0.7", {}), find_store(None, {"SLURM_JOB_NODELIST": "tpu-[003-006,9],login"})
    ('10.0.0.7:29400', 'tpu-003:29400')
    """
    where = given or env.get("MESHMEND_STORE")
    if not where and env.get("SLURM_JOB_NODELIST"):
        where = first_node(env["SLURM_JOB_NODELIST"])  # where Slurm runs the batch script
    if not where:
        raise LaunchError(
            "Where is the store? Start one with `meshmend store` on a machine that does not die with a host, and give "
            f"its address, as in --store 10.0.0.7:{DEFAULT_PORT}. To try everything on this machine: --local 8x8."
        )
    return check_address(where, "--store")


def check_address(where: str, option: str, default_port: int = DEFAULT_PORT) -> str:
    """Return an address with its port, by default the store's.

    >>> check_address("node7:5000", "--store"), check_address("fd00::7", "--store")
    ('node7:5000', '[fd00::7]:29400')
    """
    try:
        return join_address(*split_address(where, default_port))
    except ValueError:
        raise LaunchError(
            f"{option} is {where!r}, expected an address and a port: write it as 10.0.0.7:{default_port} or "
            f"[fd00::7]:{default_port}."
        ) from None


def find_job(given: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Return the job's name, the same on all its hosts and in its store."""
    slurm = f"slurm-{env['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in env else "job"
    return given or env.get("MESHMEND_JOB") or slurm


def file_name(job: str) -> str:
    """Return a job's name as that of a file.

    >>> file_name("train/7"), file_name("..")
    ('train_7', 'job')
    """
    return re.sub(r"[^\w.-]", "_", job, flags=re.ASCII)[:100].strip(".") or "job"


@contextmanager
def memory_for_events(job: str) -> Iterator[Path]:
    """Yield a folder of this host's memory, in MESHMEND_MEMORY or /dev/shm, where its events wait for the store."""
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()  # noqa: S108
    base = Path(os.environ.get("MESHMEND_MEMORY") or f"{in_memory}/meshmend-{os.getuid()}") / file_name(job)
    base.mkdir(parents=True, exist_ok=True)
    # Not one that it finds: another job may have the same name, and this process may be killed before it removes it.
    with tempfile.TemporaryDirectory(prefix="host-", dir=base, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def find_secret(file: Path | None, env: Mapping[str, str] = os.environ) -> str:
    """Return the job's secret, from a file that nobody else can read, or from MESHMEND_SECRET; "" if there is none."""
    if file is None:
        return env.get("MESHMEND_SECRET", "")
    secret = file.read_text(encoding="utf-8").strip()
    if not secret:
        raise LaunchError(f"{file} is empty. Make a secret with: openssl rand -hex 32 > {file}")
    if file.stat().st_mode & 0o077:
        raise LaunchError(f"{file} can be read by others on this machine. Keep the secret: chmod 600 {file}")
    return secret


def find_hosts(text: str | None, n_hosts: int | None) -> tuple[int, int]:
    """Return how many hosts a round needs and how many there are: from "5:8", "8" or the number that fits the machine.

    >>> find_hosts("5:8", None), find_hosts("8", None), find_hosts(None, 4)
    ((5, 8), (4, 8), (2, 4))
    """
    if text is None:
        if n_hosts is None:
            raise LaunchError(
                "How many hosts? Give the least that is useful and how many there are, as in --hosts 5:8."
            )
        text = str(n_hosts)
    first, colon, last = text.partition(":")
    numbers = [int(word) if word.isdecimal() else 0 for word in ((first, last) if colon else (first,))]
    least, most = numbers if colon else ((numbers[0] + 1) // 2, numbers[0])
    if not 0 < least <= most:
        raise LaunchError(f"--hosts is {text!r}, expected the least and the most hosts, as in 5:8.")
    if n_hosts is not None and most > n_hosts:
        raise LaunchError(f"--hosts is {text!r}, but the machine has {n_hosts} hosts.")
    return least, most


def first_node(nodes: str) -> str:
    """Return the first name of a Slurm node list.

    >>> first_node("tpu-[003-006,9],login")
    'tpu-003'
    """
    head = nodes.split(",")[0]
    if "[" not in head:
        return head
    prefix, rest = head.split("[", 1)
    return prefix + rest.rstrip("]").split("-")[0]


@dataclass(frozen=True)
class Launch:
    """One process among those that the launcher started. Made by `read_launch`, or by hand.

    `coordinator` is "address:port", on the machine of process 0, and empty if jax.distributed.initialize() was called
    before. `round` is the launcher's, 0 if it counts none; `job` names the job, the same in all of them.
    """

    coordinator: str
    n_processes: int
    process: int
    round: int = 0
    launcher: str = "by hand"
    job: str = "job"
    hosts: tuple[int, ...] = field(default=(), repr=False)
    """Number of each process's host, in order, where the launcher knows: then there is nothing left to find out."""
    least: int = field(default=1, repr=False)
    """Hosts that a round needs: with fewer, the launcher waits for others."""
    address: str = field(default="", repr=False)
    """Under which the other hosts reach this one, where the launcher knows."""
    start_over: int = field(default=0, repr=False)
    """The first round of a run that begins anew, whatever was kept before it; 0 for one that goes on."""
    state_wait_s: float = field(default=0.0, repr=False)
    """How long to wait for absent hosts that have missing parts of the state."""

    def __post_init__(self) -> None:
        if not 0 <= self.process < self.n_processes:
            raise RestartError(
                f"This is process {self.process} of {self.n_processes}, expected a number from 0 to "
                f"{self.n_processes - 1}. Look at what {self.launcher} has set."
            )
        try:
            is_address = not self.coordinator or split_address(self.coordinator)[1] > 0
        except ValueError:
            is_address = False
        if not is_address:
            raise RestartError(
                f"The coordinator is {self.coordinator!r}, expected an address and a port from 1 to 65535, as in "
                f"10.0.0.7:8476 or [fd00::7]:8476. Look at what {self.launcher} has set."
            )


def read_launch(env: Mapping[str, str] = os.environ) -> Launch:
    """Return what `meshmend run` has put into the environment; raise `RestartError` if it has not started this process.

    >>> round_ = '{"number": 2, "coordinator": "10.0.0.7:5000", "hosts": [0, 2], "process": 1}'
    >>> read_launch({"MESHMEND_ROUND": round_, "MESHMEND_JOB": "train"})
    Launch(coordinator='10.0.0.7:5000', n_processes=2, process=1, round=2, launcher='meshmend run', job='train')
    """
    if "MESHMEND_ROUND" not in env:
        raise RestartError(
            "No launcher is recognised: there is no MESHMEND_ROUND in the environment. Start the script with `meshmend "
            "run`, also under Slurm, Kubernetes or any other launcher, or call jax.distributed.initialize() first."
        )
    try:
        found = json.loads(env["MESHMEND_ROUND"])
        hosts = tuple(int(host) for host in found["hosts"])
        facts = str(found["coordinator"]), len(hosts), int(found["process"]), int(found["number"])
        known: dict[str, Any] = {
            "least": int(env.get(LEAST_HOSTS, 1)),
            "address": str(found.get("address", "")),
            "start_over": int(env.get(START_OVER, 0)),
            "state_wait_s": float(env.get(STATE_WAIT_S, 0)),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise RestartError(
            f"MESHMEND_ROUND is {env['MESHMEND_ROUND']!r} in the environment, expected what `meshmend run` puts there."
        ) from error
    return Launch(*facts, LAUNCHER, env.get("MESHMEND_JOB", "job"), hosts=hosts, **known)
