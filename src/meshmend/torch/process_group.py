"""`MeshProcessGroup`: a torchft process group that plans its all-reduce for whatever chips have survived.

torchft forms the quorum, redoes steps that failed and heals chips that come back. Each time the members change it
calls `configure`, or from its next release on `reconfigure`: the chips exchange their coordinates through the store,
so each of them finds the same hole and makes the same plan.

The guarantee assumes that every member has the same shape or machine, hardware, `plan` and meshmend version (checked);
that no two live members have the same coordinate (checked); that the survivors are connected (otherwise `PlanError`,
and no step commits until enough chips are back); and that members call the same all-reduces in the same order with
equal shapes, dtypes and operations (checked at each call, before data moves).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshmend.cost import Hardware
from meshmend.errors import MeshError, MeshmendError, name_chip
from meshmend.launch.cables import CableWatch, address_of
from meshmend.machines import Machine
from meshmend.planning import PlanFunction, plan
from meshmend.schedule import Schedule
from meshmend.topology import Cable, Mesh, Region
from meshmend.torch.collective import check_tensors
from meshmend.torch.membership import MemberInfo, introduce, neighbours, survivors, with_rates
from meshmend.torch.mesh_group import MeshGroup, bytes_of
from meshmend.torch.options import MeshOptions
from meshmend.torch.payload import device_of, kind_of
from meshmend.torch.plans import Plans
from meshmend.torch.private import gloo_group
from meshmend.torch.private_torchft import ReconfiguredGroup
from meshmend.torch.rendezvous import Patience, check_store
from meshmend.torch.work import MeshWork


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

    `MeshOptions` explains all that it shares with the backend: where the chip is, the hardware that plans are made for,
    what makes them, and the network interface. A chip that the machine calls failed cannot join.

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
        wrap: bool | Sequence[bool] | None = None,
        hardware: str | Hardware | None = None,
        plan: PlanFunction = plan,
        timeout: timedelta = timedelta(seconds=10),
        interface: str | None = None,
    ) -> None:
        super().__init__(timeout)
        self._options = MeshOptions(shape, chip, machine, wrap, hardware, plan, interface)
        self.whole, self.chip = self._options.position()
        """The machine with all of its chips, and where this process's is."""
        self._plans = self._options.plans()
        self._patience = Patience(most=timeout)
        self._bad_cables: frozenset[Cable] = frozenset()
        self._watch = CableWatch(self.chip)
        self._mesh: Mesh | None = None
        self._group: MeshGroup | None = None
        """The group of this quorum; None before the first one and after `abort`."""
        self._sizes: set[int] = set()
        """Sizes of payloads that were reduced: each new group plans for them at once."""
        self._error: Exception | None = None
        # Held briefly, never while a plan is made: `abort` needs it.
        self._guard = threading.Lock()
        self.timings = Timings()

    @property
    def timeout(self) -> timedelta:
        """How long an all-reduce may take."""
        return self._timeout

    @property
    def is_loopback(self) -> bool:
        """Whether the members are processes of one machine."""
        return self._options.is_loopback

    @property
    def hardware(self) -> Hardware:
        """The hardware that plans are made for."""
        return self._plans.hardware

    @property
    def mesh(self) -> Mesh:
        """The mesh with the hole that the members leave, and what is known of its cables by now."""
        if self._mesh is None:
            raise MeshError(f"Chip {name_chip(self.chip)} has no mesh until torchft has formed its group.")
        group = self._group
        return self._mesh if group is None else group.mesh

    def schedule(self, payload_bytes: int) -> Schedule:
        """Return the plan that a payload of this size runs."""
        return self._plans.get(self.mesh, payload_bytes)

    def prepare(self, holes: Sequence[Region | str], payload_bytes: int) -> None:
        """Plan ahead for the loss of each of `holes`, so that `configure` finds its plan made."""
        self._plans.prepare(self.whole, holes, payload_bytes)

    def leave_out(self, cables: Iterable[Cable]) -> None:
        """Plan round these cables from now on, too, as all members do that are told of them by any member.

        If that changes the plan, the group is aborted, and torchft forms the next one.
        """
        before, self._bad_cables = self._bad_cables, frozenset(cables)
        mesh = None if self._bad_cables <= before else self._mesh
        if mesh is not None and mesh.with_failures(failed_cables=self._bad_cables) != mesh:
            self.abort()

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return the name of this kind of group in torch."""
        return "meshmend"

    @contextmanager
    def forming(self, store_addr: str) -> Iterator[None]:
        """Leave the group before, wait no longer than patience lasts for the new one, and note what that took."""
        started = time.time()
        # First, so that nobody waits any more for what this chip will not send.
        self.abort(errored=False)
        try:
            check_store(store_addr, self._patience.now)
            yield
        except RuntimeError:  # of torch, or a `RendezvousError`
            self._patience.failed()
            raise
        self._patience.succeeded()
        self.timings.configured_at = time.time()
        self.timings.configure_s = self.timings.configured_at - started

    def form(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        """Find the hole that the members leave, connect them and plan."""
        interface = self._options.socket_interface()
        own = MemberInfo.of(self.chip, self.whole, self._plans, self._bad_cables, address_of(interface))
        members = introduce(store, rank, world_size, own, self._patience.now)
        self.timings.formed_ms = members[0].at_ms
        # Cables in quarantine: what any of the members knows counts.
        self._mesh = mesh = survivors(self.whole, members)
        # Gloo's timeout is for each connection. Everybody was there a moment ago.
        patience = min(2 * self._patience.now, self._timeout)
        gloo = gloo_group(store, rank, world_size, connect_timeout=patience, timeout=self._timeout, interface=interface)
        group = MeshGroup(
            mesh,
            [member.chip for member in members],
            gloo,
            self._plans,
            self._timeout,
            watch=self._watch,
            with_rates=lambda rates: with_rates(mesh, rates),
        )
        self._watch.begin(own.address, neighbours(mesh, own, members))
        with self._guard:
            self._group, self._error = group, None
            sizes = sorted(self._sizes)
        started = time.time()
        # A member that has reduced nothing yet plans too: a mesh without a plan must fail here for all members alike,
        # or those who went on would wait for the others.
        for payload_bytes in sizes or [1]:
            group.prepare(payload_bytes)
        self.timings.plan_s = time.time() - started
        return gloo

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> MeshWork:
        """Reduce tensors in place, in the background; the work's future gives the tensors or the error."""
        op = kind_of(getattr(opts, "reduceOp", opts))
        check_tensors(tensors, op)
        with self._guard:
            group = self._group
            if self._error is not None or group is None:
                raise self._error or MeshmendError(f"Chip {name_chip(self.chip)} has left its group.")
            self._sizes.add(Plans.size(bytes_of(tensors)))

        def reduce() -> list[torch.Tensor]:
            # The payload of an earlier failure may sit in the connections: nothing may run on them any more.
            if self._error is not None:
                raise self._error
            try:
                group.all_reduce(tensors, op)
            except Exception as error:
                self._fail(error, group)
                raise
            return tensors

        return MeshWork(group.start(reduce, device_of(tensors)), self.chip)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> MeshWork:
        """Reduce tensors in place as one payload."""
        return self.allreduce(tensors, opts)

    def _fail(self, error: Exception, group: MeshGroup) -> None:
        with self._guard:
            if self._error is None and self._group is group:
                self._error = error
                self.timings.failed_at = time.time()

    def errored(self) -> Exception | None:
        """Return the error that makes this group useless until it is configured again."""
        return self._error

    def abort(self, errored: bool = True) -> None:
        """Close all connections: whatever waits, here and on other chips, ends with an error."""
        left = f"Chip {name_chip(self.chip)} left the group."
        self._watch.end()
        with self._guard:
            group, self._group = self._group, None
            if errored and self._error is None:
                self._error = MeshmendError(left)
        if group is not None:
            group.close(abort=True, why=left)
        super().abort(errored=errored)

    def shutdown(self) -> None:
        """Close all connections and end the background thread."""
        self.abort()
