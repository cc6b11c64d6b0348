"""Which hosts a job has, and when they start together: the store's decisions, without its sockets.

There is one store, and only it decides who is in a round. A host that was left out is stopped before it may take part
again. Hosts that are cut off from the store train on, and nobody can tell them to stop: if all of a round are, and
others come to the store, or to one that has taken its place, two rounds train until the network is whole. They have no
host in common, so this cannot happen where a round needs more than half of the hosts. Where it needs fewer, only the
claim of an attempt (`jax/state`) keeps the older round from writing.

A round is the time from one start of the workers to the next. When it ends, its hosts stop their workers and ask for
the next, which starts as soon as all hosts that are there have asked: no keep-alive has to run out and nobody is waited
for, because a host that dies breaks its connection. Only hosts that freeze or lose their network are found by silence.

A job is in one `JobPhase`, and these are all its changes:

| phase      | next       | when                                                                                    |
|------------|------------|-----------------------------------------------------------------------------------------|
| gathering  | running    | enough hosts have asked, and the others have had their time to come                     |
| gathering  | adopted    | a host comes that trains in a round of an earlier store                                 |
| gathering  | finishing  | a host comes that has finished, after an earlier store had ended its round              |
| gathering  | over       | a host gives up                                                                         |
| adopted    | running    | all hosts of the round have come back                                                   |
| adopted    | restarting | a host does not come back, or comes without its worker; or as from running              |
| adopted    | finishing  | a host has finished                                                                     |
| adopted    | over       | a host gives up                                                                         |
| running    | restarting | a host or a worker fails, the script raises an error on some hosts, or others have come |
| running    | finishing  | a host has finished                                                                     |
| running    | over       | a host gives up, or the script has raised an error on every host                        |
| restarting | running    | all hosts that are there have asked, and enough of them are joined by cables            |
| restarting | finishing  | a host had finished before it heard that its round had ended                            |
| restarting | over       | a host gives up                                                                         |
| finishing  | over       | no host runs any more, one gives up, or the script raises an error on those that run    |

Where lost hosts cut the mesh in two, the larger part trains, and the hosts of the other wait until they are joined to
it again: gradients cannot be summed over parts that no cable joins.

How a job ends depends on what happened to each host, not on the order in which the store heard of it. A heartbeat costs
the same whatever the number of hosts, a round a few messages per host.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from meshmend.errors import MeshmendError
from meshmend.launch.addresses import is_loopback, join_address
from meshmend.launch.hosts import Hosts, name_hosts
from meshmend.launch.messages import MAX_HOSTS

Message = dict[str, Any]

START_S = 30.0
"""How long the first round waits for further hosts once it has enough: they rarely start in the same second."""
SETTLE_S = 1.0
"""How long after a host's arrival a running round ends: several that come together cause one restart."""
SILENT_S = 10.0
"""A host that was not heard from for so long is lost; each sends a heartbeat every second. Only hosts that freeze or
lose their network are found in this way, and one that is merely overloaded must not be taken for one of them."""
ASK_S = 60.0
"""How long the others wait for hosts that are there, but do not ask for a round: their workers do not end."""
RAISED_S = 5.0
"""How long the others have to reach the line where the script of one has raised an error. If all of them raise, too,
the job ends with it; if not, they start again."""
BEAT_S = 1.0
AWAY = "its worker has ended while the store was away"
STATES = ("new", "idle", "waiting", "running", "done")
"""Of a member: it has come, it stops its worker, it has asked for a round, it is in one, its worker has finished."""


def address_elsewhere(address: str, store_at: str) -> str:
    """Return the address of a host for others. One that comes to the store over loopback is on the store's machine.

    There the machine's own name may resolve to 127.0.1.1, while other machines reach the store at `store_at`.

    >>> address_elsewhere("127.0.0.1", "10.0.0.7"), address_elsewhere("10.0.0.8", "10.0.0.7")
    ('10.0.0.7', '10.0.0.8')
    """
    return store_at if store_at and is_loopback(address) else address


class JobPhase(Enum):
    """What a job does, as its store sees it."""

    GATHERING = "gathering"
    """No round has run in this store."""
    ADOPTED = "adopted"
    """A round of an earlier store runs, and some of its hosts have not come back yet."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """A round has ended: its hosts stop their workers and ask for the next."""
    FINISHING = "finishing"
    """A host has finished, so the last step is done: nothing starts again."""
    OVER = "over"
    """Nobody is admitted any more."""


class RefusedError(Exception):
    """A host cannot be a member, for a reason that its user should read.

    `retryable`: it may be admitted later. `is_certain`: if it is told so again and again, it will not be.
    """

    def __init__(self, why: str, *, retryable: bool = False, is_certain: bool = True) -> None:
        self.retryable = retryable
        self.is_certain = is_certain
        super().__init__(why)


@dataclass(slots=True)
class Participant:
    """A host that is connected to the store."""

    host: int
    address: str
    heard_at: float
    state: str = "new"
    """One of `STATES`."""
    port: int = 0


@dataclass(frozen=True)
class Round:
    """Hosts that run together."""

    number: int
    name: str
    """Random: two stores may count the same numbers."""
    hosts: tuple[int, ...]


@dataclass
class _Fates:
    """What has become of the hosts of the round that runs or ran last."""

    hosts: frozenset[int] = frozenset()
    number: int = 0
    """Of that round."""
    lost: set[int] = field(default_factory=set)
    """Those that are lost since, which is why workers of others fail."""
    failed: str = ""
    """Which worker failed by itself, and why."""
    raised: dict[int, str] = field(default_factory=dict)
    """Hosts whose script has raised an error, which is no consequence of a loss."""
    raised_at: float = 0.0
    """When the first of them did."""
    finished: int | None = None
    """The first host whose worker has finished."""
    missing: set[int] = field(default_factory=set)
    """In an adopted round: hosts that have not come back yet, also while it ends."""
    missing_until: float = 0.0


@dataclass
class Membership:
    """The members of a job. Give it what happens; send what is in `outbox`, in order, and show what is in `news`."""

    least: int = 0
    """Hosts that a round needs, as the first member says."""
    most: int = 0
    machine: str = ""
    start_s: float = START_S
    settle_s: float = SETTLE_S
    silent_s: float = SILENT_S
    ask_s: float = ASK_S
    raised_s: float = RAISED_S
    make_name: Callable[[], str] = lambda: secrets.token_hex(8)
    """Of a round."""
    members: OrderedDict[Hashable, Participant] = field(default_factory=OrderedDict)
    """By their connection; first the one that has been silent for longest."""
    outbox: list[tuple[Hashable, Message]] = field(default_factory=list)
    """Messages to members; one that goes to many is the same object."""
    news: list[str] = field(default_factory=list)
    """What has been decided, for people."""
    phase: JobPhase = JobPhase.GATHERING
    round: Round | None = None
    """The one that runs; None between rounds."""
    number: int = 0
    """Of the newest round so far."""
    rounds_before: int = 0
    """Of the newest round of earlier jobs whose events are in the store's folder."""
    store_at: str = ""
    """The address at which hosts on other machines reach the store; "" as long as none has come."""
    over: Message | None = None
    """How the job ended."""
    _keys: dict[int, Hashable] = field(default_factory=dict)
    """Each host's connection."""
    _in: dict[str, set[Hashable]] = field(default_factory=lambda: {state: set() for state in STATES})
    """Members by their state."""
    _fates: _Fates = field(default_factory=_Fates)
    _arrived_at: float = 0.0
    _ended_at: float = 0.0
    """When the last round ended."""
    _ticked_at: float | None = None
    _awake_since: float = 0.0
    """When the store last woke up after a pause, during which it could not hear anybody."""
    _asked: bool = False
    """Whether a host has asked for a round since it was last seen who can train together: that takes time."""
    _short: bool = False
    """Whether the hosts know that they wait because they are too few."""

    def arrive(self, key: Hashable, hello: Message, address: str, now: float) -> None:
        """Admit a host; raise `RefusedError` if it cannot be."""
        host, machine = int(hello["host"]), str(hello["machine"])
        least, most = (int(n) for n in hello["hosts"])
        self._check_admits()
        if not 0 <= host < MAX_HOSTS:
            raise RefusedError(f"its number is {host}, expected one from 0 to {MAX_HOSTS - 1}")
        if machine:
            try:
                Hosts.read(machine).number(host)
            except MeshmendError as error:
                raise RefusedError(f"it describes a machine that cannot be: {error}") from error
        if not self.members:
            self.least, self.most, self.machine = least, most, machine
        if (least, most) != (self.least, self.most):
            raise RefusedError(
                f"it wants {least} to {most} hosts, the others {self.least} to {self.most}. Give all the same --hosts"
            )
        if machine != self.machine:
            raise RefusedError(
                f"it describes its machine as {machine}, but host {next(iter(self._keys))} as {self.machine}. Give all "
                "hosts the same --shape and --host"
            )
        if (other := self._keys.get(host)) is not None:
            member = self.members[other]
            if now - self._heard_at(member) < 2 * BEAT_S:
                # It may be what is left of a host that has just been restarted: that one will fall silent. Nobody
                # knows whether it has while this store has heard nothing from it since a pause of its own.
                raise RefusedError(
                    f"another process, at {member.address}, is host {host} already: give each its own --host-index",
                    retryable=True,
                    is_certain=member.heard_at > self._awake_since,
                )
            self.outbox.append((other, {"type": "dropped"}))
            self.leave(other, "its process was replaced by a new one", now)
            self._check_admits()  # it may have been the last that ran
        if len(self.members) >= self.most:
            raise RefusedError(f"the job has {self.most} hosts already, as many as --hosts allows")
        self.members[key] = Participant(host, str(hello.get("address") or address), now)
        self._keys[host] = key
        self._in["new"].add(key)
        self.number = max(self.number, int(hello.get("number") or 0))
        self._arrived_at = now
        running = hello.get("running")
        if running is not None:
            self._take_back(key, Round(int(running["number"]), str(running["name"]), tuple(running["hosts"])), now)
        if host in self._fates.missing:
            self._fates.missing.remove(host)
            self._fates.missing_until = now + self.silent_s
            if self.round is not None and self.members[key].state != "running":
                self._end_lost([host], AWAY, now)
            elif self.phase is JobPhase.ADOPTED and not self._fates.missing:
                self._enter(JobPhase.RUNNING)

    def on_message(self, key: Hashable, message: Message, now: float) -> None:
        """Take a message of a member: beat, join, raised, done or failed."""
        member = self.members[key]
        member.heard_at = now
        self.members.move_to_end(key)
        kind = message["type"]
        if kind == "beat" or self.phase is JobPhase.OVER:
            return
        if kind == "join":
            was, member.port, self._asked = member.state, int(message["port"]), True
            self._move(key, "waiting")
            if was == "running":
                why = message.get("why") or "its worker has ended"
                if not self._fates.lost:
                    self._fates.failed = self._fates.failed or f"host {member.host}: {why}"
                if self.phase is not JobPhase.FINISHING:
                    self._end_round(f"host {member.host} starts again: {why}", now)
        elif kind == "raised":
            if member.state == "running":
                self._fates.raised_at = self._fates.raised_at if self._fates.raised else now
                self._fates.raised.setdefault(member.host, str(message.get("why", "")))
        elif kind == "done":
            self._move(key, "done")
            if self.phase is not JobPhase.FINISHING:
                self._fates.finished = member.host
                self._enter(JobPhase.FINISHING)
        elif kind == "failed":
            self._end_job(ok=False, why=f"host {member.host} gave up: {message.get('why', '')}")
        self._check_finished()

    def leave(self, key: Hashable, why: str, now: float) -> None:
        """Drop a member whose connection has ended."""
        self._lose([key], why, now)
        self._check_finished()

    def tick(self, now: float) -> None:
        """Do what is due: drop silent members, end a round for newcomers, start the next one.

        Call it when everything that had arrived at `now` has been heard.
        """
        if self.phase is JobPhase.OVER:
            return
        if self._ticked_at is not None and now - self._ticked_at > 2 * BEAT_S:
            # It was the store that slept, not its members; what they said meanwhile may still be on its way.
            self._awake_since = now
        self._ticked_at = now
        silent = []
        for key, member in self.members.items():
            if now - self._heard_at(member) <= self.silent_s:
                break
            silent.append(key)
        if silent:
            self.outbox += [(key, {"type": "dropped"}) for key in silent]
            silence_s = now - self._heard_at(self.members[silent[-1]])
            self._lose(silent, f"not heard from for {silence_s:.0f} s", now)
        self._check_adopted(now)
        self._check_raised(now)
        self._check_finished()
        self._advance(now)

    def due(self, now: float) -> float:
        """Return how many seconds may pass until `tick` is due."""
        since = max(self._arrived_at, self._ended_at)
        times = [self._arrived_at + self.settle_s, self._arrived_at + self.start_s, since + self.ask_s]
        times += [self._fates.missing_until] if self._fates.missing else []
        times += [self._fates.raised_at + self.raised_s] if self._fates.raised else []
        if self.members:
            times.append(self._heard_at(next(iter(self.members.values()))) + self.silent_s)
        return min(max(0.01, min((at - now for at in times if at > now), default=BEAT_S)), self.silent_s / 2)

    def _enter(self, phase: JobPhase) -> None:
        """Change the phase, as the table above allows."""
        self.phase = phase

    def _check_admits(self) -> None:
        if self.over is not None:
            raise RefusedError(f"this job is over: {self.over['why']}. Start a new store for a new job")

    def _heard_at(self, member: Participant) -> float:
        """Return since when a member is silent. A pause of the store is nobody's silence."""
        return max(member.heard_at, self._awake_since)

    def _advance(self, now: float) -> None:
        """End a round for newcomers, or start the next one, if it is time."""
        waiting = self._in["waiting"]
        if not waiting or not self._asked or self._fates.missing or self.phase in (JobPhase.FINISHING, JobPhase.OVER):
            return
        if self.round is not None:
            if now >= self._arrived_at + self.settle_s:
                self._asked = False
                hosts = [*self.round.hosts, *self._hosts_of(waiting)]
                if joined := set(self._group(hosts)) - set(self.round.hosts):
                    self._end_round(f"{name_hosts(joined)} {'has' if len(joined) == 1 else 'have'} joined", now)
            return
        if len(waiting) < len(self.members) and now < max(self._arrived_at, self._ended_at) + self.ask_s:
            return
        # A store that knows the job knows who is missing and why; a new one gives the others time to come.
        wait_s = (self.silent_s if self.number else self.start_s) if self.phase is JobPhase.GATHERING else 0.0
        if len(waiting) < self.most and now < self._arrived_at + wait_s:
            return
        self._asked = False
        group = self._group(self._hosts_of(waiting))
        if len(group) >= self.least:
            self._start_round(group)
        elif self.number and not self._short:
            self._short = True
            here = sorted(self._hosts_of(waiting))
            short: Message = {"type": "short", "hosts": here, "least": self.least, "number": self.number}
            self.outbox += [(key, short) for key in waiting]
            self.news.append(f"the job waits: it needs {self.least} hosts, and has {name_hosts(here)}")

    def _check_raised(self, now: float) -> None:
        """End the job if the script has raised an error on every host, or the round if it has on some of them."""
        fates = self._fates
        if not fates.raised or self.phase is JobPhase.OVER:
            return
        first = min(fates.raised)
        why = fates.raised[first]
        if fates.raised.keys() >= {*self._hosts_of(self._in["running"])} and not fates.lost and not fates.missing:
            who = f"host {first}" if len(fates.raised) == 1 else "every host"
            done = f", after host {fates.finished} had finished" * (self.phase is JobPhase.FINISHING)
            self._end_job(ok=False, why=f"the script raised an error on {who}{done}: {why}")
        elif now >= fates.raised_at + self.raised_s and self.phase is not JobPhase.FINISHING:
            self._end_round(f"host {first} starts again: its script raised {why}", now)

    def _check_finished(self) -> None:
        """End the job if every host that trained has ended; those that came later wait for nothing more."""
        fates = self._fates
        if self.phase is not JobPhase.FINISHING or self._in["running"] or self._in["idle"] or fates.missing:
            return
        if fates.failed and not fates.lost:
            self._end_job(ok=False, why=f"{fates.failed}, after host {fates.finished} had finished")
        else:
            not_done = fates.lost.union(self._hosts_of(self._in["waiting"]))
            self._end_job(ok=True, why="all hosts have finished" + f", except {name_hosts(not_done)}" * bool(not_done))

    def _hosts_of(self, keys: Iterable[Hashable]) -> list[int]:
        return [self.members[key].host for key in keys]

    def _group(self, hosts: list[int]) -> tuple[int, ...]:
        """Return the hosts that can train together."""
        return Hosts.read(self.machine).largest_group(hosts) if self.machine else tuple(sorted(hosts))

    def _move(self, key: Hashable, state: str) -> None:
        member = self.members[key]
        self._in[member.state].discard(key)
        self._in[state].add(key)
        member.state = state

    def _start_round(self, hosts: tuple[int, ...]) -> None:
        before, self.number = self.number, max(self.number, self.rounds_before) + 1
        self._enter(JobPhase.RUNNING)
        self._short, self._fates = False, _Fates(frozenset(hosts), self.number)
        self.round = Round(self.number, self.make_name(), hosts)
        first = self.members[self._keys[hosts[0]]]
        address = address_elsewhere(first.address, self.store_at)
        message: Message = {
            "type": "round",
            "number": self.number,
            "before": before,
            "name": self.round.name,
            "hosts": hosts,
            "cut_off": sorted(set(self._hosts_of(self._in["waiting"])) - set(hosts)),
            "coordinator": join_address(address, first.port),
            "store_at": self.store_at,
        }
        for host in hosts:
            self._move(self._keys[host], "running")
            self.outbox.append((self._keys[host], message))
        self.news.append(f"round {self.number}: {name_hosts(hosts)}")

    def _end_round(self, why: str, now: float, lost: int | None = None) -> None:
        number = self.round.number if self.round else 0
        message: Message = {"type": "stop", "why": why, "lost": lost, "number": number}
        self._enter(JobPhase.RESTARTING)
        self.round, self._ended_at, self._asked, self._fates.raised = None, now, True, {}
        for key in list(self._in["running"]):
            self._move(key, "idle")
            self.outbox.append((key, message))
        self.news.append(why)

    def _end_job(self, *, ok: bool, why: str) -> None:
        self._enter(JobPhase.OVER)
        self.over, self.round = {"ok": ok, "why": why}, None
        message = {"type": "over", **self.over}
        self.outbox += [(key, message) for key in self.members]
        self.news.append(why)

    def _lose(self, keys: list[Hashable], why: str, now: float) -> None:
        """Forget members that are lost together, and end their round."""
        running = []
        for key in keys:
            member = self.members.pop(key)
            del self._keys[member.host]
            self._in[member.state].discard(key)
            if member.state != "done" and member.host in self._fates.hosts:
                self._fates.lost.add(member.host)
            if member.state == "running":
                running.append(member.host)
        self._asked = True
        if running and self.phase is not JobPhase.OVER:
            self._end_lost(sorted(running), why, now)

    def _end_lost(self, hosts: list[int], why: str, now: float) -> None:
        self._fates.lost.update(hosts)
        text = f"{name_hosts(hosts)} {'is' if len(hosts) == 1 else 'are'} lost: {why}"
        if self.phase is JobPhase.FINISHING:
            self.news.append(text)  # the last step is done: there is nothing to start again for
        else:
            self._end_round(text, now, lost=hosts[0])

    def _take_back(self, key: Hashable, claimed: Round, now: float) -> None:
        """Continue the round that a host runs in, if this store has just been started; otherwise stop that host."""
        hosts = frozenset(claimed.hosts)
        here = hosts & self._keys.keys() - {self.members[key].host}
        fates = _Fates(hosts, claimed.number, missing=set(hosts - here))
        if self.phase is JobPhase.GATHERING:
            self._enter(JobPhase.ADOPTED)
            self.round, self.number, self._fates = claimed, max(self.number, claimed.number), fates
            if here:
                self._end_lost(sorted(here), AWAY, now)
        elif claimed.number > self._fates.number and self.phase is not JobPhase.FINISHING:
            # The round that this store adopted had ended before, so the fates of its hosts do not decide the job's end.
            if self.round is not None:
                self._end_round(f"round {claimed.number} has begun since", now)
            self._fates = fates
        if self.round is not None and self.round.name == claimed.name:
            self._move(key, "running")
            self._fates.lost.discard(self.members[key].host)
        else:
            self._move(key, "idle")
            why = "its round has ended while this host was cut off from the store"
            self.outbox.append((key, {"type": "stop", "why": why, "lost": None, "number": claimed.number}))

    def _check_adopted(self, now: float) -> None:
        """Wait no longer for hosts of an adopted round that do not come back, and end it if it still runs."""
        if self._fates.missing and now >= self._fates.missing_until:
            missing, self._fates.missing = sorted(self._fates.missing), set()
            if self.round is not None:
                who = "it" if len(missing) == 1 else "they"
                self._end_lost(missing, f"{who} did not come back to the store", now)
