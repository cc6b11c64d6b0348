"""Which hosts a job has, and when they start together: the store's decisions, without its sockets.

There is one store, and only it decides who is in a round. So two groups of hosts can never train as two jobs, however
slow or cut off some of them are, and a host that was left out is stopped before it may take part again.

A round is the time from one start of the workers to the next. It ends when a host of it is lost, when one asks for a
new round (its worker has failed), or when another host has come. Its hosts then stop their workers and ask for the next
round, which starts as soon as all hosts that are there have asked: no keep-alive has to run out and nobody is waited
for, because a host that dies breaks its connection. Only hosts that freeze or lose their network are found by silence.

Where lost hosts cut the mesh in two, the larger part trains, and the hosts of the other wait until they are joined to
it again: gradients cannot be summed over parts that no cable joins.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from meshmend.errors import MeshmendError
from meshmend.launch.hosts import Hosts, name_hosts

Message = dict[str, Any]

START_S = 30.0
"""How long the first round waits for further hosts once it has enough: they rarely start in the same second."""
SETTLE_S = 1.0
"""How long after a host's arrival a running round ends: several that come together cause one restart."""
SILENT_S = 10.0
"""A host that was not heard from for so long is lost; each sends a heartbeat every second. Only hosts that freeze or
lose their network are found in this way, and one that is merely overloaded must not be taken for one of them."""
BEAT_S = 1.0


class RefusedError(Exception):
    """A host cannot be a member, for a reason that its user should read. `for_now`: it may be admitted later."""

    def __init__(self, why: str, *, for_now: bool = False) -> None:
        self.for_now = for_now
        super().__init__(why)


@dataclass
class Participant:
    """A host that is connected to the store."""

    host: int
    address: str
    machine: str
    heard_at: float
    state: str = "idle"
    """idle (stopping its worker, or not asked for a round yet), waiting, running or done."""
    port: int = 0


@dataclass(frozen=True)
class Round:
    """Hosts that run together."""

    number: int
    name: str
    """Random: two stores may count the same numbers."""
    hosts: tuple[int, ...]


@dataclass
class Membership:
    """The members of a job. Give it what happens; send what is in `outbox`, in order."""

    least: int = 0
    """Hosts that a round needs, as the first member says."""
    most: int = 0
    start_s: float = START_S
    settle_s: float = SETTLE_S
    silent_s: float = SILENT_S
    members: dict[Hashable, Participant] = field(default_factory=dict)
    """By their connection."""
    outbox: list[tuple[Hashable, Message]] = field(default_factory=list)
    round: Round | None = None
    """The one that runs; None between rounds."""
    number: int = 0
    """Of the newest round so far."""
    over: Message | None = None
    """How the job ended."""
    _fresh: bool = True
    """Whether this store has not seen a round yet."""
    _arrived_at: float = 0.0
    _ticked_at: float | None = None
    _missing_until: float | None = None
    """Until when the hosts of an adopted round may come back."""
    _short: bool = False
    """Whether the hosts know that they wait because they are too few."""

    def arrive(self, key: Hashable, hello: Message, address: str, now: float) -> None:
        """Admit a host; raise `RefusedError` if it cannot be."""
        host, machine = int(hello["host"]), str(hello["machine"])
        least, most = (int(n) for n in hello["hosts"])
        if self.over is not None:
            raise RefusedError(f"this job is over: {self.over['why']}. Start a new store for a new job")
        if machine:
            try:
                Hosts.read(machine).number(host)
            except MeshmendError as error:
                raise RefusedError(f"it describes a machine that cannot be: {error}") from error
        if not self.members:
            self.least, self.most = least, most
        if (least, most) != (self.least, self.most):
            raise RefusedError(
                f"it wants {least} to {most} hosts, the others {self.least} to {self.most}. Give all the same --hosts"
            )
        for other, member in list(self.members.items()):
            if member.machine != machine:
                raise RefusedError(
                    f"it describes its machine as {machine}, but host {member.host} as {member.machine}. Give all "
                    "hosts the same --shape and --host"
                )
            if member.host == host:
                if now - member.heard_at < 2 * BEAT_S:
                    # It may be what is left of a host that has just been restarted: that one will fall silent.
                    raise RefusedError(
                        f"another process, at {member.address}, is host {host} already. Give each host its own --place",
                        for_now=True,
                    )
                self.leave(other, "its process was replaced by a new one", now)
        if len(self.members) >= self.most:
            raise RefusedError(f"the job has {self.most} hosts already, as many as --hosts allows")
        self.members[key] = Participant(host, str(hello.get("address") or address), machine, now)
        self.number = max(self.number, int(hello.get("number") or 0))
        self._arrived_at = now
        running = hello.get("running")
        if running is not None:
            self._take_back(key, Round(int(running["number"]), str(running["name"]), tuple(running["hosts"])), now)

    def hear(self, key: Hashable, message: Message, now: float) -> None:
        """Take a message of a member: beat, join, done or failed."""
        member = self.members[key]
        member.heard_at = now
        say = message["say"]
        if say == "join":
            why = message.get("why") or "its worker has ended"
            if finished := [str(each.host) for each in self.members.values() if each.state == "done"]:
                self._end_job({"ok": False, "why": f"host {member.host}: {why}, after host {finished[0]} had finished"})
            elif member.state == "running":
                self._end_round(f"host {member.host} starts again: {why}")
            member.state, member.port = "waiting", int(message["port"])
        elif say == "done":
            member.state = "done"
            if self._is_done:
                self._end_job({"ok": True, "why": "all hosts have finished"})
        elif say == "failed":
            self._end_job({"ok": False, "why": f"host {member.host} gave up: {message.get('why', '')}"})
        self.tick(now)

    def leave(self, key: Hashable, why: str, now: float) -> None:
        """Drop a member whose connection has ended."""
        member = self.members.pop(key)
        if self.over is not None:
            return
        if any(each.state == "done" for each in self.members.values()):
            # The last step is done: there is nothing to start again for.
            if self._is_done:
                self._end_job({"ok": True, "why": f"all hosts have finished, except host {member.host}: {why}"})
        elif self.round is not None and member.host in self.round.hosts and member.state == "running":
            self._end_round(f"host {member.host} is lost: {why}", lost=member.host)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Do what is due: drop silent members, end a round for newcomers, start the next one."""
        if self.over is not None:
            return
        if self._ticked_at is not None and now - self._ticked_at > self.silent_s:
            # It was the store that slept, not its members.
            for member in self.members.values():
                member.heard_at = now
        self._ticked_at = now
        for key, member in list(self.members.items()):
            if now - member.heard_at > self.silent_s:
                self.outbox.append((key, {"say": "dropped"}))
                self.leave(key, f"not heard from for {now - member.heard_at:.0f} s", now)
                return
        waiting = [member.host for member in self.members.values() if member.state == "waiting"]
        if self.round is not None:
            self._check_adopted(now)
        if not waiting:
            return
        if self.round is not None:
            joined = set(self._group([*self.round.hosts, *waiting])) - set(self.round.hosts)
            if joined and now >= self._arrived_at + self.settle_s:
                self._end_round(f"{name_hosts(joined)} {'has' if len(joined) == 1 else 'have'} joined")
        elif len(waiting) == len(self.members):
            # A store that knows the job knows who is missing and why; a new one gives the others time to come.
            wait_s = (self.silent_s if self.number else self.start_s) if self._fresh else 0.0
            if len(waiting) < self.most and now < self._arrived_at + wait_s:
                return
            if len(self._group(waiting)) >= self.least:
                self._start_round()
            elif self.number and not self._short:
                self._short = True
                short: Message = {"say": "short", "hosts": sorted(waiting), "least": self.least, "number": self.number}
                self.outbox += [(key, dict(short)) for key in self.members]

    def due(self, now: float) -> float:
        """Return how many seconds may pass until `tick` is due."""
        times = [member.heard_at + self.silent_s for member in self.members.values()]
        times += [self._arrived_at + self.settle_s, self._arrived_at + self.start_s, self._missing_until or 0.0]
        return min(max(0.01, min((at - now for at in times if at > now), default=BEAT_S)), self.silent_s / 2)

    @property
    def _is_done(self) -> bool:
        """Whether every host that trained has finished; those that are cut off wait for nothing more."""
        trained = [member for member in self.members.values() if member.state != "waiting"]
        return all(member.state == "done" for member in trained)

    def _group(self, hosts: list[int]) -> tuple[int, ...]:
        """Return the hosts that can train together."""
        machine = next((member.machine for member in self.members.values()), "")
        return Hosts.read(machine).largest_group(hosts) if machine else tuple(sorted(hosts))

    def _start_round(self) -> None:
        here = {member.host: key for key, member in self.members.items()}
        hosts = self._group(list(here))
        self.number, self._fresh, self._short = self.number + 1, False, False
        self.round = Round(self.number, secrets.token_hex(8), hosts)
        first = self.members[here[hosts[0]]]
        facts = {
            "number": self.number,
            "name": self.round.name,
            "hosts": hosts,
            "cut_off": sorted(here.keys() - set(hosts)),
            "coordinator": f"{first.address}:{first.port}",
        }
        for process, host in enumerate(hosts):
            self.members[here[host]].state = "running"
            self.outbox.append((here[host], {"say": "round", **facts, "process": process}))

    def _end_round(self, why: str, lost: int | None = None) -> None:
        ended, self.round, self._missing_until = self.round, None, None
        for key, member in self.members.items():
            if member.state == "running":
                member.state = "idle"
                message: Message = {"say": "stop", "why": why, "lost": lost}
                self.outbox.append((key, message | {"number": ended.number if ended else 0}))

    def _end_job(self, over: Message) -> None:
        self.over, self.round = over, None
        self.outbox += [(key, {"say": "over", **over}) for key in self.members]

    def _take_back(self, key: Hashable, claimed: Round, now: float) -> None:
        """Continue the round that a host runs in, if this store has just been started; otherwise stop that host."""
        if self._fresh:
            self._fresh, self.round, self.number = False, claimed, max(self.number, claimed.number)
            self._missing_until = now + self.silent_s
        if self.round == claimed:
            self.members[key].state = "running"
        else:
            why = "the job went on without this host, which was cut off from the store"
            self.outbox.append((key, {"say": "stop", "why": why, "lost": None, "number": claimed.number}))

    def _check_adopted(self, now: float) -> None:
        if self._missing_until is None or self.round is None:
            return
        here = {member.host for member in self.members.values()}
        missing = [host for host in self.round.hosts if host not in here]
        if not missing:
            self._missing_until = None
        elif now >= self._missing_until:
            self._end_round(f"host {missing[0]} is lost: it did not come back to the store", lost=missing[0])
