"""The keeper of a job's state: in memory after every step, on disk now and then, and back after a restart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from meshmend.errors import RestartError
from meshmend.jax.program import Halves, Program
from meshmend.jax.restart.disk import Disk
from meshmend.jax.restart.elements import Outline, StateLayout, Vectors
from meshmend.jax.restart.exchange import combine
from meshmend.jax.restart.memory import Choice, Copy, HostMemory, choose, default_folder, offer
from meshmend.jax.restart.mirror import Mirror
from meshmend.jax.restart.session import Session
from meshmend.schedule import Schedule


@dataclass(frozen=True)
class Resumed:
    """What a job goes on from: the state after `step` steps, and what was kept with it."""

    step: int
    params: Any
    state: Any
    extra: Any
    source: str
    """ "memory", "disk", or "start"."""


class Keeper:
    """Keeps a training state where the loss of a host does not reach it, and finds it again.

    - **In memory**, after each step (or every `memory_every`): each host keeps the parts of its own devices and those
      of another host's in files of `memory` (by default a folder in /dev/shm), which outlive the process. Whatever
      one host takes with it, another one has.
    - **On disk**, every `disk_every` steps if `disk` names a folder: Orbax checkpoints, asynchronous. For when more
      is lost than memory can make good: two hosts of which one kept the other's parts, or all of them.

    Every process makes the same calls. `accumulate` must be what `train_step` was given.
    """

    def __init__(
        self,
        session: Session,
        schedule: Schedule,
        program: Program | Halves,
        *,
        memory: str | Path | None = None,
        memory_every: int = 1,
        disk: str | Path | None = None,
        disk_every: int = 100,
        accumulate: DTypeLike | None = np.float32,
    ) -> None:
        self.session = session
        self.schedule = schedule
        self.program = program
        self.memory = HostMemory(default_folder(session.launch.job, session.host) if memory is None else memory)
        self.memory_every = memory_every
        self.disk = Disk(disk) if disk is not None else None
        self.disk_every = disk_every
        self.accumulate = accumulate
        self.attempt = 0
        self._layout: StateLayout | None = None
        self._mirror: Mirror | None = None

    def restore(self, params: Any, state: Any, extra: Any = None) -> Resumed:
        """Return the newest state that the survivors have between them, on this fabric, or the given one.

        `params` and `state` are what a new job starts with, on the devices, and `extra` anything that JSON can write
        and that belongs to the state, such as a position in the data. All of them come back as they were kept.
        """
        fabric = self.session.fabric
        with self.session.timeline.timed("restore") as facts:
            layout = StateLayout.of(params, state, self.program, self.schedule, fabric, accumulate=self.accumulate)
            self._layout = layout
            copies = self.memory.read() if self.memory_every else []
            saved = self.disk.newest() if self.disk is not None else None
            everybody = self.session.notices.exchange(
                {
                    "copies": [offer(copy) for copy in copies],
                    "disk": saved and (saved.attempt, saved.step),
                    "claimed": self.disk.claimed() if self.disk is not None else 0,
                }
            )
            attempts = [copy["attempt"] for held in everybody for copy in held["copies"]]
            attempts += [held["disk"][0] for held in everybody if held["disk"]]
            attempts += [held["claimed"] for held in everybody]
            # The launcher's own count starts anew with each of its agents; this one is the same on all hosts.
            self.attempt = 1 + max(attempts, default=0)
            self.session.timeline.facts["attempt"] = self.attempt
            if self.disk is not None and self.session.launch.process == 0:
                self.disk.claim(self.attempt)
            choice = choose([held["copies"] for held in everybody], layout.outline)
            on_disk = max((tuple(held["disk"]) for held in everybody if held["disk"]), default=None)
            found = None
            if self.disk is not None and on_disk and (choice is None or on_disk > (choice.attempt, choice.step)):
                found = self._from_disk(choice, layout, (params, state))
            if found is None and choice is not None:
                found = self._from_memory(choice, copies, layout, (params, state))
            if found is None:
                found = Resumed(0, params, state, extra, "start")
            self.memory.keep_only(self.attempt, found.step)
            facts |= {"source": found.source, "step": found.step}
        if self.memory_every:
            with self.session.timeline.timed("compile"):
                self._mirror = Mirror(layout, self.memory, self.attempt, self.session.timeline, self.session.give_up)
                self._mirror.compile(found.params, found.state)
        return found

    def keep(self, step: int, params: Any, state: Any, extra: Any = None) -> None:
        """Keep the state after `step` steps. Call it after each; the arrays may be donated to the next step.

        A step is committed, safe from the loss of any one host, as soon as all hosts have written their copies of it.
        Nobody waits to hear that: a host that has computed step n knows that all have written step n − 2.
        """
        if self._layout is None:
            raise RestartError("Call restore() before keep(): it finds out what there is already.", step=step)
        if self.disk is not None and self.session.launch.process == 0:
            self.disk.check_claim(self.attempt)
        if self._mirror is not None and step % self.memory_every == 0:
            self._mirror.keep(step, params, state, extra)
        if self.disk is not None and step % self.disk_every == 0:
            self.disk.save(self._layout, self.attempt, step, params, state, extra)
            self.session.timeline.note("saved", step=step)

    def close(self) -> None:
        """Wait until everything is written. A job that is over may then delete its copies by `forget`."""
        if self._mirror is not None:
            self._mirror.wait()
        if self.disk is not None:
            self.disk.close()

    def forget(self) -> None:
        """Delete this host's copies in memory."""
        self.memory.clear()

    def _from_memory(self, choice: Choice, copies: list[Copy], layout: StateLayout, like: Any) -> Resumed:
        me = self.session.launch.process
        vectors: Vectors = layout.outline.empty()
        extra = None
        for copy in copies:
            if (copy.attempt, copy.step) != (choice.attempt, choice.step):
                continue
            extra = copy.extra
            for i, device in enumerate(copy.devices):
                if choice.providers[device] == me:
                    for dtype, rows in copy.parts.items():
                        copy.outline.collect(device, dtype, rows[i], vectors)
        extras = self.session.notices.exchange(extra)
        extra = extras[min(choice.providers.values())]
        params, state = layout.lay_out(combine(vectors, self.session.fabric), like)
        return Resumed(choice.step, params, state, extra, "memory")

    def _from_disk(self, choice: Choice | None, layout: StateLayout, like: Any) -> Resumed | None:
        """Return the newest checkpoint that is whole, if it is newer than what memory has."""
        if self.disk is None:
            return None
        for step in reversed(self.disk.steps()):
            if choice is not None and (self.disk.facts(step).attempt, step) <= (choice.attempt, choice.step):
                return None
            saved, vectors = self.disk.load(step)
            if layout.outline.state != Outline.from_json(saved.facts["outline"]).state:
                raise RestartError(
                    f"The checkpoint of step {step} in {self.disk.folder} is of another model or optimiser, or of one "
                    "whose state was sharded otherwise. Give this job a folder of its own.",
                    step=step,
                )
            params, state = layout.lay_out(vectors, like)
            return Resumed(saved.step, params, state, saved.facts["extra"], "disk")
        return None
