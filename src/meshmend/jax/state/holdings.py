"""What this host has of a job's earlier states: copies in its memory, and on process 0 what is on disk.

`StateSearch` decides between the states of all hosts. This answers its questions for one host, and fetches the parts
that the host lacks.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from meshmend.buckets import Folder, SharedFile
from meshmend.errors import RestartError
from meshmend.files import with_timeout
from meshmend.jax.session.session import Session
from meshmend.jax.state.candidates import Source
from meshmend.jax.state.disk.background import Checkpoints
from meshmend.jax.state.layout.flat import Outline
from meshmend.jax.state.layout.state_layout import Reader, StateLayout
from meshmend.jax.state.memory.collect import NeededParts, gather
from meshmend.jax.state.memory.copies import Copy, HostMemory, PartReader
from meshmend.jax.state.memory.folders import delete_stale
from meshmend.jax.state.memory.redundancy import look_for_room
from meshmend.jax.state.recovery import Answer
from meshmend.launch.hosts import ranges_of

RECORD_TIMEOUT_S = 10.0
LONGEST_RECORD = 1 << 20
"""Of a record's bytes; 2,000 hosts in no order take 20 kB."""


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
        record: Record | None = None,
    ) -> None:
        self.session = session
        self.layout = layout
        self.memory = memory
        self.checkpoints = checkpoints
        self._untrusted = untrusted
        self._cleans_up = cleans_up
        self._record = record
        self._copies: list[Copy] = []
        self._files = ExitStack()
        self._reader: PartReader | None = None
        self._parts: NeededParts | None = None
        self._read: Reader | None = None
        self._generation = ""
        self._damaged: set[tuple[str, int]] = set()
        """Generations of this host's copies, and parts of them that it could not read."""

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
        if self._record is not None and self.session.launch.process == 0:
            try:
                mine["offers"] += with_timeout(RECORD_TIMEOUT_S, self._record.read)
            except OSError as error:
                mine["problems"].append(f"{self._me}: what this job has kept is not known: {error}")
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
            return {"why": str(error), "is_late": isinstance(error.__cause__, TimeoutError)}
        if saved.checksum != source["generation"]:
            return {"why": f"{source['name']} was replaced while it was read"}
        return {"why": "", "extra": saved.facts["extra"]}

    def _take_from_memory(self, what: Answer) -> Answer:
        generation = what["source"]["generation"]
        copy = self._copy(generation)
        outline = copy.outline if copy is not None else Outline.from_json(what["outline"])
        parts = self._parts = NeededParts(outline, self.layout)
        if copy is None:
            return {"why": "", "damaged": [], "wants": parts.wanted([])}
        has = [part for part in copy.parts if (generation, part) not in self._damaged]
        why, damaged = "", list[int]()
        try:
            if has:
                self._reader = self._files.enter_context(PartReader(copy))
                why, damaged = _take_own(self._reader, has, parts)
        except OSError as error:  # all processes hear of it, or the others would wait for this one
            why, damaged = f"{copy.path} cannot be read: {error.strerror}.", has
        self._damaged |= {(generation, part) for part in damaged}
        self._generation = generation
        return {"why": why, "damaged": damaged, "wants": parts.wanted(has), "extra": copy.extra}

    def send(self, sent: list[list[int]]) -> Answer:
        """Check what this process is to send of its copy."""
        why, damaged = "", list[int]()
        for part, which, sender in sent:
            if sender == self.session.launch.process and part not in damaged:
                assert self._reader is not None  # noqa: S101  # or it would not be the sender
                try:
                    for _ in self._reader.blocks(part, which):
                        pass
                except (OSError, RestartError) as error:
                    why = str(error)
                    damaged.append(part)
        self._damaged |= {(self._generation, part) for part in damaged}
        return {"why": why, "damaged": damaged}

    def receive(self, last: Answer) -> Reader:
        """Return what this process needs of the state that all go on with: for every process, at the same time."""
        if self._parts is None:
            assert self._read is not None  # noqa: S101  # it was taken from disk
            return self._read
        read = self._reader.read if self._reader is not None else (lambda *_: b"")
        sent_by = {(part, which): process for part, which, process in last["send"]}
        gather(self._parts, sent_by, read, self.layout.programs.get("gather"))
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


def _take_own(reader: PartReader, has: Sequence[int], parts: NeededParts) -> tuple[str, list[int]]:
    """Take what is needed of the parts that this process has; return why that failed, and which parts are damaged."""
    why, damaged = "", list[int]()
    for part in has:
        try:
            for which, ends in enumerate(parts.outline.slices(part)):
                if parts.needs(part, *ends):
                    for at, block in reader.blocks(part, which):
                        parts.put(part, at, np.frombuffer(block, np.uint8))
        except (OSError, RestartError) as error:
            why = str(error)
            damaged.append(part)
    return why, damaged


class Record:
    """A record beside the job's name that a copy in memory was complete: what it says outlives all copies.

    A job whose hosts come back without their memory, before there is a checkpoint, would otherwise take itself for new.
    It is an offer of the copy, without its parts (`candidates.Source`), in a folder that all hosts share.
    """

    def __init__(self, folder: Folder) -> None:
        self.file = SharedFile(folder, "kept.json")
        self._written = ""
        self._writer = threading.Thread()

    def write(self, offer: dict[str, Any], hosts: Sequence[int]) -> None:
        """Record a copy that all of these hosts have written, the first time; nothing waits for the disk."""
        if not self._written and not self._writer.is_alive():
            text = json.dumps(offer | {"parts": [], "hosts": ranges_of(hosts)})
            self._writer = threading.Thread(target=self._write, args=(text,), name="meshmend-record", daemon=True)
            self._writer.start()

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the next copy tries again
            self.file.change(lambda: text)
            self._written = text

    def read(self) -> list[dict[str, Any]]:
        """Return what was recorded, nothing for a new job; raise `OSError` if that cannot be found out."""
        try:
            offer = json.loads(self.file.read(LONGEST_RECORD)[0])
            return [{"attempt": int(offer["attempt"]), "step": int(offer["step"]), **offer}]
        except FileNotFoundError:
            return []
        except (ValueError, LookupError, TypeError) as error:
            raise OSError(f"{self.file.path} is damaged: {error}") from error
