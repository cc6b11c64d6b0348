"""An adversary for programs: all chips in one process, on a network that is as unkind as it may be.

Messages cross chunk by chunk, at any moment between their send and its completion. A message that is not staged is
read from its sender's memory at that very moment, and a direct one written to its receiver's: whatever changes too
early shows in the sums. A chip posts few receives ahead and takes those of each neighbour in order, as the engine does;
or it posts them all and takes those of all neighbours in order of step, as the engine does with few short messages. So
a wait which cannot end shows as a deadlock.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np

import meshmend.numpy as mmn
from meshmend import Schedule
from meshmend.torch.program import ChipProgram, compile_program


def play(schedule: Schedule, seed: int, *, depth: int | None = None, collective: bool = True) -> None:
    """Run every chip's program in a random order and hold the result to NumPy's, and to a plain sum."""
    rng = random.Random(seed)
    n = schedule.mesh.n_chips
    payload = np.random.default_rng(seed).integers(-1000, 1000, (n, schedule.total_chunks))
    network = _Network(schedule, payload.copy(), rng, rng.randint(1, 3) if depth is None else depth)
    network.run()
    assert np.array_equal(network.held, mmn.run(schedule, payload))
    if collective:
        assert (network.held == payload.sum(axis=0)).all()


class _Network:
    """Every chip's memory and program, and the messages under way."""

    def __init__(self, schedule: Schedule, held: Any, rng: random.Random, depth: int) -> None:
        self.held, self.rng, self.depth = held, rng, depth
        self.programs: list[ChipProgram] = [compile_program(schedule, rank) for rank in range(len(held))]
        # Each chip's sends and receives on each link, in order; both ends count them alike.
        self.out: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.into: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, own in enumerate(self.programs):
            for number, send in enumerate(own.sends):
                assert send.tag == len(self.out[rank, send.peer])
                self.out[rank, send.peer].append(number)
            for number, receive in enumerate(own.receives):
                assert receive.tag == len(self.into[receive.peer, rank])
                self.into[receive.peer, rank].append(number)
        assert {link: len(sent) for link, sent in self.out.items()} == {k: len(v) for k, v in self.into.items()}
        share = rng.choice([0.0, 0.5, 1.0])
        self.in_order = {rank for rank in range(len(held)) if rng.random() < share}
        self.issued: dict[tuple[int, int], int] = defaultdict(int)
        self.taken: dict[tuple[int, int], int] = defaultdict(int)
        self.under_way: dict[tuple[int, int, int], int] = {}
        self.copies: dict[tuple[int, int, int], Any] = {}
        self.buffers: dict[tuple[int, int, int], Any] = {}
        self.left: list[set[int]] = [set() for _ in held]
        self.copied: list[set[int]] = [set() for _ in held]
        self.written: list[set[int]] = [set() for _ in held]

    def run(self) -> None:
        # Some runs starve one kind of event as long as there is another: sends first, arrivals last and so on.
        weights = {kind: self.rng.choice([0.01, 1.0, 100.0]) for kind in ("issue", "carry", "take")}
        possible = {link: self._events(link) for link in self.out}
        while events := [event for of_link in possible.values() for event in of_link]:
            kind, link, number = self.rng.choices(events, [weights[kind] for kind, _, _ in events])[0]
            getattr(self, f"_{kind}")(link, number)
            # A change at a chip changes what its links may do: the sender's for a send, the receiver's for a take.
            changed = link[1] if kind == "take" else link[0]
            for other in self.out:
                if changed in other or other == link:
                    possible[other] = self._events(other)
        for rank, own in enumerate(self.programs):
            assert len(self.written[rank]) == len(own.receives), f"deadlock: rank {rank} waits for ever"
            assert len(self.left[rank]) == len(own.sends)

    def _events(self, link: tuple[int, int]) -> list[Any]:
        src, dst = link
        events: list[Any] = []
        issued, taken = self.issued[link], self.taken[link]
        if issued < len(self.out[link]):
            send = self.programs[src].sends[self.out[link][issued]]
            if self.written[src].issuperset(send.after_receives):
                events.append(("issue", link, issued))
        posted = range(taken, issued if dst in self.in_order else min(issued, taken + self.depth))
        events += [("carry", link, number) for number in posted if (src, dst, number) in self.under_way]
        if taken < issued and (src, dst, taken) not in self.under_way:
            own = self.into[link][taken]
            receive = self.programs[dst].receives[own]
            is_next = dst not in self.in_order or own == len(self.written[dst])
            if is_next and (receive.direct or self._may_write(dst, receive)):
                events.append(("take", link, taken))
        return events

    def _may_write(self, rank: int, receive: Any) -> bool:
        gone = self.left[rank] | self.copied[rank]
        return self.written[rank].issuperset(receive.after_receives) and gone.issuperset(receive.after_sends)

    def _issue(self, link: tuple[int, int], number: int) -> None:
        src, dst = link
        own = self.out[link][number]
        send = self.programs[src].sends[own]
        if send.staged:
            self.copies[src, dst, number] = self.held[src].copy()
            self.copied[src].add(own)
        self.under_way[src, dst, number] = send.first
        self.issued[link] += 1

    def _carry(self, link: tuple[int, int], number: int) -> None:
        src, dst = link
        send = self.programs[src].sends[self.out[link][number]]
        receive = self.programs[dst].receives[self.into[link][number]]
        assert (send.first, send.last) == (receive.first, receive.last)
        if receive.direct:
            assert self._may_write(dst, receive), "a direct message arrives too early"
            place = self.held[dst]
        else:
            place = self.buffers.setdefault((src, dst, number), np.zeros_like(self.held[dst]))
        chunk = self.under_way[src, dst, number]
        place[chunk] = self.copies.get((src, dst, number), self.held[src])[chunk]
        self.under_way[src, dst, number] = chunk + 1
        if chunk + 1 == send.last:
            del self.under_way[src, dst, number]
            self.left[src].add(self.out[link][number])

    def _take(self, link: tuple[int, int], number: int) -> None:
        src, dst = link
        own = self.into[link][number]
        receive = self.programs[dst].receives[own]
        if not receive.direct:
            place = self.held[dst][receive.first : receive.last]
            arrived = self.buffers.pop((src, dst, number))[receive.first : receive.last]
            place[:] = place + arrived if receive.adds else arrived
        self.written[dst].add(own)
        self.taken[link] += 1
