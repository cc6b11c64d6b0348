"""One queue of events and one clock: everything that happens in a simulated job is an event in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any


class Actor:
    """What lives, freezes and dies as one: a process. Events for a frozen one wait until it goes on."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.is_dead = self.is_frozen = False
        self.clock_s = 0.0
        """By how much this actor's clock is ahead of the simulation's."""
        self.deferred: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def time(self) -> float:
        """Return the time by this actor's own clock."""
        return self.queue.now + self.clock_s

    def after(self, seconds: float, do: Callable[..., Any], *args: Any) -> None:
        """Have this actor do something later, if it lives then."""
        self.queue.at(self.queue.now + seconds, self, do, *args)

    def thaw(self) -> None:
        """Go on: what was due meanwhile happens now, in its order."""
        self.is_frozen = False
        deferred, self.deferred = self.deferred, []
        for do, args in deferred:
            self.queue.at(self.queue.now, self, do, *args)


class Queue:
    """Events in the order of their time; those of one time in the order in which they were made."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)  # noqa: S311  # a seed says everything
        self.now = 1000.0
        self.n_events = 0
        self._heap: list[tuple[float, int, Actor | None, Callable[..., Any], tuple[Any, ...]]] = []
        self._count = count()

    def at(self, when: float, actor: Actor | None, do: Callable[..., Any], *args: Any) -> None:
        """Have something happen at a time, to an actor or to the world."""
        heapq.heappush(self._heap, (when, next(self._count), actor, do, args))

    def step(self) -> bool:
        """Let the next event happen; return whether there was one."""
        if not self._heap:
            return False
        when, _, actor, do, args = heapq.heappop(self._heap)
        self.now = max(self.now, when)
        if actor is not None:
            if actor.is_dead:
                return True
            if actor.is_frozen:
                actor.deferred.append((do, args))
                return True
        self.n_events += 1
        do(*args)
        return True
