"""The workers of one round, from their start to their end: they recover by the product's protocol, and then train.

The protocol is `recover` with the product's `StateSearch` on process 0; messages, disks and memories are simulated. A
step takes its time by the clock, and only what is kept of it matters: which step, which attempt, where in the data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshmend.errors import MeshmendError
from meshmend.jax.state.candidates import UNCHECKED
from meshmend.jax.state.recovery import Answer, Holder, StateSearch, recover
from meshmend.launch.failure import LINGER_S, WorkerFailure, kind_of
from meshmend.launch.member import Assignment
from meshmend_lab.simulation.faults import in_last_moments
from meshmend_lab.simulation.kernel import Actor
from meshmend_lab.simulation.referee import BATCH
from meshmend_lab.simulation.storage import Checkpoint, Key, SimulatedCopy, SimulatedMemory, parts_of

if TYPE_CHECKING:
    from meshmend_lab.simulation.host import SimulatedHost
    from meshmend_lab.simulation.job import SimulatedJob

DISK_TIMEOUT_S = 30.0
JOIN_S = 300.0
"""How long a worker waits for peers that have not started: longer than a real one, whose `initialize` waits 30 s."""


class SimulatedWorker(Actor):
    """A host's worker in one round."""

    def __init__(self, host: SimulatedHost, training: Training, process: int) -> None:
        super().__init__(host.queue)
        self.host = host
        self.training = training
        self.process = process
        self.code: int | None = None
        self.failure: WorkerFailure | None = None
        self.holdings: Holdings | None = None
        self.is_ready = False
        """Whether it has restored the state, and trains."""

    def end(self, code: int) -> None:
        """Exit, or be killed."""
        if self.code is None:
            self.code, self.is_dead, self.is_frozen = code, True, False
            if code != -9:
                self.host.job.tell(f"host {self.host.number}", f"its worker ends with {code}")
            self.host.look_soon()
            self.training.on_end(self)

    def fail(self, kind: Any, error: str) -> None:
        """Say which error ends it, and wait to be stopped."""
        if self.code is None and self.failure is None:
            self.failure = WorkerFailure(kind, error, "")
            self.is_ready = False
            self.host.job.tell(f"host {self.host.number}", f"its worker raises ({kind}): {error[:300]}")
            self.host.look_soon()
            self.after(LINGER_S, self.end, 1)
            self.training.on_end(self)


class Holdings:
    """What a host has of earlier states, and what it says of it in a recovery: what the product's `Holdings` does."""

    def __init__(self, training: Training, worker: SimulatedWorker) -> None:
        self.training = training
        self.job = training.job
        self.process = worker.process
        self.number = worker.host.number
        self.memory = SimulatedMemory(
            self.job.memories[self.number], lambda copy: self.job.referee.on_removed(self.number, copy)
        )
        self._damaged: set[tuple[str, int]] = set()
        self._generation = ""

    def have(self) -> Answer:
        """Return what there is."""
        plan, disk = self.job.plan, self.job.disk
        held: Answer = {
            "identity": "a state",
            "run": f"{self.training.name}",
            "offers": [copy.offer() for _, copy in sorted(self.memory.files.items())],
            "problems": [],
            "claimed": 0,
            "untrusted": self.job.untrusted(),
            "start_over": self.training.workers[self.process].host.begins_over,
        }
        if plan.memory_every:
            held["room"] = [1, 1]
        if plan.disk_every and self.process == 0:
            if disk.hangs:
                held["problems"].append(f"host {self.number}: the disk is unreachable")
                self.training.disk_answers = False
            else:
                held["offers"] += disk.offers()
                self.training.offered = {one.checksum for one in disk.checkpoints.values()}
                held["claimed"] = disk.claimed
        if self.process == 0 and disk.hangs:
            held["problems"].append(f"host {self.number}: what this job has kept is not known")
        elif self.process == 0 and disk.record is not None:
            self.training.record = disk.record["attempt"], disk.record["step"]
            held["offers"].append(disk.record)
        return held

    def copy(self, generation: str) -> SimulatedCopy | None:
        """Return this host's copy of a state."""
        return next((copy for copy in self.memory.files.values() if copy.generation == generation), None)

    def describe(self, source: Answer) -> Answer:
        """Return what is in a copy."""
        copy = self.copy(source["generation"])
        return {} if copy is None else {"outline": [copy.n_shares, copy.n_parts]}

    def take(self, what: Answer) -> Answer:
        """Read what this process needs and has."""
        source = what["source"]
        if source["kind"] == "disk":
            found = self.job.disk.checkpoints.get(source["step"])
            if found is None or found.is_damaged or self.job.disk.hangs:
                self.training.disk_answers &= not self.job.disk.hangs
                why = f"the checkpoint of step {source['step']} is damaged or cannot be read"
                return {"why": why, "is_late": bool(self.job.disk.hangs)}
            if found.checksum != source["generation"]:
                return {"why": f"{source['name']} was replaced while it was read"}
            return {"why": "", "extra": {"position": found.position}}
        generation, copy = source["generation"], self.copy(source["generation"])
        self._generation = generation
        if copy is None:
            return {"why": "", "damaged": [], "wants": self._wanted(what["outline"], frozenset())}
        parts = {part for part in copy.parts if (generation, part) not in self._damaged}
        needed = self._needed(copy.n_shares, copy.n_parts)
        damaged = sorted(parts & needed & copy.damaged)
        self._damaged |= {(generation, part) for part in damaged}
        wants = self._wanted([copy.n_shares, copy.n_parts], parts)
        why = f"part {damaged[0]} of {copy.name} is damaged" if damaged else ""
        return {"why": why, "damaged": damaged, "wants": wants, "extra": {"position": copy.position}}

    def send(self, sent: list[list[int]]) -> Answer:
        """Check what this process is to send."""
        copy, damaged = self.copy(self._generation), list[int]()
        for part, _, sender in sent:
            if sender == self.process and part not in damaged:
                if copy is None or part not in copy.parts:
                    raise AssertionError(f"host {self.number} is to send part {part}, which it does not have")
                if part in copy.damaged:
                    damaged.append(part)
        self._damaged |= {(self._generation, part) for part in damaged}
        return {"why": "a part is damaged" if damaged else "", "damaged": damaged}

    def _needed(self, n_shares: int, n_parts: int) -> set[int]:
        """Return the parts that hold what this process needs: all shares, and its stretch of all shards."""
        n_shards, n = n_parts - n_shares, len(self.training.hosts)
        first, last = self.process * n_shards // n, -(-(self.process + 1) * n_shards // n)
        return {*range(n_shares), *range(n_shares + first, n_shares + last)}

    def _wanted(self, outline: list[int], has: Any) -> str:
        bits = np.zeros(outline[1], np.uint8)
        bits[[*(self._needed(*outline) - {*has})]] = 1
        return np.packbits(bits).tobytes().hex()


class Training:
    """All workers of one round."""

    def __init__(self, job: SimulatedJob, assigned: Assignment) -> None:
        self.job = job
        self.name = assigned.name
        self.number = assigned.number
        self.hosts = assigned.hosts
        self.store = job.store
        self.workers: dict[int, SimulatedWorker] = {}
        self.attempt = self.step = self.position = 0
        self.saved_step = -1
        """The last step that is known to be on disk."""
        self.is_training = self.is_finishing = self.disk_answers = False
        self.offered: set[str] = set()
        """Checkpoints that were there when process 0 looked: another round may write more."""
        self.record: Key | None = None
        """The copy that was recorded as complete, when process 0 looked."""
        self._protocols: list[Any] = []
        self._facts: dict[int, Any] = {}
        self._questions: dict[int, Any] = {}
        self._restored: set[int] = set()
        self._writing: set[int] = set()
        self._saving = self._is_broken = self._is_recorded = False
        self._last: SimulatedCopy | None = None
        self._n_joined = 0
        self._parts: tuple[frozenset[int], ...] = ()
        self._n_shares = 0
        self.verified = UNCHECKED

    @property
    def queue(self) -> Any:
        """The queue of events."""
        return self.job.queue

    def add(self, worker: SimulatedWorker) -> None:
        """Have a worker start: it imports, makes its devices, and joins the others."""
        self.workers[worker.process] = worker
        worker.holdings = Holdings(self, worker)
        self._reach(worker, self.job.start_s() * self.job.slowness(worker.host.number), self._joined)
        if self._is_broken:
            worker.after(5.0 + self.queue.rng.random() * 60.0, worker.fail, "transient", "a peer has never come")
        worker.after(JOIN_S, self._expect_all, worker)

    def _expect_all(self, worker: SimulatedWorker) -> None:
        """Have a worker give up whose peers have not all started."""
        if self._n_joined < len(self.hosts):
            worker.fail("transient", "a peer has never come")

    def _reach(self, worker: SimulatedWorker, seconds: float, do: Any, *args: Any) -> None:
        """Have a worker do something when its message has passed: later, if its host is cut off."""
        if self.job.network.apart[worker.host.number]:
            worker.after(0.5, self._reach, worker, seconds, do, *args)
        else:
            worker.after(seconds, do, *args)

    # Recovery.

    def _joined(self) -> None:
        self._n_joined += 1
        if self._n_joined == len(self.hosts) and not self._is_broken:
            judge = StateSearch(
                self.hosts,
                self.number,
                "its folders",
                lambda *_: self.job.n_blocks(len(self.hosts)),
                self._describe_own,
            )
            self.disk_answers = bool(self.job.plan.disk_every)
            for process, worker in sorted(self.workers.items()):
                holdings = worker.holdings
                assert holdings is not None  # noqa: S101
                mine = Holder(holdings.have, holdings.describe, holdings.take, holdings.send)
                protocol = recover(process, judge, mine)
                self._protocols.append(protocol)
                worker.after(0.001 + self.queue.rng.random() * 0.05, self._ask, worker, protocol, None)

    def _describe_own(self, source: Any) -> Answer | None:
        holdings = self.workers[0].holdings
        return None if holdings is None else holdings.describe({"generation": source.generation}) or None

    def _ask(self, worker: SimulatedWorker, protocol: Any, answer: Any, error: MeshmendError | None = None) -> None:
        """Give a worker process 0's answer, and post its next fact."""
        try:
            question = protocol.throw(error) if error is not None else protocol.send(answer)
        except StopIteration as end:
            self._recovered(worker, *end.value)
            return
        except MeshmendError as raised:
            worker.fail(kind_of(raised), f"{type(raised).__name__}: {raised}")
            return
        self._questions[worker.process] = question
        random = self.queue.rng.random
        seconds = self.job.network.delay() + random() * self.job.plan.read_s * self.job.slowness(worker.host.number)
        if self.job.disk.hangs and worker.process == 0 and self.job.plan.disk_every:
            seconds += DISK_TIMEOUT_S
        self._reach(worker, seconds, self._post, worker, question.fact)

    def _post(self, worker: SimulatedWorker, fact: Any) -> None:
        self._facts[worker.process] = fact
        leader = self.workers[0]
        if len(self._facts) == len(self.hosts) and not leader.is_dead:
            leader.after(0.001, self._judge)

    def _judge(self) -> None:
        facts, self._facts = [self._facts[process] for process in range(len(self.hosts))], {}
        answer, error = None, None
        try:
            answer = self._questions[0].judge(facts)
        except MeshmendError as raised:
            error = raised
        self.job.referee.on_judged(self, answer, error)
        for process, worker in self.workers.items():
            self._reach(worker, self.job.network.delay(), self._ask, worker, self._protocols[process], answer, error)

    def _recovered(self, worker: SimulatedWorker, begun: Answer, last: Answer) -> None:
        """Do what `Keeper` does with what a recovery has found."""
        job = self.job
        if last["do"] == "wait":
            worker.after(job.plan.state_wait_s, worker.fail, "lasting", f"RestartError: {last['error']}")
            return
        if worker.process == 0 and job.plan.disk_every:
            if job.disk.hangs:
                self.disk_answers = False
            elif begun["attempt"] in job.disk.attempts or job.disk.claimed > begun["attempt"]:
                worker.fail("lasting", "SupersededError: another part of this job continues")
                return
            else:
                job.disk.attempts.add(begun["attempt"])
                self.disk_answers = True
        # What a host lacks comes over the network, in a collective that all take part in.
        self._reach(worker, self.queue.rng.random() * job.plan.read_s, self._restore, worker, begun, last)

    def _restore(self, worker: SimulatedWorker, begun: Answer, last: Answer) -> None:
        holdings = worker.holdings
        assert holdings is not None  # noqa: S101
        self._restored.add(worker.process)
        if len(self._restored) < len(self.hosts) or self._is_broken:
            return
        self.attempt = begun["attempt"]
        source = last.get("source") if last["do"] == "go" else None
        self.step = 0 if source is None else source["step"]
        self.position = 0 if source is None else last["extra"]["position"]
        self.job.referee.on_resumed(self, source, begun)
        self.verified = last["verified"] if self.job.untrusted() is not None else UNCHECKED
        self._parts, self._n_shares = parts_of(
            len(self.hosts), self.job.domains_of(self.hosts), begun["n_blocks"] or 1, self.job.plan.has_shards
        )
        untrusted = self.job.untrusted() or []
        for each in self.workers.values():
            if each.holdings is not None and not each.is_dead:
                its_attempt = 0 if source is None else source["attempt"]
                each.holdings.memory.go_back_to(
                    its_attempt,
                    self.step,
                    lambda attempt, step: not any(attempt <= one and step > other for one, other in untrusted),
                )
                if self.verified > 0:
                    each.holdings.memory.pinned = frozenset({self.verified})
            each.is_ready = each.code is None and each.failure is None
        disk = self.job.disk
        if self.disk_answers and not disk.hangs and (source is not None or last["is_on_disk"]):
            for step in [step for step in disk.checkpoints if step not in last["checkpoints"]]:
                self.job.referee.on_set_aside(disk.checkpoints.pop(step), self)
        self.is_training = True
        self.job.tell("job", f"round {self.number} resumes at step {self.step}, as attempt {self.attempt}")
        self.queue.at(self.queue.now + self.job.compile_s(), None, self._train)

    # Training.

    def on_end(self, worker: SimulatedWorker) -> None:
        """Have the peers of a worker that has ended, or waits to be stopped, hang or fail, sooner or later."""
        if self._is_broken or (self.is_finishing and worker.code == 0):
            return
        if self.is_training and not self.is_finishing:
            self.job.referee.on_interrupted(self)
        self._is_broken, self.is_training = not self.is_finishing, False
        if self._is_broken:
            random = self.queue.rng.random
            for each in self.workers.values():
                if each is not worker and each.code is None:
                    if random() < 0.7:
                        each.after(0.05 + random() * 6.0, each.fail, "transient", "lost a peer")
                    else:
                        each.after(5.0 + random() * 60.0, each.end, -6)

    def _train(self) -> None:
        if not self.is_training:
            return
        job, apart = self.job, self.job.network.apart
        slowest = 1.0
        for worker in self.workers.values():
            if worker.is_frozen or apart[worker.host.number]:
                self.queue.at(self.queue.now + 0.3, None, self._train)
                return
            slowest = max(slowest, job.slowness(worker.host.number))
        if self.step < job.total:
            self.step += 1
            self.position += BATCH
            job.referee.on_step(self)
            for worker in self.workers.values():
                worker.host.last_step = self.step
            self._check()
        is_last = self.step >= job.total
        if job.plan.memory_every and (is_last or self.step % job.plan.memory_every == 0):
            self._keep()
        if job.plan.disk_every and (is_last or self.step % job.plan.disk_every == 0):
            self._save()
        if is_last:
            self._finish()
        else:
            self.queue.at(self.queue.now + job.plan.step_s * slowest, None, self._train)

    def _check(self) -> None:
        """Pin a state that is being checked, and verify it a few steps later, as a job with checks does."""
        if not self.job.plan.is_checked or not self.job.plan.memory_every:
            return
        memories = [one.holdings.memory for one in self.workers.values() if one.holdings is not None]
        if self.step % 7 == 0 and not self._writing:
            for memory in memories:
                memory.pinned |= {self.step}
            self._keep()
        elif self.step % 7 == 3 and self.step - 3 > self.verified:
            self.verified = self.step - 3
            for memory in memories:
                last = max((one for one in memory.pinned if one <= self.verified), default=None)
                memory.pinned = frozenset(one for one in memory.pinned if one > self.verified or one == last)

    def _keep(self) -> None:
        """Keep copies of this step, unless a host still writes the one before."""
        if self._writing:
            return
        if self._last is not None and not self._is_recorded:  # all hosts have written it
            self._record(self._last.offer() | {"parts": []})
        key, random = (self.attempt, self.step), self.queue.rng.random
        for process, worker in self.workers.items():
            copy = SimulatedCopy(
                key,
                self.name,
                process,
                self._parts[process],
                self._n_shares,
                self._n_shares + len(self.hosts) * self.job.plan.has_shards,
                self.position,
                self.hosts,
                self.verified,
            )
            self._last = copy
            self._writing.add(process)
            self.job.referee.on_copy(copy)
            worker.after(0.01 + random() * 0.05, self._write, worker, copy)

    def _record(self, offer: Answer) -> None:
        """Record that a copy was complete, sooner or later: process 0's host writes it, and nobody waits."""
        if not self.job.disk.hangs:
            self._is_recorded = True
            self.workers[0].after(0.01 + self.queue.rng.random() * self.job.plan.read_s, self._recorded, offer)

    def _recorded(self, offer: Answer) -> None:
        if not self.job.disk.is_full:
            self.job.disk.record = offer

    def _write(self, worker: SimulatedWorker, copy: SimulatedCopy) -> None:
        assert worker.holdings is not None  # noqa: S101
        worker.holdings.memory.begin(copy.name)
        seconds = self.queue.rng.random() * self.job.plan.write_s * self.job.slowness(worker.host.number)
        worker.after(seconds, self._written, worker, copy)

    def _written(self, worker: SimulatedWorker, copy: SimulatedCopy) -> None:
        assert worker.holdings is not None  # noqa: S101
        worker.holdings.memory.end(copy)
        self._writing.discard(worker.process)
        self.job.referee.on_written(worker.host.number, copy)

    def _save(self) -> None:
        """Begin a checkpoint, unless the one before is still being written."""
        disk, leader = self.job.disk, self.workers[0]
        if self._saving or disk.hangs:
            return
        if disk.claimed > self.attempt:
            for worker in self.workers.values():
                worker.after(
                    self.job.network.delay(), worker.fail, "lasting", "SupersededError: another part continues"
                )
            return
        if self.attempt not in disk.attempts:
            disk.attempts.add(self.attempt)
        self._saving = True
        saved = Checkpoint((self.attempt, self.step), self.position, f"{self.name}/{self.step}", self.verified)
        leader.after(0.2 + self.queue.rng.random() * self.job.plan.save_s, self._saved, saved)

    def _saved(self, saved: Checkpoint) -> None:
        disk = self.job.disk
        if disk.hangs:
            self.workers[0].after(1.0, self._saved, saved)
            return
        self._saving = False
        is_older = bool(disk.checkpoints) and saved.key[1] <= max(disk.checkpoints)
        if disk.is_full or is_older or any(worker.code not in (None, 0) for worker in self.workers.values()):
            return  # not saved: the job goes on without it
        disk.preserved.verified = saved.verified
        removed = disk.add(saved)
        self.saved_step = saved.key[1]
        self.job.referee.on_saved(saved, removed)

    def _finish(self) -> None:
        """Wait for what is being written after the last step, and end."""
        self.is_finishing, self.is_training = True, False
        for worker in self.workers.values():
            worker.after(0.2 + self.queue.rng.random() * 2.0, self._close, worker, 0)
            if self.queue.rng.random() < self.job.plan.last_moments and not self.job.is_calm:
                self.queue.at(self.queue.now + 2.5 * self.queue.rng.random(), None, in_last_moments, self.job, worker)

    def _close(self, worker: SimulatedWorker, n_looks: int) -> None:
        if (worker.process in self._writing or self._saving) and n_looks < 40:
            worker.after(1.0, self._close, worker, n_looks + 1)
            return
        assert worker.holdings is not None  # noqa: S101
        if self.saved_step == self.step:
            self.job.has_deleted = True
            worker.holdings.memory.delete_all()
        self.job.finished = True
        worker.end(0)
