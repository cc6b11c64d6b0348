"""The PyTorch engine: one process per chip runs its part of a schedule over point-to-point sends and receives.

Before anything moves, all members of the group agree on what they are about to do: the plan when an engine is made,
and each call's plan, operation, dtype and shapes. Invalid calls are refused; only a failure of the network counts
as a lost chip.

Made for Gloo. It works with any group whose `send` and `recv` match messages by tag and whose `wait` blocks the caller.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Annotated, Any

import torch
import torch.distributed as dist

from meshmend import __version__
from meshmend.errors import Coordinate, DisagreementError, LostChipError, MeshmendError, ParameterError, ScheduleError
from meshmend.schedule import Collective, Schedule
from meshmend.schedule.verify import ensure_proven
from meshmend.torch.channel import MAX_MESSAGES, Channel, Deadline, TransportError
from meshmend.torch.payload import check_payload, combine_of, describe, kind_of, memory_of, overwrite
from meshmend.torch.program import ChipProgram, compile_program
from meshmend.torch.run import ProgramRun

DEFAULT_TIMEOUT = timedelta(seconds=60)


class Engine:
    """Runs one schedule on one rank, any number of times.

    `group` is a process group with one member per chip; `group_ranks[r]` is the group's number for the schedule's
    rank r (the same number where it is left out). Making an engine is a collective call, as making a group is: all
    members make theirs, in the same order, and each raises if they disagree. Engines may share a group with
    each other and with other messages, as long as those have tags below 2³⁰.

    After a `LostChipError` the group's connections are closed, so that every other chip detects it within
    milliseconds: the engine is then unusable, and says so. All other errors leave it usable.

    `channel` is for engines that run one at a time: they share one, and making them is not a collective call.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        group: Any,
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
        self._channel = Channel(group) if channel is None else channel
        self._members = list(range(schedule.mesh.n_chips)) if group_ranks is None else list(group_ranks)
        self._plan = ""
        self._worker: ThreadPoolExecutor | None = None
        self._guard = threading.Lock()
        refusal: MeshmendError | None = None
        try:
            self._program: ChipProgram = self._compile()
        except MeshmendError as error:
            refusal = error
        if channel is None:
            # Also with a plan that is refused here: the others need to know.
            words = f"{schedule!r}, {self._plan}" if refusal is None else f"refused, {refusal}"
            try:
                with self._channel.turn(self._channel.ticket()):
                    self._agree(words, Deadline(timeout))
            except DisagreementError as error:
                raise refusal or error from None
        if refusal is not None:
            raise refusal

    def _compile(self) -> ChipProgram:
        """Check the schedule against the group, prove it, and return this rank's program."""
        schedule, channel = self.schedule, self._channel
        n_chips = schedule.mesh.n_chips
        if schedule.collective is not Collective.ALL_REDUCE:
            raise ScheduleError(f"The engine runs all-reduce schedules: got {schedule.collective}.")
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
        not respond; the payload is then invalid. Calls run in the order in which they and `start` were called.
        """
        kind = kind_of(op)
        check_payload(payload, kind)
        self.reduce(payload, kind, describe([payload], kind))

    def reduce(self, payload: Annotated[torch.Tensor, "[...]"], kind: Any, words: str) -> None:
        """Reduce a payload that has been checked; `words` say what it is, and members agree on them."""
        self._reduce(payload, kind, words, self._channel.ticket())

    def _reduce(self, payload: torch.Tensor, kind: Any, words: str, ticket: int) -> None:
        # In inference mode other threads could not write to what is made here.
        with self._channel.turn(ticket), torch.inference_mode(False), torch.no_grad():
            deadline = Deadline(self.timeout)
            self._agree(f"call {ticket}, {words}, {self._plan}", deadline)
            flat = memory_of(payload)
            run = ProgramRun(self._program, self._channel, self._members, flat, combine_of(kind), deadline)
            try:
                run.go()
            except TransportError as error:
                raise self._lost(error) from error
            except BaseException as error:
                self._break(error)
                raise
            if kind == dist.ReduceOp.AVG:
                flat /= self.schedule.mesh.n_chips
            overwrite(payload, flat)

    def _agree(self, words: str, deadline: Deadline) -> None:
        try:
            self._channel.agree(words, deadline)
        except DisagreementError:
            raise
        except TransportError as error:
            self._channel.close()
            raise self._lost(error) from error
        except BaseException as error:
            self._channel.close()
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        """Record what ended a call half-way: not a lost chip, but the connections are closed as after one."""
        self._channel.fail(MeshmendError(f"An earlier call of this engine ended half-way: {error!r}."))

    def _lost(self, error: TransportError) -> LostChipError:
        """Return the error of a call that the network failed, and keep it for later calls."""
        lost = LostChipError(
            self._name(self._channel.rank), self._name(error.member), str(self.schedule.mesh), str(error)
        )
        self._channel.fail(lost)
        return lost

    def _name(self, member: int) -> Coordinate:
        """Return the chip of a member; of one that the schedule does not know, its number."""
        rank = self._members.index(member) if member in self._members else member
        mesh = self.schedule.mesh
        return mesh.chip(rank) if rank < mesh.n_chips else (member,)

    def start(
        self, payload: Annotated[torch.Tensor, "[...]"], op: Any = dist.ReduceOp.SUM
    ) -> torch.futures.Future[torch.Tensor]:
        """Start `all_reduce` and return a future of the payload. A payload that is refused is refused at once."""
        kind = kind_of(op)
        check_payload(payload, kind)
        words = describe([payload], kind)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def work(ticket: int) -> None:
            try:
                self._reduce(payload, kind, words, ticket)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(payload)

        with self._guard:
            if self.error is not None:
                future.set_exception(self.error)
                return future
            if self._worker is None:
                self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="meshmend")
            try:
                self._worker.submit(work, self._channel.ticket())
            except RuntimeError as error:  # the interpreter is shutting down
                self._break(error)
                raise
        return future

    def close(self) -> None:
        """Close the group's connections and end the background thread.

        Every pending wait ends at once, here and at the neighbours. The engine is unusable afterwards.
        """
        with self._guard:
            self._channel.fail(MeshmendError("This engine was closed: make another on a new group."))
            worker, self._worker = self._worker, None
        self._channel.close(self._members[peer] for peer in self._program.peers)
        if worker is not None:
            # What is queued is not dropped: it ends with the error, and so do those who wait for it.
            worker.shutdown(wait=False)


def digest_of(schedule: Schedule, members: Sequence[int]) -> str:
    """Return a digest of all that decides which messages an engine sends, and what they mean."""
    mesh = schedule.mesh
    facts: list[object] = [mesh.shape, mesh.wrap, mesh.coords.tolist(), schedule.total_chunks, list(members)]
    facts += [schedule.repeats, schedule.period]
    found = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    schedule = schedule.template
    for column in (schedule.step, schedule.src, schedule.dst, schedule.first_chunk, schedule.n_chunks, schedule.op):
        found.update(column.tobytes())
    return found.hexdigest()
