"""The keeper of a job's state: in memory as often as that is cheap, on disk at intervals, restored after a restart."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from meshmend.buckets import as_path
from meshmend.errors import RestartError
from meshmend.files import with_timeout
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.session.session import Session
from meshmend.jax.state.candidates import UNCHECKED, Trust
from meshmend.jax.state.disk.background import Checkpoints, warn_once
from meshmend.jax.state.disk.disk import Disk
from meshmend.jax.state.disk.read import read_foreign
from meshmend.jax.state.holdings import Holdings, Record
from meshmend.jax.state.layout.state_layout import Reader, StateLayout
from meshmend.jax.state.memory.copies import KEPT, HostMemory
from meshmend.jax.state.memory.folders import default_folder
from meshmend.jax.state.memory.peer_copy import Mirror
from meshmend.jax.state.memory.placement import place
from meshmend.jax.state.memory.redundancy import CHECKED_COPIES, Room, choose_blocks
from meshmend.jax.state.recovery import Answer, Holder, StateSearch, recover
from meshmend.jax.state.timetable import LARGE_LOSS_S, LARGEST_SLOWDOWN, NEVER, Timetable
from meshmend.jax.state.voting import Ballot
from meshmend.launch.environment import LAUNCHER

LOGGER = logging.getLogger(__name__)
WRITTEN_WITHIN_S = 10.0
"""How long a loop that an error has ended waits for the copy in memory that is being written."""


@dataclass(frozen=True)
class Resumed:
    """The start of a job that resumes: the state after `step` steps, and all that was kept with it."""

    step: int
    params: Tree
    state: Tree
    extra: Tree
    source: str
    """ "memory", "disk", or "start"."""
    verified: int = 0
    """The last step that is known to be good, 0 if none is: what a job begins with is."""


class Keeper:
    """Keeps a training state safe from failures of hosts, and restores it.

    - **In memory**, after every `memory_every` steps: each host keeps what is replicated, the shards of its own devices
      and those of another host. They are in files of `memory`, which outlive the process. By default that is a folder
      per job and host in MESHMEND_MEMORY, or in /dev/shm. So failures of hosts lose only the steps since. "auto"
      measures what copies cost, and keeps as many as take at most 3 % of the time. One that is late is left out, never
      waited for. A number of steps is a promise: where copies take longer, training waits for them.
    - **On disk**, every `disk_every` if `disk` names a folder: a time as in "10min", of which the first checkpoint
      comes a minute after each start, or a number of steps. Orbax checkpoints, asynchronous. For
      failures that memory does not cover: more hosts at once than the job says at its start. A disk that
      does not answer within `disk_timeout_s` counts as dead: the job continues without it, with a warning. Training
      waits for the disk only where a checkpoint begins, for at most that long, and not again while it hangs. Orbax
      alone reads them: they are the user's tree. A new job can `start_from` a tree of the same form that Orbax has
      saved.

    If checks run in the job, `untrusted` says what they have found so far (`meshmend.quarantine.untrusted`); process
    0's word counts. These are pairs of an attempt and a step, after which nothing of that attempt or an earlier one is
    trusted. The job resumes from the newest state that is. `keep(…, pin=True)` a state that is being checked, and
    `verify` it: copies of the last verified step stay in memory until there is a later one.

    Given a `record`, a job that has lost all copies and has no checkpoint does not take itself for a new one.

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
        record: Record | None = None,
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
        self._record = record
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

        A new job starts with `params` and `state`, on the devices. `extra` is anything that JSON can write and that
        belongs to the state, such as a position in the data. All of them are restored as they were kept. With `donate`,
        the given arrays are gone afterwards, and devices never hold two states.

        Copies and checkpoints are tried newest first. Sources that are damaged, unreachable or not trusted are skipped,
        with a warning that names them and the reason. A state of another model or optimizer is refused. Where parts of
        every copy are with hosts that are absent, all wait for these hosts under `meshmend run`, which begins another
        round when one comes back. If they do not come, if nothing is intact, or if all that was verified is lost, that
        is an error, and nothing is removed. Only the user may decide to start over, by `meshmend run --start-over`.
        """
        try:
            return self._restore(params, state, extra, donate)
        except BaseException:
            self.abandon()
            raise

    def _restore(self, params: Tree, state: Tree, extra: Tree, donate: bool) -> Resumed:
        with self.session.timeline.timed("restore") as facts:
            self.layout.check(params, state)
            holdings = Holdings(
                self.session,
                self.layout,
                self.memory if self.memory_every else None,
                self.checkpoints,
                untrusted=self._untrusted,
                cleans_up=self._has_default_folder,
                record=self._record,
            )
            with contextlib.closing(holdings):
                process, judge = self.session.launch.process, self._judge(holdings)
                mine = Holder(holdings.have, holdings.describe, holdings.take, holdings.send)
                begun, last = self.session.coordination.run(recover(process, judge, mine))
                self._trust, self.attempt = Trust.of(begun["untrusted"]), begun["attempt"]
                self.session.timeline.facts["round"] = self.attempt
                if begun["n_blocks"]:
                    self._placement = place(self.layout.fabric, n_blocks=begun["n_blocks"])
                    outline = replace(self.layout.outline, n_shares=self._placement.n_shares)
                    facts["survives"] = self._placement.describe(outline)
                if last["do"] == "wait":
                    self._wait_for_hosts(last)
                if self.checkpoints is not None:
                    self.checkpoints.claim(self.attempt)
                its_attempt = 0
                if last["do"] == "go":
                    source, like = last["source"], (params, state)
                    its_attempt = source["attempt"]
                    params, state = self.layout.to_devices(holdings.receive(last), like, donate=donate)
                    found = Resumed(source["step"], params, state, last["extra"], source["kind"], last["verified"])
                else:
                    if self.start_from is not None:
                        params, state = self._begin_with(params, state, donate)
                    found = Resumed(0, params, state, extra, "start")
            self._verified = found.verified if self._trust.is_checked else UNCHECKED
            self._go_back_to(found, its_attempt, last)
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
                    run=str(begun["run"]),
                    vote=self._ballot,
                    placement=self._placement,
                    on_complete=self._on_complete,
                )
                self._mirror.compile(found.params, found.state)
            if self._verified > 0:
                self.memory.pinned = frozenset({self._verified})
            if 0 < found.step == self._verified:
                # Its copies may have been on hosts that are lost, or on disk only.
                self._mirror.keep(found.step, found.params, found.state, found.extra, self._verified)
        return found

    def _on_complete(self, offer: dict[str, Any]) -> None:
        if self._record is not None and self.session.launch.process == 0:
            self._record.write(offer, self.memory.hosts)

    def _begin_with(self, params: Tree, state: Tree, donate: bool) -> tuple[Tree, Tree]:
        """Return the state that Orbax has saved at `start_from`."""
        read: Reader | None = None
        why = ""
        try:
            read = read_foreign(self.layout, self.start_from)
        except Exception as error:  # all processes raise it, or none would wait for the others
            why = f"The job cannot start from {self.start_from}: {str(error)[:500]}"
        self.session.coordination.decide(why, _raise_first)
        assert read is not None  # noqa: S101  # or it would have been raised
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

        From then on its copies stay, and what is kept records this step. Those of the step that was verified before it
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

    def _judge(self, holdings: Holdings) -> StateSearch:
        def n_blocks(rooms: list[Any], is_checked: bool) -> int:
            n_copies = CHECKED_COPIES if is_checked else KEPT
            return choose_blocks(self.layout, [Room(*room) for room in rooms], n_copies)

        hosts, round_ = self.session.host_of_process, self.session.launch.round
        return StateSearch(hosts, round_, self._folders(), n_blocks, holdings.describe_own)

    def _wait_for_hosts(self, last: Answer) -> NoReturn:
        """Wait for the hosts that have the missing parts of a state, and raise what is missing if they do not come.

        A host that comes back ends this round, and with it this process: the next round has the host's copies.
        """
        launch, missing, error = self.session.launch, str(last["missing"]), str(last["error"])
        if launch.launcher == LAUNCHER and launch.state_wait_s:
            limit = f"{launch.state_wait_s / 60:.3g} min"
            facts = {"step": last["step"], "hosts": last["hosts"], "wait_s": launch.state_wait_s}
            self.session.timeline.note("state incomplete", **facts)
            self._warn(
                f"{missing[0].upper()}{missing[1:]}. Nothing is removed. The job waits up to {limit} for them to come "
                "back."
            )
            until = time.monotonic() + launch.state_wait_s
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(left, 1.0))
            error = error.replace(missing, f"{missing} (waited {limit} for them)")
        raise RestartError(error)

    def _go_back_to(self, found: Resumed, attempt: int, last: Answer) -> None:
        """Drop or set aside what was written after the restored step, and warn about what was skipped."""
        for problem in last["problems"]:
            self.session.timeline.note("skipped", why=problem)
            self._warn(f"Resuming from {found.source} at step {found.step}; skipped: {problem}")
        if self.memory_every:
            self.memory.go_back_to(attempt, found.step, self._trust.trusts)
        if self.disk is None or self.checkpoints is None:
            return
        self.checkpoints.last_step = self.checkpoints.saved_step = max(last["checkpoints"], default=0)
        if self.session.launch.process != 0 or not self.checkpoints.disk_answers:
            return
        if found.source == "start" and not last["is_on_disk"]:
            return
        try:
            moved = with_timeout(self.disk.timeout_s, self.disk.set_aside_all_but, last["checkpoints"])
        except OSError as error:
            self._warn(f"{self.disk.folder} is unreachable: {error}. The job continues without it.")
            return
        if moved:
            self.session.timeline.note("set aside", steps=moved)

    def _folders(self) -> str:
        return " and ".join(
            str(folder)
            for folder in (
                self.memory.folder if self.memory_every else None,
                self.disk and self.disk.folder,
                self._record and self._record.file.path,
            )
            if folder
        )

    def _warn(self, what: str) -> None:
        warn_once(self.session, what)


def _raise_first(whys: list[str]) -> None:
    """Raise the first of these errors, if there is one."""
    for why in filter(None, whys):
        raise RestartError(why)
