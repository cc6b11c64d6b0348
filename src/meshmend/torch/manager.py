"""torchft's manager, with a timeline: where the time of a job under torchft went.

Each chip writes the file that a host under `meshmend run` writes, into the same folder, so `meshmend watch` and all
other readers take both. What torchft does between two steps is told by its own public calls: `start_quorum` begins a
step, `should_commit` ends it, `load_state_dict` brings the step of a state that was received.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torchft

from meshmend.launch.events import QuorumLog
from meshmend.launch.hosts import Hosts
from meshmend.launch.local import timeline_of
from meshmend.launch.places import find_job
from meshmend.launch.timeline import Timeline, process_started_at
from meshmend.torch.process_group import MeshProcessGroup


class Manager(torchft.Manager):
    """Use as torchft's own: `Manager(pg=group, …)`, with a `MeshProcessGroup`.

    `shared` is a folder that all chips see. Each chip has a timeline in it, `timeline/host-N.jsonl`, where N counts the
    machine's chips in row-major order; `meshmend watch SHARED` shows the job. Without it, `timeline` keeps the last
    events in memory only.

    Add what torchft does not know: `manager.note(loss=…)` before the step is committed, and around a checkpoint on disk
    `with manager.timeline.timed("checkpoint"): …`, followed by `manager.timeline.note("saved", step=…)`.
    """

    def __init__(
        self,
        pg: MeshProcessGroup,
        load_state_dict: Any,
        state_dict: Any,
        min_replica_size: int,
        *more: Any,
        shared: str | Path | None = None,
        **options: Any,
    ) -> None:
        began = process_started_at()
        hosts = Hosts.of(pg.whole.shape, (1,) * len(pg.whole.shape))
        self._hosts, self._group = hosts, pg
        number = hosts.number(pg.chip)
        path = None if shared is None else timeline_of(Path(shared), number)
        self.timeline = Timeline(path, job=find_job(None), host=number)
        self._events = QuorumLog(self.timeline, hosts)
        self._facts: dict[str, Any] = {}
        self._in_step, self._source = False, "in place"
        self._asked_at = self._ready_at = self._received_at = 0.0
        self._noted_at = time.time()
        """Up to when quorums and received states are in the timeline."""
        super().__init__(pg, load_state_dict, state_dict, min_replica_size, *more, **options)
        self.timeline.note("process", at=began, seconds=time.time() - began)
        self.timeline.note("round", least=min_replica_size, most=pg.whole.n_chips)

    def note(self, **facts: Any) -> None:
        """Add facts to the step under way: its `loss`, its `examples`, the seconds that it `waited_s` for data."""
        self._facts |= facts

    def start_quorum(self, *args: Any, **options: Any) -> None:
        """Begin a step, as torchft does."""
        self._asked_at, self._in_step = time.time(), True
        super().start_quorum(*args, **options)
        self._ready_at = time.time()
        self._note_quorum()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Take over the step of a state that was received or read, as torchft does."""
        super().load_state_dict(state_dict)
        if self._in_step:
            self._received_at = time.time()
        else:
            self._source = "disk"

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End a step, as torchft does: say whether it counts."""
        try:
            self.wait_quorum()
            self._note_quorum()
            committed = bool(super().should_commit(timeout))
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._in_step = False
        facts, self._facts = self._facts, {}
        problem = self.errored()
        if committed:
            self.timeline.note("step", step=self.current_step(), **facts, chips=self._group.mesh.n_chips)
            self._events.step(self.current_step())
        elif problem is not None:
            self._give_up(problem.original_exception)
        else:
            # Nothing went wrong on this chip: too few take part, or another process of its replica has refused.
            why = f"{self.num_participants()} take part"
            step, seconds = self.current_step() + 1, time.time() - self._asked_at
            self.timeline.note("refused", at=self._asked_at, seconds=seconds, step=step, why=why)
        return committed

    def shutdown(self, wait: bool = True) -> None:
        """Leave the job, as torchft does; the job is over unless an error is under way."""
        super().shutdown(wait)
        if sys.exception() is None:
            self.timeline.note("done", step=self.current_step())

    def _note_quorum(self) -> None:
        """Write down a quorum and a state received since the last time. With an asynchronous quorum that is later."""
        spent = self._group.timings
        if spent.configured_at > self._noted_at:
            formed_at = spent.configured_at - spent.configure_s
            mesh = self._group.mesh
            members = sorted(self._hosts.number(mesh.chip(rank)) for rank in range(mesh.n_chips))
            self.timeline.facts["attempt"] = spent.formed_ms
            self.timeline.note(
                "quorum",
                at=self._asked_at,
                seconds=formed_at - self._asked_at,
                step=self.current_step(),
                source=self._source,
                chips=mesh.n_chips,
                hosts=members,
                machine=str(self._hosts),
            )
            self._events.form(str(spent.formed_ms), members)
            self.timeline.note("join", at=formed_at, seconds=spent.configure_s - spent.plan_s)
            self.timeline.note("plan", at=spent.configured_at - spent.plan_s, seconds=spent.plan_s)
            self._noted_at, self._source = spent.configured_at, "in place"
        if self._received_at > self._noted_at:
            # Where the quorum is synchronous, the state has been put into place when `start_quorum` returns.
            ended = max(self._received_at, self._ready_at)
            seconds = ended - max(self._asked_at, spent.configured_at)
            facts = {"step": self.current_step(), "source": "peers"}
            self.timeline.note("restore", at=ended - seconds, seconds=seconds, **facts)
            self._noted_at = ended

    def _give_up(self, error: BaseException) -> None:
        failed_at = self._group.timings.failed_at
        at = failed_at if failed_at > self._asked_at else time.time()
        self.timeline.note("gave up", at=at, why=f"{type(error).__name__}: {error}"[:300])
