"""Where a state may come from: all hosts' copies and all checkpoints, newest first.

Every process reports what it has; from that, all make the same list, so that they try the same source at the same time
and all move on to the next if it fails on any of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from meshmend.errors import RestartError

UNCHECKED = -1
"""What is recorded as the last verified step of a job that nothing checks. Nobody knows more about its states: a later
run with checks takes the one that it resumes from for good."""


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

    @cached_property
    def providers(self) -> dict[tuple[int, int], int]:
        """For each part and slice of it, the process that may send it to others: all of them about as many."""
        found, n_sent = dict[tuple[int, int], int](), Counter[int]()
        # By those who have a part: how many slices each of them sends, and who; what is outdated is put in order later.
        queues = {tuple(processes): [(0, process) for process in processes] for processes in self.holders.values()}
        parts = sorted(self.holders, key=lambda part: (len(self.holders[part]), part))
        for which in range(max(self.slices)):
            for part in parts:
                if which >= self.slices[part >= self.n_shares]:
                    continue
                queue = queues[tuple(self.holders[part])]
                while queue[0][0] < n_sent[queue[0][1]]:
                    heapq.heapreplace(queue, (n_sent[queue[0][1]], queue[0][1]))
                process = found[part, which] = queue[0][1]
                n_sent[process] += 1
        return found

    def without(self, damaged: Mapping[int, Sequence[int]]) -> Source:
        """Return the source without the parts that are damaged on these processes."""
        left = {
            part: [process for process in processes if part not in damaged.get(process, ())]
            for part, processes in self.holders.items()
        }
        return replace(self, holders={part: processes for part, processes in left.items() if processes})

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
            key = (int(offer["attempt"]), int(offer["step"]), str(offer["kind"]), str(offer["generation"]))
            if key not in found:
                found[key] = Source(
                    attempt=key[0],
                    step=key[1],
                    kind="memory" if key[2] == "memory" else "disk",
                    generation=key[3],
                    differs=str(offer["differs"]),
                    n_parts=int(offer.get("n_parts", 0)),
                    n_shares=int(offer.get("shares", 0)),
                    slices=(int(offer.get("slices", (0, 0))[0]), int(offer.get("slices", (0, 0))[1])),
                    verified=int(offer["verified"]),
                    run=str(offer.get("run", "")),
                    hosts=frozenset(host for first, last in offer.get("hosts", ()) for host in range(first, last + 1)),
                )
            source = found[key]
            if int(offer["verified"]) < source.verified:
                found[key] = source = replace(source, verified=int(offer["verified"]))
            for part in offer.get("parts", ()):
                source.holders.setdefault(int(part), []).append(process)
    return [found[key] for key in sorted(found, reverse=True)]
