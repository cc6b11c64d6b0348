"""A schedule as one chip sees it: its own messages, and what each of them has to wait for.

A schedule counts steps; a chip does not have to. It needs only that a message carries what the schedule says it
carries, so a `ChipProgram` keeps, for each message of one rank, the messages of that same rank that must come first:

- a send waits for the last write of every chunk that it carries;
- a write waits for the write before it, so that sums are made in the same order in every run, and for every send
  that still has to read the old value.

A send whose chunks are written in its own step is *staged*: it leaves from a copy, and writes wait only until the copy
is made. If they waited until it has arrived, two chips that exchange chunks within a step could deadlock: each would
hold back the write that the other's message needs.

Everything else overlaps. Nothing here imports torch: this is the part that can be tested without processes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshmend.schedule import Op, Schedule


@dataclass(frozen=True)
class Send:
    """Chunks `first` … `last − 1` to rank `peer`, once the writes in `after_receives` are made.

    `staged` says that the same step writes some of them: the message leaves from a copy of them.
    """

    peer: int
    tag: int
    first: int
    last: int
    staged: bool
    after_receives: tuple[int, ...]


@dataclass(frozen=True)
class Receive:
    """Chunks from rank `peer`, added or copied once earlier writes are made and earlier sends have left.

    A send has left when it has arrived, a staged one when it is copied. `direct` says that the message cannot arrive
    before all that: it may go straight to its place.
    """

    peer: int
    tag: int
    first: int
    last: int
    adds: bool
    direct: bool
    after_receives: tuple[int, ...]
    after_sends: tuple[int, ...]


@dataclass(frozen=True)
class ChipProgram:
    """What one rank does: sends and receives in order of step, with numbers that they refer to each other by.

    A tag is a message's number among those of its pair of ranks and its direction; both ends count alike.
    """

    rank: int
    total_chunks: int
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]

    def bound(self, chunk: int, n_elements: int) -> int:
        """Where a chunk starts: chunks of one payload differ by at most one element, and nothing is padded."""
        return n_elements * chunk // self.total_chunks

    @cached_property
    def waiting_for_receive(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """For each receive, the sends and the receives that wait for its write."""
        sends: list[list[int]] = [[] for _ in self.receives]
        receives: list[list[int]] = [[] for _ in self.receives]
        for number, send in enumerate(self.sends):
            for earlier in send.after_receives:
                sends[earlier].append(number)
        for number, receive in enumerate(self.receives):
            for earlier in receive.after_receives:
                receives[earlier].append(number)
        return tuple((tuple(s), tuple(r)) for s, r in zip(sends, receives, strict=True))

    @cached_property
    def waiting_for_send(self) -> tuple[tuple[int, ...], ...]:
        """For each send, the receives that may not write before it has left."""
        waiting: list[list[int]] = [[] for _ in self.sends]
        for number, receive in enumerate(self.receives):
            for send in receive.after_sends:
                waiting[send].append(number)
        return tuple(map(tuple, waiting))


def compile_program(schedule: Schedule, rank: int) -> ChipProgram:
    """Return the program of one rank of a schedule that `verify` accepts.

    >>> from meshmend import Mesh, plan
    >>> program = compile_program(plan(Mesh("2x2"), "hamiltonian"), rank=0)
    >>> len(program.sends), len(program.receives), {send.peer for send in program.sends}
    (12, 12, {1, 2})
    """
    sends: list[Send] = []
    receives: list[Receive] = []
    last_write: dict[int, int] = {}
    reads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    n_sent: dict[int, int] = defaultdict(int)
    n_received: dict[int, int] = defaultdict(int)
    # Within a step every read comes before every write: sends (src == rank) first.
    messages = _messages(schedule, rank)
    # Chunks that always travel together here are followed as one: a run may be billions of chunks long.
    edges = sorted({edge for _, _, _, first, last, _ in messages for edge in (first, last)})
    number_of = {edge: number for number, edge in enumerate(edges)}
    written = {
        (step, chunk)
        for step, _, dst, first, last, _ in messages
        if dst == rank
        for chunk in range(number_of[first], number_of[last])
    }
    for step, src, dst, first, last, op in messages:
        chunks = range(number_of[first], number_of[last])
        earlier = tuple(sorted({last_write[c] for c in chunks if c in last_write}))
        if src == rank:
            for chunk in chunks:
                reads[chunk].append((step, len(sends)))
            staged = any((step, chunk) in written for chunk in chunks)
            sends.append(Send(dst, n_sent[dst], first, last, staged, earlier))
            n_sent[dst] += 1
        else:
            old_reads = [reads.pop(chunk, []) for chunk in chunks]
            readers = {send for reads_of in old_reads for _, send in reads_of}
            untouched = [chunk not in last_write for chunk in chunks]
            for chunk in chunks:
                last_write[chunk] = len(receives)
            adds = op == Op.REDUCE
            # A copy that comes, in a later step, from the very chip that all old values were sent to, and only to: that
            # chip had them before it sent the copy, and they in turn left after everything that was written here
            # earlier. In the same step it may send the copy first. Or one of which nothing was read or written here
            # before, as in an all-gather: there is no old value that anybody needs.
            direct = not adds and all(
                all(sends[send].peer == src and read < step for read, send in reads_of) if reads_of else fresh
                for reads_of, fresh in zip(old_reads, untouched, strict=True)
            )
            receives.append(Receive(src, n_received[src], first, last, adds, direct, earlier, tuple(sorted(readers))))
            n_received[src] += 1
    return ChipProgram(rank, schedule.total_chunks, tuple(sends), tuple(receives))


def _messages(schedule: Schedule, rank: int) -> list[tuple[int, int, int, int, int, int]]:
    """Return (step, src, dst, first, last, op) of a rank's messages: transfers side by side travel as one.

    Both ends of a pair see the same rows in the same order, so they cut the same messages.
    """
    template = schedule.template
    rows = np.flatnonzero((template.src == rank) | (template.dst == rank))
    # Of a repeated schedule only this rank's own rows are expanded.
    repeat = np.repeat(np.arange(schedule.repeats, dtype=np.int64), len(rows))
    rows = np.tile(rows, schedule.repeats)
    step, src, dst, first, op = (
        column[rows].astype(np.int64)
        for column in (template.step, template.src, template.dst, template.first_chunk, template.op)
    )
    step += repeat * schedule.period
    first += repeat * template.total_chunks
    last = first + template.n_chunks[rows]
    order = np.lexsort((first, op, dst, src, src != rank, step))
    step, src, dst, first, last, op = (column[order] for column in (step, src, dst, first, last, op))
    joined = np.zeros(len(rows), dtype=np.bool_)
    joined[1:] = first[1:] == last[:-1]
    for column in (step, src, dst, op):
        joined[1:] &= column[1:] == column[:-1]
    starts = np.flatnonzero(~joined)
    ends = np.append(starts[1:], len(rows)) - 1 if len(rows) else starts
    columns = (step[starts], src[starts], dst[starts], first[starts], last[ends], op[starts])
    return list(zip(*(column.tolist() for column in columns), strict=True))
