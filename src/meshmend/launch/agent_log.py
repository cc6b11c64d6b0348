"""Who writes an operator's alerts: hosts that are lost, a job that waits for hosts, or trains again.

Under `meshmend run` the agent of each host writes these events into the host's timeline, and sends all that is there to
the store. It lives on when its worker dies, and hears from the store what has happened; from the worker's own lines it
knows when the first step is done again. Under torchft the processes that train go on, and write them. So each is
written by several hosts that live through it, with the same `id`: a reader that knows the id counts it once, and needs
only one of them to have survived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from meshmend.launch.delivery import OFTEN_S, Outbox
from meshmend.launch.events import BELOW_MINIMUM, Done, note_alert, note_lost, note_recovered, read_event
from meshmend.launch.hosts import Hosts, name_hosts
from meshmend.launch.member import Assignment
from meshmend.launch.membership import Message
from meshmend.launch.timeline import Tail, Timeline

WRITERS = 8
"""Hosts that write an event that more live through: if all did, the loss of a rack would make millions of lines."""
DELIVER_S = 3.0
"""How long an agent that ends waits until the store has its last events."""


class AgentLog:
    """Writes a host's events, from what the store says and what the worker has written. `close` it at the end."""

    def __init__(
        self,
        timeline: Timeline,
        *,
        hosts: tuple[int, int],
        machine: str = "",
        report: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        self._timeline = timeline
        self._least, self._most = hosts
        self._machine = Hosts.read(machine) if machine else None
        self._report = report
        self._tail = None if timeline.path is None else Tail(timeline.path, all_lines=True)
        self._outbox: Outbox | None = None
        self._assignment: Assignment | None = None
        self._assigned_at = 0.0
        self._step, self._step_at = 0, 0.0
        self._is_training = timeline.path is None  # where nobody can know
        self._interrupted: Done | None = None
        """The last step before this round, when it was done and by which hosts; None once there is another."""
        self._lost: set[int] = set()
        """Hosts of the round that are lost."""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        if self._tail is not None:
            self._tail.read()  # of an earlier process
            threading.Thread(target=self._follow, name="meshmend-events", daemon=True).start()

    def deliver(self, send: Callable[[Message], bool]) -> None:
        """Send all events to the store from now on, by `send`, which returns whether there is one."""
        self._outbox = Outbox(send) if self._tail is not None else None

    def start_round(self, assigned: Assignment) -> None:
        """Record that a round starts."""
        with self._lock:
            self.look()  # the last worker has ended: these are its last steps
            if self._assignment is None or assigned.before != self._assignment.number:
                self._interrupted = None  # the others know what happened before: this host was not there
            else:
                if _writes(assigned, self._assignment.hosts):
                    self._note_missing({*assigned.hosts, *assigned.cut_off})
                if self._step_at > self._assigned_at:
                    self._interrupted = self._step, self._step_at, self._assignment.hosts
            self._assignment, self._assigned_at, self._lost = assigned, time.time(), set()
            self._timeline.facts["round"] = assigned.number
            # Not which hosts: the worker says that, and every host would write it.
            self._timeline.note("round", least=self._least, most=self._most)

    def on_message(self, message: Message) -> None:
        """Report what the store says, or that it cannot be reached, and record what is worth it."""
        kind = message["type"]
        if self._outbox is not None and kind == "have":
            self._outbox.on_have(message)
            self._outbox.tick(self._n_hosts)
            return
        if self._outbox is not None and kind == "unreachable":
            self._outbox.on_lost()
        if kind == "short":
            self._report("short", **{name: message[name] for name in ("hosts", "least", "number")})
        elif kind != "round":
            self._report("store", **message)
        with self._lock:
            if self._assignment is None:
                return
            if kind == "stop" and message["lost"] is not None and self._assignment.process <= WRITERS + len(self._lost):
                self.look()
                self._note_lost(int(message["lost"]), str(message["why"]))
            elif kind == "short":
                here = sorted(message["hosts"])
                if self._assignment.hosts[self._assignment.process] in here[:WRITERS]:
                    self._note_missing(here)
                    self._note_short(here, int(message["least"]))

    def look(self) -> int:
        """Read what the worker has written since the last time; return the last step that it has done."""
        with self._lock:
            for line in self._tail.read() if self._tail is not None else ():
                if self._outbox is not None:
                    self._outbox.add(line)
                event = read_event(line)
                if event.event == "step" and event.step:
                    self._step, self._step_at = event.step, event.at
                    if self._interrupted is not None and self._step_at > self._assigned_at:
                        self._note_recovered()
                elif event.event in ("restore", "done", "stopped"):
                    self._is_training = event.event == "restore"
            return self._step

    def is_training(self) -> bool:
        """Whether the job trains, or has trained under this agent and is not done."""
        self.look()
        return self._is_training

    def close(self) -> None:
        """Read the worker's last lines, have the store take them, and end."""
        self._closed.set()
        for _ in range(2):  # to what it reads it may add
            self._timeline.flush()
            self.look()
        if self._outbox is not None:
            self._outbox.flush(self._n_hosts, DELIVER_S)

    def _follow(self) -> None:
        while not self._closed.wait(OFTEN_S):
            self.look()
            if self._outbox is not None:
                self._outbox.tick(self._n_hosts)

    @property
    def _n_hosts(self) -> int:
        return self._most if self._assignment is None else len(self._assignment.hosts)

    def _note_missing(self, here: Iterable[int]) -> None:
        """Record the loss of hosts that died while the others were between two rounds: the store names only one."""
        if self._assignment is not None:
            for host in sorted({*self._assignment.hosts} - {*here} - self._lost):
                self._note_lost(host, f"host {host} is lost: it did not come to the next round")

    def _note_lost(self, host: int, why: str) -> None:
        self._lost.add(host)
        note_lost(self._timeline, self._name, host, self._step, self._machine, why)

    def _note_short(self, here: list[int], least: int) -> None:
        text = f"the job waits after step {self._step}: it needs {least} hosts, and has {name_hosts(here)}"
        text += ", which no cables join" * (len(here) >= least)
        facts = {"step": self._step, "hosts": here, "least": least}
        note_alert(self._timeline, BELOW_MINIMUM, f"{self._name}/{BELOW_MINIMUM}", text, facts)

    def _note_recovered(self) -> None:
        assigned = self._assignment
        if self._interrupted is not None and assigned is not None and _writes(assigned, self._interrupted[2]):
            note_recovered(self._timeline, self._name, self._interrupted, (self._step, self._step_at, assigned.hosts))
        self._interrupted = None

    @property
    def _name(self) -> str:
        """The name of the round, the same on all hosts and for no other."""
        return self._assignment.name if self._assignment is not None else ""


def _writes(assigned: Assignment, were: Iterable[int]) -> bool:
    """Whether a host is one of the first in a round that were there before."""
    return len({*were}.intersection(assigned.hosts[: assigned.process])) < WRITERS


class QuorumLog:
    """Writes the events of a job whose survivors go on by themselves, under torchft: its quorums say who is left."""

    def __init__(self, timeline: Timeline, machine: Hosts) -> None:
        self._timeline = timeline
        self._machine = machine
        self._name = ""
        self._hosts: tuple[int, ...] = ()
        self._last: Done | None = None
        self._interrupted: Done | None = None

    def form(self, name: str, hosts: Iterable[int], quarantined: Iterable[int] = ()) -> None:
        """Record a quorum, by a name that is the same on all its hosts; those in quarantine are not lost."""
        before, self._name, self._hosts = self._hosts, name, tuple(hosts)
        lost = sorted({*before} - {*self._hosts})
        if self._last is not None and lost:  # a host that joins interrupts nobody
            self._interrupted = self._interrupted or self._last
            for host in sorted({*lost} - {*quarantined}):
                why = f"host {host} is lost: it is not in the next quorum"
                note_lost(self._timeline, name, host, self._last[0], self._machine, why)

    def step(self, number: int) -> None:
        """Record that a step is done."""
        self._last = number, time.time(), self._hosts
        if self._interrupted is not None:
            note_recovered(self._timeline, self._name, self._interrupted, self._last)
            self._interrupted = None
