"""A keeper's checkpoints: when one is begun, what has become of it, and what is said if the disk does not answer."""

from __future__ import annotations

import warnings

from meshmend.errors import RestartError
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.session.session import Session
from meshmend.jax.state.disk.disk import Disk, SupersededError
from meshmend.jax.state.layout.state_layout import StateLayout
from meshmend.jax.state.waiting import with_timeout


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
        self._told = ""
        """Why the last checkpoint was not saved, without what differs each time."""

    def claim(self, attempt: int) -> None:
        """Claim an attempt, on process 0: each save looks whether another part of the job has claimed a later one."""
        if self.session.launch.process != 0:
            return
        try:
            with_timeout(self.disk.timeout_s, self.disk.hold_claim, attempt)
        except OSError as error:
            if self.disk_answers:
                warn_once(self.session, f"{self.disk.folder} is unreachable: {error}. The job continues without it.")
            self.disk_answers = False
        else:
            self.disk_answers = True

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
        """Note what has become of the checkpoint that was begun last, if it is over; with `wait`, wait a while.

        Raises `RestartError` if another part of the job has continued without this one.
        """
        try:
            step = self.disk.finished(within_s=self.disk.timeout_s if wait else 0.0)
        except SupersededError:
            raise
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
            warn_once(self.session, f"Step {step} is not saved on disk: {why}. The job continues without it.")

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


def warn_once(session: Session, what: str) -> None:
    """Warn once for the whole job, not on every host."""
    if session.launch.process == 0:
        warnings.warn(what, RuntimeWarning, stacklevel=4)
