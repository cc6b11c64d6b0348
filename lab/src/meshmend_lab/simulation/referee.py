"""What must hold in every job, whatever happens, and is checked by the truth that only a simulation knows.

The referee shares no code with what it judges: it counts who has written what, who could be heard, and whose workers
live, where the product has to conclude that from messages.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshmend.errors import TransientError
from meshmend.launch.member import Assignment
from meshmend.launch.membership import ASK_S, JobPhase, Membership, Message
from meshmend_lab.simulation.network import TO_HOST, Wire
from meshmend_lab.simulation.storage import Checkpoint, Key, SimulatedCopy

if TYPE_CHECKING:
    from meshmend_lab.simulation.host import SimulatedHost
    from meshmend_lab.simulation.job import SimulatedJob
    from meshmend_lab.simulation.store import SimulatedStore
    from meshmend_lab.simulation.training import Training

BATCH = 32
"""Samples of a step."""


class Violation(Exception):  # noqa: N818  # what is violated is an invariant
    """Something that must never happen. `kind` names the invariant."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(kind, text)  # as another process makes it again

    def __str__(self) -> str:
        return f"{self.kind}: {self.args[1]}"


class WatchedMembership(Membership):
    """The product's membership, whose decisions the referee sees before they are made."""

    referee: Referee

    def arrive(self, key: Hashable, hello: Message, address: str, now: float) -> None:
        """Admit a host."""
        is_new = self.phase is JobPhase.GATHERING
        super().arrive(key, hello, address, now)
        claimed = hello.get("running")
        if not is_new or claimed is None or (self.round is not None and self.round.name == claimed["name"]):
            return
        if not self._keys.keys() & {*claimed["hosts"]} - {hello["host"]}:
            self.referee.on_forgotten(hello)

    def _lose(self, keys: list[Hashable], why: str, now: float) -> None:
        if why.startswith("not heard from"):
            for key in keys:
                self.referee.on_silent(key, why)
        super()._lose(keys, why, now)

    def _start_round(self, hosts: tuple[int, ...]) -> None:
        self.referee.before_round(self, hosts)
        super()._start_round(hosts)

    def _end_job(self, *, ok: bool, why: str) -> None:
        self.referee.on_over(self, ok=ok, why=why)
        super()._end_job(ok=ok, why=why)


@dataclass
class Commit:
    """A state that is kept, as it is in truth."""

    key: Key
    hosts: tuple[int, ...]
    written: dict[int, float] = field(default_factory=dict)
    """When each host has written its part."""
    is_complete: bool = False


class Referee:
    """Judges one job."""

    def __init__(self, job: SimulatedJob) -> None:
        self.job = job
        self.commits: dict[str, Commit] = {}
        self.newest: Commit | None = None
        self.lost_at: dict[int, float] = {}
        """When a fault last took copies from a host."""
        self.numbers: dict[int, str] = {}
        self.n_splits = 0
        self.has_trained = False
        self.recovered_s: list[float] = []
        """From the loss of a host that trained to the next step."""
        self._live: list[Training] = []
        self._interrupted_at: float | None = None

    def _violated(self, kind: str, text: str) -> None:
        raise Violation(kind, text)

    # The store.

    def on_forgotten(self, hello: Message) -> None:
        """Judge a new store that ends a round, though no host of it has lost its worker."""
        self._violated(
            "a round is forgotten",
            f"host {hello['host']} runs round {hello['running']['number']}, which a new store ends",
        )

    def on_silent(self, key: Hashable, why: str) -> None:
        """Judge that a host is dropped: it must have been silent, or unheard for a reason of its own."""
        assert isinstance(key, Wire)  # noqa: S101  # the store's connections
        host: Any = key.ends[TO_HOST][0]
        is_well = not host.is_dead and not host.is_frozen and not key.is_lost and key.is_open[1]
        silent_s = self.job.store.membership.silent_s if self.job.store else 10.0
        if is_well and self.job.queue.now > self.job.trouble_until[key.number] + silent_s + 2.0:
            self._violated("reported as silent", f"host {key.number} is dropped as {why}, and has sent heartbeats")

    def before_round(self, membership: Membership, hosts: tuple[int, ...]) -> None:
        """Judge the start of a round: no worker of the last one may live on a host that is there."""
        now = self.job.store.time() if self.job.store else 0.0
        if len(hosts) < membership.least:
            self._violated("too few hosts", f"a round of {len(hosts)} starts, at least {membership.least} are needed")
        has_waited = now >= max(membership._arrived_at, membership._ended_at) + ASK_S
        for key, member in membership.members.items():
            host: Any = key.ends[TO_HOST][0] if isinstance(key, Wire) else None
            worker = None if host is None or host.is_dead else host.worker
            if worker is None or worker.code is not None or member.state == "done":
                continue
            if member.host in hosts or not has_waited:
                which = f"host {member.host} still runs its worker of round {worker.training.number}"
                self._violated("a worker of the last round lives", f"a round starts, and {which}")
        number = max(membership.number, membership.rounds_before) + 1
        known = max((self._number_of(key) for key in membership.members), default=0)
        if number <= known:
            self._violated("round numbers", f"round {number} starts, and a host has been in round {known}")

    @staticmethod
    def _number_of(key: Hashable) -> int:
        host: Any = key.ends[TO_HOST][0] if isinstance(key, Wire) else None
        return 0 if host is None else int(host.talk._number)

    def on_over(self, membership: Membership, *, ok: bool, why: str) -> None:
        """Judge the end: a success only if a worker has finished, a failure only for a reason."""
        job = self.job
        if ok and not job.finished:
            self._violated("how a job ends", f"it ends as a success ({why}), and no worker has finished")
        if not ok and "gave up" not in why and "raised an error" not in why:
            # A worker that failed by itself, after another one had finished. The loss of a host would explain it.
            fates, rounds = membership._fates, [*job.trainings.values()]
            workers = [one for each in rounds if each.number == fates.number for one in each.workers.values()]
            had_finished = {one.host.number for one in workers if one.code == 0}
            died = [host for host in fates.hosts if job.died_at.get(host, -1.0) > job.round_at]
            if lost := [host for host in died if host not in had_finished]:
                self._violated(
                    "how a job ends", f"it ends as a failure ({why}), and hosts {lost} of its round were lost"
                )
        has_split = "SupersededError" in why and 2 * job.plan.least <= job.plan.n_hosts
        if not ok and not job.excuses and not has_split and job.plan.max_restarts > 1000:
            self._violated("how a job ends", f"it ends as a failure for no reason: {why}")

    def after_store(self, store: SimulatedStore) -> None:
        """Judge the books of a store that has acted: its round and its members agree."""
        membership = store.membership
        round_ = membership.round
        if round_ is not None and round_.name not in self.numbers.values():
            self.numbers[round_.number] = round_.name
            self.job.round_at = self.job.queue.now
        if membership.phase is JobPhase.OVER:
            return
        if round_ is not None and membership.phase is JobPhase.RUNNING:
            running = {membership.members[key].host for key in membership._in["running"]}
            if running != set(round_.hosts):
                self._violated("the store's books", f"the round has hosts {round_.hosts}, of which {running} run")

    # Hosts.

    def before_start(self, host: SimulatedHost, assigned: Assignment) -> None:
        """Judge the start of a worker: not for a round that its host knows to be over, nor for an older one."""
        if host.talk.stop is not None:
            self._violated("a round that is over", f"host {host.number} starts a worker for round {assigned.number}")
        if host.worker is not None and host.worker.training.number >= assigned.number:
            self._violated("an older round", f"host {host.number} starts round {assigned.number} after a later one")
        if host.worker is not None and host.worker.code is None:
            self._violated("two workers", f"host {host.number} starts a worker, and the last one still runs")

    # Training.

    def on_step(self, training: Training) -> None:
        """Judge a step that is done."""
        job = self.job
        if training.position != training.step * BATCH:
            self._violated(
                "each sample once",
                f"step {training.step} ends at sample {training.position}, not {training.step * BATCH}",
            )
        self._live = [one for one in self._live if one.is_training and one is not training]
        for other in self._live:
            self.n_splits += 1
            if 2 * job.plan.least > job.plan.n_hosts:
                self._violated(
                    "two rounds train",
                    f"round {other.number} of {other.hosts}, round {training.number} of {training.hosts}",
                )
        self._live.append(training)
        self.has_trained = True
        job.last_step_at = job.queue.now
        job.last_step = training.step
        if job.is_calm and job.total > training.step + 5:
            job.total = training.step + 5  # it has recovered, and is to end
        if self._interrupted_at is not None and training.number > self._interrupted_number:
            self.recovered_s.append(job.queue.now - self._interrupted_at)
            self._interrupted_at = None

    _interrupted_number = 0

    def on_interrupted(self, training: Training) -> None:
        """Note that a round that trained has lost a worker."""
        if self._interrupted_at is None:
            self._interrupted_at, self._interrupted_number = self.job.queue.now, training.number

    def on_copy(self, copy: SimulatedCopy) -> None:
        """Note that a host begins to write a copy."""
        self.commits.setdefault(copy.generation, Commit(copy.key, copy.hosts))

    def on_written(self, host: int, copy: SimulatedCopy) -> None:
        """Note that a host has written a copy: the step is committed when all of its round have."""
        commit = self.commits.get(copy.generation)
        if commit is None:
            return  # fifty copies ago: its host was frozen while it wrote, and its round has ended
        commit.written[host] = self.job.queue.now
        if len(commit.written) == len(commit.hosts) and not commit.is_complete:
            self._complete(commit)

    def _complete(self, commit: Commit) -> None:
        commit.is_complete = True
        if self.newest is None or commit.key > self.newest.key:
            self.newest = commit
        if len(self.commits) > 50:
            self.commits = dict([*self.commits.items()][-20:])

    def on_removed(self, host: int, copy: SimulatedCopy) -> None:
        """Judge the removal of a copy: something newer must be complete, or the same on disk."""
        worker = self.job.hosts[host].worker
        if worker is not None and worker.training.is_finishing and worker.training.saved_step == copy.key[1]:
            return  # the last step was on disk when it looked; that the disk has lost it since, nobody can know
        pinned = worker.holdings.memory.pinned if worker is not None and worker.holdings is not None else ()
        kept = self.job.memories[host].values()
        if sum(one.key[1] not in pinned for one in kept) > 2:
            return  # several starts in a row have ended before their first copy was complete: only so many stay
        if any(one.key < copy.key for one in kept) and sum(one.key > copy.key for one in kept) >= 2:
            return  # the same: the oldest stays, and with the copy that is now written three newer ones
        newest = self.newest.key if self.newest is not None else (0, 0)
        on_disk = max((one.key for one in self.job.disk.checkpoints.values()), default=(0, 0))
        if max(newest, on_disk, self.saved) <= copy.key and copy.key not in (on_disk, self.saved):
            self._violated(
                "removed too early",
                f"host {host} removes its copy of {copy.key}, and nothing newer is complete",
            )

    saved: Key = (0, 0)
    """The newest checkpoint that was ever complete."""

    def on_saved(self, saved: Checkpoint, removed: list[Checkpoint]) -> None:
        """Judge what is removed for a checkpoint that is complete."""
        self.saved = max(self.saved, saved.key)
        if any(one.key >= saved.key for one in removed):
            self._violated("removed too early", f"a checkpoint of step {removed[0].key[1]} is removed for an older one")

    def on_set_aside(self, checkpoint: Checkpoint, training: Training) -> None:
        """Judge what a restart sets aside: never a checkpoint that it could have resumed from."""
        source = training.attempt, training.step
        if (
            checkpoint.is_damaged
            or checkpoint.checksum not in training.offered
            or not self._trusts(checkpoint.key)
            or checkpoint.key < source
        ):
            return
        self._violated("set aside", f"the checkpoint {checkpoint.key}, newer than {source}, is intact")

    def on_lost(self, host: int) -> None:
        """Note that a fault has taken copies, or damaged one."""
        self.lost_at[host] = self.job.queue.now

    def on_storage_fault(self) -> None:
        """Note that the disk has lost what it had."""
        self.saved = max((one.key for one in self.job.disk.checkpoints.values()), default=(0, 0))

    def _trusts(self, key: Key) -> bool:
        return not any(key[0] <= attempt and key[1] > step for attempt, step in self.job.observations)

    def restorable(self, training: Training) -> Key | None:
        """Return the newest state that the hosts of a round have in truth, between them or on disk."""
        found = list[Key]()
        parts: dict[str, set[int]] = {}
        about: dict[str, SimulatedCopy] = {}
        for host in training.hosts:
            for copy in self.job.memories[host].values():
                about[copy.generation] = copy
                parts.setdefault(copy.generation, set()).update(copy.parts - copy.damaged)
        # What a later round has written while messages of this one were late is none of its business.
        rounds = [*self.job.trainings.values()]
        later = {one.name for one in rounds[rounds.index(training) + 1 :]} if training in rounds else set()
        found += [
            about[name].key
            for name, has in parts.items()
            if len(has) == about[name].n_parts and name.partition("/")[0] not in later
        ]
        if self.job.plan.disk_every and training.disk_answers:
            there = [one for one in self.job.disk.checkpoints.values() if one.checksum in training.offered]
            found += [one.key for one in there if not one.is_damaged]
        begun = self._begun(training)
        found = [key for key in found if self._trusts(key) and key[0] >= begun and begun != training.number]
        return max(found, default=None)

    def _begun(self, training: Training) -> int:
        """Return the first round of a job that was begun anew on purpose."""
        return min(worker.host.begins_over for worker in training.workers.values())

    def _traces(self, training: Training) -> list[Key]:
        """Return all states of which a round's hosts have anything at all."""
        begun = self._begun(training)
        found = [copy.key for host in training.hosts for copy in self.job.memories[host].values()]
        if self.job.plan.disk_every and training.disk_answers:
            found += [one.key for one in self.job.disk.checkpoints.values()]
        found += [training.record] if training.record else []
        return sorted(key for key in found if self._trusts(key) and key[0] >= begun and begun != training.number)

    def _promised(self, training: Training) -> Commit | None:
        """Return the newest committed state, if no more was lost since than the job says that it survives."""
        commit = self.newest
        if commit is None or len(commit.hosts) < 2 or not self._trusts(commit.key) or self.job.n_started_over:
            return None
        lost = {host for host in commit.hosts if self.lost_at.get(host, -1.0) >= commit.written[host]}
        domains = self.job.plan.domains
        named = {domains[host] for host in lost} if domains else set()
        within = len(named) == 1 and 2 * sum(domains[host] in named for host in commit.hosts) <= len(commit.hosts)
        if len(lost) > 1 and not within:
            return None
        return commit if {*commit.hosts} - lost <= {*training.hosts} else None

    def on_judged(self, training: Training, answer: Any, error: Exception | None) -> None:
        """Judge process 0's answer: it may begin anew, wait or give up only where nothing can be restored."""
        if isinstance(error, TransientError) or (error is None and answer["do"] not in ("start", "wait")):
            return  # the next round tries again, or this one goes on
        if error is None and answer["do"] == "start" and (traces := self._traces(training)):
            self._violated(
                "begins at 0", f"round {training.number} begins at step 0, and there are traces of {traces[-3:]}"
            )
        what = f"ends with {error}" if error is not None else answer["do"] + "s"
        found = self.restorable(training)
        if found is not None:
            self._violated(
                "a state is lost",
                f"round {training.number} {what}, and its hosts have step {found[1]} of attempt {found[0]}",
            )
        promised = self._promised(training)
        if promised is not None and promised.key[1] and not self._is_on_disk_only():
            self._violated(
                "a committed step is lost", f"round {training.number} {what}, and step {promised.key[1]} was committed"
            )
        if error is not None or answer["do"] == "wait":
            self.job.excuses.add("nothing could be restored")

    def _is_on_disk_only(self) -> bool:
        return self.job.has_deleted

    def on_resumed(self, training: Training, source: Message | None, begun: Message) -> None:
        """Judge which state a round resumes from: the newest that there is."""
        if source is None:
            return
        key = source["attempt"], source["step"]
        found = self.restorable(training)
        if found is not None and found > key:
            self._violated("a state is lost", f"round {training.number} resumes from {key}, and its hosts have {found}")
        promised = self._promised(training)
        if promised is not None and promised.key > key and not self._is_on_disk_only():
            self._violated(
                "a committed step is lost", f"round {training.number} resumes from {key}, {promised.key} was committed"
            )
        if begun["attempt"] <= source["attempt"]:
            self._violated("attempts", f"attempt {begun['attempt']} resumes from attempt {source['attempt']}")
