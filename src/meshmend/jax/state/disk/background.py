"""A keeper's checkpoints: when one is begun, what has become of it, and what is said if the disk does not answer."""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np

from meshmend.errors import RestartError
from meshmend.files import with_timeout
from meshmend.jax.engine.collectives import Tree
from meshmend.jax.session.session import Session
from meshmend.jax.state.disk.disk import SLOWEST_BYTES_PER_S, Disk, SupersededError
from meshmend.jax.state.disk.write import copy_to_host
from meshmend.jax.state.layout.state_layout import StateLayout


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
        self._saving: Saving | None = None
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
        """Begin to write a checkpoint, if all processes have written the one before it.

        The arrays may be donated as soon as this returns.
        """
        with self.session.timeline.timed("checkpoint", step=step):
            self.note_saved(within_s=self.disk.timeout_s)
            why = "" if self._saving is None else self._saving.why_not_yet
            reason = self.session.coordination.decide(why, lambda all_: next(filter(None, all_), ""))
            if not reason:
                facts = {"step": step, "attempt": attempt, "extra": extra, "verified": verified}
                facts = json.loads(json.dumps(facts))  # what JSON cannot write is refused here
                runs = copy_to_host(layout, params, state)
                n_bytes = sum(math.prod(user.shape) * np.dtype(user.dtype).itemsize for user in layout.users)
                # Each has its own channel: one that has failed leaves exchanges unfinished.
                channel = self.session.coordination.channel("save")
                self._saving = Saving(step, n_bytes, partial(self.disk.save, layout, runs, facts, channel))
        if reason:
            self._note_not_saved(step, reason)
        else:
            self.last_step = step

    def note_saved(self, *, within_s: float = 0.0) -> None:
        """Note what has become of the checkpoint that was begun last, if it is over within so many seconds.

        Raises `RestartError` if another part of the job has continued without this one.
        """
        if self._saving is None or not self._saving.wait(within_s):
            return
        saving, self._saving = self._saving, None
        if isinstance(saving.error, SupersededError):
            raise saving.error
        if saving.error is not None:
            self._note_not_saved(saving.step, str(saving.error))
            return
        self.saved_step, self._told = saving.step, ""
        self.session.timeline.note("saved", step=saving.step)

    def _note_not_saved(self, step: int, why: str) -> None:
        self.session.timeline.note("not saved", step=step, why=why)
        told, self._told = self._told, why.partition(":")[0]
        if told != self._told:
            warn_once(self.session, f"Step {step} is not saved on disk: {why}. The job continues without it.")

    def close(self) -> None:
        """Wait for what is being written, as long as a slow disk may take, and say if it hangs.

        Raises `RestartError` if it has failed.
        """
        saving = self._saving
        if saving is not None and not saving.wait(self.disk.timeout_s + saving.n_bytes / SLOWEST_BYTES_PER_S):
            self._told = ""  # the last word on it
            self._note_not_saved(saving.step, saving.why_not_yet)
            return
        self.disk.close()
        if saving is not None and saving.error is not None:
            raise RestartError(
                f"Step {saving.step} was not saved in {self.disk.folder}: {saving.error}", step=saving.step
            ) from saving.error
        self.note_saved()


class Saving:
    """One checkpoint on its way to disk, in a thread of its own: `write` returns when all of it is there."""

    def __init__(self, step: int, n_bytes: int, write: Callable[[], None]) -> None:
        self.step = step
        self.n_bytes = n_bytes
        self.error: BaseException | None = None
        """What went wrong, once it is over."""
        self._since = time.monotonic()
        self._is_late = False
        self._over = threading.Event()
        threading.Thread(target=self._run, args=(write,), name="meshmend-checkpoint", daemon=True).start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self.error = error
        finally:
            self._over.set()

    def wait(self, seconds: float) -> bool:
        """Wait until it is over, and return whether it is. Nobody waits again for what was waited for in vain."""
        is_over = self._over.wait(0.0 if self._is_late else seconds)
        self._is_late = not is_over and (self._is_late or seconds > 0)
        return is_over

    @property
    def why_not_yet(self) -> str:
        """What is to be said of it while it is not over."""
        seconds = time.monotonic() - self._since
        return f"the checkpoint of step {self.step} hangs, or the disk is slow: it has been written for {seconds:.0f} s"


def warn_once(session: Session, what: str) -> None:
    """Warn once for the whole job, not on every host."""
    if session.launch.process == 0:
        warnings.warn(what, RuntimeWarning, stacklevel=4)
