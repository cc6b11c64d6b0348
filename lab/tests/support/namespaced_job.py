"""A job with one network namespace per host: each has its own name, addresses and cable, and fails as a machine does.

The network is a lab with the store in the middle row and the hosts in the rows above and below it. A host has one
cable, so nothing passes through it, and cutting that cable drops its packets and nobody else's. By default the name of
each host resolves to 127.0.1.1, as Debian's installer writes it. Processes share the file system, nothing else.

    with NamespacedJob(script, folder, "1x3") as job:
        job.start()
        job.until(lambda: "step 5" in job.output(0), timeout_s=60)
        job.power_off(2)
        statuses = job.wait(timeout_s=60)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from meshmend import Mesh
from meshmend.launch.hosts import Hosts
from meshmend.launch.messages import DEFAULT_PORT
from meshmend.launch.processes import die_with_parent
from meshmend_lab.mesh import Lab

RATE = "1gbit"
DROP_ALL = "tbf rate 1kbit burst 1 limit 1"
"""A token bucket drops what is larger than itself: no packet fits into one byte. Routes stay, and no sender hears."""
CARRY = f"tbf rate {RATE} burst 256kb latency 400ms"
AS_A_HOST = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
POLL_S = 0.1


def unsupported_reason() -> str:
    """Return why there can be no such job here, "" if there can be one."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [tool for tool in ("ip", "tc", "sysctl", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed"
    probe = f"meshmend-can{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this machine does not allow network namespaces"
    try:
        limit = ["tc", "-n", probe, *f"qdisc add dev lo root {DROP_ALL}".split()]
        if subprocess.run(limit, capture_output=True, check=False).returncode:
            return "this kernel has no token bucket filter"
        name = ["ip", "netns", "exec", probe, "unshare", "--uts", "hostname", probe]
        return (
            "" if not subprocess.run(name, capture_output=True, check=False).returncode else "no host names of its own"
        )
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False)


class NamespacedJob:
    """`meshmend store`, and one `meshmend run` per host of the machine `shape`, each in its own namespace.

    `argv` is the script and its arguments, `options` are further options of `meshmend run`. `resolves_to` is the
    address that each host has under its own name, None for the one by which others reach it. With `store_on`, the store
    is on the machine of that host, and all find it by the machine's name. `environment` returns what a host gets
    besides. Leaving the `with` block kills every process and removes the namespaces.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        folder: Path,
        shape: str,
        *,
        host: str = "1x1",
        options: Sequence[str] = (),
        resolves_to: str | None = "127.0.1.1",
        store_on: int | None = None,
        environment: Callable[[int], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self.hosts = Hosts.of(shape, host)
        self.folder = folder
        self.shared = folder / "shared"
        self.secret_file = folder / "secret"
        self._argv = [str(word) for word in argv]
        self._options = [*("--shape", shape, "--host", host), *options]
        self._resolves_to = resolves_to
        self._store_on = store_on
        self._environment = environment
        self._columns = (len(self.hosts) + 1) // 2
        self._processes: dict[int | str, subprocess.Popen[bytes]] = {}
        self._exits = contextlib.ExitStack()
        self._lab: Lab | None = None

    def __enter__(self) -> Self:
        self.shared.mkdir(parents=True, exist_ok=True)
        self.secret_file.write_text(secrets.token_hex(32))
        self.secret_file.chmod(0o600)
        with self._exits as exits:
            self._memory = Path(tempfile.mkdtemp(prefix="meshmend-test-", dir="/dev/shm"))
            exits.callback(shutil.rmtree, self._memory, ignore_errors=True)
            name = f"n{secrets.token_hex(4)}"
            self._lab = exits.enter_context(Lab.temporary(self._network(), rate=RATE, name=name))
            exits.callback(self._kill_all)
            self.start_store()
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    @property
    def store(self) -> str:
        """Where the hosts find the store."""
        where = self.lab.address((1, 0)) if self._store_on is None else _name(self.place(self._store_on))
        return f"{where}:{DEFAULT_PORT}"

    @property
    def lab(self) -> Lab:
        """The namespaces and their cables."""
        assert self._lab is not None, "use it in a with block"
        return self._lab

    def place(self, host: int) -> tuple[int, int]:
        """Return the chip of the lab that a host is."""
        return (0 if host < self._columns else 2), host % self._columns

    def address(self, host: int) -> str:
        """Return the address under which the others reach a host."""
        return self.lab.address(self.place(host))

    def start_store(self) -> None:
        """Start the store, or start it again where it was."""
        at = (1, 0) if self._store_on is None else self.place(self._store_on)
        where = self.store if self._store_on is None else f"0.0.0.0:{DEFAULT_PORT}"
        words = ["--listen", where, "--secret-file", str(self.secret_file), "--folder", str(self.shared)]
        self._run("store", at, ["store", *words], {})

    def start(self, *hosts: int) -> None:
        """Start hosts, including ones that have been switched off; without arguments, all of them."""
        for host in hosts or range(len(self.hosts)):
            self.join(host)
            where = ("--store", self.store, "--secret-file", str(self.secret_file), "--shared", str(self.shared))
            words = ["run", *self._options, *where, "--host-index", str(host), *self._argv]
            memory = {"MESHMEND_MEMORY": str(self._memory / f"host-{host}")}
            self._run(host, self.place(host), words, {**memory, **self._environment(host)})

    def call(self, host: int, *words: str, timeout_s: float) -> tuple[int, str]:
        """Run another `meshmend` command on a host to its end; return its exit status and what it wrote."""
        name = f"call-{host}"
        self._run(name, self.place(host), words, {"MESHMEND_MEMORY": str(self._memory / name)})
        return self._processes[name].wait(timeout_s), self.output(name)

    def output(self, host: int | str) -> str:
        """Return all that a host, or "store", has written so far."""
        return self._log(host).read_text(errors="replace") if self._log(host).exists() else ""

    def outputs(self) -> str:
        """Return what the store and all hosts have written, for the message of a test that fails."""
        return "\n".join(f"── {name}\n{self.output(name)}" for name in self._processes)

    @property
    def running(self) -> list[int]:
        """Hosts whose `meshmend run` has not ended."""
        return [name for name, one in self._processes.items() if isinstance(name, int) and one.poll() is None]

    def until(self, condition: Callable[[], bool], timeout_s: float) -> float:
        """Wait for a condition, and return how many seconds it took; fail if all hosts have ended before."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + timeout_s, f"not so after {timeout_s:g} s\n{self.outputs()}"
            assert self.running, f"all hosts have ended\n{self.outputs()}"
            time.sleep(POLL_S)
        return time.monotonic() - began

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Wait until all hosts have ended; return their exit statuses."""
        until = time.monotonic() + timeout_s
        while self.running:
            assert time.monotonic() < until, f"hosts {self.running} still run after {timeout_s:g} s\n{self.outputs()}"
            time.sleep(POLL_S)
        return {name: one.returncode for name, one in self._processes.items() if isinstance(name, int)}

    def pids(self, host: int) -> list[int]:
        """Return all processes of a host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.lab.namespace(self.place(host))], capture_output=True, text=True, check=True
        )
        return [int(word) for word in listed.stdout.split()]

    def power_off(self, host: int) -> float:
        """Kill a host as a power cut does: no packet says so, and its memory is lost. Return when, as `time.time()`."""
        at = time.time()
        self.cut(host)
        self.kill(host)
        shutil.rmtree(self._memory / f"host-{host}", ignore_errors=True)
        return at

    def kill(self, host: int) -> None:
        """Kill all processes of a host; the kernel closes their connections."""
        # All are stopped first, so that none reacts to the end of another.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            self._signal(host, number)
        self._processes[host].wait(10)

    def freeze(self, host: int) -> None:
        """Stop all processes of a host; its kernel still acknowledges what it receives."""
        self._signal(host, signal.SIGSTOP)

    def thaw(self, host: int) -> None:
        """Let a frozen host continue."""
        self._signal(host, signal.SIGCONT)

    def cut(self, host: int, *, sent: bool = True, received: bool = True) -> None:
        """Drop the packets that a host sends, those that it is sent, or both, without a word to anybody."""
        for end, is_cut in zip(self._ends(host), (sent, received), strict=True):
            if is_cut:
                self._limit(end, DROP_ALL)

    def join(self, host: int) -> None:
        """Carry the packets of a host again."""
        for end in self._ends(host):
            self._limit(end, CARRY)

    def _network(self) -> Mesh:
        """Return a mesh whose middle row joins all chips, each of the others by one cable."""
        columns = range(self._columns - 1)
        return Mesh(
            (3, self._columns),
            failed_cables=[((row, column), (row, column + 1)) for row in (0, 2) for column in columns],
        )

    def _ends(self, host: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return a host's end of its cable and the other one: namespaces and interfaces."""
        row, column = self.place(host)
        mine, other = ("south", "north") if row == 0 else ("north", "south")
        return (self.lab.namespace((row, column)), mine), (self.lab.namespace((1, column)), other)

    def _limit(self, end: tuple[str, str], how: str) -> None:
        namespace, interface = end
        words = ["tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *how.split()]
        subprocess.run(words, check=True, capture_output=True, text=True)

    def _log(self, name: int | str) -> Path:
        return self.folder / (f"host-{name}.log" if isinstance(name, int) else f"{name}.log")

    def _run(self, name: int | str, at: tuple[int, int], words: Sequence[str], more: Mapping[str, str]) -> None:
        """Run `meshmend` in a namespace, as a machine with a name of its own."""
        own, hosts = _name(at), self.folder / f"{name}.hosts"
        known = {chip: self.lab.address(chip) for chip in self.lab.namespaces}  # as a name server knows them
        known[at] = self._resolves_to or known[at]
        lines = ["127.0.0.1 localhost", *(f"{address} {_name(chip)}" for chip, address in known.items())]
        hosts.write_text("\n".join(lines) + "\n")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MESHMEND", "XLA"))}
        # The hosts share this machine's cores; a name server that cannot be reached is not to be waited for.
        quick = {"JAX_PLATFORMS": "cpu", "RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}
        as_host = ["unshare", "--uts", "sh", "-ec", AS_A_HOST, "sh", own, str(hosts)]
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*("ip", "netns", "exec", self.lab.namespace(at)), *as_host, sys.executable, "-m", "meshmend", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**kept, **quick, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _signal(self, host: int, number: signal.Signals) -> None:
        for pid in self.pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill_all(self) -> None:
        for host in [name for name in self._processes if isinstance(name, int)]:
            self.kill(host)
        for other in self._processes.values():
            other.kill()
            other.wait()


def _name(at: tuple[int, ...]) -> str:
    """Return the name of a machine."""
    return "-".join(["host", *map(str, at)])
