"""The lab: one network namespace per chip, one rate-limited veth pair per cable; real packets, real queues.

Everything is created inside namespaces whose names start with `meshmend-`, addresses included; nothing else on the
machine is touched, and everything is recorded in a journal first. A lab of a `with` block is removed when the block
ends, and by a watcher process when the block's own process is killed. Links may have a delay (`delay`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from meshmend.cost import Hardware
from meshmend.errors import Coordinate
from meshmend.topology import Cable, Mesh, Region, name_shape
from meshmend.topology.rates import RateLike
from meshmend_lab.errors import LabError
from meshmend_lab.mesh import delay as delays
from meshmend_lab.mesh import description, journal
from meshmend_lab.mesh.commands import Commands, listed_namespaces
from meshmend_lab.mesh.journal import Journal
from meshmend_lab.mesh.routes import route_commands

PREFIX = "meshmend-"
ENDING = rf"(?:(?:-\d+)*|-{delays.SUFFIX})"
"""What follows a lab's name in those of its namespaces: the coordinates of a chip, or where frames are delayed."""

MAX_CHIPS = 400
"""Each chip is a separate network stack in the kernel, with a route to every other chip. A lab of this size has
160,000 routes and takes minutes to build; the addresses of 10.77.0.0/16 would allow 64,000."""

INTERFACE = "chip0"
"""The interface with a chip's address; Gloo needs it as GLOO_SOCKET_IFNAME."""

MTU = 9000
"""Long frames leave TCP about 99 % of a link's rate for the payload, and cost less to forward."""

ETHERNET = 14
"""Bytes of a frame's header, beyond the MTU."""

LATE_S = 175e-6
"""How late a timer may be that lets a frame go, without a loss of rate."""

QUEUE = "400ms"
"""How long a packet may wait for its link before it is dropped."""

CLONE_NEWNET = 0x40000000

_BUSY = "Lab '{}' is being changed by another process: wait until it has finished."


@dataclass(frozen=True)
class Lab:
    """A mesh of namespaces on this machine. Created by `Lab.up`, found again by `Lab.find`."""

    name: str
    mesh: Mesh
    rate: str
    token: str = field(default="", compare=False, repr=False)
    delay: str | None = None

    @classmethod
    def up(cls, mesh: Mesh, *, rate: str = "40mbit", delay: str | None = None, name: str = "lab") -> Lab:
        """Create the namespaces of the live chips, their cables and their routes. Needs root.

        `delay` is that of every link, one way, as tc writes times: "5ms". A packet waits so long at each hop.
        """
        lab, record = cls._claimed(mesh, rate, delay, name)
        return lab._make(record)

    @classmethod
    def find(cls, name: str = "lab") -> Lab:
        """Return a lab that is up."""
        check_name(name)
        record = Journal.read(name)
        if record is None and not namespaces_of(name):
            raise LabError(f"No lab named {name} is up. Create one: meshmend lab mesh up 4x4 --name {name}")
        if record is None or record.stage != "up":
            raise LabError(why_taken(name))
        return cls(name, record.mesh, record.rate, record.token, record.delay)

    @classmethod
    @contextlib.contextmanager
    def temporary(
        cls, mesh: Mesh, *, rate: str = "40mbit", delay: str | None = None, name: str | None = None
    ) -> Iterator[Lab]:
        """Create a lab for the duration of a `with` block. It is removed even if this process is killed."""
        # Claimed before the watcher starts: the watcher may remove only what this process has created.
        lab, record = cls._claimed(mesh, rate, delay, name or f"tmp{os.getpid()}", temporary=True)
        with _watched(lab):
            try:
                yield lab._make(record)
            finally:
                lab.down()

    @classmethod
    def _claimed(
        cls, mesh: Mesh, rate: str, delay: str | None, name: str, *, temporary: bool = False
    ) -> tuple[Lab, Journal]:
        """Check everything that can be checked, and claim the name. Nothing has been created yet."""
        check_name(name)
        if not journal.RATE.fullmatch(rate):
            raise LabError(f"{rate!r} is not a rate. Write it as tc does: 40mbit, 500kbit, 1gbit.")
        delays.delay_seconds(delay)
        if mesh.size > MAX_CHIPS:
            raise LabError(f"A lab of {name_shape(mesh.shape)} has {mesh.size:,} chips; the limit is {MAX_CHIPS}.")
        if not mesh.is_connected:
            raise LabError(f"The chips of {mesh} are not connected: there is no route between some of them.")
        check_root()
        record = Journal(name, mesh, rate, temporary=temporary, delay=delay)
        try:
            record.claim()
        except FileExistsError:
            raise LabError(why_taken(name)) from None
        if namespaces_of(name):
            journal.forget(name)
            raise LabError(why_taken(name))
        return cls(name, mesh, rate, record.token, delay), record

    def _make(self, record: Journal) -> Lab:
        try:
            with self._locked() as commands:
                self._build(commands)
                self.describe()
                replace(record, stage="up").write()
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """Remove what this lab created: its namespaces, and with them cables, addresses and routes.

        If it is down already and another lab now has its name, that one stays.
        """
        remove(self.name, self.token)

    def kill(self, *holes: Region | Coordinate | str) -> Lab:
        """Cut chips off: remove their cables, and route the others round the hole. Return the remaining lab."""
        left = replace(self, mesh=self.mesh.fail(*holes))
        if not left.mesh.is_connected:
            raise LabError(f"Without {', '.join(map(str, holes))} the chips of {self.mesh} are not connected.")
        lost = [rank for rank in range(self.mesh.n_chips) if not left.mesh.live[self.mesh.chip(rank)]]
        with self._locked() as commands:
            record = Journal.read(self.name)
            if record is None:
                raise LabError(f"Lab {self.name!r} is down.")
            replace(record, mesh=left.mesh, stage="changing").write()
            for rank in lost:
                namespace = self.namespace(self.mesh.chip(rank))
                directions = np.flatnonzero(self.mesh.neighbours[rank] >= 0).tolist()
                # Processes may still run in the namespace; without its cables they have no network.
                commands.ip(*(f"link del {self._interfaces[d]}" for d in directions), namespace=namespace, force=True)
                # A cable with a delay is two pairs: the neighbour's end does not go with the chip's.
                for d in directions if self.delay else ():
                    beyond = self.namespace(self.mesh.chip(int(self.mesh.neighbours[rank, d])))
                    commands.ip(f"link del {self._interfaces[d ^ 1]}", namespace=beyond, force=True)
                commands.ip(f"netns del {namespace}")
            left._route(commands)
            left.describe()
            replace(record, mesh=left.mesh, stage="up").write()
        return left

    def cut(self, *cables: Cable | str) -> Lab:
        """Take the signal from cables, at both of their ends. Return the remaining lab, whose `renew` sets its routes.

        Until then packets of the pairs whose routes led over these cables are lost.
        """
        left = replace(self, mesh=self.mesh.with_failures(failed_cables=cables))
        if not left.mesh.is_connected:
            raise LabError(f"Without {len(cables)} cables the chips of {self.mesh} are not connected.")
        with self._locked() as commands:
            record = Journal.read(self.name)
            if record is None:
                raise LabError(f"Lab {self.name!r} is down.")
            for rank, direction in np.argwhere((self.mesh.neighbours >= 0) & (left.mesh.neighbours < 0)).tolist():
                namespace = self.namespace(self.mesh.chip(rank))
                commands.ip(f"link set {self._interfaces[direction]} down", namespace=namespace)
            replace(record, mesh=left.mesh).write()
        return left

    def slow(self, rates: Mapping[Cable | str, RateLike]) -> Lab:
        """Give cables other rates, as parts of the lab's, and all others that. Return the lab with them.

        The machine file stays as it is: nobody tells the processes.
        """
        mesh = Mesh(
            self.mesh.shape,
            wrap=self.mesh.wrap,
            failed=self.mesh.holes,
            failed_cables=self.mesh.failed_cables,
            cable_rates=rates,
        )
        changed = replace(self, mesh=mesh)
        with self._locked() as commands:
            record = Journal.read(self.name)
            if record is None:
                raise LabError(f"Lab {self.name!r} is down.")
            for rank in range(mesh.n_chips):
                lines = changed._limits(rank, "replace")
                commands.run("tc", "-n", self.namespace(mesh.chip(rank)), "-batch", "-", lines=lines)
            replace(record, mesh=mesh).write()
        return changed

    def renew(self) -> None:
        """Set the routes for the mesh as it is now, as a routing daemon would."""
        with self._locked() as commands:
            self._route(commands)

    def namespace(self, chip: Coordinate) -> str:
        """Return the name of a chip's namespace."""
        return f"{PREFIX}{self.name}-{'-'.join(map(str, chip))}"

    @property
    def namespaces(self) -> dict[Coordinate, str]:
        """The namespace of each live chip."""
        chips = (self.mesh.chip(rank) for rank in range(self.mesh.n_chips))
        return {chip: self.namespace(chip) for chip in chips}

    def enter(self, chip: Coordinate) -> None:
        """Move this process into the network namespace of a chip."""
        libc, namespace = ctypes.CDLL(None, use_errno=True), self.namespace(chip)
        with open(f"/run/netns/{namespace}") as handle:  # noqa: PTH123  # the descriptor is what setns needs
            if libc.setns(handle.fileno(), CLONE_NEWNET) != 0:
                raise LabError(f"Namespace {namespace} cannot be entered: {os.strerror(ctypes.get_errno())}.")

    def address(self, chip: Coordinate) -> str:
        """Return a chip's address inside the lab."""
        number = 0
        for position, length in zip(chip, self.mesh.shape, strict=True):
            number = number * length + position
        return f"10.77.{number // 250}.{number % 250 + 1}"

    def environment(self, chip: Coordinate) -> dict[str, str]:
        """Return the environment of a command on a chip: its chip, its machine, its rank, and where rank 0 listens."""
        return {
            "MESHMEND_CHIP": ",".join(map(str, chip)),
            "MESHMEND_MACHINE": str(journal.machine_folder(self.name) / description.MACHINE),
            "MESHMEND_SHAPE": name_shape(self.mesh.shape),
            "MESHMEND_FAILED": " ".join(map(str, self.mesh.holes)),
            "RANK": str(self.mesh.rank(chip)),
            "WORLD_SIZE": str(self.mesh.n_chips),
            "MASTER_ADDR": self.address(self.mesh.chip(0)),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def describe(self) -> None:
        """Write the machine file that the lab's processes read: the mesh as it is now, and what a link carries."""
        description.write_machine(journal.machine_folder(self.name), self.mesh, self.hardware)

    @property
    def hardware(self) -> Hardware:
        """What plans for this lab are made for."""
        return description.hardware_of(self.rate, self.rate_bytes_per_s, self.delay)

    @property
    def rate_bytes_per_s(self) -> float:
        """Bytes per second of a link of full rate."""
        number, unit = re.fullmatch(r"(\d+)([kmg])bit", self.rate).groups()  # type: ignore[union-attr]
        return int(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit] / 8

    @property
    def _interfaces(self) -> list[str]:
        if self.mesh.n_axes == 2:
            return ["south", "north", "east", "west"]
        return [f"axis{axis}{way}" for axis in range(self.mesh.n_axes) for way in ("up", "down")]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Commands]:
        """Hold this lab's lock while it is changed, if it is still this lab."""
        try:
            with journal.locked(self.name) as lock:
                found = Journal.read(self.name)
                if found is None or found.token != self.token:
                    raise LabError(f"Lab {self.name!r} has been removed meanwhile.")
                yield Commands(lock)
        except TimeoutError:
            raise LabError(_BUSY.format(self.name)) from None

    @property
    def delay_namespace(self) -> str:
        """The name of the namespace in which frames wait, if the links have a delay."""
        return f"{PREFIX}{self.name}-{delays.SUFFIX}"

    def _build(self, commands: Commands) -> None:
        mesh, names = self.mesh, self._interfaces
        chips = [mesh.chip(rank) for rank in range(mesh.n_chips)]
        commands.ip(*(f"netns add {self.namespace(chip)}" for chip in chips))
        if self.delay is not None:
            commands.ip(f"netns add {self.delay_namespace}")
        kind = _address_kind(commands, self.namespace(chips[0]))
        cables: list[tuple[str, str]] = []
        for rank, chip in enumerate(chips):
            for direction in range(0, mesh.n_directions, 2):
                other = int(mesh.neighbours[rank, direction])
                if other >= 0:
                    near = f"{names[direction]} mtu {MTU} netns {self.namespace(chip)}"
                    far = f"{names[direction + 1]} mtu {MTU} netns {self.namespace(chips[other])}"
                    cables.append((near, far))
        pairs = cables if self.delay is None else delays.split(cables, f"mtu {MTU} netns {self.delay_namespace}")
        commands.ip(*(f"link add {end} type veth peer name {other}" for end, other in pairs))
        for rank, chip in enumerate(chips):
            ends = [names[d] for d in range(mesh.n_directions) if mesh.neighbours[rank, d] >= 0]
            commands.ip(
                "link set lo up",
                f"link add {INTERFACE} type {kind}",
                f"addr add {self.address(chip)}/32 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                *(f"link set {end} up" for end in ends),
                namespace=self.namespace(chip),
            )
            settings = ["net.ipv4.ip_forward=1"]
            settings += [f"net.ipv4.conf.{name}.rp_filter=0" for name in ("all", "default", *ends)]
            commands.run("ip", "netns", "exec", self.namespace(chip), "sysctl", "-qw", *settings)
            commands.run("tc", "-n", self.namespace(chip), "-batch", "-", lines=self._limits(rank))
        self._route(commands)
        if self.delay is not None:
            delays.connect(commands, self.delay_namespace, len(cables), self.delay, MTU)

    def _limits(self, rank: int, how: str = "add") -> list[str]:
        """Return what holds the links of a chip to their rates: a slow cable has its part of the lab's."""
        limits = []
        for direction in np.flatnonzero(self.mesh.neighbours[rank] >= 0).tolist():
            part = float(self.mesh.link_rates[rank * self.mesh.n_directions + direction])
            rate = self.rate if part == 1 else f"{round(8 * self.rate_bytes_per_s * part)}bit"
            # All that an idle link sends at once: with more, short messages would be faster than on any such cable.
            burst = MTU + ETHERNET + round(LATE_S * self.rate_bytes_per_s * part)
            end = self._interfaces[direction]
            limits.append(f"qdisc {how} dev {end} root tbf rate {rate} burst {burst} latency {QUEUE}")
        return limits

    def _route(self, commands: Commands) -> None:
        mesh = self.mesh
        addresses = [self.address(mesh.chip(rank)) for rank in range(mesh.n_chips)]
        routes = route_commands(mesh, addresses, self._interfaces)
        for rank in range(mesh.n_chips):
            namespace = self.namespace(mesh.chip(rank))
            # Removes the source rules from before a kill; the kernel's own lookups have other priorities.
            commands.ip("rule flush", "rule add from all lookup main priority 32766", namespace=namespace)
            if routes[rank]:
                commands.ip(*routes[rank], namespace=namespace)


def namespaces_of(name: str) -> list[str]:
    """Return the namespaces of a lab that exist, whatever its journal says."""
    return [found for found in listed_namespaces(PREFIX) if re.fullmatch(f"{PREFIX}{re.escape(name)}{ENDING}", found)]


def remove(name: str, token: str | None = None) -> None:
    """Remove the namespaces of a lab, then its journal; with a token, only if the journal has it."""
    if token is None:
        _leave_to_its_builder(name)
    try:
        with journal.locked(name) as lock:
            with contextlib.suppress(LabError):  # namespaces are removed even if the journal is damaged
                record = Journal.read(name)
                if token is not None and (record is None or record.token != token):
                    return
            if token is None:
                _leave_to_its_builder(name)
            there = namespaces_of(name)
            if there:
                Commands(lock).ip(*(f"netns del {namespace}" for namespace in there), force=True)
            if left := namespaces_of(name):
                raise LabError(f"{len(left)} of {len(there)} namespaces of lab {name!r} cannot be removed: {left[0]} …")
            journal.forget(name)
    except TimeoutError:
        raise LabError(_BUSY.format(name)) from None


def _leave_to_its_builder(name: str) -> None:
    try:
        record = Journal.read(name)
    except LabError:
        return
    if record is not None and record.stage != "up" and record.process_lives:
        raise LabError(f"Lab {name!r} is being built by process {record.pid}: wait for it, or end that process first.")


def why_taken(name: str) -> str:
    """Return why a new lab cannot have this name, and what to do about it."""
    record = Journal.read(name)
    way_out = f"`meshmend lab mesh down {name}` removes it"
    if record is None:
        return f"Namespaces of a lab {name!r} exist, but it has no journal: {way_out}."
    if record.stage == "up":
        return f"Lab {name!r} is up (made by process {record.pid}): {way_out}."
    if record.process_lives:
        return f"Lab {name!r} is being built by process {record.pid}: wait for it, or choose another name."
    return f"Lab {name!r} is half-built (process {record.pid} ended before it was complete): {way_out}."


def check_name(name: str) -> None:
    """Raise `LabError` unless this is a valid name: it becomes part of file and namespace names."""
    if not re.fullmatch(r"[a-z][a-z0-9]{0,15}", name):
        raise LabError(
            f"{name!r} is not a valid name for a lab: expected up to 16 lower-case letters and digits, a letter first."
        )


def check_root() -> None:
    """Raise `LabError` unless this process may create and remove namespaces."""
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("sysctl", "procps")):
        if shutil.which(tool) is None:
            raise LabError(f"The lab needs the command {tool}: install {package}.")
    if os.geteuid() != 0:
        raise LabError("The lab creates network namespaces, which needs root: run this command with sudo.")


def _address_kind(commands: Commands, namespace: str) -> str:
    """Return an interface type that only holds an address; some kernels lack `dummy`."""
    try:
        commands.ip(f"link add {INTERFACE} type dummy", f"link del {INTERFACE}", namespace=namespace)
    except LabError:
        return "bridge"
    return "dummy"


@contextlib.contextmanager
def _watched(lab: Lab) -> Iterator[None]:
    """Start a process that removes the lab if this one ends without doing so."""
    reading, writing = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(writing)
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Returns when the last copy of the writing end is closed: by this block, or by the death of its process.
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
