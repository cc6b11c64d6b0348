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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torchft

from meshmend.errors import ParameterError, QuarantineError
from meshmend.launch.events import QuorumLog
from meshmend.launch.hosts import Hosts
from meshmend.launch.local import timeline_of
from meshmend.launch.places import find_job
from meshmend.launch.timeline import Timeline, process_started_at
from meshmend.torch.checks import TorchChecks
from meshmend.torch.guard import KEY, StateGuard
from meshmend.torch.process_group import MeshProcessGroup
from meshmend.torch.watchlist import Watchlist

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
    `QuarantineError` at its next step if it has joined before; a cable of the list counts as failed.

    `checks` compares the chips' states at intervals, and can recompute gradients: see `mmt.Checks` and `recompute`. A
    chip that is found to compute wrong numbers is quarantined and leaves; all others go back to the last verified
    state.

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
        checks: TorchChecks | None = None,
        **options: Any,
    ) -> None:
        if checks is not None and (shared is None or options.get("use_async_quorum")):
            raise ParameterError(
                "Checks need a shared folder, for the quarantine list, and a synchronous quorum: give shared=DIR, and "
                "leave out use_async_quorum."
            )
        began = process_started_at()
        hosts = Hosts.of(pg.whole.shape, (1,) * len(pg.whole.shape))
        self._hosts, self._group = hosts, pg
        number = hosts.number(pg.chip)
        path = None if shared is None else timeline_of(Path(shared), number)
        self.timeline = Timeline(path, job=find_job(None), host=number)
        self._events = QuorumLog(self.timeline, hosts)
        self._watchlist = None if shared is None else Watchlist(shared, pg.whole, pg.chip, hosts, self.timeline)
        if self._watchlist is not None:
            # Before torchft's server sends a heartbeat: the others would wait for a chip that must not join.
            self._watchlist.read()
            if (entry := self._watchlist.own) is not None:
                raise self._watchlist.refusal(entry)
            pg.leave_out(self._watchlist.cables)
        least = pg.whole.n_chips // 2 + 1 if min_replica_size is None else min_replica_size
        options, self._own_store = _with_defaults(pg, options)
        self._facts: dict[str, Any] = {}
        self._in_step, self._in_company, self._source = False, False, "in place"
        self._asked_at = self._ready_at = self._received_at = 0.0
        self._noted_at = time.time()
        """Up to when quorums and received states are in the timeline."""
        self._parts: dict[str, tuple[Callable[[Any], object], Callable[[], Any]]] = {}
        super().__init__(pg, load_state_dict, state_dict, least, **options)
        self._guard: StateGuard | None = None
        if checks is not None and self._watchlist is not None:
            self._guard = StateGuard(checks, self, self._rewind, pg, self._parts, self._watchlist, self.timeline, hosts)
            super().register_state_dict_fn(KEY, self._guard.receive, self._guard.send)
        self.timeline.note("process", at=began, seconds=time.time() - began)
        self.timeline.note("round", least=least, most=pg.whole.n_chips)

    @classmethod
    def of(
        cls,
        pg: MeshProcessGroup,
        *,
        shared: str | Path | None = None,
        checks: TorchChecks | None = None,
        **parts: Stateful,
    ) -> Manager:
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

        return cls(pg, restore, save, shared=shared, checks=checks)

    def note(self, **facts: Any) -> None:
        """Add facts to the step under way: its `loss`, its `examples`, the seconds that it `waited_s` for data."""
        self._facts |= facts

    def start_quorum(self, *args: Any, **options: Any) -> None:
        """Begin a step, as torchft does; raise `QuarantineError` and leave the job if this chip is in quarantine."""
        with self._leaving(), self._group.apart():
            self._look_at_list()
            if self._guard is not None:
                self._guard.before_quorum()
            self._asked_at, self._in_step = time.time(), True
            super().start_quorum(*args, **options)
            self._ready_at = time.time()
            self._note_quorum()
            if self._guard is not None:
                self._guard.after_quorum()

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], object], state_dict: Callable[[], Any]
    ) -> None:
        """Add a part whose state a chip that comes back receives, as torchft does."""
        super().register_state_dict_fn(key, load_state_dict, state_dict)
        self._parts[key] = load_state_dict, state_dict

    def recompute(self, gradients: Callable[[Any], Any], batch: Any) -> None:
        """Let another chip compute the gradient of this chip's samples, if that is due; call it in each step.

        `gradients(batch)` returns tensors, the same bits on every chip that has the same state: take the gradients of
        the module itself with `torch.autograd.grad`, not of the DistributedDataParallel around it. `batch` is what
        `torch.save` writes and `torch.load(…, weights_only=True)` reads. Call this before the step's forward pass: if
        chips disagree, all go back to the last verified state, and the step counts no more.
        """
        if self._guard is not None:
            with self._leaving():
                self._guard.recompute(gradients, batch)

    @property
    def verified(self) -> int:
        """The last step whose state all due checks have found to be good; 0 if none has."""
        return 0 if self._guard is None else self._guard.verified

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
            if self._guard is not None:
                self._guard.check_recomputed()
            with self._group.apart():
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

    def _look_at_list(self) -> None:
        """Leave if this chip has been quarantined, and let the group plan round cables that have been."""
        if self._watchlist is not None:
            self._watchlist.look()
            if (entry := self._watchlist.own) is not None:
                raise self._watchlist.refusal(entry)
            self._group.leave_out(self._watchlist.cables)

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Leave the job if there is a `QuarantineError`: the next quorum forms without this chip."""
        try:
            yield
        except QuarantineError as error:
            self._in_step = False
            self._give_up(error)
            self._group.abort()
            super().shutdown(wait=False)
            raise

    def _rewind(self, state: dict[str, int]) -> None:
        """Count on from an earlier step."""
        super().load_state_dict(state)
        self._source = "memory"

    def _note_quorum(self) -> None:
        """Write down a quorum and a state received since the last time. With an asynchronous quorum that is later."""
        spent = self._group.timings
        if spent.configured_at > self._noted_at:
            if self._watchlist is not None:
                self._watchlist.look()  # who is missing may have left because of it
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
            left = [] if self._watchlist is None else map(self._hosts.number, self._watchlist.chips)
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
