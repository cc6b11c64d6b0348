"""Where a state may come from: all hosts' copies and all checkpoints, newest first, and which of them are trusted.

Every process reports what it has; from that, all make the same list, so that they try the same source at the same time
and all move on to the next if it fails on any of them.

Every copy and checkpoint records the last step that was verified when it was written. An observation of wrong numbers
says in which attempt it was seen, and which step had been verified last: what that attempt or an earlier one kept of
later steps may be wrong, whoever turns out to be the culprit. What a later attempt keeps is trusted again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from meshmend.errors import RestartError

UNCHECKED = -1
"""What is recorded as the last verified step of a job that nothing checks. Nobody knows more about its states: a later
run with checks takes the one that it resumes from for good."""


Slice = tuple[int, int]
"""A part, and the number of a slice of it."""


@dataclass(frozen=True)
class Source:
    """One state that the job may resume from, according to what the processes report."""

    attempt: int
    step: int
    kind: Literal["disk", "memory"]
    generation: str
    """Names this state and no other: that of the copies, or the checksum of a checkpoint's facts."""
    differs: str = ""
    """Where its identity first differs from that of this job's state; "" if it is the same."""
    n_parts: int = 0
    n_shares: int = 0
    """In memory: parts that are shares, which come first."""
    slices: tuple[int, int] = (0, 0)
    """In memory: slices of each share, and of each device's shards."""
    verified: int = UNCHECKED
    """The last step that was verified when it was written."""
    run: str = ""
    """In memory: what all hosts of one attempt share."""
    hosts: frozenset[int] = frozenset()
    """In memory: numbers of the hosts that had all parts between them."""
    holders: dict[int, list[int]] = field(default_factory=dict)
    """In memory: for each part the processes that have it."""

    @property
    def is_whole(self) -> bool:
        """Whether the processes have all parts between them."""
        return len(self.holders) == self.n_parts

    def senders(self, wanted: Iterable[Slice]) -> dict[Slice, int]:
        """For each of these slices, the process that sends it to others: all of them about as many."""
        found, n_sent = dict[Slice, int](), Counter[int]()
        # By those who have a part: how many slices each of them sends, and who; what is outdated is put in order later.
        queues = {tuple(processes): [(0, process) for process in processes] for processes in self.holders.values()}
        for part, which in sorted(wanted, key=lambda one: (one[1], len(self.holders[one[0]]), one[0])):
            queue = queues[tuple(self.holders[part])]
            while queue[0][0] < n_sent[queue[0][1]]:
                heapq.heapreplace(queue, (n_sent[queue[0][1]], queue[0][1]))
            process = found[part, which] = queue[0][1]
            n_sent[process] += 1
        return found

    def all_slices(self) -> Iterator[Slice]:
        """Return all slices, part by part."""
        for part in range(self.n_parts):
            for which in range(self.slices[part >= self.n_shares]):
                yield part, which

    @property
    def holding(self) -> set[int]:
        """The processes that have any part."""
        return set[int]().union(*self.holders.values())

    def without(self, damaged: Mapping[int, Sequence[int]]) -> Source:
        """Return the source without the parts that are damaged on these processes."""
        left = {
            part: [process for process in processes if part not in damaged.get(process, ())]
            for part, processes in self.holders.items()
        }
        return replace(self, holders={part: processes for part, processes in left.items() if processes})

    def facts(self) -> dict[str, Any]:
        """Return what every process needs to find it."""
        names = ("attempt", "step", "kind", "generation")
        return {name: getattr(self, name) for name in names} | {"name": str(self)}

    def __str__(self) -> str:
        where = "the copies in memory" if self.kind == "memory" else "the checkpoint on disk"
        return f"{where} of step {self.step} (attempt {self.attempt})"


def check_agreement(everybody: Sequence[dict[str, Any]]) -> None:
    """Raise what is wrong with any process, the same error on all of them."""
    errors = [held["error"] for held in everybody if "error" in held]
    if errors:
        raise RestartError(errors[0])
    if len({held["identity"] for held in everybody}) > 1:
        raise RestartError("Processes train different models or optimizers. Give all of them the same script.")


def rank_sources(offers: Sequence[Sequence[Mapping[str, Any]]]) -> list[Source]:
    """Return all sources, newest first, from what every process offers.

    A later attempt is always newer: it resumed from what was intact before it. At the same step memory comes first: it
    is faster. Copies count as one source only if they are of one generation.
    """
    found: dict[tuple[int, int, str, str], Source] = {}
    for process, offered in enumerate(offers):
        for offer in offered:
            key = (offer["attempt"], offer["step"], offer["kind"], offer["generation"])
            if key not in found:
                facts = {name: value for name, value in offer.items() if name != "parts"}
                facts["slices"] = tuple(offer.get("slices", (0, 0)))
                ranges = offer.get("hosts", ())
                facts["hosts"] = frozenset(host for first, last in ranges for host in range(first, last + 1))
                found[key] = Source(**facts)
            known = found[key]
            if offer["verified"] < known.verified:
                known = found[key] = replace(known, verified=offer["verified"])
            for part in offer.get("parts", ()):
                known.holders.setdefault(part, []).append(process)
    return [found[key] for key in sorted(found, reverse=True)]


LISTED = 4
"""States that a message names."""


@dataclass(frozen=True)
class Trust:
    """What a job's observations say of its states: the states of attempts up to `attempt` after `step` are not trusted.

    >>> trust = Trust(((2, 100),))
    >>> trust.trusts(2, 100), trust.trusts(1, 101), trust.trusts(3, 101)
    (True, False, True)
    """

    untrusted: tuple[tuple[int, int], ...] = ()
    """Pairs of attempt and step."""
    is_checked: bool = True
    """Whether checks run in this job."""

    @classmethod
    def of(cls, untrusted: Any) -> Trust:
        """Return what pairs say, as JSON has them; None if nothing checks this job."""
        return cls(tuple((int(attempt), int(step)) for attempt, step in untrusted or ()), untrusted is not None)

    @property
    def newest_attempt(self) -> int:
        """The last attempt that has seen an observation, 0 if none has."""
        return max((attempt for attempt, _ in self.untrusted), default=0)

    @property
    def last_verified(self) -> int:
        """The last step that was verified before that attempt's observations."""
        return min((step for attempt, step in self.untrusted if attempt == self.newest_attempt), default=0)

    def trusts(self, attempt: int, step: int) -> bool:
        """Whether nothing speaks against what an attempt has kept of a step."""
        return not any(attempt <= its_attempt and step > its_step for its_attempt, its_step in self.untrusted)

    def verified_step(self, source: Source, sources: Sequence[Source]) -> int:
        """Return the last verified step of the state that a job resumes from, given all that was found.

        A state is verified itself if a later step of its attempt was, by an observation's word or that of other copies
        of the same run: what it has recorded itself is older.
        """
        known = [step for attempt, step in self.untrusted if source.attempt <= attempt]
        known += [one.verified for one in sources if one.run == source.run != "" and one.attempt == source.attempt]
        if max(known, default=UNCHECKED) >= source.step:
            return source.step
        if source.verified == UNCHECKED:
            return source.step if self.is_checked else UNCHECKED
        return source.verified

    def nothing_verified(self, passed_over: Sequence[Source], problems: Sequence[str], folders: str) -> RestartError:
        """Return the error for a job that has kept nothing that is both verified and intact."""
        listed = "".join(f"\n- {problem}" for problem in dict.fromkeys([self.explain(passed_over), *problems]))
        return RestartError(
            f"Nothing that this job has kept of step {self.last_verified}, the last verified one, or before can be "
            f"restored:{listed}\nBring back what is missing. To start over, remove {folders}. If the check was wrong, "
            "and these states are good, move fault_log.jsonl in the job's shared folder away: then they are trusted.",
            step=self.last_verified,
        )

    def explain(self, passed_over: Sequence[Source]) -> str:
        """Say why these states are not trusted."""
        more = f" and {len(passed_over) - LISTED} more" if len(passed_over) > LISTED else ""
        return (
            f"a check found wrong numbers in attempt {self.newest_attempt}, and the last verified step was "
            f"{self.last_verified}: not trusted are {', '.join(map(str, passed_over[:LISTED]))}{more}"
        )


class Preserved:
    """Which checkpoints stay on disk, as Orbax asks for it: the newest few, and the last up to the verified step.

    >>> kept = Preserved(2)
    >>> kept.of([100, 200, 300, 400])
    [False, False, True, True]
    >>> kept.verified = 250
    >>> kept.of([100, 200, 300, 400])
    [False, True, True, True]
    """

    def __init__(self, newest: int) -> None:
        self.newest = newest
        self.verified = UNCHECKED

    def of(self, steps: Sequence[int]) -> list[bool]:
        """Say for each of these steps, oldest first, whether its checkpoint stays."""
        stay = {*steps[-self.newest :], *[step for step in steps if step <= self.verified][-1:]}
        return [step in stay for step in steps]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:  # noqa: ARG002
        """Answer Orbax."""
        return self.of([info.step for info in checkpoints])
