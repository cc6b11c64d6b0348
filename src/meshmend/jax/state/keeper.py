"""The keeper of a job's state: in memory as often as that is cheap, on disk at intervals, restored after a restart."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshmend.errors import RestartError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.session.session import Session
from meshmend.jax.state.candidates import UNCHECKED, Source, Trust, check_agreement, rank_sources
from meshmend.jax.state.disk.background import Checkpoints, warn_once
from meshmend.jax.state.disk.disk import Disk, as_path
from meshmend.jax.state.disk.read import read_foreign
from meshmend.jax.state.layout.flat import Outline
from meshmend.jax.state.layout.state_layout import Reader, StateLayout
from meshmend.jax.state.memory.collect import NeededParts, gather
from meshmend.jax.state.memory.copies import KEPT, Copy, HostMemory, PartReader
from meshmend.jax.state.memory.folders import default_folder, delete_stale
from meshmend.jax.state.memory.peer_copy import Mirror
from meshmend.jax.state.memory.placement import place
from meshmend.jax.state.memory.redundancy import CHECKED_COPIES, Room, choose_blocks, look_for_room
from meshmend.jax.state.timetable import LARGE_LOSS_S, LARGEST_SLOWDOWN, NEVER, Timetable
from meshmend.jax.state.voting import Ballot
from meshmend.jax.state.waiting import with_timeout
from meshmend.launch.environment import LAUNCHER
from meshmend.launch.hosts import name_hosts

LOGGER = logging.getLogger(__name__)
WRITTEN_WITHIN_S = 10.0
"""How long a loop that an error has ended waits for the copy in memory that is being written."""


@dataclass(frozen=True)
class Resumed:
    """What a job resumes from: the state after `step` steps, and what was kept with it."""

    step: int
    params: Tree
    state: Tree
    extra: Tree
    source: str
    """ "memory", "disk", or "start"."""
    verified: int = 0
    """The last step that is known to be good, 0 if none is: what a job begins with is."""


class Keeper:
    """Keeps a training state safe from the loss of a host, and restores it.

    - **In memory**, after every `memory_every` steps: each host keeps what is replicated, the shards of its own devices
      and those of another host's in files of `memory`, which outlive the process. By default that is a folder per job
      and host in MESHMEND_MEMORY, or in /dev/shm. So failures of hosts lose only the steps since. "auto" measures what
      copies cost, and keeps as many as take at most 3 % of the time; one that is late is left out, never waited for.
      A number of steps is a promise: where copies take longer, training waits for them.
    - **On disk**, every `disk_every` if `disk` names a folder: a time as in "10min", of which the first checkpoint
      comes a minute after each start, or a number of steps. Orbax checkpoints, asynchronous. For
      failures that memory does not cover: more hosts at once than the job says at its start. A disk that
      does not answer within `disk_timeout_s` counts as dead: the job continues without it, with a warning. Training
      waits for the disk only where a checkpoint begins, for at most that long, and not again while it hangs. Orbax
      alone reads them: they are the user's tree. What Orbax has saved of the same tree, a new job can `start_from`.

    If checks run in the job, `untrusted` says what they have found so far (`meshmend.quarantine.untrusted`; process 0's
    word counts): pairs of an attempt and a step after which nothing of that attempt, or of one before, is trusted. The
    job resumes from the newest state that is. `keep(…, pin=True)` a state that is being checked, and `verify` it:
    copies of the last verified step stay in memory until there is a later one.

    `layout` says what the state is and how it lies on the session's fabric: `compile_train_step(…).layout`, or
    `StateLayout.of(training, program, params)`. Every process makes the same calls.
    """

    def __init__(
        self,
        session: Session,
        layout: StateLayout,
        *,
        memory: str | Path | None = None,
        memory_every: int | str = 1,
        disk: str | Path | None = None,
        disk_every: int | str = "10min",
        disk_timeout_s: float = 30.0,
        start_from: str | Path | None = None,
        untrusted: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if layout.fabric != session.fabric:
            raise RestartError(
                f"The layout is for {layout.fabric!r}, but the session's fabric is {session.fabric!r}. Make the train "
                "step and the program for session.fabric."
            )
        self.session = session
        self.layout = layout
        self._has_default_folder = memory is None
        self.memory = HostMemory(default_folder(session.launch.job, session.host) if memory is None else memory)
        self.memory.hosts = tuple(session.host_of_process)
        self.memory_every = memory_every
        self.disk = Disk(disk, timeout_s=disk_timeout_s) if disk is not None else None
        self.checkpoints = None if self.disk is None else Checkpoints(self.disk, session)
        self.disk_every = disk_every
        self.start_from = None if start_from is None else as_path(start_from)
        self.attempt = 0
        """Number of this attempt of the job, from 1; 0 until `restore`."""
        self._untrusted = None if untrusted is None else [list(pair) for pair in untrusted]
        self._trust = Trust.of(self._untrusted)
        self._verified = 0 if self._trust.is_checked else UNCHECKED
        self._mirror: Mirror | None = None
        self._table = Timetable(0, disk_every=disk_every)
        self._ballot: Ballot | None = None
        self._placement = place(layout.fabric)
        self._noted_interval = 0
        self._damaged: set[int] = set()
        self._kept_step = 0

    @property
    def verified(self) -> int:
        """The last step that is known to be good, 0 if none is: what a job begins with is."""
        return max(self._verified, 0)

    def restore(self, params: Tree, state: Tree, extra: Tree = None, *, donate: bool = False) -> Resumed:
        """Return the newest state that the survivors have between them, on this fabric, or the given one.

        `params` and `state` are what a new job starts with, on the devices, and `extra` anything that JSON can write
        and that belongs to the state, such as a position in the data. All of them are restored as they were kept. With
        `donate`, the given arrays are gone afterwards, and devices never hold two states.

        Copies and checkpoints are tried newest first. What is damaged or unreachable is skipped, with a warning that
        says what and why, as is what is not trusted; a state of another model or optimizer is refused. Where parts of
        every copy are with hosts that are absent, all wait for these hosts under `meshmend run`, which begins another
        round when one comes back. If they do not come, if nothing is intact, or if all that was verified is lost, that
        is an error, and nothing is removed: only the user may decide to start over, by `meshmend run --start-over`.
        """
        try:
            return self._restore(params, state, extra, donate)
        except BaseException:
            self.abandon()
            raise

    def _restore(self, params: Tree, state: Tree, extra: Tree, donate: bool) -> Resumed:
        with self.session.timeline.timed("restore") as facts:
            self.layout.check(params, state)
            copies, mine = self._inventory()
            everybody = self.session.coordination.exchange(mine)
            check_agreement(everybody)
            sources = rank_sources([held["offers"] for held in everybody])
            problems = [problem for held in everybody for problem in held["problems"]]
            usable = sources
            if begun := min(held["start_over"] for held in everybody):
                is_first = begun == self.session.launch.round
                usable, problems = [one for one in sources if one.attempt >= begun and not is_first], []
            # The launcher's round, or the next one, where it has no count or does not know of earlier ones.
            attempts = [source.attempt for source in sources] + [held["claimed"] for held in everybody]
            self._trust = Trust.of(everybody[0]["untrusted"])
            self.attempt = max(self.session.launch.round, 1 + max(*attempts, self._trust.newest_attempt))
            self.session.timeline.facts["round"] = self.attempt
            if self.memory_every:
                n_copies = CHECKED_COPIES if self._trust.is_checked else KEPT
                rooms = [Room(*held["room"]) for held in everybody]
                self._placement = place(self.layout.fabric, n_blocks=choose_blocks(self.layout, rooms, n_copies))
                outline = replace(self.layout.outline, n_shares=self._placement.n_shares)
                facts["survives"] = self._placement.describe(outline)
            if self.checkpoints is not None:
                self.checkpoints.claim(self.attempt)
            found, its_attempt = self._search(usable, problems, copies, (params, state), donate)
            if found is None:
                if self.start_from is not None:
                    params, state = self._begin_with(params, state, donate)
                found = Resumed(0, params, state, extra, "start")
            self._verified = found.verified if self._trust.is_checked else UNCHECKED
            self._go_back_to(found, its_attempt, sources, problems)
            facts |= {"source": found.source, "step": found.step}
            if self.checkpoints is not None:
                facts["saved"] = self.checkpoints.saved_step
        self._table = Timetable(
            self.memory_every,
            found.step,
            disk_every=0 if self.checkpoints is None else self.disk_every,
            leads=self.session.launch.process == 0,
            shares_cores=self.layout.fabric.platform == "cpu",
        )
        self._ballot = Ballot(self.layout.fabric, self.layout.programs.get("vote"))
        if self.memory_every:
            with self.session.timeline.timed("compile"):
                self._mirror = Mirror(
                    self.layout,
                    self.memory,
                    self.attempt,
                    self.session.timeline,
                    self.session.give_up,
                    run=str(everybody[0]["run"]),
                    vote=self._ballot,
                    placement=self._placement,
                )
                self._mirror.compile(found.params, found.state)
            if self._verified > 0:
                self.memory.pinned = frozenset({self._verified})
            if 0 < found.step == self._verified:
                # Its copies may have been on hosts that are lost, or on disk only.
                self._mirror.keep(found.step, found.params, found.state, found.extra, self._verified)
        return found

    def _begin_with(self, params: Tree, state: Tree, donate: bool) -> tuple[Tree, Tree]:
        """Return the state that Orbax has saved at `start_from`."""
        read: Reader | None = None
        why = ""
        try:
            read = read_foreign(self.layout, self.start_from)
        except Exception as error:  # all processes raise it, or none would wait for the others
            why = f"The job cannot start from {self.start_from}: {str(error)[:500]}"
        whys = [word for word in self.session.coordination.exchange(why) if word]
        if whys or read is None:
            raise RestartError(whys[0])
        self.session.timeline.note("started from", path=str(self.start_from))
        if self.session.launch.process == 0:
            LOGGER.warning("Step 0 and the data's first sample, with the state that is in %s.", self.start_from)
        return self.layout.to_devices(read, (params, state), donate=donate)

    def keep(
        self, step: int, params: Tree, state: Tree, extra: Tree = None, *, save: bool = False, pin: bool = False
    ) -> None:
        """Keep the state after `step` steps. Call it after each; the arrays may be donated to the next step.

        `save` also puts it on disk, whatever `disk_every` says, or in memory if there is no disk: for the last step.
        `pin` keeps it in memory, whatever `memory_every` says (unless that is 0), until it or a later pinned one is
        verified: for a step whose state is being checked.

        A step whose copy is kept is committed, safe from the failures that `Placement.describe` names, as soon as all
        hosts have written it. No host waits for confirmation: there is no later copy before that (`peer_copy`).
        """
        if not self.attempt:
            raise RestartError("Call restore() before keep(): it finds what is already there.", step=step)
        if self.checkpoints is not None:
            self.checkpoints.note_saved()
        mirror, table = self._mirror, self._table
        table.tick(step)
        must = pin or (save and self.checkpoints is None)
        if mirror is not None and (must or table.copy_due(step)):
            if pin:
                self.memory.pinned |= {step}
            waits = must or not table.is_auto
            mirror.keep(step, params, state, extra, self._verified, waits=waits, table=table)
            self._kept_step = step
            self._tell_interval(step)
        elif self._ballot is not None and table.vote_due(step):
            table.voted(step, self._ballot(table.wishes()))
        if self.checkpoints is not None and (save or table.save_due(step)):
            self.checkpoints.save(self.layout, self.attempt, step, params, state, extra, self._verified)
            table.saved(step)

    def keep_last(self, step: int, params: Tree, state: Tree, extra: Tree) -> None:
        """Keep the state in memory, if that was not done: for a loop that was left, on all processes alike."""
        if self._mirror is not None and step > self._kept_step:
            self._mirror.keep(step, params, state, extra, self._verified)
            self._kept_step = step

    def keep_now(self, step: int, params: Tree, state: Tree, extra: Tree) -> None:
        """Keep the state in memory and on disk, if that was not done: for a loop that is stopped, on all alike."""
        self.keep_last(step, params, state, extra)
        if self.checkpoints is not None and step > self.checkpoints.last_step:
            self.checkpoints.save(self.layout, self.attempt, step, params, state, extra, self._verified)

    def where(self, step: int) -> str:
        """Say where the state of a step is kept, after `close`."""
        if self.disk is not None and self.checkpoints is not None and self.checkpoints.saved_step == step > 0:
            return f"its state is saved in {self.disk.folder}"
        if self._mirror is not None and self._kept_step == step > 0:
            return f"its state is kept in memory, in {self.memory.folder}"
        return "its state is not kept" if step else "there is nothing to keep yet"

    def _tell_interval(self, step: int) -> None:
        """Note how often copies are kept whenever that has changed much, and say so once it is known what they cost."""
        table, every = self._table, self._table.every
        if every == NEVER or 0.8 < every / (self._noted_interval or 1e-9) < 1.25:
            return
        is_first, self._noted_interval = not self._noted_interval, every
        facts = (
            {} if table.cost is None else {"cut_s": round(table.cost.cut_s, 4), "write_s": round(table.cost.write_s, 4)}
        )
        at_risk_s = table.at_risk_s
        self.session.timeline.note("copies", step=step, every=every, at_risk_s=round(at_risk_s, 3), **facts)
        if not is_first or not table.is_auto or self.session.launch.process:
            return
        LOGGER.log(
            logging.WARNING if at_risk_s > LARGE_LOSS_S else logging.INFO,
            "Copies in memory after every %d steps take at most %d %% of the time; the failure of a host costs up to "
            "%d steps. Job(memory_every=…) sets another number of steps.",
            every,
            round(100 * LARGEST_SLOWDOWN),
            table.at_risk,
        )

    def verify(self, step: int) -> None:
        """Say that the state after `step` is good: all checks that were due have passed, on all processes.

        From then on its copies stay, and what is kept records this step; those of the step that was verified before it
        go with the next copy, which is made only when all hosts have written this one. If it was not pinned, the newest
        pinned one before it stays instead.
        """
        if step > self._verified:
            self._verified = step
            pinned = self.memory.pinned
            last = max((one for one in pinned if one <= step), default=None)
            self.memory.pinned = frozenset(one for one in pinned if one > step or one == last)

    def close(self) -> None:
        """Wait until everything is written. Copies in memory go if the last step is on disk as well.

        Otherwise they stay for the next job of this name, until `delete_copies`, or until their folder has not been
        written to for `folders.STALE_AFTER_DAYS`. A checkpoint that hangs is waited for as long as a slow disk takes,
        not for ever, and a warning says so; one that has failed is a `RestartError`.
        """
        try:
            if self._mirror is not None:
                self._mirror.wait()
            if self.checkpoints is not None:
                self.checkpoints.close()
                if 0 < self._kept_step <= self.checkpoints.saved_step:
                    self.delete_copies()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of this host's folder, whatever is still to be written: for a loop that an error has ended.

        The next keeper of this process, as in a notebook, takes it over.
        """
        if self._mirror is not None:
            with contextlib.suppress(BaseException):  # the error that has ended the loop says more
                with_timeout(WRITTEN_WITHIN_S, self._mirror.wait)
        self.memory.lock.release()

    def delete_copies(self) -> None:
        """Delete this host's copies in memory."""
        self.memory.clear()
        if self._has_default_folder:
            with contextlib.suppress(OSError):
                # The job's own folder, once no other host of this machine has copies in it.
                self.memory.folder.parent.rmdir()

    def _inventory(self) -> tuple[list[Copy], dict[str, Any]]:
        """Return the copies of this host, and what other processes need to know about them and the disk."""
        me = f"host {self.session.host}"
        mine: dict[str, Any] = {
            "identity": self.layout.identity.digest,
            "run": secrets.token_hex(8),
            "offers": [],
            "problems": [],
            "claimed": 0,
            "untrusted": self._untrusted,
            "start_over": self.session.launch.start_over,
        }
        copies: list[Copy] = []
        if self.memory_every:
            try:
                self.memory.lock.take()
                mine["room"] = look_for_room(self.memory.folder)
                if self._has_default_folder:
                    for folder in delete_stale(self.memory.folder):
                        self.session.timeline.note("forgot", folder=str(folder))
            except (OSError, RestartError) as error:
                # All processes raise this after the exchange; raised here, the others would wait for this one.
                mine["error"] = f"{me}: {error}"
            copies, damaged = self.memory.read()
            mine["problems"] += [f"{me}: {error}" for error in damaged]
            for copy in list(copies):
                if copy.identity == self.layout.copy_identity and copy.outline.vectors != self.layout.outline.vectors:
                    copies.remove(copy)
                    mine["problems"].append(f"{me}: the copy {copy.name} is damaged: its outline is of another state.")
            mine["offers"] += [copy.offer(self.layout.copy_identity) for copy in copies]
        if self.disk is not None and self.checkpoints is not None:
            try:
                offers, problems, mine["claimed"] = with_timeout(
                    self.disk.timeout_s, self.disk.offers, self.layout.identity
                )
                mine["offers"] += offers
                mine["problems"] += problems
            except OSError as error:
                self.checkpoints.disk_answers = False
                mine["problems"].append(f"{me}: {self.disk.folder} is unreachable: {error}")
        return copies, mine

    def _search(
        self, sources: Sequence[Source], problems: list[str], copies: Sequence[Copy], like: Tree, donate: bool
    ) -> tuple[Resumed | None, int]:
        """Return the first source, newest first, that all processes can provide, and its attempt.

        What is skipped is added to `problems`.
        """
        incomplete, passed_over = [], []
        for source in sources:
            if source.differs:
                raise RestartError(
                    f"A state of another model or optimizer is in this job's place: of {source}, {source.differs}. "
                    f"Give this job its own name (MESHMEND_JOB) and its own folders (here: {self._folders()}), or "
                    "remove what is in them.",
                    step=source.step,
                )
            if not self._trust.trusts(source.attempt, source.step):
                passed_over.append(source)
                continue
            if not source.is_whole:
                incomplete.append(source)
                continue
            load = self._load_from_disk if source.kind == "disk" else self._load_from_memory
            loaded = load(source, copies, problems)
            if loaded is None:
                continue
            read, extra = loaded
            params, state = self.layout.to_devices(read, like, donate=donate)
            if passed_over:
                problems.append(self._trust.explain(passed_over))
            verified = max(self._trust.verified_step(source, sources), 0)
            return Resumed(source.step, params, state, extra, source.kind, verified), source.attempt
        problems += [self._await_hosts_of(source) for source in incomplete[:1]]
        if passed_over and self._trust.last_verified:
            raise self._trust.nothing_verified(passed_over, problems, self._folders())
        if problems:
            listed = "".join(f"\n- {problem}" for problem in dict.fromkeys(problems))
            raise RestartError(
                f"Nothing of what this job has kept can be restored:{listed}\nNothing was removed from "
                f"{self._folders()}. Bring back what is missing and start the job again; or begin anew on purpose: "
                "`meshmend run --start-over`, or remove these folders."
            )
        if passed_over:
            problems.append(self._trust.explain(passed_over))
        return None, 0

    def _await_hosts_of(self, source: Source) -> str:
        """Wait for the hosts that have the missing parts of a state, and say what is missing when they do not come.

        A host that comes back ends this round, and with it this process: the next round has the host's copies.
        """
        launch = self.session.launch
        absent = sorted(source.hosts - {*self.session.host_of_process})
        missing = f"{source} lack {source.n_parts - len(source.holders)} of {source.n_parts} parts"
        if not absent:
            return missing
        only = f"{missing}, which only {name_hosts(absent)} {'has' if len(absent) == 1 else 'have'}"
        if launch.launcher != LAUNCHER or not launch.state_wait_s:
            return only
        limit = f"{launch.state_wait_s / 60:.3g} min"
        self.session.timeline.note("state incomplete", step=source.step, hosts=absent, wait_s=launch.state_wait_s)
        self._warn(
            f"{only[0].upper()}{only[1:]}. Nothing is removed. The job waits up to {limit} for them to come back."
        )
        until = time.monotonic() + launch.state_wait_s
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
        return f"{only} (waited {limit} for them)"

    def _load_from_disk(self, source: Source, _: Sequence[Copy], problems: list[str]) -> tuple[Reader, Tree] | None:
        """Return what this process needs of a checkpoint, and what was kept with it; None if any process has failed."""
        assert self.disk is not None  # noqa: S101  # or it would not be a source
        read: Reader | None = None
        extra, why = None, ""
        try:
            saved, read = self.disk.load(source.step, self.layout)
            extra = saved.facts["extra"]
            if saved.checksum != source.generation:
                why = f"{source} was replaced while it was read"
        except RestartError as error:
            why = str(error)
        failures = self._failures(self.session.coordination.exchange({"why": why}), problems)
        if failures or read is None:
            self._damaged.add(source.step)
            return None
        return read, extra

    def _load_from_memory(
        self, source: Source, copies: Sequence[Copy], problems: list[str]
    ) -> tuple[Reader, Tree] | None:
        """Return what this process needs of all hosts' copies, and what was kept with them; None if parts are damaged.

        A part that is damaged on one host may be whole on another.
        """
        me, exchange = self.session.launch.process, self.session.coordination.exchange
        mine = next((copy for copy in copies if copy.generation == source.generation), None)
        first = min(source.providers.values())
        word = {"extra": mine.extra, "outline": mine.outline.as_json()} if mine is not None and me == first else {}
        told = exchange(word)[first]
        parts = NeededParts(Outline.from_json(told["outline"]), self.layout)
        while source.is_whole:
            has = [part for part, processes in source.holders.items() if me in processes]
            provides = [one for one, process in source.providers.items() if process == me]
            with contextlib.ExitStack() as files:
                reader: PartReader | None = None
                found: dict[str, Any] = {"why": "", "damaged": []}
                if mine is not None and has:
                    try:
                        reader = files.enter_context(PartReader(mine))
                        found = _take_own(reader, has, provides, parts)
                    except OSError as error:  # all processes hear of it, or the others would wait for this one
                        found = {"why": f"{mine.path} cannot be read: {error.strerror}.", "damaged": has}
                answers = exchange(found | {"wants": parts.wanted(has)})
                if not self._failures(answers, problems):
                    wanted = parts.all_wanted(word["wants"] for word in answers)
                    sent_by = {one: process for one, process in source.providers.items() if one in wanted}
                    read = reader.read if reader is not None else (lambda *_: b"")
                    gather(parts, sent_by, read, self.layout.programs.get("gather"))
                    return parts.needed, told["extra"]
            source = source.without({process: word["damaged"] for process, word in enumerate(answers)})
        return None

    def _failures(self, answers: Sequence[Any], problems: list[str]) -> bool:
        """Whether any process has failed; the first of them is added to `problems`."""
        failures = [f"host {host}: {word['why']}" for host, word in self._by_host(answers) if word["why"]]
        if failures:
            more = f" (and on {len(failures) - 1} more hosts)" if len(failures) > 1 else ""
            problems.append(failures[0] + more)
        return bool(failures)

    def _go_back_to(self, found: Resumed, attempt: int, sources: Sequence[Source], problems: Sequence[str]) -> None:
        """Drop or set aside what was written after the restored step, and warn about what was skipped."""
        for problem in dict.fromkeys(problems):
            self.session.timeline.note("skipped", why=problem)
            self._warn(f"Resuming from {found.source} at step {found.step}; skipped: {problem}")
        if self.memory_every:
            self.memory.go_back_to(attempt, found.step, self._trust.trusts)
        if self.disk is None or self.checkpoints is None:
            return
        on_disk = [source for source in sources if source.kind == "disk"]
        older = {one.step for one in on_disk if one.step <= found.step and self._trust.trusts(one.attempt, one.step)}
        older -= self._damaged
        self.checkpoints.last_step = self.checkpoints.saved_step = max(older, default=0)
        if self.session.launch.process != 0 or not self.checkpoints.disk_answers:
            return
        if found.source == "start" and not on_disk:
            return
        try:
            moved = with_timeout(self.disk.timeout_s, self.disk.set_aside_all_but, older)
        except OSError as error:
            self._warn(f"{self.disk.folder} is unreachable: {error}. The job continues without it.")
            return
        if moved:
            self.session.timeline.note("set aside", steps=moved)

    def _by_host(self, answers: Sequence[Any]) -> list[tuple[int, Any]]:
        return list(zip(self.session.host_of_process, answers, strict=True))

    def _folders(self) -> str:
        return " and ".join(
            str(folder)
            for folder in (self.memory.folder if self.memory_every else None, self.disk and self.disk.folder)
            if folder
        )

    def _warn(self, what: str) -> None:
        warn_once(self.session, what)


def _take_own(
    reader: PartReader, has: Sequence[int], provides: Sequence[tuple[int, int]], parts: NeededParts
) -> dict[str, Any]:
    """Take what is needed of the parts that this process has, and check what it may send to others.

    Returns which parts are damaged, and why, or "": others then send what was taken of those.
    """
    why, damaged = "", list[int]()
    for part in has:
        needed = [which for which, ends in enumerate(parts.outline.slices(part)) if parts.needs(part, *ends)]
        try:
            for which in sorted({*needed, *(which for one, which in provides if one == part)}):
                for at, block in reader.blocks(part, which):
                    if which in needed:
                        parts.put(part, at, np.frombuffer(block, np.uint8))
        except (OSError, RestartError) as error:
            why = str(error)
            damaged.append(part)
    return {"why": why, "damaged": damaged}
