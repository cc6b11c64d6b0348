"""A keeper's checkpoints: when one is begun, what has become of it, and what is said if the disk does not answer."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial

from meshmend.errors import RestartError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.session.session import Session
from meshmend.jax.state.disk.disk import Disk
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.jax.state.waiting import with_timeout

LOOK_EVERY_S = 5.0
"""Seconds between looks at the claims of other parts of the job. Each lists a folder of the shared disk."""


class Checkpoints:
    """The checkpoints of one attempt, on a disk that may be away or hang while the job trains.

    What is not saved is noted in the timeline, and the first time for the same reason there is a warning; the job
    continues. Training waits for the disk in `save` alone, for at most the disk's `timeout_s`, and not again while what
    it waited for hangs.
    """

    def __init__(self, disk: Disk, session: Session) -> None:
        self.disk = disk
        self.session = session
        self.saved_step = 0
        """The last step that is known to be on disk, also by an earlier attempt."""
        self.last_step = 0
        """That one, or a later one that is on its way there."""
        self.disk_answers = True
        self._claim_watch: ClaimWatch | None = None
        self._told = ""
        """Why the last checkpoint was not saved, without what differs each time."""

    def claim(self, attempt: int) -> None:
        """Claim an attempt, and watch from now on that no other part of the job claims a later one: on process 0."""
        if self.session.launch.process != 0:
            return
        problem = ""
        try:
            with_timeout(self.disk.timeout_s, self.disk.hold_claim, attempt)
        except OSError as error:
            problem = str(error)
        self.note_answer(problem)
        self._claim_watch = ClaimWatch(partial(self.disk.hold_claim, attempt), self.disk.timeout_s, problem=problem)
        weakref.finalize(self, self._claim_watch.stop)  # a keeper that nobody closes

    def look(self) -> None:
        """Raise `RestartError` if another part of the job has continued; warn if the disk does not answer any more.

        Asks no disk: the watch does that, beside training.
        """
        if self._claim_watch is not None:
            self.note_answer(self._claim_watch.look())
        self.note_saved()

    def note_answer(self, problem: str) -> None:
        """Take in that the disk does not answer, and why; or, with "", that it does."""
        if problem and self.disk_answers:
            self._warn(f"{self.disk.folder} is unreachable: {problem}. The job continues without it.")
        self.disk_answers = not problem

    def save(
        self, layout: StateLayout, attempt: int, step: int, params: Tree, state: Tree, extra: Tree, verified: int
    ) -> None:
        """Begin to write a checkpoint, if the disk answers and the one before it is written."""
        with self.session.timeline.timed("checkpoint", step=step):
            self.note_saved(wait=True)
            problem = self.disk.save(layout, attempt, step, params, state, extra, verified)
        if problem:
            self._note_not_saved(step, problem)
        else:
            self.last_step = step

    def note_saved(self, *, wait: bool = False) -> None:
        """Note what has become of the checkpoint that was begun last, if it is over; with `wait`, wait a while."""
        try:
            step = self.disk.finished(within_s=self.disk.timeout_s if wait else 0.0)
        except RestartError as error:
            self._note_not_saved(error.step or 0, str(error))
            return
        if step is not None:
            self.saved_step, self._told = step, ""
            self.session.timeline.note("saved", step=step)

    def _note_not_saved(self, step: int, why: str) -> None:
        self.session.timeline.note("not saved", step=step, why=why)
        told, self._told = self._told, why.partition(":")[0]
        if told != self._told:
            self._warn(f"Step {step} is not saved on disk: {why}. The job continues without it.")

    def close(self) -> None:
        """Wait for what is being written, as long as a slow disk may take, and say if it hangs.

        Raises `RestartError` if it has failed.
        """
        step, problem = self.disk.close()
        if problem:
            self._told = ""  # the last word on it
            self._note_not_saved(step, problem)
            return
        done = self.disk.finished()
        if done is not None:
            self.saved_step = done
            self.session.timeline.note("saved", step=done)

    def _warn(self, what: str) -> None:
        warn_once(self.session, what)

    def abandon(self) -> None:
        """Watch no more."""
        if self._claim_watch is not None:
            self._claim_watch.stop()


class ClaimWatch:
    """Looks whether another part of the job has continued without this one, every few seconds, beside training.

    `hold_claim` asks the shared disk; it raises `RestartError` if that is so, and `OSError` if the disk is away.
    """

    def __init__(
        self,
        hold_claim: Callable[[], None],
        timeout_s: float,
        *,
        problem: str = "",
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        self.timeout_s = timeout_s
        self._hold_claim = hold_claim
        self._every_s = every_s
        self._refusal: RestartError | None = None
        self._why = problem
        self._asked: float | None = None
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="meshmend-claim", daemon=True).start()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._asked = time.monotonic()
            try:
                self._hold_claim()
                self._why = ""
            except RestartError as refusal:
                self._refusal = refusal
                return
            except OSError as error:
                self._why = str(error)
            self._asked = None

    def look(self) -> str:
        """Return why the disk does not answer, "" if it does; raise `RestartError` if this part must stop."""
        if self._refusal is not None:
            raise self._refusal
        waited_s = 0.0 if self._asked is None else time.monotonic() - self._asked
        return f"no answer for {waited_s:.0f} s" if waited_s > self.timeout_s else self._why

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()


def warn_once(session: Session, what: str) -> None:
    """Warn once for the whole job, not on every host."""
    if session.launch.process == 0:
        warnings.warn(what, RuntimeWarning, stacklevel=4)
