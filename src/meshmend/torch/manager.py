"""torchft's manager, with defaults for one process per chip and a timeline: where the time of a job went.

Each chip writes the file that a host under `meshmend run` writes, into the same folder, so `meshmend watch` and all
other readers take both. What torchft does between two steps is told by its own public calls: `start_quorum` begins a
step, `should_commit` ends it, `load_state_dict` brings the step of a state that was received.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torchft

from meshmend.buckets import refuse_bucket
from meshmend.errors import ParameterError, QuarantineError, name_chip
from meshmend.launch.agent_log import QuorumLog
from meshmend.launch.environment import find_job
from meshmend.launch.events import note_quarantined
from meshmend.launch.hosts import Hosts
from meshmend.launch.timeline import Timeline, process_started_at, timeline_of
from meshmend.quarantine import Quarantined, QuarantineList, Suspect
from meshmend.quarantine.entries import cables_of, chips_of
from meshmend.torch.process_group import MeshProcessGroup

LIGHTHOUSE_ENV = "TORCHFT_LIGHTHOUSE"
CONNECT_TIMEOUT = timedelta(seconds=10)
"""torchft waits a minute for a peer that a chip receives its weights from; one that has died meanwhile is no use."""

LINGER_S = 2.0


class Stateful(Protocol):
    """Whatever has a state to save and to restore: a model, an optimizer, a learning-rate schedule."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over a state."""


class Manager(torchft.Manager):
    """torchft's manager for one process per chip: `Manager.of(group, model=…, optimizer=…)`.

    Those are the parts whose state a chip that comes back receives from the others: whatever has `state_dict` and
    `load_state_dict`. `Manager(pg=group, load_state_dict=…, state_dict=…)` takes the two functions as torchft does.

    All else that torchft's manager takes may be given by keyword, and has a default here:

    - `lighthouse_addr`: the environment's `TORCHFT_LIGHTHOUSE`.
    - `hostname`: where the others reach this process. The host's name; 127.0.0.1 where the group uses loopback.
    - `min_replica_size`: more than half of the machine's chips, so that no two groups of chips train side by side.
    - `replica_id`: `chipN`, where N counts the machine's chips in row-major order.
    - `timeout`: the group's. `connect_timeout`: 10 s. `use_async_quorum`: no, so that chips that come back compute a
      full step at once.
    - `store_addr`, `store_port`, `rank`, `world_size`: a store of this chip's own, for one process.

    `shared` is a folder that all chips see. Each chip has a timeline in it, `timeline/host-N.jsonl`, where N counts the
    machine's chips in row-major order; `meshmend watch SHARED` shows the job. Without it, `timeline` keeps the last
    events in memory only. A chip that the folder's quarantine list names cannot join, and leaves with a
    `QuarantineError` at its next step if it has joined before. A cable of the list counts as failed.

    Add what torchft does not know: `manager.note(loss=…)` before the step is committed, and around a checkpoint on disk
    `with manager.timeline.timed("checkpoint"): …`, followed by `manager.timeline.note("saved", step=…)`.
    """

    def __init__(
        self,
        pg: MeshProcessGroup,
        load_state_dict: Callable[[Any], object] | None,
        state_dict: Callable[[], Any] | None,
        min_replica_size: int | None = None,
        *,
        shared: str | Path | None = None,
        **options: Any,
    ) -> None:
        refuse_bucket(shared, "chips under torchft write their timelines there, so give one that all of them see")
        began = process_started_at()
        hosts = Hosts.of(pg.whole.shape, (1,) * len(pg.whole.shape))
        self._hosts, self._group = hosts, pg
        number = hosts.number(pg.chip)
        path = None if shared is None else timeline_of(Path(shared), number)
        self.timeline = Timeline(path, job=find_job(None), host=number)
        self._events = QuorumLog(self.timeline, hosts)
        self._shared, self._list = shared, None if shared is None else QuarantineList(shared)
        self._listed: tuple[Quarantined, ...] = ()
        self._noted_entries: set[tuple[Suspect, float]] = set()
        # Before torchft's server sends a heartbeat: the others would wait for a chip that must not join.
        self._read_list()
        self._obey_list()
        least = pg.whole.n_chips // 2 + 1 if min_replica_size is None else min_replica_size
        options, self._own_store = _with_defaults(pg, options)
        self._facts: dict[str, Any] = {}
        self._in_step, self._in_company, self._source = False, False, "in place"
        self._asked_at = self._ready_at = self._received_at = 0.0
        self._noted_at = time.time()
        """Up to when quorums and received states are in the timeline."""
        super().__init__(pg, load_state_dict, state_dict, least, **options)
        self.timeline.note("process", at=began, seconds=time.time() - began)
        self.timeline.note("round", least=least, most=pg.whole.n_chips)

    @classmethod
    def of(cls, pg: MeshProcessGroup, *, shared: str | Path | None = None, **parts: Stateful) -> Manager:
        """Return a manager that keeps the state of these parts, with a default for everything else."""
        if not parts:
            raise ParameterError("Say what a chip that comes back shall receive, as in Manager.of(group, model=model).")
        names = ", ".join(name for name, part in parts.items() if not hasattr(part, "load_state_dict"))
        if names:
            raise ParameterError(
                f"Manager.of keeps parts that have state_dict and load_state_dict, and {names} has not. Options of the "
                "manager itself are for Manager(pg=…, load_state_dict=…, state_dict=…, …)."
            )

        def restore(saved: Mapping[str, Any]) -> None:
            for name, part in parts.items():
                part.load_state_dict(saved[name])

        def save() -> dict[str, Any]:
            return {name: part.state_dict() for name, part in parts.items()}

        return cls(pg, restore, save, shared=shared)

    def note(self, **facts: Any) -> None:
        """Add facts to the step under way: its `loss`, its `examples`, the seconds that it `waited_s` for data."""
        self._facts |= facts

    def start_quorum(self, *args: Any, **options: Any) -> None:
        """Begin a step, as torchft does; raise `QuarantineError` and leave the job if this chip is in quarantine."""
        self._read_list_again()
        try:
            self._obey_list()
        except QuarantineError as error:
            self._give_up(error)
            self._group.abort()
            super().shutdown(wait=False)
            raise
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
        """Leave the job, as torchft does; the job is over unless an error is under way.

        Then this chip stays reachable for two seconds: others may still be receiving their part of the last step, and
        without it could not finish it any more.
        """
        if sys.exception() is None and self._in_company:
            time.sleep(LINGER_S)
        super().shutdown(wait)
        if sys.exception() is None:
            self.timeline.note("done", step=self.current_step())
        self.timeline.flush()

    def _read_list(self) -> None:
        """Read the quarantine list; raise `QuarantineError` if it is damaged or that of another machine."""
        if self._list is not None:
            listed, whole = self._list.active(), self._group.whole
            for entry in listed:
                entry.suspect.check(whole.shape, len(self._hosts), whole.wrap)
            self._listed = listed
            for entry in listed:
                if (entry.suspect, entry.since) not in self._noted_entries:
                    self._noted_entries.add((entry.suspect, entry.since))
                    note_quarantined(self.timeline, entry, self._hosts)

    def _read_list_again(self) -> None:
        """Read the list as it is now. A job that trains does not stop for a list that cannot be read."""
        try:
            self._read_list()
        except (QuarantineError, OSError) as error:
            warnings.warn(f"No quarantine list, so the one read before still counts: {error}", stacklevel=3)

    def _obey_list(self) -> None:
        """Raise `QuarantineError` if this chip is in quarantine, and let the group plan round cables that are.

        There is no process 0 that reads the list for all. Whether a chip is left out is its own affair: it leaves, and
        the next quorum forms without it. Cables concern all members, who exchange them when they form a group.
        """
        chip = self._group.chip
        for entry in self._listed:
            if chip in entry.suspect.chips(self._hosts):
                until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(entry.until))
                by = entry.by if entry.by.startswith("by") else f"by {entry.by}"
                self.timeline.flush()  # the process ends
                raise QuarantineError(
                    f"Chip {name_chip(chip)} leaves the job: {entry.suspect} is in quarantine until {until} UTC, {by}, "
                    f"because of {entry.why[:500]}. The others train without it. When it is repaired, clear it with "
                    f"`meshmend quarantine clear {self._shared} {str(entry.suspect)!r}`, and start this process again."
                )
        self._group.leave_out(cables_of(self._listed))

    def _note_quorum(self) -> None:
        """Write down a quorum and a state received since the last time. With an asynchronous quorum that is later."""
        spent = self._group.timings
        if spent.configured_at > self._noted_at:
            self._read_list_again()  # who is missing may have left because of it
            formed_at = spent.configured_at - spent.configure_s
            mesh = self._group.mesh
            members = sorted(self._hosts.number(mesh.chip(rank)) for rank in range(mesh.n_chips))
            self.timeline.facts["round"] = spent.formed_ms
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
            left = map(self._hosts.number, chips_of(self._listed, self._hosts))
            self._events.form(str(spent.formed_ms), members, quarantined=left)
            self.timeline.note("join", at=formed_at, seconds=spent.configure_s - spent.plan_s)
            self.timeline.note("plan", at=spent.configured_at - spent.plan_s, seconds=spent.plan_s)
            self._noted_at, self._source = spent.configured_at, "in place"
            self._in_company = mesh.n_chips > 1
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
        self.timeline.flush()


def _with_defaults(pg: MeshProcessGroup, given: Mapping[str, Any]) -> tuple[dict[str, Any], dist.TCPStore | None]:
    """Return the options for torchft's manager, and the store that this process serves, if it does."""
    host = "127.0.0.1" if pg.is_loopback else socket.gethostname()
    options: dict[str, Any] = {
        "hostname": host,
        "replica_id": f"chip{pg.whole.rank(pg.chip)}",
        "timeout": pg.timeout,
        "connect_timeout": CONNECT_TIMEOUT,
        "use_async_quorum": False,
        "rank": 0,
        "world_size": 1,
        **given,
    }
    if not (options.get("lighthouse_addr") or os.environ.get(LIGHTHOUSE_ENV)):
        raise ParameterError(
            f"Where is the lighthouse? Put its address into {LIGHTHOUSE_ENV}, as in http://10.0.0.1:29510, or pass "
            "lighthouse_addr=. Start one with torchft_lighthouse --min_replicas N --join_timeout_ms 60000 "
            "--heartbeat_timeout_ms 1000."
        )
    if "store_addr" in given:
        return options, None
    store = dist.TCPStore(options["hostname"], 0, is_master=True, wait_for_workers=False)
    return {**options, "store_addr": options["hostname"], "store_port": store.port}, store
