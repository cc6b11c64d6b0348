"""The members of a process group and the mesh that they form: collectives that run plans, in one order of calls.

Under the backend of torch.distributed and under torchft alike; a group that is formed again is another `MeshGroup`.
Members number themselves as the group does; plans number chips. `members[r]` is the member on the chip of rank r.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshmend.errors import Coordinate, MeshmendError, PlanError
from meshmend.launch.cables import CableWatch, tell, told
from meshmend.schedule import Collective, Schedule
from meshmend.topology import Mesh
from meshmend.torch.channel import FLAGGED, QUIET, Channel, Deadline, NewsError, TransportError
from meshmend.torch.collective import reduce_tensors
from meshmend.torch.engine import Engine
from meshmend.torch.lost import Reports
from meshmend.torch.payload import NAMES, combine_of, describe, overwrite
from meshmend.torch.plans import Plans
from meshmend.torch.program import compile_program
from meshmend.torch.run import ProgramRun
from meshmend.torch.slow import PATIENCE, Pace, find_rates
from meshmend.torch.work import Worker

T = TypeVar("T")
Tensors = Sequence[torch.Tensor]


class MeshGroup:
    """Runs collectives over the mesh that a group's members form. Arguments have been checked by the caller.

    `chips[m]` is the chip of member m, in the coordinates of the whole machine; `reports` finds a lost one. `watch` has
    news of this chip's cables. `with_rates` returns the members' mesh for the rates of some cables of the machine, 0
    for dead ones; None where they form none.
    """

    def __init__(
        self,
        mesh: Mesh,
        chips: Sequence[Coordinate],
        group: dist.ProcessGroup,
        plans: Plans,
        timeout: timedelta,
        reports: Reports | None = None,
        watch: CableWatch | None = None,
        with_rates: Callable[[Mapping[str, Fraction]], Mesh | None] = lambda _: None,
    ) -> None:
        self.mesh = self._formed = mesh
        self.members = tuple(sorted(range(len(chips)), key=chips.__getitem__))
        self.timeout = timeout
        # Engines share a channel: whichever plan a payload runs, all members count its calls alike.
        self._channel = Channel(group, dict(enumerate(chips)), reports)
        self._member = self._channel.rank
        self._rank = self.members.index(self._member)
        self._plans = plans
        self._engines: dict[tuple[object, ...], Engine] = {}
        self._worker = Worker(self._channel)
        self._with_rates = with_rates
        self._chips = chips
        self._watch = watch = watch or CableWatch(chips[self._member])
        self._pace = Pace()
        self._told: dict[str, Fraction] = {}
        """The rates of dead and slow cables that this member has told the others."""
        self._channel.dead_cables = lambda: watch.dead
        self._channel.has_news = lambda: watch.rates != self._told or self._is_due()

    def start(
        self, job: Callable[[], list[torch.Tensor]], device: torch.device | None = None
    ) -> torch.futures.Future[list[torch.Tensor]]:
        """Run a job in the background, after those that were started before it; raise if the group is broken.

        A job with tensors of a device comes after what the caller's stream has to do now.
        """
        if self._channel.error is not None:
            raise self._channel.error
        return self._worker.start(job, device)

    @property
    def error(self) -> Exception | None:
        """The error that broke this group, if any."""
        return self._channel.error

    def prepare(self, payload_bytes: int) -> Engine:
        """Return the engine for all-reduces of this size, which is made now if it was not before."""
        size = Plans.size(payload_bytes)
        return self._engine((Collective.ALL_REDUCE, size), lambda: self._plans.get(self.mesh, size))

    def all_reduce(self, tensors: Tensors, op: Any, timeout: timedelta | None = None) -> None:
        """Reduce tensors in place, as one payload per dtype."""
        size = Plans.size(bytes_of(tensors))
        run = partial(self._run, (Collective.ALL_REDUCE, size), lambda: self._plans.get(self.mesh, size))
        reduce_tensors(tensors, run, op, timeout=timeout)

    def broadcast(self, tensors: Tensors, root: int, timeout: timedelta | None) -> None:
        """Give everybody the root's tensors."""
        size, rank = Plans.size(bytes_of(tensors)), self.members.index(root)
        run = partial(self._run, ("broadcast", rank, size), lambda: self._plans.broadcast(self.mesh, rank, size))
        for tensor in tensors:
            words = f"broadcast from {root}, {describe([tensor], None)}"
            held = tensor if tensor.is_contiguous() else tensor.contiguous()
            run(held, None, words, timeout=timeout)
            if held is not tensor:
                overwrite(tensor, held.reshape(-1))

    def all_gather(self, outputs: Tensors, shards: Tensors, timeout: timedelta | None) -> None:
        """Fill each output with everybody's shard, in order of member. All are of one dtype."""
        n, words = len(self.members), f"shards of {describe(shards, None)}"
        size = Plans.size(n * bytes_of(shards))
        run = self._sharded(Collective.ALL_GATHER, size)
        if len(outputs) == 1 and outputs[0].is_contiguous():
            own = outputs[0].detach().view(n, -1)[self._member]
            if own.data_ptr() != shards[0].data_ptr() or not shards[0].is_contiguous():
                overwrite(own, shards[0].detach().reshape(-1))
            run(outputs[0], None, words, timeout=timeout)
            return
        packed = shards[0].new_empty((n, sum(shard.numel() for shard in shards)))
        torch.cat([shard.detach().reshape(-1) for shard in shards], out=packed[self._member])
        run(packed, None, words, timeout=timeout)
        parts = packed.split([shard.numel() for shard in shards], dim=1)
        for output, part in zip(outputs, parts, strict=True):
            overwrite(output, part.reshape(-1))

    def gather_lists(self, outputs: Tensors, shard: torch.Tensor, timeout: timedelta | None) -> None:
        """Fill output g with the shard of member g."""
        packed = shard.new_empty((len(outputs), shard.numel()))
        self.all_gather([packed], [shard], timeout)
        for output, part in zip(outputs, packed, strict=True):
            overwrite(output, part)

    def reduce_scatter(self, outputs: Tensors, payloads: Sequence[Tensors], op: Any, timeout: timedelta | None) -> None:
        """Fill each output with the sum (mean, …) of this member's shard; `payloads[i]` is everybody's, in a row.

        It is given in one tensor or in one per member, and left as it is. All are of one dtype.
        """
        n = len(self.members)
        words = f"reduce-scatter, {NAMES[op]} of shards of {describe(outputs, None)}"
        run = self._sharded(Collective.REDUCE_SCATTER, Plans.size(n * bytes_of(outputs)))
        packed = outputs[0].new_empty((n, sum(output.numel() for output in outputs)))
        parts = packed.split([output.numel() for output in outputs], dim=1)
        for part, payload in zip(parts, payloads, strict=True):
            if len(payload) == 1:
                part.copy_(payload[0].detach().reshape(n, -1))
            else:
                for row, shard in zip(part, payload, strict=True):
                    row.copy_(shard.detach().reshape(-1))
        run(packed, op, words, timeout=timeout)
        for output, part in zip(outputs, parts, strict=True):
            overwrite(output, part[self._member])

    def time_run(self, schedule: Schedule, payload_bytes: int) -> float:
        """Run transfers that need not be a collective, in the order of calls; return the seconds that it took here."""
        program = compile_program(schedule, self._rank)
        flat = torch.zeros(max(1, payload_bytes // 4))

        def run(channel: Channel, deadline: Deadline) -> float:
            channel.agree("ready to measure", deadline)
            started = time.monotonic()
            channel.agree(f"measuring, {schedule.n_steps} steps, {payload_bytes} bytes", deadline)
            ProgramRun(program, channel, self.members, flat, combine_of(dist.ReduceOp.SUM), deadline).go()
            return time.monotonic() - started

        return self._call(run)

    def exchange(self, description: str, own: bytes) -> list[bytes]:
        """Return what each member passed, by rank of the group: as many bytes from each, of what `description` says."""
        return self._call(lambda channel, deadline: channel.gather(description, own, deadline))

    def _call(self, what: Callable[[Channel, Deadline], T]) -> T:
        """Run a call of all members after those that were started before it, and return its result."""
        found: list[T] = []

        def job() -> list[torch.Tensor]:
            found.append(self._now(what))
            return []

        self.start(job).wait()
        return found[0]

    def _now(self, what: Callable[[Channel, Deadline], T]) -> T:
        """Run a call of all members in this thread, and return its result."""
        try:
            with self._channel.in_order(self._channel.ticket()):
                return what(self._channel, Deadline(self.timeout))
        except TransportError as error:
            self._channel.close()
            raise self._channel.lose(error, str(self.mesh)) from error

    def _sharded(self, collective: Collective, size: int) -> Callable[..., None]:
        plan = lambda: self._plans.shards(self.mesh, collective, self.members, size)  # noqa: E731  # as of this mesh
        return partial(self._run, (collective, size), plan)

    def _run(
        self,
        key: tuple[object, ...],
        plan: Callable[[], Any],
        payload: torch.Tensor,
        kind: Any,
        words: str,
        **named: Any,
    ) -> None:
        """Run the plan for the mesh as it is now; where a member has news of its cables, all hear them first."""
        while True:
            try:
                engine = self._engine(key, plan)
            except PlanError:
                if self.mesh is self._formed:
                    raise
                self._change(self._formed)  # a detour is slower than a plan around a cable, and faster than none
                continue
            try:
                self._pace.note(key, engine.run(payload, kind, words, **named), time.monotonic())
                return
            except NewsError:
                self._hear()

    def _is_due(self) -> bool:
        """Return whether this member asks for its group's cables to be measured."""
        return len(self._watch.answering) > 0 and self._formed.n_cables > 1 and self._pace.is_due(time.monotonic())

    def _hear(self) -> None:
        """Tell all members which of this chip's cables are dead or slow, and plan for what any of them has told.

        All do this at the same place among their calls, and from the same words: so they plan for the same mesh. Where
        any member asks for it, they measure their cables.
        """
        self._told = self._watch.rates
        words = tell(self._told) + (FLAGGED if self._is_due() else QUIET)
        heard = self._now(lambda channel, deadline: channel.gather("rates of cables", words, deadline))
        rates = told(word[:-1] for word in heard)
        if any(word.endswith(FLAGGED) for word in heard):
            self._measure(rates)
        mesh = self._with_rates(rates) if rates else None
        # Where too little is left, messages that were to take a dead cable make a detour.
        self._change(mesh if mesh is not None and mesh.is_connected else self._formed)

    def _measure(self, known: dict[str, Fraction]) -> None:
        """Measure the group's cables with all members. What a cable's ends learn, they tell before the next call."""
        started = time.monotonic()
        dead = {name: rate for name, rate in known.items() if rate == 0}
        mesh, rates = self._with_rates(dead) if dead else self._formed, known
        if mesh is not None:
            answering, timeout = self._watch.answering, max(self.timeout, PATIENCE)
            find = partial(find_rates, mesh, self.members, self._chips, known, answering, timeout)
            rates = self._now(lambda channel, _: find(channel))
            self._watch.learn(rates)
        now = time.monotonic()
        self._pace.measured(now, now - started, has_changed=rates != known)

    def _change(self, mesh: Mesh) -> None:
        if mesh != self.mesh:
            self.mesh = mesh
            self._engines.clear()
            self._pace.forget()

    def _engine(self, key: tuple[object, ...], plan: Callable[[], Any]) -> Engine:
        """Return the engine for a collective and a size of payload; made at most once, in the background thread."""
        key = (self._plans.hardware.priced, *key)
        if key not in self._engines:
            self._engines[key] = Engine(
                plan(), self._rank, None, group_ranks=self.members, timeout=self.timeout, channel=self._channel
            )
        return self._engines[key]

    def close(self, *, abort: bool, why: str = "This process group was closed: make another.") -> None:
        """Take no more calls; with `abort`, also close all connections, so that those under way end with an error."""
        self._worker.close(MeshmendError(why), abort=abort)


def bytes_of(tensors: Tensors) -> int:
    """Return the size of some tensors together.

    >>> bytes_of([torch.ones(3), torch.ones(2, dtype=torch.int64)])
    28
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
