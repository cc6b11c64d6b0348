"""What this host has of a job's earlier states: copies in its memory, and on process 0 what is on disk.

`Recovery` decides between the states of all hosts; this answers its questions for one of them, and brings what it lacks
from the others.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from meshmend.errors import RestartError
from meshmend.jax.session.session import Session
from meshmend.jax.state.candidates import Source
from meshmend.jax.state.disk.background import Checkpoints
from meshmend.jax.state.layout.flat import Outline
from meshmend.jax.state.layout.state_layout import Reader, StateLayout
from meshmend.jax.state.memory.collect import NeededParts, gather
from meshmend.jax.state.memory.copies import Copy, HostMemory, PartReader
from meshmend.jax.state.memory.folders import delete_stale
from meshmend.jax.state.memory.redundancy import look_for_room
from meshmend.jax.state.recovery import Answer, sent_by
from meshmend.jax.state.waiting import with_timeout


class Holdings:
    """What this host can say and do in a recovery, with the functions of `recovery.Holder`, and what it has read.

    `memory` is None for a job that keeps no copies in memory; `cleans_up` says whether copies of jobs that have not run
    for long are deleted. `close` it.
    """

    def __init__(
        self,
        session: Session,
        layout: StateLayout,
        memory: HostMemory | None,
        checkpoints: Checkpoints | None,
        *,
        untrusted: Any,
        cleans_up: bool,
    ) -> None:
        self.session = session
        self.layout = layout
        self.memory = memory
        self.checkpoints = checkpoints
        self._untrusted = untrusted
        self._cleans_up = cleans_up
        self._copies: list[Copy] = []
        self._files = ExitStack()
        self._reader: PartReader | None = None
        self._parts: NeededParts | None = None
        self._read: Reader | None = None
        self._damaged: dict[str, set[int]] = {}
        """By generation: parts of this host's copy that it could not read."""

    def have(self) -> Answer:
        """Return what other processes need to know about the copies of this host, and on process 0 about the disk."""
        mine: Answer = {
            "identity": self.layout.identity.digest,
            "run": secrets.token_hex(8),
            "offers": [],
            "problems": [],
            "claimed": 0,
            "untrusted": self._untrusted,
            "start_over": self.session.launch.start_over,
        }
        if self.memory is not None:
            self._look_into_memory(self.memory, mine)
        if self.checkpoints is not None and self.session.launch.process == 0:
            disk = self.checkpoints.disk
            try:
                offers, problems, mine["claimed"] = with_timeout(disk.timeout_s, disk.offers, self.layout.identity)
                mine["offers"] += offers
                mine["problems"] += problems
            except OSError as error:
                self.checkpoints.disk_answers = False
                mine["problems"].append(f"{self._me}: {disk.folder} is unreachable: {error}")
        return mine

    def _look_into_memory(self, memory: HostMemory, mine: Answer) -> None:
        try:
            memory.lock.take()
            mine["room"] = look_for_room(memory.folder)
            if self._cleans_up:
                for folder in delete_stale(memory.folder):
                    self.session.timeline.note("forgot", folder=str(folder))
        except (OSError, RestartError) as error:
            # All processes raise this when they hear of it; raised here, the others would wait for this one.
            mine["error"] = f"{self._me}: {error}"
        copies, damaged = memory.read()
        mine["problems"] += [f"{self._me}: {error}" for error in damaged]
        for copy in copies:
            if copy.identity == self.layout.copy_identity and copy.outline.vectors != self.layout.outline.vectors:
                mine["problems"].append(
                    f"{self._me}: the copy {copy.name} is damaged: its outline is of another state."
                )
            else:
                self._copies.append(copy)
        mine["offers"] += [copy.offer(self.layout.copy_identity) for copy in self._copies]

    def describe(self, source: Answer) -> Answer:
        """Return what is in the copies of a state, of which this host has one."""
        copy = self._copy(source["generation"])
        return {} if copy is None else {"outline": copy.outline.as_json()}

    def describe_own(self, source: Source) -> Answer | None:
        """Return the same, None if this host has no copy of that state."""
        return self.describe({"generation": source.generation}) or None

    def take(self, what: Answer) -> Answer:
        """Read what this process needs and has of a state, and what it is to send."""
        self.close()
        return self._take_from_disk(what) if what["source"]["kind"] == "disk" else self._take_from_memory(what)

    def _take_from_disk(self, what: Answer) -> Answer:
        assert self.checkpoints is not None  # noqa: S101  # or it would not be a source
        source = what["source"]
        try:
            saved, self._read = self.checkpoints.disk.load(source["step"], self.layout)
        except RestartError as error:
            return {"why": str(error)}
        if saved.checksum != source["generation"]:
            return {"why": f"{source['name']} was replaced while it was read"}
        return {"why": "", "extra": saved.facts["extra"]}

    def _take_from_memory(self, what: Answer) -> Answer:
        source, me = what["source"], self.session.launch.process
        copy, parts = self._copy(source["generation"]), NeededParts(Outline.from_json(what["outline"]), self.layout)
        damaged = self._damaged.setdefault(source["generation"], set())
        has = [] if copy is None else [part for part in copy.parts if part not in damaged]
        sends = [(part, which) for part, row in enumerate(what["send"]) for which, one in enumerate(row) if one == me]
        why, found = "", list[int]()
        if copy is not None and has:
            try:
                self._reader = self._files.enter_context(PartReader(copy))
                why, found = _take_own(self._reader, has, sends, parts)
            except OSError as error:  # all processes hear of it, or the others would wait for this one
                why, found = f"{copy.path} cannot be read: {error.strerror}.", has
        damaged.update(found)
        self._parts = parts
        extra = {} if copy is None else {"extra": copy.extra}
        return {"why": why, "damaged": found, "wants": parts.wanted(has), **extra}

    def receive(self, last: Answer) -> Reader:
        """Return what this process needs of the state that all go on with: for every process, at the same time."""
        if self._parts is None:
            assert self._read is not None  # noqa: S101  # it was taken from disk
            return self._read
        read = self._reader.read if self._reader is not None else (lambda *_: b"")
        senders = sent_by(last["send"], last["wanted"])
        gather(self._parts, senders, read, self.layout.programs.get("gather"))
        return self._parts.needed

    def close(self) -> None:
        """Close the files of a copy."""
        self._files.close()
        self._reader = self._parts = self._read = None

    def _copy(self, generation: str) -> Copy | None:
        return next((copy for copy in self._copies if copy.generation == generation), None)

    @property
    def _me(self) -> str:
        return f"host {self.session.host}"


def _take_own(
    reader: PartReader, has: Sequence[int], sends: Sequence[tuple[int, int]], parts: NeededParts
) -> tuple[str, list[int]]:
    """Take what is needed of the parts that this process has, and check what it may send to others.

    Returns which parts are damaged, and why: others then send what was taken of those.
    """
    why, damaged = "", list[int]()
    for part in has:
        needed = [which for which, ends in enumerate(parts.outline.slices(part)) if parts.needs(part, *ends)]
        try:
            for which in sorted({*needed, *(which for one, which in sends if one == part)}):
                for at, block in reader.blocks(part, which):
                    if which in needed:
                        parts.put(part, at, np.frombuffer(block, np.uint8))
        except (OSError, RestartError) as error:
            why = str(error)
            damaged.append(part)
    return why, damaged
