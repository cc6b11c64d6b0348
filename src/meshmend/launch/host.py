"""One host of a job: its agent and its worker, in a process of their own.

The description comes as JSON on standard input, and what happens goes out as JSON lines over the descriptor. Standard
output and standard error are the worker's alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, NoReturn

from meshmend.errors import LaunchError, MeshmendError, QuarantineError
from meshmend.files import with_timeout
from meshmend.launch.agent import STOPPED, HostAgent, LeaveError
from meshmend.launch.agent_log import AgentLog
from meshmend.launch.cables import CableWatch
from meshmend.launch.certificates import CREDENTIALS, make_credentials
from meshmend.launch.environment import LEAST_HOSTS, START_OVER, STATE_WAIT_S
from meshmend.launch.hosts import Hosts
from meshmend.launch.member import Assignment, Member
from meshmend.launch.membership import SILENT_S
from meshmend.launch.processes import die_with_parent
from meshmend.launch.signing import hand_over_key
from meshmend.launch.timeline import Timeline
from meshmend.launch.worker import Workers
from meshmend.machines import read_machine
from meshmend.quarantine import THE_JOB, Quarantined, QuarantineList, Suspect
from meshmend.quarantine.entries import cables_of, chips_of
from meshmend.topology import Cable, name_cable

DONE, FAILED = 0, 1
LIST_S = 10.0
"""How long an agent waits for the quarantine list before a round."""


@dataclass(frozen=True)
class HostDescription:
    """What one host runs, and as which host of which machine."""

    argv: list[str]
    """The script and its arguments; or -m, a module and its arguments."""
    store: str
    host: int
    hosts: tuple[int, int]
    """How many hosts a round needs, and how many there are."""
    job: str
    machine: str = ""
    """As all hosts must describe it; empty where the devices report their coordinates."""
    environment: dict[str, str] = field(default_factory=dict)
    """For the worker."""
    timeline: str = ""
    """A file on this host for its events, on their way to the store."""
    address: str = ""
    """Under which other hosts reach this one; by default the one that it reaches the store from."""
    max_restarts: int = 3
    reach_s: float = 60.0
    silent_s: float = SILENT_S
    warm: bool = True
    start_over: bool = False
    """Whether the job begins anew, whatever it has kept."""
    state_wait_s: float = 0.0
    """How long survivors wait for absent hosts that have missing parts of the state."""

    def to_json(self) -> str:
        """Return the description as JSON. The secret is not part of it: it stays in the environment."""
        return json.dumps(asdict(self))


def be_host(descriptor: int, what: HostDescription, *, forks: bool = False) -> int:
    """Run a host until the job is over; return the exit status. `forks` is for a process that may: see `Workers`."""
    os.set_inheritable(descriptor, False)
    os.environ.update(what.environment)
    secret = os.environ.pop("MESHMEND_SECRET", "")  # the worker has no use for it, only for a key of its own
    hand_over_key(secret)

    reporting = threading.Lock()  # what is longer than a page is not written at once

    def report(event: str, **facts: Any) -> None:
        with reporting, contextlib.suppress(OSError):
            os.write(descriptor, json.dumps({"event": event, "host": what.host, **facts}).encode() + b"\n")

    try:
        check_admitted(what)  # before the store counts on this host
    except MeshmendError as error:
        return _ended(error, report)
    # Importing JAX and reaching the store take seconds each: they run side by side.
    workers = Workers(warm=what.warm, fork_without=descriptor if forks else None)
    make_credentials(secret, what.job, what.host)  # imports what the first round would wait for
    timeline = Timeline(what.timeline or None, job=what.job, host=what.host)
    log = AgentLog(timeline, hosts=(what.hosts[0], what.hosts[1]), machine=what.machine, report=report)
    member = Member(
        what.store,
        host=what.host,
        hosts=(what.hosts[0], what.hosts[1]),
        machine=what.machine,
        job=what.job,
        secret=secret,
        address=what.address or None,
        reach_s=what.reach_s,
        silent_s=what.silent_s,
        on_message=log.on_message,
    )
    log.deliver(member.send)
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    try:
        return _run(what, secret, member, workers, log, report)
    except MeshmendError as error:
        return _ended(error, report)
    except LeaveError:
        return STOPPED
    finally:
        workers.close()
        log.close()
        member.close()


def _ended(error: MeshmendError, report: Any) -> int:
    """Report why this host ends; return its exit status. One in quarantine is no failure: the job goes on."""
    is_quarantined = isinstance(error, _QuarantinedError)
    report("quarantined" if is_quarantined else "error", message=str(error))
    return DONE if is_quarantined else FAILED


def _run(what: HostDescription, secret: str, member: Member, workers: Workers, log: AgentLog, report: Any) -> int:
    first_round = 0

    def environment(assigned: Assignment) -> dict[str, str]:
        nonlocal first_round
        first_round = first_round or assigned.number
        report(
            "round", number=assigned.number, hosts=assigned.hosts, process=assigned.process, cut_off=assigned.cut_off
        )
        log.start_round(assigned)
        timeline = {"MESHMEND_TIMELINE": what.timeline} if what.timeline else {}
        credentials = make_credentials(secret, what.job, what.host)
        return {
            "MESHMEND_JOB": what.job,
            LEAST_HOSTS: str(what.hosts[0]),
            CREDENTIALS: credentials,
            START_OVER: str(first_round * what.start_over),
            STATE_WAIT_S: str(what.state_wait_s),
            **timeline,
        }

    agent = HostAgent(
        what.argv,
        member,
        workers,
        max_restarts=what.max_restarts,
        admit=lambda: check_admitted(what),
        environment=environment,
        progress=log.look,
        report=report,
        is_training=log.is_training,
        dead_cables=_watch_cables(what),
    )
    try:
        over = agent.run()
    except LaunchError:
        if member.over is None or not member.over["ok"]:
            raise
        over = member.over  # cut off from the others, it waited until they had finished
    report("over", **over)
    return DONE if over["ok"] else FAILED


def _watch_cables(what: HostDescription) -> Callable[[], str]:
    """Watch this host's cables, where a host is a chip of a machine whose file has addresses.

    Return what puts those that have died on the job's quarantine list, and names the ones that nobody has put there.
    """
    shared, file = what.environment.get("MESHMEND_SHARED"), what.environment.get("MESHMEND_MACHINE")
    if not (shared and file and what.machine):
        return str
    hosts, machine = Hosts.read(what.machine), read_machine(file)
    mesh, chips = machine.mesh, hosts.chips(what.host)
    if len(chips) > 1 or not mesh.live[chips[0]] or chips[0] not in machine.chips:
        return str
    near = (mesh.chip(int(rank)) for rank in mesh.neighbours[mesh.rank(chips[0])] if rank >= 0)
    addresses = {chip: machine.chips[chip].address or "" for chip in near if chip in machine.chips}
    watch, entries, noted, own = CableWatch(chips[0]), QuarantineList(shared), set[Cable](), list[str]()
    watch.begin(machine.chips[chips[0]].address or "", addresses, with_detour=True)

    def list_cable(cable: Cable) -> None:
        if cable not in cables_of(entries.active()):
            entries.add(Suspect(cable), why="it does not answer any more", by=THE_JOB, hosts=hosts)
            own.append(name_cable(cable))

    def dead_cables() -> str:
        noted.intersection_update(watch.dead)
        for cable in sorted(watch.dead - noted):
            with contextlib.suppress(OSError, QuarantineError):  # then the next look tries again
                with_timeout(LIST_S, list_cable, cable)
                noted.add(cable)
        named = [own.pop(0) for _ in range(len(own))]  # also what a slow disk has listed after its time
        return ", ".join(named)

    return dead_cables


class _QuarantinedError(LaunchError):
    """All chips of this host are in quarantine: it ends, and the others go on without it."""


def check_admitted(what: HostDescription) -> None:
    """Raise an error if no chip of this host may take part, by the list in the job's shared folder."""
    shared = what.environment.get("MESHMEND_SHARED")
    if not shared or not what.machine:
        return
    machine = Hosts.read(what.machine)
    listed: tuple[Quarantined, ...] = ()
    # Where a disk or a bucket is away, process 0 reads the list when the round begins.
    with contextlib.suppress(OSError):
        listed = with_timeout(LIST_S, lambda: QuarantineList(shared).active())
    entries = [one for one in listed if (one.suspect.host or 0) < len(machine)]
    if {*machine.chips(what.host)} <= {*chips_of(entries, machine)}:
        raise _QuarantinedError(
            f"all chips of host {what.host} are in quarantine, so it has no part in the job. `meshmend quarantine list "
            f"{shared}` shows why. When it is repaired, clear it there and start it again"
        )


def _leave(number: int, _: FrameType | None) -> None:
    del number
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise LeaveError


def run_host() -> None:
    """Be a host: the entry point of the process that `meshmend run` starts, with a descriptor as its argument."""
    die_with_parent()
    end_host(be_host(int(sys.argv[1]), HostDescription(**json.loads(sys.stdin.read()))))


def end_host(status: int) -> NoReturn:
    """End this process. Threads of libraries may still run; there is no need to wait for them."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)
