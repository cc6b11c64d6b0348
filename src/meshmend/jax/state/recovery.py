"""What a job decides when it starts again: which state it resumes from, and who sends which part of it.

`StateSearch` is a value, without JAX, sockets or files: every process has one, process 0 answers with its own. It takes
the facts of all processes and says what all of them do next. The questions, and why each is needed:

    have        What do you have?                    once: only its host knows its copies
    describe    What is in the copies of this state? where a host has none of them, and process 0 neither
    take        What of it do you lack, or can't     once per state that is tried: a part is only found to be damaged
                you read?                            when it is read, and it may be whole on another host
    send        Can you read what you are to send?   only where a host lacks something

    have -> take -> go                               every host has all that it needs
            take -> send -> go                       the usual case where states are sharded
            take -> take, send -> take               a part is damaged: it comes from another host that has it, or all
                                                     try the state before it
            take -> an error, and the next round     the disk does not answer: its checkpoint may be whole
    have -> start                                    nothing was ever kept
    have -> wait                                     hosts that are absent have the rest: they may come back

What cannot be restored is an error, the same on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshmend.errors import RestartError, TransientError
from meshmend.jax.session.coordination import Facts, Protocol, Question
from meshmend.jax.state.candidates import Slice, Source, Trust, check_agreement, rank_sources
from meshmend.launch.hosts import name_hosts

Answer = dict[str, Any]


@dataclass
class StateSearch:
    """Process 0's decisions of one recovery. `have`, `describe`, `take` and `send` judge the facts of all processes.

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
    _extra: Any = None
    """What was kept with the state that all go on with."""

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
        return {"do": "take", "source": self._left[0].facts(), **next(one for one in facts if one is not None)}

    def take(self, facts: Facts) -> Answer:
        """Judge what the processes have read of a source: say who sends what they lack, or what is tried next."""
        source = self._left[0]
        if again := self._without_damaged(source, facts):
            return again
        self._extra = next(one["extra"] for one in facts if "extra" in one)
        wanted = wanted_slices(source, [one["wants"] for one in facts]) if source.kind == "memory" else []
        if not wanted:
            return self._go(source)
        senders = source.senders(wanted)
        return {"do": "send", "send": [[*one, senders[one]] for one in sorted(wanted)]}

    def send(self, facts: Facts) -> Answer:
        """Judge what the processes have read of what they are to send."""
        return self._without_damaged(self._left[0], facts) or self._go(self._left[0])

    def _without_damaged(self, source: Source, facts: Facts) -> Answer:
        """Return what is done next where a process could not read something, and nothing where all could."""
        failed = [(host, one["why"]) for host, one in zip(self.hosts, facts, strict=True) if one["why"]]
        if not failed:
            return {}
        late = [host for host, one in zip(self.hosts, facts, strict=True) if one.get("is_late")]
        if late:
            raise TransientError(
                f"host {late[0]}: {dict(failed)[late[0]]} (it may be whole). The job tries again, and goes back to no "
                "older one.",
                step=source.step,
            )
        more = f" (and on {len(failed) - 1} more hosts)" if len(failed) > 1 else ""
        self.problems.append(f"host {failed[0][0]}: {failed[0][1]}{more}")
        if source.kind == "memory":
            self._left[0] = source.without({process: one["damaged"] for process, one in enumerate(facts)})
            if self._left[0].is_whole and self._left[0].holders != source.holders:
                return {"do": "take", "source": source.facts()}
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
            elif source.is_whole and (source.kind == "disk" or len(source.holding) == len(self.hosts)):
                return {"do": "take", "source": source.facts()}
            elif source.is_whole:  # some have no copy, which would say what is in it
                described = self.describe_own(source)
                if described is not None:
                    return {"do": "take", "source": source.facts(), **described}
                return {"do": "describe", "source": source.facts(), "process": min(source.holding)}
            else:
                self._incomplete.append(source)
            del self._left[0]
        return self._nothing()

    def _go(self, source: Source) -> Answer:
        """All have read what they were to read: say what becomes of the rest."""
        if self._passed_over:
            self.problems.append(self._trust.explain(self._passed_over))
        verified = max(self._trust.verified_step(source, self._sources), 0)
        return {"do": "go", "extra": self._extra, "verified": verified, **self._rest(source.step)}

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
    """Given what is taken: read it, and return `why` it failed, what is `damaged`, what it `wants`, and any `extra`; of
    a checkpoint, whether the disk `is_late`."""
    send: Callable[[list[list[int]]], Answer]
    """Given part, slice and sender of all that is sent: read what this one sends, and return `why` and `damaged`."""


def recover(process: int, judge: StateSearch, mine: Holder) -> Protocol[tuple[Answer, Answer]]:
    """Find the state to resume from, with all other processes; return what holds for the job, and the last answer.

    That has the `source`, and what is to `send`, if a host lacks anything.
    """
    begun = answer = yield Question(mine.have(), judge.have)
    taken: Answer = {}
    while answer["do"] in ("describe", "take", "send"):
        if answer["do"] == "describe":
            fact = mine.describe(answer["source"]) if answer["process"] == process else None
            answer = yield Question(fact, judge.describe)
        elif answer["do"] == "take":
            taken = {"outline": taken.get("outline"), **answer, "send": []}
            answer = yield Question(mine.take(taken), judge.take)
        else:
            taken["send"] = answer["send"]
            answer = yield Question(mine.send(answer["send"]), judge.send)
    return begun, taken | answer


def wanted_slices(source: Source, wants: Sequence[str]) -> list[Slice]:
    """Return the slices of a source that any process wants: each of these has a bit per slice, as hex digits."""
    bits = np.bitwise_or.reduce([np.frombuffer(bytes.fromhex(word), np.uint8) for word in wants])
    slices = [*source.all_slices()]
    return [slices[number] for number in np.flatnonzero(np.unpackbits(bits)).tolist()]
