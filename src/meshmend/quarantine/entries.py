"""The quarantine list: a file in the job's shared folder with what is left out, why, since when and until when.

It is small, written whole and atomically, and changed by one process at a time. Who reads it gets all of it or an error
that says what to do: a damaged list is never taken for an empty one, since then chips that are known to compute wrong
numbers would come back.

An entry stays when it has expired, and one that is cleared ends at that moment. So the list also says which
observations are settled: those that name a suspect and were noted before its entry expired, or were in the log when it
was cleared. The clock of the machine that cleared it does not matter. Settled observations confirm no other, and do not
bring the suspect back. They still say which states are not to be trusted (`untrusted`): these do not become right when
a chip is replaced.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshmend.buckets import Folder, SharedFile
from meshmend.errors import Coordinate, QuarantineError
from meshmend.quarantine.fault_log import FaultLog, LogEntry
from meshmend.quarantine.observation import is_count
from meshmend.quarantine.suspect import ChipsOfHosts, Suspect
from meshmend.topology import Cable

FILE = "quarantine.json"
VERSION = 1
MAX_BYTES = 4 << 20
MAX_ENTRIES = 10_000
MAX_WHY = 2000
THE_JOB = "the job"
BY_HAND = "by hand"
WEEK_S = 7 * 86400.0
"""For how long a suspect is left out if nobody says otherwise: long enough to test it, too short to be forgotten."""
FOREVER_S = 100 * 365 * 86400.0
SHARE = 16
"""The job may quarantine one chip in so many by itself, and at least as many as one host has.

Such chips are rare: large fleets report about one in a thousand over months. One in sixteen is something else, such as
a program that is not deterministic, and leaving out more would not cure that. A host always fits: it fails as a whole.
"""


@dataclass(frozen=True)
class Quarantined:
    """One entry of the list. Times are seconds since 1970."""

    suspect: Suspect
    why: str
    by: str
    since: float
    until: float
    step: int = 0
    """The step of the last observation; 0 if the entry was made by hand."""
    verified: int = 0
    """The last step whose state is known to be good; 0 if none is."""
    settled: float | None = None
    """If the entry was cleared: the time of the last observation by then, on the clock of who noted it."""

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON can write it."""
        return asdict(self) | {"suspect": str(self.suspect)}

    @classmethod
    def of(cls, facts: Any) -> Quarantined:
        """Return the entry that `facts` describes; raise `QuarantineError` if it is none."""
        try:
            suspect, why, by = (facts[name] for name in ("suspect", "why", "by"))
            times, steps = [[facts[name] for name in pair] for pair in (("since", "until"), ("step", "verified"))]
        except (KeyError, TypeError) as error:
            raise QuarantineError(f"it lacks {error}.") from error
        if not all(isinstance(text, str) and len(text) <= MAX_WHY for text in (suspect, why, by)):
            raise QuarantineError("suspect, why and by are not short texts.")
        settled = facts.get("settled")
        if not all(is_count(number) for number in (*times, *steps, settled or 0)):
            raise QuarantineError("since, until, step, verified and settled are not numbers.")
        numbers = float(times[0]), float(times[1]), int(steps[0]), int(steps[1])
        return cls(Suspect.parse(suspect), why, by, *numbers, None if settled is None else float(settled))


class QuarantineList:
    """The list of the job in a folder. Every call reads the file anew: hosts and people change it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     entries = QuarantineList(folder)
    ...     entry = entries.add(Suspect.parse("2,3"), why="seen to flip bits")
    ...     [str(one.suspect) for one in entries.active()], entry.by
    (['2,3'], 'by hand')
    """

    def __init__(self, folder: Folder, *, now: Callable[[], float] = time.time) -> None:
        self._file = SharedFile(folder, FILE)
        self.path = self._file.path
        self._now = now

    def read(self) -> tuple[Quarantined, ...]:
        """Return all entries, also those that have expired or were cleared, in the order in which they were made."""
        try:
            text, size = self._file.read(MAX_BYTES)
            if size > MAX_BYTES:
                raise self._damaged(f"it has {size:,} bytes, expected at most {MAX_BYTES:,}")
        except FileNotFoundError:
            return ()
        try:
            facts = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"it is not JSON ({str(error)[:100]})") from error
        if not isinstance(facts, dict) or not isinstance(facts.get("entries"), list):
            raise self._damaged("it has no list of entries")
        if facts.get("version") != VERSION:
            raise self._damaged(f"its version is {str(facts.get('version'))[:20]}, expected {VERSION}")
        if len(facts["entries"]) > MAX_ENTRIES:
            raise self._damaged(f"it has {len(facts['entries']):,} entries, expected at most {MAX_ENTRIES:,}")
        return tuple(self._entry(number, entry) for number, entry in enumerate(facts["entries"]))

    def active(self) -> tuple[Quarantined, ...]:
        """Return the entries that have not expired."""
        now = self._now()
        return tuple(entry for entry in self.read() if entry.until > now)

    def add(
        self,
        suspect: Suspect,
        *,
        why: str,
        by: str = BY_HAND,
        for_s: float = WEEK_S,
        step: int = 0,
        verified: int = 0,
        hosts: ChipsOfHosts | None = None,
        n_chips: int | None = None,
    ) -> Quarantined:
        """Quarantine a suspect, and return its entry. With an earlier one, the later end counts, and a person's word.

        Entries of the job (`by=THE_JOB`) are limited to a share of the machine, which `hosts` describes, or else
        `n_chips`; past it, `QuarantineError`. Entries by hand do not count.
        """
        if not 0 < for_s <= FOREVER_S:
            raise QuarantineError(f"A quarantine of {for_s:g} s: expected more than 0 s, up to 100 years.")
        now = self._now()
        new = entry = Quarantined(suspect, why[:MAX_WHY], by, now, now + for_s, step, verified)
        if hosts is not None:
            suspect.check(hosts.shape, len(hosts))

        def with_it() -> str:
            nonlocal entry
            entries, entry = self.read(), new
            for before in entries:
                if before.suspect == suspect and before.until > now:
                    entry = _merged(before, entry)
            if entry.by == THE_JOB:
                self._check_limit(entries, entry, hosts, n_chips)
            return self._text([*entries, entry])

        self._file.change(with_it)
        return entry

    def clear(self, suspects: Iterable[Suspect] | None = None) -> tuple[Quarantined, ...]:
        """End the entries of these suspects now, by default of all; return those that had not expired.

        The observations against them are settled, or the job would quarantine them again at once. That goes for
        suspects, too, that only the fault log names, because the job has reached its limit.
        """
        now = self._now()
        gone: tuple[Quarantined, ...] = ()

        def without_them() -> str:
            nonlocal gone
            entries = self.read()
            listed = {entry.suspect: entry for entry in entries if entry.until > now}
            log = FaultLog(self.path.parent).read()
            observed = {one for noted in unsettled(log, entries) for one in noted.observation.suspects}
            wanted = observed.union(listed) if suspects is None else set(suspects)
            if missing := wanted - observed - listed.keys():
                names = ", ".join(map(str, [*listed][:8])) or "nothing"
                raise QuarantineError(f"{min(map(str, missing))} is not in quarantine. {self.path} lists: {names}.")
            gone = tuple(entry for suspect, entry in listed.items() if suspect in wanted)
            cleared = [Quarantined(suspect, "cleared", BY_HAND, now, now) for suspect in sorted(wanted - listed.keys())]
            settled = max((noted.at for noted in log), default=0.0)
            ended = [replace(entry, until=now, settled=settled) for entry in (*gone, *cleared)]
            return self._text([*entries, *ended])

        self._file.change(without_them)
        return gone

    def _check_limit(
        self, entries: Iterable[Quarantined], entry: Quarantined, hosts: ChipsOfHosts | None, n_chips: int | None
    ) -> None:
        total = n_chips if hosts is None else math.prod(hosts.shape)
        if total is None:
            raise QuarantineError("How much the job may quarantine depends on the machine: give hosts or n_chips.")
        most = limit(total, 1 if hosts is None else hosts.chips_per_host)
        by_job = [one for one in entries if one.by == THE_JOB and one.until > entry.since]
        before, after = (len(chips_of(some, hosts)) for some in (by_job, [*by_job, entry]))
        if after > max(most, before):
            raise QuarantineError(
                f"The job wants to quarantine {entry.suspect} ({entry.why[:200]}), but it has already left out "
                f"{before} of {total:,} chips by itself, and may leave out {most}. So many bad chips "
                "at once are more likely a fault of the program, of a check or of the software. Look at the evidence: "
                f"`meshmend quarantine list {self.path.parent}`. If it holds, confirm it by hand with `meshmend "
                f"quarantine add {self.path.parent} SUSPECT`, which does not count; otherwise clear it with `meshmend "
                f"quarantine clear {self.path.parent} SUSPECT`. Then start the job again."
            )

    def _text(self, entries: Iterable[Quarantined]) -> str:
        """Return the list with the last entry of each suspect; where they are too many, not those that ended first."""
        newest: dict[Suspect, Quarantined] = {}
        for entry in entries:
            newest.pop(entry.suspect, None)
            newest[entry.suspect] = entry
        ended = sorted((entry.until, suspect) for suspect, entry in newest.items() if entry.until <= self._now())
        for _, suspect in ended[: max(0, len(newest) - MAX_ENTRIES)]:
            del newest[suspect]
        if len(newest) > MAX_ENTRIES:
            raise QuarantineError(f"{self.path} is full: it has {MAX_ENTRIES:,} entries. Clear some of them.")
        facts = {"version": VERSION, "entries": [entry.facts() for entry in newest.values()]}
        return json.dumps(facts, indent=1) + "\n"

    def _entry(self, number: int, facts: Any) -> Quarantined:
        try:
            return Quarantined.of(facts)
        except QuarantineError as error:
            raise self._damaged(f"entry {number}: {error}".removesuffix(".")) from error

    def _damaged(self, why: str) -> QuarantineError:
        return QuarantineError(
            f"{self.path} is damaged: {why}. It says which chips are left out because they compute wrong numbers, so "
            "nothing starts without it. Repair it, or move it away and add what is still to be left out: `meshmend "
            f"quarantine add {self.path.parent} SUSPECT`."
        )


def limit(n_chips: int, chips_per_host: int = 1) -> int:
    """Return how many chips a job may quarantine by itself.

    >>> limit(512, 8), limit(64, 8), limit(4)
    (32, 8, 1)
    """
    return max(1, chips_per_host, n_chips // SHARE)


def chips_of(entries: Iterable[Quarantined], hosts: ChipsOfHosts | None = None) -> list[Coordinate]:
    """Return the chips that are left out with these entries, each once, in order."""
    return sorted({chip for entry in entries for chip in entry.suspect.chips(hosts)})


def cables_of(entries: Iterable[Quarantined]) -> list[Cable]:
    """Return the cables among these entries."""
    return sorted({(e.suspect.ends[0], e.suspect.ends[1]) for e in entries if e.suspect.kind == "cable"})


def unsettled(log: Iterable[LogEntry], entries: Iterable[Quarantined]) -> list[LogEntry]:
    """Return the observations of a log that count: nobody that they name was left out, or cleared, since."""
    until: dict[Suspect, float] = {}
    for entry in entries:
        ended = entry.until if entry.settled is None else entry.settled
        until[entry.suspect] = max(ended, until.get(entry.suspect, 0.0))
    return [one for one in log if all(one.at > until.get(suspect, -1.0) for suspect in one.observation.suspects)]


def _merged(before: Quarantined, now: Quarantined) -> Quarantined:
    if before.by == BY_HAND and now.by != BY_HAND:
        return replace(before, until=max(before.until, now.until))
    return replace(now, since=before.since, until=max(before.until, now.until))
