"""The simulated store: the product's `Membership`, and around it what `launch/store.py` does with sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshmend.launch.membership import BEAT_S, Membership, RefusedError
from meshmend.launch.store import LINGER_S
from meshmend_lab.simulation.kernel import Actor
from meshmend_lab.simulation.network import BEAT, EOF, TO_HOST, TO_STORE, Message, Wire

if TYPE_CHECKING:
    from meshmend_lab.simulation.job import SimulatedJob


class SimulatedStore(Actor):
    """One process of the store. Connections are the keys of its membership."""

    def __init__(self, job: SimulatedJob, *, rounds_before: int) -> None:
        super().__init__(job.queue)
        self.job = job
        self.membership: Membership = job.make_membership(start_s=job.plan.start_s, rounds_before=rounds_before)
        self.peers: dict[Wire, bool] = {}
        """Connections, and whether each has said hello."""
        self._inbox: dict[Wire, list[Message]] = {}
        self._is_woken = False
        self._timer_at = 0.0
        self._beat_at = 0.0
        self._over_at: float | None = None
        self.after(0.0, self._serve)

    def accept(self, wire: Wire) -> None:
        """Take a new connection."""
        self.peers[wire] = False

    def receive(self, wire: Wire, message: Message) -> None:
        """Put what has arrived where the store finds it: the kernel does that, whatever the store does."""
        self._inbox.setdefault(wire, []).append(message)
        if not self._is_woken and message is not BEAT:  # which it hears of within a second
            self._is_woken = True
            self.after(0.0002 + self.queue.rng.random() * 0.001, self._serve)

    def stop(self, *, quietly: bool) -> None:
        """Die, or be switched off."""
        self.is_dead = True
        for wire in list(self.peers):
            wire.close(TO_STORE, quietly=quietly)

    def _serve(self) -> None:
        """Hear all that has arrived, in any order of the connections, and only then judge who was silent."""
        self._is_woken = False
        membership, now = self.membership, self.time()
        if membership.over is not None:
            self._over_at = self._over_at or now
            if not membership.members or now > self._over_at + LINGER_S:
                self.job.store_ends(self)
                return
        inbox, self._inbox = self._inbox, {}
        wires = list(inbox)
        if len(wires) > 1:
            self.queue.rng.shuffle(wires)
        is_news = False
        for wire in wires:
            for message in inbox[wire]:
                if message is BEAT and wire in membership.members:
                    membership.on_message(wire, message, now)
                elif wire in self.peers:
                    is_news = True
                    self._take(wire, message)
        membership.tick(now)
        if now >= self._beat_at:
            self._beat_at = now + max(BEAT_S, membership.silent_s / 4)
            membership.outbox += [(key, BEAT) for key in membership.members]
        self._send_all()
        if is_news:
            self.job.referee.after_store(self)
        wait_s = max(0.001, min(membership.due(now), self._beat_at - now, BEAT_S))
        if not self.queue.now < self._timer_at <= self.queue.now + wait_s:
            self._timer_at = self.queue.now + wait_s
            self.after(wait_s, self._serve)

    def _take(self, wire: Wire, message: Message) -> None:
        membership = self.membership
        if message is EOF:
            self._close(wire)
        elif self.peers[wire]:
            if wire in membership.members:
                if message is not BEAT:
                    self.job.tell("store", f"hears of host {wire.number}", message)
                membership.on_message(wire, message, self.time())
            else:
                wire.send(TO_HOST, {"type": "dropped"})
                self._close(wire)
        else:
            self._greet(wire, message)

    def _greet(self, wire: Wire, hello: Message) -> None:
        self.peers[wire] = True
        membership = self.membership
        try:
            membership.arrive(wire, hello, f"10.0.0.{wire.number}", self.time())
        except RefusedError as error:
            if membership.over is not None:
                wire.send(TO_HOST, {"type": "over", **membership.over})
            else:
                facts = {"retryable": error.retryable, "is_certain": error.is_certain}
                self.job.tell("store", f"refuses host {wire.number}: {error}")
                wire.send(TO_HOST, {"type": "refused", "why": str(error), **facts})
            self._close(wire)
            return
        self.job.tell("store", f"admits host {wire.number}", hello)
        wire.send(TO_HOST, BEAT)

    def _send_all(self) -> None:
        membership = self.membership
        while membership.outbox:
            outbox, membership.outbox = membership.outbox, []
            for key, message in outbox:
                if not isinstance(key, Wire) or key not in self.peers:
                    continue
                if not key.send(TO_HOST, message) or message["type"] == "dropped":
                    self._close(key)
        for line in membership.news:
            self.job.tell("store", line)
        membership.news.clear()

    def _close(self, wire: Wire) -> None:
        if self.peers.pop(wire, None) is None:
            return
        wire.close(TO_STORE)
        if wire in self.membership.members:
            self.membership.leave(wire, "its connection to the store broke", self.time())
