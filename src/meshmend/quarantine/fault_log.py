"""The fault log: a file in the job's shared folder with the observations that its processes have seen, one line each.

It outlives the processes, so that a second observation after a restart is held together with the first. It also says
which states are not to be trusted: those that an attempt kept after the last step that was verified before its
observation. It is written whole and atomically, by one process at a time: whatever is not as written is an error,
because states that an observation speaks against would be trusted without it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from meshmend.buckets import Folder, SharedFile
from meshmend.errors import QuarantineError
from meshmend.quarantine.judge import MAX_OBSERVATIONS
from meshmend.quarantine.observation import LAST_STEP, Observation, is_count

FILE = "fault_log.jsonl"
MAX_BYTES = 32 << 20
"""Of the log. The oldest go first, and an attempt's restart has dropped what its observations speak against."""


@dataclass(frozen=True)
class LogEntry:
    """One line of the log: an observation, and what was known when it was seen."""

    observation: Observation
    attempt: int
    """The job's attempt that has seen it, from 1."""
    verified: int
    """The last step that was verified by then: what that attempt kept of later ones is not trusted."""
    at: float
    """Seconds since 1970."""

    @property
    def tagged(self) -> Observation:
        """The observation with its attempt, as the judge counts it."""
        return replace(self.observation, numbers={**self.observation.numbers, "attempt": self.attempt})

    def to_json(self) -> str:
        """Return this as one line."""
        facts = {"attempt": self.attempt, "verified": self.verified, "at": self.at}
        return json.dumps({**facts, "observation": self.observation.facts()}, allow_nan=False)

    @classmethod
    def of(cls, facts: Any) -> LogEntry:
        """Return the line that `facts` describes; raise `QuarantineError` if it is none."""
        if not isinstance(facts, dict) or set(facts) != {"attempt", "verified", "at", "observation"}:
            raise QuarantineError("it does not have exactly attempt, verified, at and observation.")
        attempt, verified, at = (facts[name] for name in ("attempt", "verified", "at"))
        if not all(isinstance(n, int) and is_count(n, LAST_STEP) for n in (attempt, verified)):
            raise QuarantineError("attempt and verified are not whole numbers from 0.")
        if not is_count(at):
            raise QuarantineError("at is not a time.")
        return cls(Observation.of(facts["observation"]), attempt, verified, float(at))


class FaultLog:
    """The observations of the job in a folder. Every call reads the file anew: all processes write to it.

    >>> import tempfile
    >>> from meshmend.quarantine import Suspect
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = FaultLog(folder)
    ...     log.add([Observation("digest", (Suspect.parse("2,3"),), 400)], attempt=1, verified=380)
    ...     [(noted.observation.step, noted.attempt) for noted in log.read()], untrusted(log)
    ([(400, 1)], [(1, 380)])
    """

    def __init__(self, folder: Folder, *, now: Callable[[], float] = time.time) -> None:
        self._file = SharedFile(folder, FILE)
        self.path = self._file.path
        self._now = now

    def read(self) -> tuple[LogEntry, ...]:
        """Return all observations in the order in which they were noted."""
        try:
            content, size = self._file.read(MAX_BYTES)
            if size > MAX_BYTES:
                raise self._damaged(f"it has {size:,} bytes, expected at most {MAX_BYTES:,}")
            lines = content.removesuffix(b"\n").split(b"\n") if size else []
        except FileNotFoundError:
            return ()
        if len(lines) > MAX_OBSERVATIONS:
            raise self._damaged(f"it has {len(lines):,} observations, expected at most {MAX_OBSERVATIONS:,}")
        return tuple(self._line(number, line) for number, line in enumerate(lines, 1))

    def add(self, observations: Iterable[Observation], *, attempt: int, verified: int) -> None:
        """Note what this attempt has seen. An observation that another process of it has noted is not noted again.

        `verified` is the last step that was verified by then, 0 if none was.
        """
        if not (0 <= attempt < LAST_STEP and 0 <= verified < LAST_STEP):
            raise QuarantineError(f"Attempt {attempt} and verified step {verified}: expected numbers from 0.")
        now = self._now()
        wanted = [LogEntry(observation, attempt, verified, now) for observation in dict.fromkeys(observations)]
        if wanted:
            self._file.change(lambda: self._with(wanted))

    def _with(self, wanted: Iterable[LogEntry]) -> str | None:
        """Return the log with what is new in it, without its oldest observations if it is full; None if nothing is."""
        there = self.read()
        known = {(noted.observation, noted.attempt, noted.verified) for noted in there}
        new = [noted for noted in wanted if (noted.observation, noted.attempt, noted.verified) not in known]
        if not new:
            return None
        lines = [noted.to_json() + "\n" for noted in (*there, *new)][-MAX_OBSERVATIONS:]
        size = sum(map(len, lines))
        while size > MAX_BYTES:
            size -= len(lines.pop(0))
        return "".join(lines)

    def _line(self, number: int, line: bytes) -> LogEntry:
        try:
            return LogEntry.of(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"line {number}: it is not JSON ({str(error)[:100]})") from error
        except QuarantineError as error:
            raise self._damaged(f"line {number}: {error}".removesuffix(".")) from error

    def _damaged(self, why: str) -> QuarantineError:
        return QuarantineError(
            f"{self.path} is damaged: {why}. It says which chips are suspected to compute wrong numbers, and which "
            "states were kept after that, so nothing starts without it. Repair it, for example by removing that line; "
            "or move it away, if what the job has kept can be trusted all the same."
        )


def untrusted(log: FaultLog) -> list[tuple[int, int]]:
    """Return whose states are not to be trusted: (attempt, step) for what that attempt or one before kept after a step.

    Every observation counts, confirmed or not, and whoever has cleared it.
    """
    return sorted({(noted.attempt, noted.verified) for noted in log.read()})
