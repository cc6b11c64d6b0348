"""A simulated host: the product's `Conversation` and `supervise`, and around them what `Member` and `HostAgent` do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshmend.errors import LaunchError
from meshmend.launch.agent import MONITOR_S, Act, Decisions, Seen, supervise
from meshmend.launch.failure import WorkerFailure
from meshmend.launch.member import FAIL_S, Assignment, Conversation
from meshmend.launch.membership import BEAT_S, RefusedError
from meshmend_lab.simulation.kernel import Actor
from meshmend_lab.simulation.network import BEAT, EOF, TO_HOST, TO_STORE, Message, Wire

if TYPE_CHECKING:
    from meshmend_lab.simulation.job import SimulatedJob
    from meshmend_lab.simulation.training import SimulatedWorker


class SimulatedHost(Actor):
    """One process of a host's agent, from its start to its end."""

    def __init__(self, job: SimulatedJob, number: int) -> None:
        super().__init__(job.queue)
        self.job = job
        self.number = number
        self.clock_s = job.clocks[number]
        self.talk = Conversation(
            number, job.plan.hosts, job.plan.machine, "store:29400", self.time(), uniform=self.queue.rng.uniform
        )
        self.worker: SimulatedWorker | None = None
        self.starts_over = job.starts_over
        self.begins_over = 0
        """The first round of a process that was asked to begin the job anew."""
        self.last_step = 0
        """That its workers have done."""
        self.beat_at = self.queue.now
        """When it last sent a heartbeat that nothing held back."""
        self._decisions: Decisions[Message] = supervise(job.plan.max_restarts, lambda: self.last_step)
        self._act = Act("join")
        self._n_acts = 0
        self._seen: WorkerFailure | None = None
        self._wire: Wire | None = None
        self._greeted = False
        self._heard_at = 0.0
        self._is_woken = False
        self.after(0.0, self._connect)
        self.after(0.0, self._advance)
        self.after(0.0, self._beat)

    # What Member does: a connection to the store.

    def _connect(self) -> None:
        if not self.talk.goes_on:
            return
        network, store = self.job.network, self.job.store
        if network.is_cut(self.number) or network.store_is_off:
            self.after(3 * self.talk.silent_s, self._lose, TimeoutError("timed out"))
        elif store is None or store.is_dead:
            self.after(network.delay(), self._lose, ConnectionError("Connection refused"))
        else:
            self._wire = Wire(network, self.number, (store, store.receive), (self, self.receive))
            self._greeted, self._heard_at = False, self.queue.now
            store.accept(self._wire)
            self.after(2 * network.delay(), self._greet, self._wire)

    def _greet(self, wire: Wire) -> None:
        if wire is self._wire:
            self._greeted = True
            for message in self.talk.greet(f"10.0.0.{self.number}"):
                wire.send(TO_STORE, message)

    def receive(self, wire: Wire, message: Message) -> None:
        """Put what has arrived where the thread that reads finds it."""
        if self.is_frozen:
            self.after(0.0, self.receive, wire, message)
        elif wire is self._wire:
            self._read(message)

    def _read(self, message: Message) -> None:
        if message is EOF:
            self._lose(ConnectionError("the connection was closed"))
            return
        self._heard_at = self.queue.now
        try:
            self.talk.hear(message)
        except RefusedError as error:
            self._lose(error)
            return
        if message is not BEAT:
            self.job.tell(f"host {self.number}", "hears", message)
            self._wake()

    def _lose(self, error: Exception) -> None:
        """Judge the end of a connection, or that there was none."""
        if self._wire is not None:
            self._wire.close(TO_HOST)
            self._wire = None
        pause_s = self.talk.lose(error, self.time())
        self._wake()
        if self.talk.goes_on:
            self.after(pause_s, self._connect)

    def _beat(self) -> None:
        if self._wire is not None and self.queue.now > self._heard_at + 3 * self.talk.silent_s:
            self._lose(TimeoutError("timed out"))
        if not self.talk.goes_on:
            return
        if self._wire is not None and self._greeted:
            self._wire.beat()
        had_error = self.talk.error is not None
        self.talk.beat(self.time())
        if not had_error and self.talk.error is not None:
            self._wake()
        self.after(BEAT_S, self._beat)

    def _say(self, message: Message) -> None:
        if self._wire is not None and self._greeted:
            self._wire.send(TO_STORE, message)

    # What HostAgent does: the acts that `supervise` decides on.

    def _wake(self) -> None:
        """Have the agent's thread look at what has changed; it may be a while until it runs."""
        if not self._is_woken:
            self._is_woken = True
            random = self.queue.rng.random
            self.after(0.0005 * random() if random() < 0.9 else self.job.plan.slow_s * random(), self._awake)

    def _awake(self) -> None:
        self._is_woken = False
        do, talk = self._act.do, self.talk
        if do == "join":
            if (again := talk.join_again()) is not None:
                self._say(again)
            if talk.goes_on:
                if talk.assignment is not None:
                    self._advance(talk.assignment)
            else:
                self._end_with_error()
        elif do == "look":
            self._look_again()
        elif do in ("finish", "fail") and not talk.goes_on:
            self._answer_end(self._n_acts)

    def _advance(self, answer: Any = None) -> None:
        """Give the agent what came of its last act, and begin the next."""
        try:
            act = self._decisions.send(answer)
        except StopIteration as end:
            self._end(end.value, "")
            return
        except LaunchError as error:
            self._end(None, str(error))
            return
        self._act, self._n_acts = act, self._n_acts + 1
        random = self.queue.rng.random
        if act.do == "join":
            self._seen = None
            self._say(self.talk.join(7000, act.given))
            self._wake()
        elif act.do == "start":
            self.job.referee.before_start(self, act.given)
            self.after(0.02 + random() * self.job.plan.fork_s, self._started, act.given)
        elif act.do == "look":
            if act.given == MONITOR_S:
                self._look_again()
            else:
                self.after(act.given, self._look_is_over, self._n_acts)
                self._look_again()
        elif act.do == "stop":
            worker = self.worker
            if worker is None or worker.code is not None:
                self._stopped()
            else:
                self.after(0.01 + random() * (0.1 if random() < 0.9 else 3.0), self._stopped)
        elif act.do == "raised":
            self._say(self.talk.raised(act.given))
            self._advance()
        else:
            self._say(self.talk.fail(act.given) if act.do == "fail" else self.talk.finish())
            self.after(FAIL_S if act.do == "fail" else act.given, self._answer_end, self._n_acts)
            self._wake()

    def _started(self, assigned: Assignment) -> None:
        self.begins_over = self.begins_over or assigned.number * self.starts_over
        self.worker = self.job.start_worker(self, assigned)
        self._advance()

    def _stopped(self) -> None:
        assert self.worker is not None  # noqa: S101  # it was started before it is stopped
        self.worker.end(-9)
        self._advance(self.worker.code)

    def look_soon(self) -> None:
        """Have the agent look at its worker, which has changed: it does so every `MONITOR_S`."""
        if not self.is_dead and self._act.do == "look":
            self.after(self.queue.rng.random() * MONITOR_S, self._look_again)

    def _look(self) -> Seen:
        worker = self.worker
        assert worker is not None  # noqa: S101  # it looks at one
        stopped = self.talk.stopped
        is_frozen = worker.is_frozen and worker.code is None
        return Seen(stopped, self.talk.over, worker.code, worker.failure, is_frozen)

    def _look_again(self) -> None:
        """Answer a look as soon as there is something to be seen: looks at nothing new change nothing."""
        if self._act.do != "look":
            return
        seen = self._look()
        if self._act.given != MONITOR_S:
            if seen.stopped is not None:
                self._advance(seen)
            return
        is_new = seen.failure is not None and seen.failure is not self._seen
        if seen.is_frozen:
            self.after(MONITOR_S, self._advance_look, self._n_acts)
        elif is_new or seen.stopped is not None or seen.over is not None or seen.code is not None:
            self._seen = seen.failure
            self._advance(seen)

    def _advance_look(self, n_acts: int) -> None:
        if n_acts == self._n_acts:
            self._advance(self._look())

    def _look_is_over(self, n_acts: int) -> None:
        if n_acts == self._n_acts:
            self._advance(self._look())

    def _answer_end(self, n_acts: int) -> None:
        if n_acts != self._n_acts:
            return
        if self._act.do == "fail":
            self._advance()
        elif self.talk.over is not None:
            self._advance(self.talk.over)
        elif self.talk.error is not None:
            self._end_with_error()
        else:
            self._advance({"ok": True, "why": "the others had not finished"})

    def _end_with_error(self) -> None:
        try:
            self.talk.check()
        except LaunchError as error:
            self._end(None, str(error))

    def _end(self, over: Message | None, error: str) -> None:
        """End the process: the agent has returned, or raised an error."""
        if self.worker is not None:
            self.worker.end(-9)
        if over is None and self.talk.over is not None and self.talk.over["ok"]:
            over = self.talk.over
        self.job.host_ends(self, over, error)

    def leave(self) -> None:
        """Be asked to leave, as by SIGTERM, when the worker has saved what it could."""
        if self.worker is not None and self.worker.code == 0:
            self._say(self.talk.finish())
        self._end(None, "asked to leave")

    def stop(self, *, quietly: bool) -> None:
        """Die, or be switched off."""
        self.is_dead = True
        if self.worker is not None:
            self.worker.end(-9)
        if self._wire is not None:
            self._wire.close(TO_HOST, quietly=quietly)
