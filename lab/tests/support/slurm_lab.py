"""A real Slurm cluster of several nodes on one machine, and a job on it that is one Slurm job per host.

Debian's slurmd takes `-N`, so several run side by side. A node dies when its slurmd and all processes of its jobs are
killed; Slurm then puts the job that ran there back into its queue, and starts it again when the node is back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from meshmend.launch.processes import children, die_with_parent

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")

CONFIGURATION = """
ClusterName=lab
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/ctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdTimeout=10
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def unsupported_reason() -> str:
    """Return why there can be no cluster here, "" if there can be one."""
    if os.geteuid() != 0:
        return "starting Slurm's daemons needs root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"{missing[0]} is not installed: apt-get install slurm-wlm munge" if missing else ""


class SlurmLab:
    """A cluster of nodes host0, host1, … Leaving the `with` block ends its daemons and everything that they run."""

    def __init__(self, n_nodes: int, folder: Path) -> None:
        self.n_nodes = n_nodes
        self.folder = folder
        self._munged: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        for name in ("state", "log", *(f"spool/host{i}" for i in range(self.n_nodes))):
            (self.folder / name).mkdir(parents=True)
        ports = free_ports(self.n_nodes + 1)
        machine = socket.gethostname().split(".")[0]
        lines = [CONFIGURATION.format(folder=self.folder, machine=machine, port=ports[0])]
        for i, port in enumerate(ports[1:]):
            lines.append(
                f"NodeName=host{i} NodeHostname={machine} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN\n"
            )
        (self.folder / "slurm.conf").write_text("".join(lines))
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        self._munged = subprocess.Popen(
            [
                *("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket"),
                *(f"--key-file={self.folder}/munge.key", f"--pid-file={self.folder}/munged.pid"),
                *(f"--log-file={self.folder}/log/munged.log", f"--seed-file={self.folder}/munge.seed"),
            ],
            preexec_fn=die_with_parent,
        )
        wait_until(lambda: (self.folder / "munge.socket").exists(), "munged")
        self.run("slurmctld", "-f", str(self.folder / "slurm.conf"))
        for node in range(self.n_nodes):
            self.start_node(node)
        wait_until(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * self.n_nodes, "idle nodes")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in range(self.n_nodes):
            self.kill_node(node)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.folder / "ctld.pid").read_text()), signal.SIGKILL)
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait()

    def run(self, *words: str) -> str:
        """Run one of Slurm's commands, and return what it prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start_node(self, node: int) -> None:
        self.run("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", f"host{node}")

    def kill_node(self, node: int) -> None:
        """Kill a node's daemon, and everything that Slurm runs there."""
        pids = []
        with contextlib.suppress(FileNotFoundError):
            pids.append(int((self.folder / f"host{node}.pid").read_text()))
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # A step's daemon keeps the name of its node only in the environment of what it runs.
                if (process / "cmdline").read_bytes().startswith(b"slurmstepd: ["):
                    below = children(int(process.name))
                    if any(self._runs_on(pid, node) for pid in below):
                        pids += [int(process.name), *below]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _runs_on(self, pid: int, node: int) -> bool:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ours = f"SLURM_CONF={self.folder}/slurm.conf".encode()
            return f"SLURMD_NODENAME=host{node}".encode() in words and ours in words
        return False


class SlurmJob:
    """A training job whose hosts are Slurm jobs of one node each, with the interface of `LocalJob`."""

    def __init__(
        self, lab: SlurmLab, command: Sequence[str], folder: Path, *, shape: str, host: str, least: int
    ) -> None:
        self.lab = lab
        self.folder = folder
        secret = folder / "secret"
        folder.mkdir(parents=True, exist_ok=True)
        secret.write_text(os.urandom(32).hex())
        secret.chmod(0o600)
        self._options = ["--job", "train", "--secret-file", str(secret)]
        self._where = f"127.0.0.1:{free_ports(1)[0]}"
        hosts = f"{least}:{lab.n_nodes}"
        words = [sys.executable, "-m", "meshmend", "run", *self._options, "--store", self._where, "--hosts", hosts]
        words += ["--shape", shape, "--host", host, "--shared", str(folder / "launcher"), "--host-index"]
        script = [
            "#!/bin/bash",
            "#SBATCH --nodes=1 --ntasks=1 --requeue --open-mode=append",
            "export JAX_PLATFORMS=cpu",
        ]
        script.append(f"exec {' '.join(words)} $1 {' '.join(command)}")
        self._script = folder / "host.sh"
        self._script.write_text("\n".join(script) + "\n")
        self._jobs: dict[int, str] = {}
        self._store: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with (self.folder / "store.log").open("wb") as log:
            self._store = subprocess.Popen(
                [sys.executable, "-m", "meshmend", "store", "--listen", self._where, *self._options],
                stdout=log,
                preexec_fn=die_with_parent,
            )
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs.values():
            self.lab.run("scancel", "--full", job)
        if self._store is not None:
            self._store.kill()
            self._store.wait()

    def start(self, *hosts: int) -> None:
        """Submit all hosts; or bring nodes back, on which Slurm starts again what ran there."""
        for host in hosts or range(self.lab.n_nodes):
            if host not in self._jobs:
                log = self.folder / f"host-{host}.log"
                words = [
                    "sbatch",
                    "--parsable",
                    f"--nodelist=host{host}",
                    f"--output={log}",
                    str(self._script),
                    str(host),
                ]
                self._jobs[host] = self.lab.run(*words).strip()
                continue
            # Slurm waits for two minutes before it starts a job again. Twenty seconds are enough here; without any,
            # the node's registration, which does not know of the job yet, ends what has just been started.
            wait_until(lambda host=host: "PENDING" in self._state(host), "the lost host's job in the queue")
            self.lab.start_node(host)
            self.lab.run("scontrol", "update", f"JobId={self._jobs[host]}", "StartTime=now+20")

    def kill(self, host: int) -> float:
        at = time.time()
        self.lab.kill_node(host)
        return at

    @property
    def running(self) -> list[int]:
        """Hosts whose job has not ended."""
        return [host for host in self._jobs if not {"COMPLETED", "FAILED", "CANCELLED"} & {self._state(host)}]

    def watch(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def wait(self, timeout_s: float) -> dict[int, int]:
        wait_until(lambda: not self.running, "the end of all hosts' jobs", timeout_s)
        return {host: int(self._state(host) != "COMPLETED") for host in self._jobs}

    def _state(self, host: int) -> str:
        facts = self.lab.run("scontrol", "show", "job", self._jobs[host])
        return facts.split("JobState=")[1].split()[0]


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in taken]


def wait_until(condition: object, what: str, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, f"no {what} after {timeout_s:g} s"
        time.sleep(0.3)
