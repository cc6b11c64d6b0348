"""The simulation can fail: ten faults that are put back one at a time, each of which it must find within a minute."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meshmend.jax.state.memory import copies, placement
from meshmend.jax.state.recovery import StateSearch
from meshmend.launch.membership import Membership
from meshmend_lab.simulation import storage
from meshmend_lab.simulation.job import SimulatedJob
from meshmend_lab.simulation.plan import draw
from meshmend_lab.simulation.referee import BATCH
from meshmend_lab.simulation.training import Training

WITHIN_S = 60.0
Patch = pytest.MonkeyPatch


def starts_over(patch: Patch) -> None:
    """Nothing whole is left: the job begins at step 0, in place of waiting or ending with an error."""
    patch.setattr(StateSearch, "_nothing", lambda search: {"do": "start", "verified": 0, **search._rest(0)})


def removes_early(patch: Patch) -> None:
    patch.setattr(copies, "KEPT", 1)


def starts_early(patch: Patch) -> None:
    """A round starts without those that still stop their workers."""
    advance = Membership._advance

    def at_once(self: Membership, now: float) -> None:
        self.ask_s, ask_s = -math.inf, self.ask_s
        advance(self, now)
        self.ask_s = ask_s

    patch.setattr(Membership, "_advance", at_once)


def forgets(patch: Patch) -> None:
    """A store that is started again stops the hosts that train in a round of the one before."""
    take_back = Membership._take_back

    def forget(self: Membership, key: Any, claimed: Any, now: float) -> None:
        take_back(self, key, claimed, now)
        if self.round is not None:
            self._end_round("nobody knows this round", now)

    patch.setattr(Membership, "_take_back", forget)


def ends_by_order(patch: Patch) -> None:
    """Whether a worker that failed counts depends on who was heard first: a host that was lost, or the worker."""
    lose = Membership._lose

    def forget(self: Membership, keys: Any, why: str, now: float) -> None:
        before = set(self._fates.lost)
        lose(self, keys, why, now)
        if self._fates.failed:
            self._fates.lost = before

    patch.setattr(Membership, "_lose", forget)


def counts_own_pause(patch: Patch) -> None:
    patch.setattr(Membership, "_heard_at", lambda _, member: member.heard_at)


def keeps_next_door(patch: Patch) -> None:
    def next_door(hosts: Any, order: Any) -> Any:
        keeper = np.arange(len(hosts))
        around = np.argsort(np.argsort(order)[hosts], kind="stable")
        keeper[around] = np.roll(around, -1)
        return keeper

    patch.setattr(placement, "_keepers", next_door)


def acknowledges_early(patch: Patch) -> None:
    """A checkpoint counts as saved when it is begun."""
    save = Training._save

    def early(self: Training) -> None:
        save(self)
        self.saved_step = self.step

    patch.setattr(Training, "_save", early)


def is_not_renewed(patch: Patch) -> None:
    on_message = Membership.on_message

    def deaf(self: Membership, key: Any, message: Any, now: float) -> None:
        if message["type"] != "beat":
            on_message(self, key, message, now)

    patch.setattr(Membership, "on_message", deaf)


def counts_twice(patch: Patch) -> None:
    """A job resumes where the data was after the step before the one that was committed."""
    take = StateSearch.take

    def again(self: StateSearch, facts: Any) -> Any:
        for fact in facts:
            if "extra" in fact:
                fact["extra"] = {"position": max(0, fact["extra"]["position"] - BATCH)}
        return take(self, facts)

    patch.setattr(StateSearch, "take", again)


BUGS: dict[str, tuple[Callable[[Patch], None], set[str]]] = {
    "the job that starts over": (starts_over, {"begins at 0", "a committed step is lost"}),
    "a copy removed early": (removes_early, {"removed too early"}),
    "a round that starts before all workers of the last are stopped": (
        starts_early,
        {"a worker of the last round lives"},
    ),
    "a store that forgets the round after its restart": (forgets, {"a round is forgotten"}),
    "an end that depends on the order of messages": (ends_by_order, {"how a job ends"}),
    "silence counted by the store's own pause": (counts_own_pause, {"reported as silent"}),
    "the keeper next door": (keeps_next_door, {"a committed step is lost"}),
    "an acknowledgement before the write": (acknowledges_early, {"removed too early"}),
    "a heartbeat that is not renewed": (is_not_renewed, {"reported as silent"}),
    "a commit counted twice": (counts_twice, {"each sample once"}),
}
"""Each fault, and the invariants of which one must be violated."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_each_fault_that_is_put_back_is_found(bug: str, monkeypatch: Patch) -> None:
    put_back, expected = BUGS[bug]
    storage.parts_of.cache_clear()
    placement.place_on.cache_clear()
    put_back(monkeypatch)
    began, seed, found = time.process_time(), 0, None
    while found is None and time.process_time() < began + WITHIN_S:
        found = SimulatedJob(draw(seed)).run().violation
        seed += 1
    storage.parts_of.cache_clear()
    placement.place_on.cache_clear()
    assert found is not None, f"not found in {seed} jobs"
    sys.stdout.write(f"{bug}: {time.process_time() - began:.1f} s, seed {seed - 1}: {found}" + "\n")
    assert found.kind in expected
