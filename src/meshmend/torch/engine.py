"""The PyTorch engine: one process per chip runs its part of a schedule over point-to-point sends and receives.

Before anything moves, all members of the group agree on what they are about to do: the plan when an engine is made,
and each call's plan, operation, dtype and shapes. Invalid calls are refused; only a failure of the network counts
as a lost chip.

Made for Gloo. It works with any group whose `send` and `recv` match messages by tag and whose `wait` blocks the caller.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist

from meshmend import __version__
from meshmend.errors import DisagreementError, MeshmendError, ParameterError, ScheduleError
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.verify import ensure_proven
from meshmend.torch.channel import MAX_MESSAGES, Channel, Deadline, NewsError, TransportError
from meshmend.torch.lost import Reports
from meshmend.torch.payload import Flat, check_payload, combine_of, describe, kind_of, memory_of, overwrite
from meshmend.torch.private import Transport
from meshmend.torch.program import ChipProgram, compile_program
from meshmend.torch.run import ProgramRun
from meshmend.torch.staging import Staged

DEFAULT_TIMEOUT = timedelta(seconds=60)


class Engine:
    """Runs one schedule on one rank, any number of times.

    `group` is a process group with one member per chip; `group_ranks[r]` is the group's number for the schedule's
    rank r (the same number where it is left out). Making an engine is a collective call, as making a group is: all
    members make theirs, in the same order, and each raises if they disagree. Engines may share a group with
    each other and with other messages, as long as those have tags below 2³⁰.

    After a `LostChipError` the group's connections are closed, so that every other chip detects it within milliseconds.
    The engine is then unusable, and raises an error that says it. All other errors leave it usable.

    `channel` is for engines that run one at a time: they share one, and making them is not a collective call.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        group: dist.ProcessGroup | Transport | None,
        *,
        group_ranks: Sequence[int] | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        channel: Channel | None = None,
    ) -> None:
        if timeout <= timedelta(0):
            raise ParameterError(f"The engine's timeout is {timeout}: expected more than 0.")
        self.schedule = schedule
        self.rank = rank
        self.timeout = timeout
        self._members = list(range(schedule.mesh.n_chips)) if group_ranks is None else list(group_ranks)
        is_own = channel is None
        if channel is None:
            coordinates = map(schedule.mesh.chip, range(schedule.mesh.n_chips))
            chips = dict(zip(self._members, coordinates, strict=False))
            channel = Channel(group, chips, Reports.of(group, chips))
        self._channel = channel
        self._plan = ""
        refusal: MeshmendError | None = None
        try:
            self._program: ChipProgram = self._compile()
        except MeshmendError as error:
            refusal = error
        if is_own:
            # Also with a plan that is refused here: the others need to know.
            words = f"{schedule!r}, {self._plan}" if refusal is None else f"refused, {refusal}"
            try:
                with self._channel.in_order(self._channel.ticket()):
                    self._agree(words, Deadline(timeout))
            except DisagreementError as error:
                raise refusal or error from None
        if refusal is not None:
            raise refusal

    def _compile(self) -> ChipProgram:
        """Check the schedule against the group, prove it, and return this rank's program."""
        schedule, channel = self.schedule, self._channel
        n_chips = schedule.mesh.n_chips
        if len(self._members) != n_chips:
            raise ScheduleError(
                f"{schedule!r} needs a group rank for each of {n_chips} chips: got {len(self._members)}."
            )
        if channel.size != n_chips:
            raise ScheduleError(
                f"{schedule!r} is for {n_chips} chips, but the process group has {channel.size} members. "
                f"Plan for the mesh that this group serves, or make a group of the chips that the plan serves."
            )
        if sorted(self._members) != list(range(n_chips)):
            raise ScheduleError(f"Expected each group rank from 0 to {n_chips - 1} once, got {self._members}.")
        if not 0 <= self.rank < n_chips or self._members[self.rank] != channel.rank:
            raise ScheduleError(
                f"Rank {self.rank} of the schedule is not rank {channel.rank} of the group, which this process is. "
                f"Expected rank {self._members.index(channel.rank)}; group_ranks says which is which."
            )
        ensure_proven(schedule)
        program = compile_program(schedule, self.rank)
        if len(program.sends) > MAX_MESSAGES or len(program.receives) > MAX_MESSAGES:
            raise ScheduleError(f"{schedule!r} has more than {MAX_MESSAGES:,} messages for one chip.")
        self._plan = f"plan {digest_of(schedule, self._members)} (meshmend {__version__})"
        return program

    @property
    def error(self) -> Exception | None:
        """The error that broke this engine, if any."""
        return self._channel.error

    def all_reduce(self, payload: Annotated[torch.Tensor, "[...]"], op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce a contiguous tensor in place over all chips; every chip ends with the same bits.

        Raises `PayloadError` for a tensor that cannot be reduced, and `DisagreementError` on every chip if they do not
        pass equal ones: nothing has been sent then. Raises `LostChipError` within the engine's timeout if a chip does
        not respond; the payload is then invalid. Calls of several threads run in the order in which they were made.
        """
        self.need_all_reduce()
        kind = kind_of(op)
        check_payload(payload, kind)
        self.run(payload, kind, describe([payload], kind))

    def need_all_reduce(self) -> None:
        """Raise `ScheduleError` if the schedule is of another collective."""
        if not self.schedule.collective.is_all_reduce:
            raise ScheduleError(
                f"This engine runs {self.schedule!r}, which is no all-reduce. Make an engine with meshmend.plan(mesh)."
            )

    def run(
        self, payload: Annotated[torch.Tensor, "[...]"], kind: Any, words: str, *, timeout: timedelta | None = None
    ) -> float:
        """Run the schedule, of whatever collective, on a payload that has been checked; with no kind it is moved.

        Return the seconds that messages took, without the wait for members that came late.

        `words` say what the payload is, and members agree on them. After a reduce-scatter, chunks that this chip does
        not own are scratch: partial sums that mean nothing.
        """
        ticket = self._channel.ticket()
        # In inference mode other threads could not write to what is made here.
        with self._channel.in_order(ticket), torch.inference_mode(False), torch.no_grad():
            flat = memory_of(payload)
            staged = None if flat.device.type == "cpu" else self._stage(flat, kind)
            # A device may still compute what is to be reduced.
            if staged is not None:
                staged.wait()
            deadline = Deadline(timeout or self.timeout)
            self._agree(f"call {ticket}, {words}, {self._plan}", deadline, hears_news=True)
            combine, started = torch.Tensor.copy_ if kind is None else combine_of(kind), time.monotonic()
            try:
                ProgramRun(self._program, self._channel, self._members, flat, combine, deadline, staged).go()
            except TransportError as error:
                raise self._channel.lose(error, str(self.schedule.mesh)) from error
            except BaseException as error:
                self._break(error)
                raise
            took_s = time.monotonic() - started
            if kind == dist.ReduceOp.AVG:
                n_chips = self.schedule.mesh.n_chips
                if staged is not None:
                    staged.divide(n_chips)
                for first, last in self._sums(flat.numel()) if staged is None else ():
                    flat[first:last] /= n_chips
            overwrite(payload, flat)
        return took_s

    def _stage(self, flat: Flat, kind: Any) -> Staged:
        """Begin to copy a payload from its device: all of it, or this chip's own chunks where payloads are only moved.

        A piece of the result returns when it is complete; that of a mean, when it has been divided.
        """
        program, n = self._program, flat.numel()
        if kind is None:
            down, up = self._chunks(n), self._chunks(n, own=False)
        else:
            down, up = [(0, n)], self._sums(n)
        staged = Staged(flat, self._channel.pinned, down, up)
        if kind != dist.ReduceOp.AVG:
            staged.expect((program.bound(r.first, n), program.bound(r.last, n)) for r in program.receives)
        return staged

    def _sums(self, n_elements: int) -> list[tuple[int, int]]:
        """Return which elements are sums at the end of a reduction: all, or this chip's shard."""
        return [(0, n_elements)] if self.schedule.collective.is_all_reduce else self._chunks(n_elements)

    def _chunks(self, n_elements: int, *, own: bool = True) -> list[tuple[int, int]]:
        """Return where the elements of chunks are that this chip owns, or those of all others."""
        chosen = (self.schedule.owners == self.rank) == own
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).reshape(-1, 2).tolist()
        return [
            (self._program.bound(first, n_elements), self._program.bound(last, n_elements)) for first, last in edges
        ]

    def _agree(self, words: str, deadline: Deadline, *, hears_news: bool = False) -> None:
        """Agree on what comes next; close the connections where that fails, unless all members have seen why."""
        try:
            self._channel.agree(words, deadline, hears_news=hears_news)
        except (DisagreementError, NewsError):
            raise
        except TransportError as error:
            self._channel.close()
            raise self._channel.lose(error, str(self.schedule.mesh)) from error
        except BaseException as error:
            self._channel.close()
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        """Record what ended a call half-way: not a lost chip, but the connections are closed as after one."""
        self._channel.fail(MeshmendError(f"An earlier call of this engine ended half-way: {error!r}."))

    def close(self) -> None:
        """Close the group's connections: every pending wait ends at once, here and at the neighbours.

        The engine is unusable afterwards.
        """
        self._channel.fail(MeshmendError("This engine was closed: make another on a new group."))
        self._channel.close()


def digest_of(schedule: Schedule, members: Sequence[int]) -> str:
    """Return a digest of all that decides which messages an engine sends, and what they mean."""
    mesh = schedule.mesh
    facts: list[object] = [mesh.shape, mesh.wrap, mesh.coords.tolist(), schedule.total_chunks, list(members)]
    facts += [schedule.repeats, schedule.period, str(schedule.collective)]
    found = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    schedule = schedule.template
    for column in (schedule.step, schedule.src, schedule.dst, schedule.first_chunk, schedule.n_chunks, schedule.op):
        found.update(column.tobytes())
    if schedule.collective is not Collective.ALL_REDUCE:  # which owners mean nothing to
        found.update(schedule.owners.tobytes())
    return found.hexdigest()
