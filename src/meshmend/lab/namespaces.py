"""The lab: a network namespace for each chip, a veth pair for each cable, held to a rate; real packets, real queues.

Everything is made inside namespaces whose names start with `meshmend-`, addresses included; nothing else on the
machine is touched. A lab of a `with` block is taken down when the block ends, and by a watcher process when the
block's own process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmend.errors import Coordinate, LabError, name_chip
from meshmend.lab.routes import route_commands
from meshmend.topology import Mesh, Region, name_shape

PREFIX = "meshmend-"
STATE = Path("/run/meshmend")
"""One file for each lab that is up: what was made, and so what may be taken down."""

INTERFACE = "chip0"
"""Holds a chip's address; give it to Gloo as GLOO_SOCKET_IFNAME."""

MTU = 9000
"""Long frames leave TCP about 99 % of a link's rate for the payload, and cost less to forward."""

BURST = "32kb"
QUEUE = "400ms"
"""How long a packet may wait for its link before it is dropped."""


@dataclass(frozen=True)
class Lab:
    """A mesh of namespaces on this machine. Made by `Lab.up`, found again by `Lab.find`."""

    name: str
    mesh: Mesh
    rate: str

    @classmethod
    def up(cls, mesh: Mesh, *, rate: str = "40mbit", name: str = "lab") -> Lab:
        """Make the namespaces of the live chips, their cables and their routes. Needs root."""
        lab = cls(name, mesh, rate)
        _check(name, rate)
        if not mesh.is_connected:
            raise LabError(f"The chips of {mesh} are cut apart, so there is no way between some of them.")
        if lab._state.exists() or lab._existing():
            raise LabError(f"A lab named {name} is up already. Take it down first: meshmend lab down --name {name}")
        STATE.mkdir(mode=0o755, exist_ok=True)
        lab._save()
        try:
            lab._build()
        except BaseException:
            lab.down()
            raise
        return lab

    @classmethod
    def find(cls, name: str = "lab") -> Lab:
        """Return a lab that is up."""
        _check(name, "1mbit")
        try:
            facts = json.loads((STATE / f"{name}.json").read_text(encoding="utf-8"))
            mesh = Mesh(
                facts["shape"], wrap=facts["wrap"], failed=facts["failed"], failed_cables=facts["failed_cables"]
            )
            return cls(name, mesh, str(facts["rate"]))
        except FileNotFoundError:
            raise LabError(f"No lab named {name} is up. Make one: meshmend lab up 4x4 --name {name}") from None

    @classmethod
    @contextlib.contextmanager
    def temporary(cls, mesh: Mesh, *, rate: str = "40mbit", name: str | None = None) -> Iterator[Lab]:
        """Make a lab for the length of a `with` block. It goes even if this process is killed."""
        lab_name = name or f"tmp{os.getpid()}"
        _check(lab_name, rate)
        with _watched(cls(lab_name, mesh, rate)):
            lab = cls.up(mesh, rate=rate, name=lab_name)
            try:
                yield lab
            finally:
                lab.down()

    def down(self) -> None:
        """Take down what this lab made: its namespaces, and with them cables, addresses and routes."""
        for namespace in self._existing():
            _ip(f"netns del {namespace}")
        self._state.unlink(missing_ok=True)

    def kill(self, *holes: Region | Coordinate | str) -> Lab:
        """Cut chips off: their cables go, and the others' routes lead round the hole. Return the lab that is left."""
        left = Lab(self.name, self.mesh.fail(*holes), self.rate)
        if not left.mesh.is_connected:
            raise LabError(f"Without {', '.join(map(str, holes))} the chips of {self.mesh} are cut apart.")
        lost = [rank for rank in range(self.mesh.n_chips) if not left.mesh.live[self.mesh.chip(rank)]]
        for rank in lost:
            ends = [self._interfaces[d] for d in range(self.mesh.n_directions) if self.mesh.neighbours[rank, d] >= 0]
            # Processes may still live in the namespace: without its cables they hear nothing more.
            _ip(*(f"link del {end}" for end in ends), namespace=self.namespace(self.mesh.chip(rank)), force=True)
            _ip(f"netns del {self.namespace(self.mesh.chip(rank))}")
        left._route()
        left._save()
        return left

    def namespace(self, chip: Coordinate) -> str:
        """Return the name of a chip's namespace."""
        return f"{PREFIX}{self.name}-{'-'.join(map(str, chip))}"

    @property
    def namespaces(self) -> dict[Coordinate, str]:
        """The namespace of each live chip."""
        chips = (self.mesh.chip(rank) for rank in range(self.mesh.n_chips))
        return {chip: self.namespace(chip) for chip in chips}

    def address(self, chip: Coordinate) -> str:
        """Return a chip's address inside the lab."""
        number = 0
        for place, length in zip(chip, self.mesh.shape, strict=True):
            number = number * length + place
        return f"10.77.{number // 250}.{number % 250 + 1}"

    def environment(self, chip: Coordinate) -> dict[str, str]:
        """Return what a command on a chip is told: who it is, and where rank 0 listens."""
        return {
            "MESHMEND_CHIP": ",".join(map(str, chip)),
            "MESHMEND_SHAPE": name_shape(self.mesh.shape),
            "MESHMEND_FAILED": " ".join(map(str, self.mesh.holes)),
            "RANK": str(self.mesh.rank(chip)),
            "WORLD_SIZE": str(self.mesh.n_chips),
            "MASTER_ADDR": self.address(self.mesh.chip(0)),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes a second of one link."""
        number, unit = re.fullmatch(r"(\d+)([kmg])bit", self.rate).groups()  # type: ignore[union-attr]
        return int(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit] / 8

    @property
    def _state(self) -> Path:
        return STATE / f"{self.name}.json"

    @property
    def _interfaces(self) -> list[str]:
        if self.mesh.n_axes == 2:
            return ["south", "north", "east", "west"]
        return [f"axis{axis}{way}" for axis in range(self.mesh.n_axes) for way in ("up", "down")]

    def _existing(self) -> list[str]:
        """Namespaces of this lab that are there, whatever the state file says."""
        listed = subprocess.run(["ip", "-json", "netns", "list"], capture_output=True, text=True, check=True)  # noqa: S607
        names = [str(entry["name"]) for entry in json.loads(listed.stdout or "[]")]
        return [name for name in names if re.fullmatch(rf"{PREFIX}{re.escape(self.name)}(-\d+)+", name)]

    def _save(self) -> None:
        facts: dict[str, Any] = {
            "shape": self.mesh.shape,
            "wrap": self.mesh.wrap,
            "failed": [str(hole) for hole in self.mesh.holes],
            "failed_cables": self.mesh.failed_cables,
            "rate": self.rate,
        }
        partial = self._state.with_suffix(".part")
        partial.write_text(json.dumps(facts), encoding="utf-8")
        partial.replace(self._state)

    def _build(self) -> None:
        mesh, names, kind = self.mesh, self._interfaces, _address_kind()
        chips = [mesh.chip(rank) for rank in range(mesh.n_chips)]
        _ip(*(f"netns add {self.namespace(chip)}" for chip in chips))
        cables = []
        for rank, chip in enumerate(chips):
            for direction in range(0, mesh.n_directions, 2):
                other = int(mesh.neighbours[rank, direction])
                if other >= 0:
                    cables.append(
                        f"link add {names[direction]} mtu {MTU} netns {self.namespace(chip)} type veth "
                        f"peer name {names[direction + 1]} mtu {MTU} netns {self.namespace(chips[other])}"
                    )
        _ip(*cables)
        for rank, chip in enumerate(chips):
            ends = [names[d] for d in range(mesh.n_directions) if mesh.neighbours[rank, d] >= 0]
            _ip(
                "link set lo up",
                f"link add {INTERFACE} type {kind}",
                f"addr add {self.address(chip)}/32 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                *(f"link set {end} up" for end in ends),
                namespace=self.namespace(chip),
            )
            settings = ["net.ipv4.ip_forward=1"]
            settings += [f"net.ipv4.conf.{name}.rp_filter=0" for name in ("all", "default", *ends)]
            _run("ip", "netns", "exec", self.namespace(chip), "sysctl", "-qw", *settings)
            limits = [f"qdisc add dev {end} root tbf rate {self.rate} burst {BURST} latency {QUEUE}" for end in ends]
            _run("tc", "-n", self.namespace(chip), "-batch", "-", lines=limits)
        self._route()

    def _route(self) -> None:
        mesh = self.mesh
        addresses = [self.address(mesh.chip(rank)) for rank in range(mesh.n_chips)]
        commands = route_commands(mesh, addresses, self._interfaces)
        for rank in range(mesh.n_chips):
            namespace = self.namespace(mesh.chip(rank))
            # Rules for sources from before a kill; the lookups of the kernel itself have other priorities.
            _ip("rule flush", "rule add from all lookup main priority 32766", namespace=namespace)
            if commands[rank]:
                _ip(*commands[rank], namespace=namespace)


def _check(name: str, rate: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]{0,15}", name):
        raise LabError(f"{name!r} is not a name for a lab: up to 16 small letters and digits, a letter first.")
    if not re.fullmatch(r"[1-9]\d{0,5}[kmg]bit", rate):
        raise LabError(f"{rate!r} is not a rate. Write it as tc does: 40mbit, 500kbit, 1gbit.")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LabError(f"The lab needs the command {tool}: install iproute2.")
    if os.geteuid() != 0:
        raise LabError("The lab makes network namespaces, which takes root: run this command with sudo.")


def _address_kind() -> str:
    """Return a kind of interface that holds an address and nothing else; some kernels have no dummy."""
    probe = f"{PREFIX}probe{os.getpid()}"
    _ip(f"netns add {probe}")
    try:
        _ip(f"link add {INTERFACE} type dummy", namespace=probe)
    except LabError:
        return "bridge"
    finally:
        _ip(f"netns del {probe}")
    return "dummy"


def _ip(*lines: str, namespace: str | None = None, force: bool = False) -> None:
    """Run `ip` commands as one batch."""
    words = ["ip"] + (["-n", namespace] if namespace else []) + (["-force"] if force else [])
    _run(*words, "-batch", "-", lines=list(lines), check=not force)


def _run(*words: str, lines: list[str] | None = None, check: bool = True) -> None:
    text = None if lines is None else "\n".join(lines) + "\n"
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)  # noqa: S603
    if check and done.returncode != 0:
        raise LabError(f"{' '.join(words[:6])} failed: {done.stderr.strip()[:500]}")


@contextlib.contextmanager
def _watched(lab: Lab) -> Iterator[None]:
    """Have another process take the lab down if this one ends without doing so."""
    reading, writing = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(writing)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Ends when the last copy of the writing end is closed: by this block, or by the death of its process.
        word = os.read(reading, 1)
        if not word:
            with contextlib.suppress(Exception):
                lab.down()
        os._exit(0)
    os.close(reading)
    os.set_inheritable(writing, False)
    try:
        yield
        os.write(writing, b".")
    finally:
        os.close(writing)
        os.waitpid(watcher, 0)


def name_lab(lab: Lab) -> str:
    """Say what a lab is, in a few words."""
    first = lab.mesh.chip(0)
    return f"{lab.mesh}, {lab.mesh.n_chips} chips, {lab.rate} a link, {name_chip(first)} at {lab.address(first)}"
