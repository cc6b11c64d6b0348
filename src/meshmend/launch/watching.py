"""A job as it runs, from the events in its store's folder: what `meshmend watch` shows, and metrics are made of."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshmend.buckets import is_bucket, refuse_bucket
from meshmend.errors import LaunchError, QuarantineError
from meshmend.launch.events import Alert, Start, read_event
from meshmend.launch.goodput import (
    HostHistory,
    HostRound,
    Recovery,
    TimeAccount,
    gave_up_at,
    recovery_of,
    rounds_of,
    short_at,
    summarize,
)
from meshmend.launch.hosts import Hosts
from meshmend.launch.timeline import Tail, read_timeline
from meshmend.quarantine import Quarantined, QuarantineList

NAMES = re.compile(r"host-(\w+)\.jsonl")
STATES = ("starting", "training", "recovering", "waiting", "stalled", "over")
"""Waiting is for hosts: fewer are left than the job needs."""
QUIET_STEPS = 10
"""A job that has committed nothing for so many times its median step is stalled."""


class Watch:
    """A job's hosts, followed by their timelines. Its memory does not grow with the number of steps."""

    def __init__(self, folder: str | Path) -> None:
        refuse_bucket(folder, "give that of the job's store, as in its --folder, which has the timelines")
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise LaunchError(
                f"There is no folder {self.folder}. Give that of the job's store, as in --folder, or its shared one."
            )
        self.histories: dict[str, HostHistory] = {}
        self._tails: dict[str, Tail] = {}

    def read(self) -> None:
        """Read what has been written since the last time, also by hosts that are new."""
        for path in timelines(self.folder):
            found = NAMES.fullmatch(path.name)
            if found is not None:
                self._tails.setdefault(found[1], Tail(path))
        for name, tail in self._tails.items():
            lines = tail.read()
            if tail.is_anew:
                self.histories[name] = HostHistory()
            for line in lines:
                self.histories[name].add(line)

    def account(self, until: float | None = None) -> TimeAccount | None:
        """Return where the time went so far; None before the first step."""
        account = summarize(list(self.histories.values()), until)
        if account is None:
            return None
        # Lost since the last step: nobody has done one without them yet.
        rounds = [one for host in self.histories.values() for one in host.rounds if one.ended >= account.last_step_at]
        lost = {host for one in rounds for host in one.lost}
        if not lost.intersection(account.hosts):
            return account
        left = tuple(host for host in account.hosts if host not in lost)
        chips = account.chips * len(left) // len(account.hosts)
        return replace(account, hosts=left, chips=chips)

    def recovery(self, failed_at: float, number: int | None = None) -> tuple[Recovery, int] | None:
        """Return how the job came back after a failure, and its first step since then; None if it has not.

        That was in the first round that has started since then, unless its `number` is given.
        """
        rounds = rounds_of(self.histories.values())
        for before, now in pairwise(rounds):
            if now.started > failed_at if number is None else now.number == number:
                stages = now.stages_since(
                    failed_at, gave_up_at(self.histories.values()), short_at(self.histories.values())
                )
                return recovery_of(before, now, failed_at, stages), now.marks[0][0]
        return None

    @property
    def latest(self) -> dict[str, HostRound]:
        """The last round of each host."""
        return {name: host.rounds[-1] for name, host in self.histories.items() if host.rounds}

    @property
    def newest(self) -> list[HostRound]:
        """The newest round, as each of its hosts knows it."""
        number = max((one.number for one in self.latest.values()), default=0)
        return [one for one in self.latest.values() if one.number == number]

    def state(self, account: TimeAccount | None) -> str:
        """Return what the job with this account does now: one of `STATES`."""
        if account is None:
            return "starting"
        latest = list(self.latest.values())
        if any(one.over for one in latest):
            return "over"
        last = max(one.marks[-1][1] for one in latest if one.marks) if any(one.marks for one in latest) else 0.0
        if self._short(last) is not None:
            return "waiting"
        if any((one.gave_up or 0.0) > last or one.started > last for one in latest):
            return "recovering"
        return "stalled" if time.time() - last > max(QUIET_STEPS * account.step_s, 1.0) else "training"

    def _short(self, since: float) -> Alert | None:
        """Return what a host has said of the hosts that the job waits for, None if it does not."""
        latest = list(self.latest.values())
        begun = max(since, *(one.started for one in latest), 0.0)
        return next((one.short for one in latest if one.short is not None and one.short.at > begun), None)

    def account_now(self) -> tuple[TimeAccount | None, str]:
        """Return the account of a job and its state. A job that waits or recovers writes nothing, and time passes."""
        account = self.account()
        state = self.state(account)
        return (self.account(time.time()) if state in ("waiting", "recovering") else account), state

    def snapshot(self) -> JobSnapshot:
        """Read what is new, and return the job as it is now."""
        self.read()
        (account, state), latest = self.account_now(), self.latest
        short = None if state != "waiting" or account is None else self._short(account.last_step_at)
        quarantined, problem = read_quarantine(self.folder)
        return JobSnapshot(
            folder=str(self.folder),
            state=state,
            waiting="" if short is None else short.text,
            waiting_s=0.0 if short is None else time.time() - short.at,
            account=account,
            started=tuple(latest),
            losses=next((tuple(one.losses) for one in latest.values() if one.losses), ()),
            copies={name: one.kept for name, one in latest.items()},
            checkpoint=max((one.saved for one in self.newest), default=0),
            quarantined={str(entry.suspect): f"{entry.by}: {entry.why}" for entry in quarantined},
            quarantine_problem=problem,
        )


def read_quarantine(folder: Path) -> tuple[tuple[Quarantined, ...], str]:
    """Return what is in quarantine, and why that cannot be read, empty if it can: who watches does not stop for it."""
    try:
        return QuarantineList(folder).active(), ""
    except (QuarantineError, OSError) as error:
        return (), str(error)


def find_machine(folder: str | Path) -> Hosts | None:
    """Return the machine that the job in a folder last ran on, None if no timeline there says so."""
    for path in () if is_bucket(folder) else timelines(folder):
        for event in map(read_event, reversed(read_timeline(path))):
            if isinstance(event, Start) and event.machine is not None:
                return Hosts.read(event.machine)
    return None


def timelines(folder: str | Path) -> list[Path]:
    """Return the files of a job's hosts."""
    inner = Path(folder) / "timeline"
    return sorted((inner if inner.is_dir() else Path(folder)).glob("host-*.jsonl"))


@dataclass(frozen=True)
class JobSnapshot:
    """A job at one moment: what `meshmend watch` shows."""

    folder: str
    state: str
    waiting: str
    """For what a job waits that has too few hosts, and which it has."""
    waiting_s: float
    """For how long it has."""
    account: TimeAccount | None
    """None before the first step."""
    started: tuple[str, ...]
    """Hosts that have started, ever."""
    losses: tuple[float, ...]
    """Of the last steps."""
    copies: dict[str, int]
    """By host, the last step of which it has a copy in memory."""
    checkpoint: int
    """The last one on disk."""
    quarantined: dict[str, str]
    """What is left out, by its name as in "2,3", "2,3-2,4" or "host 5": who said so, and why."""
    quarantine_problem: str
    """Why the quarantine list cannot be read, empty if it can."""

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON can write it."""
        account = {} if self.account is None else self.account.facts()
        own = {name: value for name, value in vars(self).items() if name != "account"}
        return own | account
