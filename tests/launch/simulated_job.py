"""Hosts that are values around the real `Membership`, with a clock of their own."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from meshmend.launch import membership
from meshmend.launch.membership import JobPhase, Membership, Message

TABLE = set(re.findall(r"^\| (\w+) +\| (\w+) +\| .+ \|$", membership.__doc__ or "", re.M)) - {("phase", "next")}
"""Changes of the phase, as the module's docstring lists them."""


CLAIM = {"number": 7, "name": "abc", "hosts": [0, 1, 2]}
"""The round of an earlier store that a host trains in."""


@dataclass
class Watched(Membership):
    """A membership that makes no change that the table has not."""

    changes: list[tuple[str, str]] = field(default_factory=list)

    def _enter(self, phase: JobPhase) -> None:
        change = (self.phase.value, phase.value)
        assert change in TABLE, f"{change} is not in the table of {membership.__name__}"
        self.changes.append(change)
        super()._enter(phase)


class Job:
    """Hosts that talk to a membership and do as they are told, unless a test says otherwise."""

    def __init__(self, n_hosts: int, *, least: int = 1, machine: str = "", **settings: Any) -> None:
        self.now = 100.0
        self.machine = machine
        self.n_hosts = n_hosts
        self.least = least
        self.membership = Watched(**settings)
        self.received: dict[Hashable, list[Message]] = {}

    def hello(self, host: int, **more: Any) -> Message:
        return {"host": host, "hosts": [self.least, self.n_hosts], "machine": self.machine, **more}

    def arrive(self, *hosts: int, **more: Any) -> None:
        for host in hosts:
            self.received[host] = []
            self.membership.arrive(host, self.hello(host, **more), f"10.0.0.{host}", self.now)
        self.deliver()

    def say(self, host: int, **message: Any) -> None:
        self.membership.on_message(host, message, self.now)
        self.membership.tick(self.now)
        self.deliver()

    def join(self, *hosts: int) -> None:
        for host in hosts:
            self.say(host, type="join", port=7000 + host)

    def leave(self, host: int) -> None:
        self.membership.leave(host, "its connection to the store broke", self.now)
        self.membership.tick(self.now)
        self.deliver()

    def wait(self, seconds: float, *, silent: tuple[int, ...] = ()) -> None:
        """Let time pass, with heartbeats of all but the silent ones."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.5)
            for host in list(self.membership.members):
                if host not in silent:
                    self.membership.on_message(host, {"type": "beat"}, self.now)
            self.membership.tick(self.now)
        self.deliver()

    def deliver(self) -> None:
        for key, message in self.membership.outbox:
            self.received[key].append(message)
        self.membership.outbox.clear()

    def last(self, host: int) -> Message:
        return self.received[host][-1]

    def started(self, *hosts: int) -> None:
        """Check that just these hosts run in one round, and that all of them know it."""
        rounds = [self.last(host) for host in hosts]
        assert {message["type"] for message in rounds} == {"round"}
        assert all(tuple(message["hosts"]) == hosts for message in rounds)
        first = f"10.0.0.{hosts[0]}:{7000 + hosts[0]}"
        assert {message["coordinator"] for message in rounds} == {first}
        assert len({message["name"] for message in rounds}) == 1


def running(n_hosts: int, **settings: Any) -> Job:
    job = Job(n_hosts, **settings)
    job.arrive(*range(n_hosts))
    job.join(*range(n_hosts))
    job.started(*range(n_hosts))
    return job
