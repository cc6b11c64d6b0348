"""From what a process has seen to the quarantine list: note observations, judge all of the log, list the verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from meshmend.buckets import Folder
from meshmend.quarantine.entries import THE_JOB, Quarantined, QuarantineList, unsettled
from meshmend.quarantine.fault_log import FaultLog, LogEntry
from meshmend.quarantine.judge import Verdict, judge, recent
from meshmend.quarantine.observation import Observation
from meshmend.quarantine.suspect import ChipsOfHosts, Suspect


def report(
    folder: Folder,
    observations: Iterable[Observation],
    *,
    attempt: int,
    verified: int,
    hosts: ChipsOfHosts | None = None,
    n_chips: int | None = None,
    now: Callable[[], float] = time.time,
) -> tuple[Quarantined, ...]:
    """Note observations in the shared folder's log, and quarantine what all of the log proves; return the new entries.

    `attempt` is the job's own count, and `verified` the last step that was verified. The limit on what the job may
    quarantine depends on `hosts`, or else on `n_chips`; past it, `QuarantineError`: stop, and start again when somebody
    has looked at it. Any process may call this, also several with the same observations: they count once.
    """
    FaultLog(folder, now=now).add(observations, attempt=attempt, verified=verified)
    return enforce(folder, hosts=hosts, n_chips=n_chips, now=now)


def enforce(
    folder: Folder,
    *,
    hosts: ChipsOfHosts | None = None,
    n_chips: int | None = None,
    now: Callable[[], float] = time.time,
) -> tuple[Quarantined, ...]:
    """Quarantine what the log proves and the list does not have; return the new entries.

    Called at every start before the list is read: the process that should have listed a suspect may have ended before
    it did, or at the limit. If the limit still holds, this raises the same `QuarantineError` instead of letting the job
    train with the suspect.
    """
    entries = QuarantineList(folder, now=now)
    noted = unsettled(FaultLog(folder).read(), entries.read())
    made = []
    for verdict in _verdicts(noted):
        facts = {"step": verdict.step, "verified": _verified(verdict, noted)}
        made.append(entries.add(verdict.suspect, why=verdict.why, by=THE_JOB, hosts=hosts, n_chips=n_chips, **facts))
    return tuple(made)


def refused(folder: Folder) -> tuple[Suspect, ...]:
    """Return whom the log proves and the list does not have: the limit has stopped the job before them.

    For a moment that is also so while a process lists a suspect.
    """
    noted = unsettled(FaultLog(folder).read(), QuarantineList(folder).read())
    return tuple(verdict.suspect for verdict in _verdicts(noted))


def _verdicts(noted: Iterable[LogEntry]) -> list[Verdict]:
    return judge(recent(one.tagged for one in noted))


def _verified(verdict: Verdict, noted: Iterable[LogEntry]) -> int:
    """Return the last step that was verified before the observations of a verdict's last attempt."""
    of_attempt: dict[int, int] = {}
    observations = set(verdict.observations)
    for one in noted:
        if one.tagged in observations:
            of_attempt[one.attempt] = min(of_attempt.get(one.attempt, one.verified), one.verified)
    return of_attempt[max(of_attempt)]
