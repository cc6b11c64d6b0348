"""From a schedule to what each chip does, one instruction after the other, waiting for its neighbours and nobody else.

A directed pair of chips that exchange anything is a *channel*: an out-port of its sender, an in-port of its receiver.
Transfers of a channel take its *slots* in turn. A slot has room for one transfer in the receiver's inbox, a semaphore
that says when it has arrived, and one that says when it is free again (a *credit*); so a slot never has more than one
transfer under way, and whatever arrives is known by its slot alone.

Every instruction has a *time*: the number of the schedule's step in which it is sent, counted in the pieces that
transfers of several chunks are cut into. What a chip receives it may take as late as it likes before it sends the
chunk on (or the slot is needed again); that is what slack in a plan is for. Two rules hold:

1. A chip's instructions are in order of time, and within a time it sends before it receives.
2. A transfer is received no earlier than it is sent, and earlier than the next one in its slot is sent.

**No deadlock.** Of all instructions that chips have not finished take one of the least time, a send before a receive.
A send waits for the credit of an earlier transfer, which its receiver gives at an earlier time: that is over. A
receive waits for a send of an earlier time, or of the same: that is over, too, and what has been sent arrives and has
then left, which is all that any other instruction waits for. So this one goes on, and with it everything ends.

**Nothing is overwritten before it is read.** In the inbox: a slot is written only with its credit, which is given
after it was read. In the payload, by the chip itself: instructions that touch the same chunk are in the order of the
schedule's steps, reads of a step before its writes, and a chunk that is still leaving is waited for (`SENT`) before it
is written. By a neighbour: a chunk is written straight into its place only if it is final (nothing writes it there
later) and its receiver has sent its own, once, after the last write. What arrives contains what was sent then, so that
had left. All other transfers go through the inbox.

Nothing here needs JAX. `kernel` runs the instructions; `lab/tests/jax_programs/pallas` explores all orders in which
chips can take them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import ParameterError
from meshmend.schedule import Op, Schedule
from meshmend.schedule.lanes import FEW_STEPS

INBOX_SHARE = 24
"""The inbox is at most one part in so many of the payload, where the plan has chunks enough."""
MIN_SLOTS, MAX_SLOTS = 2, 8
"""Slots per channel. A slot is free again after the latency of a message and of a credit: more of them hide more."""
MAX_PORTS, MAX_SIZES = 256, 16
LATER = np.iinfo(np.int64).max
"""A time after all others."""

TABLE_WORDS = 1024
"""Words of instructions that a chip fetches into its scalar memory at a time."""

Ints = NDArray[np.int64]


class Kind(IntEnum):
    """What an instruction does."""

    SEND = 0
    """Wait for the slot's credit, if `credit`, and for what left from it before, if `before`; send a run of chunks."""
    RECEIVE = 1
    """Wait for a run of chunks; add it, or put it into its place, if it is in the inbox; give `credit`."""
    SENT = 2
    """Wait until what was sent from this slot has left."""
    NOTHING = 3


@dataclass(frozen=True)
class KernelShape:
    """All of a kernel that is the same on every chip."""

    n_instructions: int
    n_ports: int
    slots: int
    sizes: tuple[int, ...]
    """Lengths of the runs of chunks that one transfer carries."""

    @property
    def inbox_chunks(self) -> tuple[int, int, int]:
        """Ports, slots, and chunks of a slot."""
        return self.n_ports, self.slots, max(self.sizes, default=1)


@dataclass(frozen=True)
class Instructions:
    """What all chips do: two words per instruction, and for each port the chip at its other end and the port there."""

    shape: KernelShape
    words: Annotated[NDArray[np.int32], "int32[N, J, 2]"]
    ports: Annotated[NDArray[np.int32], "int32[N, 4, V]"]
    """For each out-port the receiver and its in-port, for each in-port the sender and its out-port; −1 if none."""

    @property
    def flat_words(self) -> Annotated[NDArray[np.int32], "int32[N, W]"]:
        """Each chip's words in one row, as the kernel fetches them; with more axes a TPU would pad each of them."""
        rows = self.words.reshape(len(self.words), -1)
        return np.pad(rows, ((0, 0), (0, -rows.shape[1] % TABLE_WORDS)))

    @property
    def flat_ports(self) -> Annotated[NDArray[np.int32], "int32[N, V]"]:
        """Each chip's ports in one row."""
        return self.ports.reshape(len(self.ports), -1)


def _encode(kind: Kind, port: Ints, slot: Ints, size: Ints, *flags: NDArray[np.bool_], before: Ints | int = 0) -> Ints:
    """Return second words, from the lowest bit: kind (3), credit, direct, add, slot (6), size (4), before (5), port.

    `size` is a place in `KernelShape.sizes`. `before` is that of what was sent from this slot before and has not been
    waited for, and 1 more; 0 if there is nothing.
    """
    word = slot << 3 | size << 9 | np.asarray(before) << 13 | port << 18
    for bit, flag in enumerate(flags):
        word |= np.asarray(flag, np.int64) << bit
    return int(kind) | word << 3


def instructions_of(schedule: Schedule, *, slots: int | None = None) -> Instructions:
    """Return what each chip does to run a proven schedule. `slots` are as many as fit, unless they are given.

    >>> import meshmend as mm
    >>> made = instructions_of(mm.plan(mm.Mesh("1x2"), "weave", chunks=2))
    >>> made.shape
    KernelShape(n_instructions=6, n_ports=1, slots=2, sizes=(1,))
    >>> [Kind(word & 7).name for word in made.words[0, :, 1]]
    ['SEND', 'RECEIVE', 'SEND', 'RECEIVE', 'SENT', 'SENT']
    """
    rows = schedule.expanded()
    ports, out_port, in_port = _ports(rows)
    if not rows.n_transfers:
        return _assemble(rows, KernelShape(0, 0, 0, ()), np.empty((0, 5), np.int64), ports)
    n_ports = int(ports.shape[2])
    pieces = _Pieces(rows, _longest_piece(rows, n_ports))
    longest = int(pieces.n.max())
    given = slots
    slots = slots or int(np.clip(rows.total_chunks // (INBOX_SHARE * n_ports * longest), MIN_SLOTS, MAX_SLOTS))
    while True:
        received, is_taken = pieces.received(slots)
        if is_taken:
            break
        if given is not None or slots >= 64:
            raise ParameterError(
                f"{schedule!r} needs more than {slots} slots per channel: a chip receives a chunk that it sends in the "
                "same step, and has no room for what comes meanwhile. Run it with meshmend.jax."
            )
        slots *= 2
    sizes, size = np.unique(pieces.n, return_inverse=True)
    shape = KernelShape(0, n_ports, slots, tuple(sizes.tolist()))
    if n_ports > MAX_PORTS or len(sizes) > MAX_SIZES:
        raise ParameterError(
            f"A chip of {schedule!r} has {n_ports} partners and {len(sizes)} lengths of runs, more than {MAX_PORTS} "
            f"and {MAX_SIZES}. Run it with meshmend.jax, or plan with weave."
        )
    return _assemble(rows, shape, _transfers(pieces, shape, received, size, out_port, in_port), ports)


def _longest_piece(rows: Schedule, n_ports: int) -> int:
    """Return how many chunks one transfer carries at most, a power of two.

    A plan of few steps is for few bytes: its inbox may be as large as its runs are long. Otherwise it stays small.
    """
    longest = int(rows.n_chunks.max())
    if rows.n_steps > FEW_STEPS:
        longest = min(longest, max(1, rows.total_chunks // (INBOX_SHARE * n_ports * MIN_SLOTS)))
    return 1 << (longest.bit_length() - 1)


def _ports(rows: Schedule) -> tuple[NDArray[np.int32], Ints, Ints]:
    """Return the table of each chip's channels, and for each transfer its sender's and its receiver's number for it."""
    n = rows.mesh.n_chips
    edges, edge = np.unique(rows.src.astype(np.int64) * n + rows.dst, return_inverse=True)
    src, dst = np.divmod(edges, n)
    out, into = _count_within(src), _count_within(dst)
    ports = np.full((n, 4, max(int(out.max(initial=-1)), int(into.max(initial=-1))) + 1), -1, dtype=np.int32)
    ports[src, 0, out], ports[src, 1, out] = dst, into
    ports[dst, 2, into], ports[dst, 3, into] = src, out
    return ports, out[edge], into[edge]


def _count_within(groups: Ints) -> Ints:
    """Return each member's number in its group, in the order they come in."""
    order = np.argsort(groups, kind="stable")
    heads = np.flatnonzero(np.diff(groups[order], prepend=-1))
    found = np.empty(len(groups), dtype=np.int64)
    found[order] = np.arange(len(groups)) - np.repeat(heads, np.diff(heads, append=len(groups)))
    return found


class _Pieces:
    """A schedule's transfers cut into pieces of 2^i chunks, and the times at which those are sent and received."""

    def __init__(self, rows: Schedule, longest: int) -> None:
        self.rows = rows
        run, first = rows.n_chunks.astype(np.int64), rows.first_chunk.astype(np.int64)
        parts = [(np.repeat(np.arange(len(run)), run // longest), longest, _within(run // longest) * longest)]
        for bit in range(longest.bit_length() - 1):
            size = 1 << bit
            parts.append((which := np.flatnonzero(run & size), size, run[which] // (2 * size) * (2 * size)))
        row = np.concatenate([which for which, _, _ in parts])
        offset = np.concatenate([at for _, _, at in parts])
        order = np.lexsort((offset, row))
        self.row, self.first = row[order], first[row[order]] + offset[order]
        self.n = np.concatenate([np.full(len(which), size) for which, size, _ in parts])[order]
        self.src, self.dst = (column[self.row].astype(np.int64) for column in (rows.src, rows.dst))
        self.step, self.copies = rows.step[self.row].astype(np.int64), rows.op[self.row] == Op.COPY
        self.channel = self.src * rows.mesh.n_chips + self.dst
        # The pieces of a channel go one after the other, those of different channels side by side.
        _, pair = np.unique(self.channel * rows.n_steps + self.step, return_inverse=True)
        turn = _count_within(pair)
        turns = np.zeros(rows.n_steps, dtype=np.int64)
        np.maximum.at(turns, self.step, turn + 1)
        self.starts = np.concatenate([[0], np.cumsum(turns)])
        self.sent = self.starts[self.step] + turn
        self.number = _count_within(self.channel)
        """Of a piece among those of its channel: pieces are in order of step."""
        self._follow_chunks()

    def _follow_chunks(self) -> None:
        """Find what each piece's place in the payload is read and written by, before and after."""
        rows, count = self.rows, len(self.row)
        total, steps = rows.total_chunks, rows.n_steps
        piece = np.repeat(np.arange(count), self.n)
        chunk = np.repeat(self.first, self.n) + _within(self.n)
        reads = (self.src[piece] * total + chunk) * steps + self.step[piece]
        order = np.argsort(reads, kind="stable")
        reads, reader = reads[order], piece[order]
        writes = (self.dst[piece] * total + chunk) * steps + self.step[piece]
        order = np.argsort(writes, kind="stable")
        writes, writer = writes[order], piece[order]
        cell = writes // steps
        # Reads of the cell in earlier steps, in this one, and the first after it; and the writes next to this one.
        begin, here, after = (np.searchsorted(reads, key) for key in (cell * steps, writes, writes + 1))
        end = np.searchsorted(reads, (cell + 1) * steps)
        follows = np.append(cell[1:] == cell[:-1], False)
        is_first = np.append(True, cell[1:] != cell[:-1])
        last_write = np.where(is_first, cell * steps - 1, np.roll(writes, 1))
        self.earliest, self.latest = self.sent.copy(), np.full(count, LATER)
        padded = np.append(self.sent[reader], LATER)
        # Reads of one step have several times: the last of this step's, the first of the next step that has one.
        for i in range(int((after - here).max(initial=0))):
            at = np.where(here + i < after, here + i, len(reads))
            np.maximum.at(self.earliest, writer, np.where(at < len(reads), padded[at], -1))
        next_key = np.append(reads, -1)[np.minimum(after, len(reads))]
        until = np.searchsorted(reads, next_key, side="right")
        for i in range(int((until - after)[after < end].max(initial=0))):
            at = np.where((after < end) & (after + i < until), after + i, len(reads))
            np.minimum.at(self.latest, writer, np.where(at < len(reads), padded[at] - 1, LATER))
        next_write = np.where(follows, self.starts[np.roll(writes, -1) % steps], LATER)
        np.minimum.at(self.latest, writer, next_write)
        # Straight into its place: final, and the chip has sent its own exactly once, after the last write there.
        has_left = (after - begin == 1) & (here - begin == 1)
        has_left &= last_write < np.append(reads, 0)[begin]
        is_direct = np.ones(count, dtype=np.bool_)
        np.logical_and.at(is_direct, writer, has_left & ~follows)
        self.direct = is_direct & self.copies
        # What else is written while an earlier send of the same chunk may still be leaving.
        low = np.searchsorted(reads, last_write + 1)
        pairs = np.where(self.direct[writer], 0, after - low)
        self.leaving = reader[np.repeat(low, pairs) + _within(pairs)]
        self.overwritten_by = np.repeat(writer, pairs)

    def received(self, slots: int) -> tuple[Ints, bool]:
        """Return when each piece is received, and whether that is before its slot is needed again."""
        # A credit takes as long to come back as the message did: half of the slots are for either.
        latest = np.minimum(self.latest, self.sent_later(max(1, slots // 2)) - 1)
        taken = np.minimum(np.maximum(self.earliest, latest), self.starts[-1])
        return taken, bool((taken < self.sent_later(slots)).all())

    def sent_later(self, further: int) -> Ints:
        """Return when the piece that is so many further on in the same channel is sent."""
        before = self.earlier(further)
        found = np.full(len(before), LATER)
        found[before[before >= 0]] = self.sent[before >= 0]
        return found

    def earlier(self, slots: int) -> Ints:
        """Return the piece that is so many before each in the same channel; −1 where none is."""
        order = np.lexsort((self.number, self.channel))
        found = np.full(len(order), -1)
        same = self.channel[order][:-slots] == self.channel[order][slots:]
        found[order[slots:]] = np.where(same, order[:-slots], -1)
        return found


def _within(counts: Ints) -> Ints:
    """Return 0, …, n−1 for each n, one after the other."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts, counts)


def _transfers(
    pieces: _Pieces, shape: KernelShape, received: Ints, size: Ints, out_port: Ints, in_port: Ints
) -> Annotated[Ints, "[J, 5]"]:
    """Return sends, receives and waits: chip, time, order within a time, and the two words of each."""
    slots, out, into = shape.slots, out_port[pieces.row], in_port[pieces.row]
    slot = pieces.number % slots
    again = pieces.sent_later(slots)
    # A send is waited for once: before its chunk is written, before its slot is used again, or at the end.
    written = np.full(len(slot), LATER)
    np.minimum.at(written, pieces.leaving, received[pieces.overwritten_by])
    is_waited_for = (written < again) | (again == LATER)
    earlier = pieces.earlier(slots)
    before = np.where((earlier >= 0) & ~is_waited_for[earlier], 1 + size[earlier], 0)
    send = _encode(Kind.SEND, out, slot, size, pieces.number >= slots, pieces.direct, before=before)
    receive = _encode(Kind.RECEIVE, into, slot, size, again < LATER, pieces.direct, ~pieces.copies)
    wait = _encode(Kind.SENT, out, slot, size)
    chosen = np.flatnonzero(is_waited_for)
    parts = (
        (pieces.src, pieces.sent, 0, pieces.first, send),
        (pieces.dst, received, 2, pieces.first, receive),
        (pieces.src[chosen], written[chosen], 1, pieces.first[chosen], wait[chosen]),
    )
    return np.concatenate([np.stack(np.broadcast_arrays(*part), axis=1) for part in parts])


def _assemble(rows: Schedule, shape: KernelShape, listed: Ints, ports: NDArray[np.int32]) -> Instructions:
    """Give each chip its own instructions, in order of time."""
    chip, time, phase, chunk, word = listed.T
    order = np.lexsort((np.arange(len(chip)), phase, time, chip))
    position = _count_within(chip[order])
    length = int(position.max(initial=-1)) + 1
    words = np.zeros((rows.mesh.n_chips, length, 2), dtype=np.int32)
    words[:, :, 1] = int(Kind.NOTHING)
    words[chip[order], position, 0], words[chip[order], position, 1] = chunk[order], word[order]
    return Instructions(replace(shape, n_instructions=length), words, ports)
