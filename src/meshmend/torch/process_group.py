"""`MeshProcessGroup`: a torchft process group that plans its all-reduce for whatever chips have survived.

torchft forms the quorum, redoes steps that failed and heals chips that come back. Each time the members change it
calls `configure`: the chips exchange their coordinates through the store, so each of them finds the same hole
and makes the same plan.

The guarantee assumes that every member has the same shape or machine, hardware, `plan` and
meshmend version (checked); that no
two live members have the same coordinate (checked); that the survivors are connected (otherwise `PlanError`, and no
step commits until enough chips are back); and that members call the same all-reduces in the same order with equal
shapes, dtypes and operations (checked at each call, before data moves).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshmend import __version__
from meshmend.cost import Hardware
from meshmend.errors import Coordinate, MeshError, MeshmendError, name_chip
from meshmend.machines import Machine
from meshmend.planning import PlanFunction, plan
from meshmend.schedule import Schedule
from meshmend.topology import Cable, Mesh, Region
from meshmend.torch.channel import Channel
from meshmend.torch.collective import check_tensors, reduce_tensors
from meshmend.torch.engine import Engine
from meshmend.torch.membership import Introduction, compare
from meshmend.torch.place import choose_hardware, describe_machine, find_place, without_cables
from meshmend.torch.plans import Plans
from meshmend.torch.private import fail_future, gloo_group
from meshmend.torch.private_torchft import ReconfiguredGroup
from meshmend.torch.rendezvous import Patience, check_store, exchange
from meshmend.torch.work import MeshWork

INTERFACE_ENV = "GLOO_SOCKET_IFNAME"


@dataclass
class Timings:
    """Seconds of the last `configure`, and the moment of the last error, on the clock of `time.time`."""

    configure_s: float = 0.0
    plan_s: float = 0.0
    configured_at: float = 0.0
    failed_at: float = 0.0
    formed_ms: int = 0
    """When the first member began to form the group, in milliseconds: the same on all members, and later ones are
    larger, also after the lighthouse has begun to count its quorums from one again."""


class MeshProcessGroup(ReconfiguredGroup):
    """One chip of a mesh, for torchft's `Manager`, its `DistributedDataParallel` and its optimizer wrappers.

    `shape` and `wrap` describe the whole machine, `chip` is this process's coordinate in it. In their place, `machine`
    or the file that describes it (`meshmend.machines.read_machine`) also brings the failed and slow cables, and `chip`
    may be a name that it has. A chip that it calls failed cannot join.

    `hardware` is what plans are made for: a preset's name, a file of `measure`, or your own; by default the machine's,
    else the preset "gloo-loopback" where `interface` is "lo" and "ethernet-10g" where it is not.

    `plan` makes the plans: by default `meshmend.plan`, which takes the fastest for the survivors and the payload. Bind
    parameters to it for others, as in `functools.partial(meshmend.plan, planner="row-pairs", cache=PlanCache())`.

    A chip that dies during an all-reduce raises an error on every survivor: within a fraction of a second if its
    process ended, within `timeout` if its cables were cut.

    All-reduces run the plan, one after the other, in the background. Other collectives go through Gloo itself. `abort`
    and `shutdown` end the background thread; `abort` never waits for a plan that is being made.
    """

    def __init__(
        self,
        shape: Sequence[int] | str | None = None,
        chip: Sequence[int] | str | None = None,
        *,
        machine: Machine | Path | str | None = None,
        wrap: bool | Sequence[bool] = False,
        hardware: str | Hardware | None = None,
        plan: PlanFunction = plan,
        timeout: timedelta = timedelta(seconds=10),
        interface: str | None = None,
    ) -> None:
        super().__init__(timeout)
        self._whole, self._chip = find_place(shape, chip, machine, wrap)
        self._interface = interface or os.environ.get(INTERFACE_ENV)
        self._plans = Plans(plan, hardware=choose_hardware(hardware, machine, plan, is_loopback=self.is_loopback))
        self._patience = Patience(most=timeout)
        self._bad_cables: frozenset[Cable] = frozenset()
        self._mesh: Mesh | None = None
        self._group_ranks: list[int] = []
        self._channel: Channel | None = None
        self._engines: dict[int, Engine] = {}
        self._sizes: set[int] = set()
        self._generation = 0
        self._error: Exception | None = None
        # Held briefly, never while a plan is made: `abort` needs it.
        self._guard = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self.timings = Timings()

    @property
    def chip(self) -> Coordinate:
        """Where this process's chip is."""
        return self._chip

    @property
    def timeout(self) -> timedelta:
        """How long an all-reduce may take."""
        return self._timeout

    @property
    def is_loopback(self) -> bool:
        """Whether the members are processes of one machine."""
        return self._interface == "lo"

    @property
    def whole(self) -> Mesh:
        """The machine with all of its chips."""
        return self._whole

    @property
    def hardware(self) -> Hardware:
        """What plans are made for."""
        return self._plans.hardware

    @property
    def mesh(self) -> Mesh:
        """The mesh with the hole that the members leave."""
        if self._mesh is None:
            raise MeshError(f"Chip {name_chip(self._chip)} has no mesh until torchft has called configure.")
        return self._mesh

    def schedule(self, payload_bytes: int) -> Schedule:
        """Return the plan that a payload of this size runs."""
        return self._plans.get(self.mesh, payload_bytes)

    def prepare(self, holes: Sequence[Region | str], payload_bytes: int) -> None:
        """Plan ahead for the loss of each of `holes`, so that `configure` finds its plan made."""
        self._plans.prepare(self._whole, holes, payload_bytes)

    def leave_out(self, cables: Iterable[Cable]) -> None:
        """Plan round these cables from now on, too, as all members do that are told of them by any member.

        If that changes the plan, the group is aborted, and torchft forms the next one.
        """
        before, self._bad_cables = self._bad_cables, frozenset(cables)
        mesh = None if self._bad_cables <= before else self._mesh
        if mesh is not None and without_cables(mesh, self._bad_cables) != mesh:
            self.abort()

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return the name of this kind of group in torch."""
        return "meshmend"

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Form the group again over the members of a quorum, find the hole and plan for it."""
        started = time.time()
        # First, so that nobody waits any more for what this chip will not send.
        self.abort(errored=False)
        try:
            check_store(store_addr, self._patience.now)
            super().configure(
                store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
            )
        except RuntimeError:  # of torch, or a `RendezvousError`
            self._patience.failed()
            raise
        self._patience.succeeded()
        self.timings.configured_at = time.time()
        self.timings.configure_s = self.timings.configured_at - started

    def form(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        """Find the hole that the members leave, connect them and plan; `configure` calls this."""
        group = self._meet(store, rank, world_size)
        with self._guard:
            self._generation += 1
            self._error = None
            self._engines = {}
            # Engines share a channel: whichever plan a payload runs, all members count its calls alike.
            self._channel = Channel(group)
        started = time.time()
        # A member that has reduced nothing yet plans too: a mesh without a plan must fail here for all members alike,
        # or those who went on would wait for the others.
        reduced = sorted(self._sizes)
        for payload_bytes in reduced or [1]:
            self._engine(payload_bytes)
        self._sizes = set(reduced)
        self.timings.plan_s = time.time() - started
        return group

    def _meet(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        """Find out where the members' chips are, and connect to them."""
        chips, cables = self._exchange(store, rank, world_size)
        self._mesh = without_cables(self._holed(chips), cables)
        self._group_ranks = [0] * world_size
        for member, chip in enumerate(chips):
            self._group_ranks[self._mesh.rank(chip)] = member
        # Gloo's timeout is for each connection. Everybody was there a moment ago.
        patience = min(2 * self._patience.now, self._timeout)
        interface = self._interface
        return gloo_group(store, rank, world_size, connect_timeout=patience, timeout=self._timeout, interface=interface)

    def _exchange(self, store: dist.Store, rank: int, world_size: int) -> tuple[list[Coordinate], frozenset[Cable]]:
        """Exchange coordinates with the other members, and cables in quarantine: what any of them knows counts."""
        wrap = "".join(str(int(w)) for w in self._whole.wrap)
        terms = f"meshmend {__version__}, {describe_machine(self._whole)}, wrap {wrap}, {self._plans}"
        own = Introduction(self._chip, terms, self._bad_cables, Introduction.now_ms())
        words = exchange(store, rank, world_size, str(own), self._patience.now)
        members = [Introduction.read(word) for word in words]
        self.timings.formed_ms = members[0].at_ms
        return [member.chip for member in members], compare(own, members)

    def _holed(self, chips: list[Coordinate]) -> Mesh:
        """Return the machine without the chips that are not members."""
        for chip in chips:
            if chips.count(chip) > 1:
                raise MeshError(f"{chips.count(chip)} members say that they are chip {name_chip(chip)}.")
        here = set(chips)
        missing = [self._whole.chip(rank) for rank in range(self._whole.n_chips)]
        return self._whole.fail(*(chip for chip in missing if chip not in here))

    def _engine(self, payload_bytes: int) -> Engine:
        """Return the engine for payloads of this size; made at most once for each plan."""
        size = Plans.size(payload_bytes)
        with self._guard:
            if size in self._engines:
                return self._engines[size]
            self._sizes.add(size)
            mesh, members, channel, generation = self.mesh, self._group_ranks, self._channel, self._generation
        if channel is None:
            raise MeshmendError(f"Chip {name_chip(self._chip)} has left its group: torchft forms the next one.")
        engine = Engine(
            self._plans.get(mesh, payload_bytes),
            mesh.rank(self._chip),
            None,
            group_ranks=members,
            timeout=self._timeout,
            channel=channel,
        )
        with self._guard:
            if self._generation != generation:
                raise MeshmendError("The group was formed again while this all-reduce was planned.")
            return self._engines.setdefault(size, engine)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> MeshWork:
        """Reduce tensors in place, in the background; the work's future gives the tensors or the error."""
        op = getattr(opts, "reduceOp", opts)
        op = getattr(op, "op", op)
        check_tensors(tensors, op)
        payload_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        with self._guard:
            if self._error is not None:
                raise self._error
            generation = self._generation
        engine = self._engine(payload_bytes)

        def work() -> None:
            try:
                # The payload of an earlier failure may sit in the connections: nothing may run on them any more.
                if self._error is not None or self._generation != generation:
                    raise self._error or MeshmendError("The group was formed again before this all-reduce began.")
                reduce_tensors(tensors, engine, op)
            except Exception as error:
                self._fail(error, generation)
                fail_future(future, error)
            else:
                future.set_result(tensors)

        with self._guard:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="meshmend")
            self._worker.submit(work)
        return MeshWork(future, self._chip)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> MeshWork:
        """Reduce tensors in place as one payload."""
        return self.allreduce(tensors, opts)

    def _fail(self, error: Exception, generation: int) -> None:
        with self._guard:
            if self._error is None and self._generation == generation:
                self._error = error
                self.timings.failed_at = time.time()

    def errored(self) -> Exception | None:
        """Return the error that makes this group useless until it is configured again."""
        return self._error

    def abort(self, errored: bool = True) -> None:
        """Close all connections: whatever waits, here and on other chips, ends with an error."""
        with self._guard:
            channel, self._channel = self._channel, None
            worker, self._worker = self._worker, None
            left = MeshmendError(f"Chip {name_chip(self._chip)} left the group.")
            if errored and self._error is None:
                self._error = left
        if channel is not None:
            channel.fail(left)
            channel.close()
        if worker is not None:
            # What is queued is not dropped: it ends with the error, and so do those who wait for it.
            worker.shutdown(wait=False)
        super().abort(errored=errored)

    def shutdown(self) -> None:
        """Close all connections and end the background thread."""
        self.abort()
