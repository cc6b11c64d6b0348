"""What a job decides when it starts again: which state it resumes from, and who sends which part of it.

`Recovery` is a value, without JAX, sockets or files: every process has one, process 0 answers with its own. It takes
the facts of all processes and says what all of them do next. The questions, and why each is needed:

    have        What do you have?                    every process       once: only its host knows its copies
    describe    What is in the copies of this state? one that has them   only if process 0 has none of its own
    take        Can you read your parts of it?       every process       damage shows when a part is read, and a part
                                                                         that is damaged here may be whole elsewhere

    have -> take -> go                               the usual case
            take -> take                             a part is damaged, and another host has it
            take -> take (the next state)            nobody else has it, or the checkpoint cannot be read
    have -> start                                    nothing was ever kept
    have -> wait                                     hosts that are absent have the rest: they may come back

`take` and `go` name who sends each slice. What cannot be restored is an error, the same on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshmend.errors import RestartError
from meshmend.jax.session.coordination import Facts, Protocol, Question
from meshmend.jax.state.candidates import Source, Trust, check_agreement, rank_sources
from meshmend.launch.hosts import name_hosts

Answer = dict[str, Any]
Slice = tuple[int, int]
"""A part, and the number of a slice of it."""


@dataclass
class Recovery:
    """Process 0's decisions of one recovery. `have`, `describe` and `take` each judge the facts of all processes.

    `hosts` has the number of each process's host, `round_` is the launcher's; `folders` says where states are kept, and
    `choose_blocks` how many blocks copies will have, given what each process said of its `room` and whether the job is
    checked. `describe_own` returns what process 0 itself knows of a source's copies, None without one.
    """

    hosts: Sequence[int]
    round_: int
    folders: str
    choose_blocks: Callable[[list[Any], bool], int]
    describe_own: Callable[[Source], Answer | None]
    problems: list[str] = field(default_factory=list)
    """What was skipped, and why."""
    _sources: list[Source] = field(default_factory=list)
    """All that there are, newest first."""
    _left: list[Source] = field(default_factory=list)
    """Those that are still to be tried, with the one that is tried now as the first."""
    _incomplete: list[Source] = field(default_factory=list)
    _passed_over: list[Source] = field(default_factory=list)
    _damaged: set[int] = field(default_factory=set)
    """Steps whose checkpoint cannot be read."""
    _trust: Trust = field(default_factory=Trust)

    def have(self, facts: Facts) -> Answer:
        """Rank what all processes have, and say what is tried first; the answer also has what holds for all of it."""
        check_agreement(facts)
        self._sources = rank_sources([held["offers"] for held in facts])
        self.problems = [problem for held in facts for problem in held["problems"]]
        self._left = list(self._sources)
        if begun := min(held["start_over"] for held in facts):
            is_first = begun == self.round_
            self._left = [one for one in self._sources if one.attempt >= begun and not is_first]
            self.problems = []
        self._trust = Trust.of(facts[0]["untrusted"])
        # The launcher's round, or the next one, where it has no count or does not know of earlier ones.
        newest = max([facts[0]["claimed"], self._trust.newest_attempt, *(one.attempt for one in self._sources)])
        rooms = [held["room"] for held in facts if "room" in held]
        common = {
            "attempt": max(self.round_, 1 + newest),
            "untrusted": facts[0]["untrusted"],
            "run": facts[0]["run"],
            "n_blocks": self.choose_blocks(rooms, self._trust.is_checked) if rooms else 0,
        }
        return common | self._try_next()

    def describe(self, facts: Facts) -> Answer:
        """Say what is taken, given the description that one of its holders has sent."""
        return self._take(self._left[0], next(one for one in facts if one is not None))

    def take(self, facts: Facts) -> Answer:
        """Judge what the processes have read of a source: go on with it, without what is damaged, or try the next."""
        source = self._left[0]
        failed = [(host, one["why"]) for host, one in zip(self.hosts, facts, strict=True) if one["why"]]
        if not failed:
            return self._go(source, facts)
        more = f" (and on {len(failed) - 1} more hosts)" if len(failed) > 1 else ""
        self.problems.append(f"host {failed[0][0]}: {failed[0][1]}{more}")
        if source.kind == "memory":
            self._left[0] = source.without({process: one["damaged"] for process, one in enumerate(facts)})
            if self._left[0].is_whole:
                return {"do": "take", "source": source.facts(), "send": senders(self._left[0])}
        else:
            self._damaged.add(source.step)
        del self._left[0]
        return self._try_next()

    def _try_next(self) -> Answer:
        """Return what is done with the newest source that is left, or that there is none."""
        while self._left:
            source = self._left[0]
            if source.differs:
                raise RestartError(
                    f"A state of another model or optimizer is in this job's place: of {source}, {source.differs}. "
                    f"Give this job its own name (MESHMEND_JOB) and its own folders (here: {self.folders}), or "
                    "remove what is in them.",
                    step=source.step,
                )
            if not self._trust.trusts(source.attempt, source.step):
                self._passed_over.append(source)
            elif source.is_whole and source.kind == "disk":
                return {"do": "take", "source": source.facts()}
            elif source.is_whole:
                described = self.describe_own(source)
                if described is not None:
                    return self._take(source, described)
                return {"do": "describe", "source": source.facts(), "process": min(source.providers.values())}
            else:
                self._incomplete.append(source)
            del self._left[0]
        return self._nothing()

    def _take(self, source: Source, described: Answer) -> Answer:
        return {"do": "take", "source": source.facts(), "send": senders(source), **described}

    def _go(self, source: Source, facts: Facts) -> Answer:
        """All have read what they were to read: say which slices are sent, and what becomes of the rest."""
        if self._passed_over:
            self.problems.append(self._trust.explain(self._passed_over))
        verified = max(self._trust.verified_step(source, self._sources), 0)
        extra = next(one["extra"] for one in facts if "extra" in one)
        wanted = union(one["wants"] for one in facts) if source.kind == "memory" else ""
        return {"do": "go", "extra": extra, "wanted": wanted, "verified": verified, **self._rest(source.step)}

    def _rest(self, step: int) -> Answer:
        """Return what is kept of all checkpoints, with the problems, after it is known which step the job is at."""
        on_disk = [one for one in self._sources if one.kind == "disk"]
        good = {one.step for one in on_disk if one.step <= step and self._trust.trusts(one.attempt, one.step)}
        keep = sorted(good - self._damaged)
        return {"checkpoints": keep, "is_on_disk": bool(on_disk), "problems": list(dict.fromkeys(self.problems))}

    def _nothing(self) -> Answer:
        """Nothing is left to be tried: a job that has kept nothing begins, and any other does not start over."""
        if not self._incomplete and not self.problems and not (self._passed_over and self._trust.last_verified):
            if self._passed_over:
                self.problems.append(self._trust.explain(self._passed_over))
            return {"do": "start", "verified": 0, **self._rest(0)}
        problems, absent = list(self.problems), list[int]()
        for source in self._incomplete[:1]:
            absent = sorted(source.hosts - {*self.hosts})
            missing = f"{source} lack {source.n_parts - len(source.holders)} of {source.n_parts} parts"
            only = f", which only {name_hosts(absent)} {'has' if len(absent) == 1 else 'have'}" if absent else ""
            problems.append(missing + only)
        if self._passed_over and self._trust.last_verified:
            error = self._trust.nothing_verified(self._passed_over, problems, self.folders)
        else:
            listed = "".join(f"\n- {problem}" for problem in dict.fromkeys(problems))
            error = RestartError(
                f"Nothing of what this job has kept can be restored:{listed}\nNothing was removed from "
                f"{self.folders}. Bring back what is missing and start the job again; or begin anew on purpose: "
                "`meshmend run --start-over`, or remove these folders."
            )
        if not absent:
            raise error
        return {
            "do": "wait",
            "hosts": absent,
            "step": self._incomplete[0].step,
            "missing": problems[-1],
            "error": str(error),
        }


@dataclass(frozen=True)
class Holder:
    """What a process can say and do in a recovery; each function is called when its answer is asked for."""

    have: Callable[[], Answer]
    describe: Callable[[Answer], Answer]
    """Given a source's facts."""
    take: Callable[[Answer], Answer]
    """Given what is taken: read it, and return `why` it failed, what is `damaged`, what it `wants`, and any `extra`."""


def recover(process: int, judge: Recovery, mine: Holder) -> Protocol[tuple[Answer, Answer]]:
    """Find the state to resume from, with all other processes; return what holds for the job, and the last answer."""
    begun = answer = yield Question(mine.have(), judge.have)
    taken: Answer = {}
    while answer["do"] in ("describe", "take"):
        if answer["do"] == "describe":
            fact = mine.describe(answer["source"]) if answer["process"] == process else None
            answer = yield Question(fact, judge.describe)
        else:
            taken |= answer
            answer = yield Question(mine.take(taken), judge.take)
    return begun, taken | answer


def senders(source: Source) -> list[list[int]]:
    """Return who sends each slice of a source, part by part: a process per slice, in their order."""
    found: list[list[int]] = [[] for _ in range(source.n_parts)]
    for (part, _), process in sorted(source.providers.items()):
        found[part].append(process)
    return found


def union(wants: Iterable[str]) -> str:
    """Return the bits, as hex digits, that any of these has."""
    found: np.ndarray[Any, np.dtype[np.uint8]] = np.bitwise_or.reduce(
        [np.frombuffer(bytes.fromhex(word), np.uint8) for word in wants]
    )
    return found.tobytes().hex()


def sent_by(send: Sequence[Sequence[int]], wanted: str) -> Mapping[Slice, int]:
    """Return the process that sends each slice which any process wants."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(wanted), np.uint8))
    slices = [(part, which) for part, row in enumerate(send) for which in range(len(row))]
    return {(part, which): send[part][which] for (part, which), bit in zip(slices, bits, strict=False) if bit}
