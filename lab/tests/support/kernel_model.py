"""A model of the kernel's semaphores: chips that follow their instructions in any order, and a network as slow as any.

It reads the same instructions as the kernel and shares nothing else with it. `explore` tries all orders in which chips
can go on; `run_at_random` one of them, for schedules of any size. Both raise `Broken` at the first thing that must not
happen: a slot that is written before it was read, a chunk that is written while it leaves, or used while it is written;
chips that all wait; a semaphore that is not back at zero; a wrong result.

**Transfers have no events of their own.** From its start to its receiver's wait a transfer may arrive at any moment,
and to that wait or its sender's it may still be leaving; so its slot and both of its places count as in use as long.
An earlier arrival would make fewer things wrong, not more. What is left of a state is then how far each chip has come:
all else follows from that, or two accesses were not in order, and that is an error in one of the orders that are tried.

A value counts contributions: that of chip i is 256^i.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from meshmend_lab.pallas.instructions import Instructions, Kind

Place = tuple[int, int]
"""A port and a slot."""


class Instruction(NamedTuple):
    """One instruction, as two words say it: see `_encode` in `instructions`, and `_follow` in `kernel`."""

    kind: Kind
    chunk: int
    size: int = 0
    port: int = 0
    slot: int = 0
    credit: bool = False
    direct: bool = False
    add: bool = False
    before: int = 0


def decode(words: tuple[int, int]) -> Instruction:
    """Read an instruction."""
    chunk, word = words
    flags = word >> 3
    return Instruction(
        Kind(word & 7),
        chunk,
        size=flags >> 9 & 15,
        port=flags >> 18,
        slot=flags >> 3 & 63,
        credit=bool(flags & 1),
        direct=bool(flags >> 1 & 1),
        add=bool(flags >> 2 & 1),
        before=flags >> 13 & 31,
    )


class Broken(Exception):  # noqa: N818  # what the model finds, not how it fails
    """What went wrong."""


class Transfer(NamedTuple):
    src: int
    dst: int
    chunk: int
    run: int
    sent: Place
    into: Place
    direct: bool
    values: tuple[int, ...]

    def overlaps(self, chunk: int, run: int) -> bool:
        return self.chunk < chunk + run and chunk < self.chunk + self.run


class State:
    """How far each chip is, what it holds, and what is under way."""

    def __init__(self, n: int, total_chunks: int) -> None:
        self.at = [0] * n
        self.held = [[256**chip] * total_chunks for chip in range(n)]
        self.leaving: list[dict[Place, Transfer]] = [{} for _ in range(n)]
        """For each chip what it has sent and not yet waited for."""
        self.coming: list[dict[Place, Transfer]] = [{} for _ in range(n)]
        """For each chip what was sent to it and it has not yet received."""
        self.credits: list[dict[Place, int]] = [{} for _ in range(n)]

    def copy(self) -> State:
        twin = State(0, 0)
        twin.at, twin.held = self.at[:], [row[:] for row in self.held]
        twin.leaving, twin.coming = [dict(one) for one in self.leaving], [dict(one) for one in self.coming]
        twin.credits = [dict(one) for one in self.credits]
        return twin

    def check_still(self, chip: int, chunk: int, run: int) -> None:
        """Nothing of these chunks may be leaving: it would be overwritten."""
        for place, one in self.leaving[chip].items():
            has_arrived = self.coming[one.dst].get(one.into) is not one
            if one.sent == place and not has_arrived and one.overlaps(chunk, run):
                raise Broken(f"chunk {one.chunk} of chip {chip} is written while it leaves for chip {one.dst}")

    def check_quiet(self, chip: int, chunk: int, run: int) -> None:
        """Nobody else may be writing these chunks."""
        for one in self.coming[chip].values():
            if one.direct and one.overlaps(chunk, run):
                raise Broken(f"chunk {one.chunk} of chip {chip} is used while chip {one.src} writes it")


class Machine:
    """All chips of a kernel."""

    def __init__(self, made: Instructions, total_chunks: int) -> None:
        self.sizes, self.ports, self.total_chunks = made.shape.sizes, made.ports.tolist(), total_chunks
        decoded = [[decode((a, b)) for a, b in words] for words in made.words.tolist()]
        self.lists = [[one for one in ones if one.kind is not Kind.NOTHING] for ones in decoded]
        self.n = len(self.lists)

    def ready(self, state: State) -> list[int]:
        """The chips that can go on."""
        return [chip for chip in range(self.n) if self.can_go(state, chip)]

    def can_go(self, state: State, chip: int) -> bool:
        """Whether a chip has something to do, and need not wait for it."""
        if state.at[chip] == len(self.lists[chip]):
            return False
        one = self.lists[chip][state.at[chip]]
        if one.kind is Kind.SEND and one.credit:
            return state.credits[chip].get((one.port, one.slot), 0) > 0
        if one.kind is Kind.RECEIVE:
            return (one.port, one.slot) in state.coming[chip]
        return True  # what was sent has left some time

    def go(self, state: State, chip: int) -> None:
        """Let a chip follow its next instruction."""
        one = self.lists[chip][state.at[chip]]
        state.at[chip] += 1
        place, run = (one.port, one.slot), self.sizes[one.size]
        if one.kind is Kind.SEND:
            self._send(state, chip, one, place, run)
        elif one.kind is Kind.SENT:
            self._has_left(state, chip, place, run)
        else:
            self._receive(state, chip, one, place, run)

    def _has_left(self, state: State, chip: int, place: Place, run: int) -> None:
        found = state.leaving[chip].pop(place, None)
        if found is None or found.run != run:
            raise Broken(f"chip {chip} waits for {run} chunks to leave from {place}, but what was sent is {found}")

    def _send(self, state: State, chip: int, one: Instruction, place: Place, run: int) -> None:
        if one.credit:
            state.credits[chip][place] -= 1
        if one.before:
            self._has_left(state, chip, place, self.sizes[one.before - 1])
        if place in state.leaving[chip]:
            raise Broken(f"chip {chip} sends from {place}, and has not waited for what it sent there")
        dst, into = self.ports[chip][0][one.port], (self.ports[chip][1][one.port], one.slot)
        if into in state.coming[dst]:
            raise Broken(f"slot {into} of chip {dst} is written before it was read")
        state.check_quiet(chip, one.chunk, run)
        if one.direct:
            state.check_still(dst, one.chunk, run)
            state.check_quiet(dst, one.chunk, run)
        values = tuple(state.held[chip][one.chunk : one.chunk + run])
        sent = Transfer(chip, dst, one.chunk, run, place, into, one.direct, values)
        state.leaving[chip][place] = state.coming[dst][into] = sent

    def _receive(self, state: State, chip: int, one: Instruction, place: Place, run: int) -> None:
        got = state.coming[chip].pop(place)
        if (got.chunk, got.run, got.direct) != (one.chunk, run, one.direct):
            raise Broken(f"chip {chip} expects {one}, got {got}")
        state.check_still(chip, one.chunk, run)
        state.check_quiet(chip, one.chunk, run)
        for i, value in enumerate(got.values):
            state.held[chip][one.chunk + i] = value + (state.held[chip][one.chunk + i] if one.add else 0)
        if one.credit:
            src, back = self.ports[chip][2][one.port], (self.ports[chip][3][one.port], one.slot)
            state.credits[src][back] = state.credits[src].get(back, 0) + 1

    def check_end(self, state: State) -> None:
        waiting = [chip for chip in range(self.n) if state.at[chip] < len(self.lists[chip])]
        if waiting:
            raise Broken(f"chips {waiting} wait for ever")
        if any(map(any, state.leaving)) or any(map(any, state.coming)) or any(sum(c.values()) for c in state.credits):
            raise Broken("a semaphore is not back at zero")
        whole = sum(256**chip for chip in range(self.n))
        if any(value != whole for row in state.held for value in row):
            raise Broken(f"a wrong sum, expected {whole}: {state.held}")


def explore(made: Instructions, total_chunks: int, most: int = 1_000_000) -> int:
    """Try all orders; return how many states there are."""
    machine = Machine(made, total_chunks)
    start = State(machine.n, total_chunks)
    seen, todo = {tuple(start.at)}, [start]
    while todo:
        state = todo.pop()
        ready = machine.ready(state)
        if not ready:
            machine.check_end(state)
        for chip in ready:
            after = state.copy()
            machine.go(after, chip)
            if tuple(after.at) not in seen:
                seen.add(tuple(after.at))
                todo.append(after)
        assert len(seen) <= most, "too many states to explore"
    return len(seen)


def run_at_random(made: Instructions, total_chunks: int, seed: int) -> None:
    """Run once, in a random order, in which chips go far ahead of others."""
    draw, machine = random.Random(seed), Machine(made, total_chunks)
    state = State(machine.n, total_chunks)
    while ready := machine.ready(state):
        for chip in draw.sample(ready, draw.randrange(1, len(ready) + 1)):
            # The others are held up meanwhile.
            for _ in range(draw.choice((1, 3, 1000))):
                if not machine.can_go(state, chip):
                    break
                machine.go(state, chip)
    machine.check_end(state)
